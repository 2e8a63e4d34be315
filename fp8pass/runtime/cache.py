"""AOTAutograd's cache with the pass: what a hit, in which the pass does not run, restores.

NOTE [a warm start] A hit skips tracing, rewriting and partitioning, so the record of the rewrite, which binding and inspection
read, travels inside torch's entry: as an attribute of its metadata, which AOTAutograd pickles whole. Unpickled, it tells the
compilation under way that it is there. The record has the key that it was made for (`cache_key.py`), which is also an attribute
of the graph and so a part of torch's own key. An entry whose record is missing, damaged or made for another key is not used,
and the graph gets another one under a second key. Graphs are not in the record; they are traced again when someone asks for
them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext

from fp8pass import requests
from fp8pass.graph.traces import Snapshot
from fp8pass.inputs import Needed
from fp8pass.recipes import Recipe
from fp8pass.rewrite.runner import Rewrite
from fp8pass.runtime.session import CompiledGraph
from fp8pass.runtime.snapshots import summary_of

log = logging.getLogger(__name__)

#: `CompiledGraph.cache` of a graph that came from the cache.
HIT = "hit"
#: The attribute of a graph that holds our key, and of torch's metadata that holds the record.
_ATTRIBUTE = "_fp8pass"


# -- the record of a rewrite in an entry


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a rewrite, as bytes, in an entry of AOTAutograd's cache."""

    key: str  # The key of the graph that was rewritten.
    content: bytes  # The pickled rewrite, summary, and whether the graph trains.
    obstacle: str = ""  # Why there is no content.

    @property
    def digest(self) -> str:
        """A digest of the record, by which a damaged one is known."""
        return hashlib.sha256(repr((self.key, self.content, self.obstacle)).encode()).hexdigest()

    def __reduce__(self) -> Any:
        return _arrive, (self.key, self.content, self.obstacle, self.digest)


_arrived: contextvars.ContextVar[list[Record] | None] = contextvars.ContextVar("arrived", default=None)


def _arrive(key: str, content: bytes, obstacle: str, digest: str) -> Record:
    """The record in an entry that is being unpickled, which the compilation under way hears of if it is whole."""
    record, arrived = Record(key, content, obstacle), _arrived.get()
    if arrived is not None and record.digest == digest:
        arrived.append(record)
    return record


@contextlib.contextmanager
def _arrivals() -> Iterator[list[Record]]:
    """The records of the entries that are unpickled meanwhile."""
    arrived: list[Record] = []
    token = _arrived.set(arrived)
    try:
        yield arrived
    finally:
        _arrived.reset(token)


def attach(graph: CompiledGraph, key: str) -> None:
    """Put the record of a graph into the entry that will be made of the compilation under way. To be called when the graph is
    rewritten and partitioned, before its forward is compiled."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None or graph.rewrite is None:
        return
    rewrite = dataclasses.replace(graph.rewrite, before=NOT_TRACED, after=NOT_TRACED)
    try:
        record = Record(key, dumped((rewrite, summary_of(graph), graph.trains), graph))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        record = Record(key, b"", f"the record of the rewrite cannot be pickled: {error}")
    setattr(context.fw_metadata, _ATTRIBUTE, record)


#: The snapshot of a graph that came from the cache.
NOT_TRACED = Snapshot(())


class _Pickler(pickle.Pickler):
    """Recipes go by their position among those of the rules, which the key has: a user's own need not be picklable."""

    recipes: Sequence[Recipe]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Recipe) and value in self.recipes:
            return self.recipes.index(value)
        return None


class _Unpickler(pickle.Unpickler):
    recipes: Sequence[Recipe]

    def persistent_load(self, position: Any) -> Any:
        return self.recipes[position]


def dumped(value: object, graph: CompiledGraph) -> bytes:
    """A value of a graph as bytes. Raises what pickle raises."""
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5)
    pickler.recipes = graph.key.rules.recipes
    pickler.dump(value)
    return file.getvalue()


def loaded(content: bytes, graph: CompiledGraph) -> Any:
    """The value that `dumped` made bytes of, for a graph with equal rules."""
    unpickler = _Unpickler(io.BytesIO(content))
    unpickler.recipes = graph.key.rules.recipes
    return unpickler.load()


# -- what a graph asks for before it has an entry


def recall(key: str | None, graph: CompiledGraph) -> Needed:
    """The needs of a graph when it was compiled under this key; nothing where they are not known."""
    content = None if key is None else requests.read(key)
    if content is None:
        return Needed()
    needed = loaded(content, graph)
    assert isinstance(needed, Needed)
    return needed


def remember(key: str | None, graph: CompiledGraph, needed: Needed) -> None:
    """Keep what a graph asked for, for later processes."""
    if key is None:
        return
    try:
        content = dumped(needed, graph)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        log.info("%s: its extra inputs cannot be saved: %s", graph.name, error)
        return
    requests.write(key, content)


# -- a compilation with the cache


def compiled(
    graph: CompiledGraph, module: fx.GraphModule, key: str, compile_inner: Callable[[str], Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs, or take it from AOTAutograd's cache: `graph.cache` says which. graph: the record, which a
    miss fills in as the pass runs, and a hit from the entry. module: what `compile_inner` compiles for a key. An entry that is
    damaged is left there, so the graph has a second key."""
    off = is_off()
    if off is not None:
        graph.cache = f"bypassed: {off}"
        return compile_inner(key)
    why = "its entries are damaged"
    for tried in (key, f"{key} again"):
        setattr(module, _ATTRIBUTE, tried)
        num_bypassed = counters["aot_autograd"]["autograd_cache_bypass"]
        with _arrivals() as arrived:
            function = compile_inner(tried)
        if graph.rewrite is not None:
            is_bypassed = counters["aot_autograd"]["autograd_cache_bypass"] > num_bypassed
            graph.cache = f"bypassed: {_why_bypassed(module)}" if is_bypassed else "miss"
            return function
        record = next((record for record in reversed(arrived) if record.key == tried), None)
        if record is not None and not record.obstacle:
            rewrite, summary, trains = loaded(record.content, graph)
            assert isinstance(rewrite, Rewrite)
            graph.rewrite, graph.summary, graph.trains, graph.cache = rewrite, summary, trains, HIT
            return function
        if record is not None:
            why = record.obstacle
            break
        log.warning("%s: its entry in AOTAutograd's cache has no complete record of the rewrite, and is not used", graph.name)
    log.warning("%s was found in AOTAutograd's cache and is compiled without it: %s", graph.name, why)
    with without():
        function = compile_inner(key)
    graph.cache = f"bypassed: {why}"
    return function


def is_off() -> str | None:
    """The reason why torch itself would not use AOTAutograd's cache now, or None."""
    from torch._functorch._aot_autograd import autograd_cache

    if autograd_cache.should_use_local_autograd_cache() or autograd_cache.should_use_remote_autograd_cache():
        return None
    return "AOTAutograd's cache is off (torch._functorch.config.enable_autograd_cache, TORCHINDUCTOR_FORCE_DISABLE_CACHES)"


def without() -> Any:
    """A context in which AOTAutograd's cache is neither read nor written."""
    return functorch_config.patch(enable_autograd_cache=False)


def at_once() -> Any:
    """A context for a graph whose backward may never run: it is compiled with the forward, which makes the entry."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


def whole_entries() -> Any:
    """A context for what runs without generated code: entries hold it whole, and its backward is compiled with the forward."""
    return functorch_config.patch(force_autograd_cache=True, bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)


def _why_bypassed(module: fx.GraphModule) -> str:
    """Torch's reason for not taking a graph. It only logs it, so its checks are made again."""
    from torch._functorch._aot_autograd import autograd_cache

    for name in ("check_cacheable", "_collect_context_fn_hashes"):
        try:
            getattr(autograd_cache, name, lambda module: None)(module)
        except autograd_cache.BypassAOTAutogradCache as reason:
            return f"torch caches no such graph: {' '.join(str(reason).split())}"
    return 'torch caches no such graph: TORCH_LOGS="torch._functorch._aot_autograd.autograd_cache" says why'
