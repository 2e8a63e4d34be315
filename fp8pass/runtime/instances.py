"""The places of module instances in the user's model. Dynamo compiles a frame once and runs it for every layer with the same
code; the identity of the Parameters among its arguments tells the layers apart."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fp8pass.graph.gemms import GraphInput
from fp8pass.graph.origin import Path, TensorName, begins, joined
from fp8pass.scales.stores import Move
from fp8pass.weights.parameters import Seen

Held = tuple[tuple[Path, nn.Module], ...]
"""Modules that a frame's variables lead to, with their paths below these."""

_Known = Seen | weakref.ref[nn.Module]  # A Parameter or a module that a call has been of.

#: The name of the model itself, whose path is empty, whatever its own frame calls it.
ROOT = "self"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The places of a frame's variables in the user's model, for one module instance."""

    variables: dict[str, dict[str, str]]
    """Per variable, what begins a path below it -> what begins the path in the model instead. With `self` in `layers.3`, ""
    becomes "layers.3"; where `args` holds the model first, "0" becomes ""."""
    has_root: bool
    wrapped: frozenset[str] = frozenset()  # Paths that wrappers such as DistributedDataParallel add; names leave them out.

    def __hash__(self) -> int:
        return hash(frozenset((variable, frozenset(places.items())) for variable, places in self.variables.items()))

    def name_module(self, path: Path | None) -> str:
        """The path in the user's model of one below a variable: ROOT for the model itself. None is what a frame's own code
        does: it belongs to the module that is `self` there, and is named "matmul" where that is the model itself or unknown."""
        if path is None:
            is_known = self.has_root and "" in self.variables.get("self", {})
            return own if is_known and (own := self.name_module(Path("self", ""))) != ROOT else "matmul"
        places = self.variables.get(path.root, {"": "" if self.has_root else path.root})
        if not self.has_root:
            places = {beginning: "" if prefix == "self" else prefix for beginning, prefix in places.items()}
        place = _place_in(places, path.below)
        if place is None:  # no Parameter there is one of the model's
            return str(path)
        return without_wrappers(place, self.wrapped) or (ROOT if self.has_root else path.root)

    def name_tensor(self, name: TensorName) -> TensorName:
        """A tensor's name for this instance."""
        return name.placed(self.name_module(name.path))


class ModuleNames:
    """Paths in the user's model for the variables of one call's frames. With a root module, the names of its Parameters place a
    frame: `self` of a frame that reads `layers.3.attn.wq.weight` as `wq.weight` is `layers.3.attn`, and so is `args[0]` of one
    that reads it as `args[0].wq.weight`. Where they do not tell the place, the modules do that the frame's variables lead to.

    A root function has no names of its own: its variables' names replace them, and further instances of a variable are numbered
    in the order of their first call: `layer`, `layer#1`, `layer#2`; one that comes in the place of another that is gone has its
    number. A "#" is an ordinary character in the globs of rules."""

    def __init__(self, root: Callable[[], nn.Module | None]):
        self._root = root
        self.search: Search | None = None  # In a call that runs; between calls the model may change without a trace.
        self._modules: dict[str, weakref.ref[nn.Module]] = {}  # The root's modules by their paths, when `moves` last looked.
        self._children: list[tuple[str, weakref.ref[nn.Module]]] = []  # Then too, what `_children` returns.
        self._seen: dict[str, list[dict[str, _Known]]] = {}  # The instances of a function's variables.
        self._new: list[str] = []  # Names of variables that were given to new instances since then.

    def place(self, inputs: Sequence[GraphInput], args: Sequence[Any], held: Held = ()) -> Placement:
        """The placement of the instance that a call with `args` belongs to. held: the modules that its frame's variables lead
        to, where `is_told` is False."""
        by_variable = _by_variable(inputs, args)
        root = self._root()
        if root is None:
            things: dict[str, dict[str, Any]] = {variable: dict(found) for variable, found in by_variable.items()}
            for at, module in held:
                things.setdefault(at.root, {})[at.below] = module
            return Placement({v: {"": self._numbered(v, found)} for v, found in things.items()}, False)
        search = self._searched(root, by_variable, [module for _, module in held])
        places = {v: _chosen(_candidates(found, search.names)) or {"": v} for v, found in by_variable.items()}
        for at, module in sorted(held, key=lambda found: len(found[0].below)):
            found = search.paths.get(id(module), ())
            if found and _place_in(places.get(at.root, {}), at.below) not in found:
                places.setdefault(at.root, {})[at.below] = min(found, key=_length)
        return Placement(places, True, search.wrapped)

    def is_told(self, inputs: Sequence[GraphInput], args: Sequence[Any]) -> bool:
        """True if the Parameters among `args` tell the instance that a call belongs to: one of them has a single place in the
        model, and no tensor stands in for another, whose module may be any."""
        if any(given.stands_in for given in inputs):
            return False
        root = self._root()
        if root is None:
            return True
        by_variable = _by_variable(inputs, args)
        search = self._searched(root, by_variable)
        found = [_candidates(held, search.names) for held in by_variable.values()]
        return any(len(prefixes) == 1 for candidates in found for prefixes in candidates.values())

    def has_news(self) -> bool:
        """True if modules may have moved or gone since this was last asked: once per call, and after each search."""
        search = self.search  # which another thread may end
        if search is None or self._new:
            return True
        is_new, search.is_new = search.is_new, False
        return is_new

    def _searched(
        self, root: nn.Module, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]], modules: Iterable[nn.Module] = ()
    ) -> Search:
        """The search of the model, again in a call where one of the tensors or modules is not where it was."""
        search = self.search or Search()  # which another thread may end
        held = [tensor for found in tensors.values() for _, tensor in found]
        if not (search.paths and all(map(search.holds, held)) and all(id(module) in search.paths for module in modules)):
            search.run(root)
        return search

    def _numbered(self, variable: str, things: Mapping[str, Any]) -> str:
        """The name of an instance of a function's variable. things: Parameters and modules below it, by their paths."""
        every = self._seen.setdefault(variable, [])
        known = next((i for i, seen in enumerate(every) if _agree(seen, things)), None)
        left = (i for i, seen in enumerate(every) if _agree(seen, things, or_gone=True) or all(map(_is_gone, seen.values())))
        number = next(left, len(every)) if known is None else known
        name = f"{variable}#{number}" if number else variable
        if known is None:
            every[number : number + 1] = [{}]
            self._new.append(name)
        for path, thing in things.items():
            every[number][path] = weakref.ref(thing) if isinstance(thing, nn.Module) else Seen(thing, None)
        return name

    def moves(self, named: Callable[[], Iterable[str]], away: Collection[nn.Module]) -> list[Move]:
        """The modules, among those at the paths `named`, that have another place than when this was last asked, and those of
        `away` that are in the model again. A path of no module is that of the nearest module above it."""
        root = self._root()
        if root is None:
            new, self._new = self._new, []
            return [(None, path, None) for path in (named() if new else ()) if any(begins(variable, path) for variable in new)]
        children, known = _children(root), self._children
        if len(children) == len(known) and all(a == b and r() is c for (a, c), (b, r) in zip(children, known, strict=True)):
            return []
        wrapped, before = wrapper_paths(root), self._modules
        now = {without_wrappers(path, wrapped): module for path, module in root.named_modules(remove_duplicate=False)}
        self._modules = {path: weakref.ref(module) for path, module in now.items()}
        self._children = [(name, weakref.ref(module)) for name, module in children]
        places = {id(module): path for path, module in reversed(now.items())}
        found: list[Move] = [(module, None, places[id(module)]) for module in away if id(module) in places]
        for path in named():
            above = path
            while above and above not in before:
                above = above.rpartition(".")[0]
            module = before[above]() if above else None
            if above and (module is None or now.get(above) is not module):
                place = places.get(id(module))
                found.append((module, path, None if place is None else place + path[len(above) :]))
        return found


def _agree(seen: Mapping[str, _Known], things: Mapping[str, Any], or_gone: bool = False) -> bool:
    """True if an instance has some of these things, and no other one in the place of any. or_gone: but what is gone."""
    both = [(seen[path], thing) for path, thing in things.items() if path in seen]
    return bool(both) and all(_is_of(one, thing) or (or_gone and _is_gone(one)) for one, thing in both)


def _is_of(known: _Known, thing: Any) -> bool:
    return known.is_of(thing) if isinstance(known, Seen) else known() is thing


def _is_gone(known: _Known) -> bool:
    return known.is_gone if isinstance(known, Seen) else known() is None


def _children(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of all modules, by their names in these: equal lists are equal trees. Faster than paths."""
    found, modules = [], [root]
    for module in modules:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        found += children
        modules += [child for _, child in children]
    return found


def _by_variable(inputs: Sequence[GraphInput], args: Sequence[Any]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """The Parameters and buffers among the arguments of a call, with their paths, by the variables that these begin at."""
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for given, arg in zip(inputs, args, strict=False):
        if given.is_parameter and given.path is not None and isinstance(arg, torch.Tensor):
            found.setdefault(given.path.root, []).append((given.path.below, arg))
    return found


class Search:
    """The names of what a model holds: searched once in a call, for all layers that it binds. Keeps the model alive."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}  # Of its Parameters and buffers, by their identities.
        self.paths: dict[int, list[str]] = {}  # Of its modules, by their identities.
        self.wrapped: frozenset[str] = frozenset()
        self.is_new = True  # `ModuleNames.has_news`
        self.trains: bool | None = None  # `Session.is_in_training`, once it was asked.
        self._root: nn.Module | None = None

    def run(self, root: nn.Module) -> None:
        """Search a model. Another thread may read what was found before."""
        modules = list(root.named_modules(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        paths: dict[int, list[str]] = {}
        for path, module in modules:
            paths.setdefault(id(module), []).append(path)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(joined(path, key))
        self._root, self.names, self.paths, self.wrapped, self.is_new = root, names, paths, _wrapper_paths(modules), True
        self.trains = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is still where it was found."""
        *parents, key = self.names.get(id(tensor), [""])[0].split(".")
        module = self._root
        for parent in parents:
            module = None if module is None else module._modules.get(parent)
        return module is not None and (module._parameters.get(key) is tensor or module._buffers.get(key) is tensor)


def _candidates(held: list[tuple[str, torch.Tensor]], known: dict[int, list[str]]) -> dict[str, set[str]]:
    """Map the beginnings of the paths of `held` tensors to those that may take their place: see `Placement.variables`. A tensor
    with another name in the frame, such as an argument of a function, is a place of its own."""
    candidates: dict[str, set[str]] = {}
    for below, tensor in held:
        every = [(below, name) for name in known.get(id(tensor), ())]
        pairs = [short for pair in every if (short := without_common_end(*pair)) != pair] or every
        beginning = min((b for b, _ in pairs), key=len, default=None)
        if beginning is not None:
            found = {prefix for b, prefix in pairs if b == beginning}
            earlier = candidates.get(beginning, found)
            candidates[beginning] = earlier & found or earlier
    return candidates


def _chosen(candidates: dict[str, set[str]]) -> dict[str, str]:
    return {beginning: min(prefixes, key=_length) for beginning, prefixes in candidates.items()}


def _length(path: str) -> tuple[int, str]:
    return len(path), path


def _place_in(places: Mapping[str, str], below: str) -> str | None:
    """The path in the model of one below a variable, by what begins it; None where nothing known does."""
    beginning = max((p for p in places if begins(p, below)), key=len, default=None)
    return None if beginning is None else joined(places[beginning], below[len(beginning) :].lstrip("."))


def without_common_end(left: str, right: str) -> tuple[str, str]:
    """Two dotted paths without the components that they both end with."""
    lefts, rights = left.split("."), right.split(".")
    while lefts and rights and lefts[-1] == rights[-1]:
        lefts.pop()
        rights.pop()
    return ".".join(lefts), ".".join(rights)


def module_paths(root: nn.Module) -> set[str]:
    """The paths that may be before the colon in the names of a model's tensors."""
    paths = [path for path, _ in root.named_modules(remove_duplicate=False)]
    paths += [name for name, _ in root.named_parameters(remove_duplicate=False)]
    wrapped = wrapper_paths(root)
    return {without_wrappers(path, wrapped) for path in paths} | {ROOT, "matmul"}


_WRAPPERS = {
    DistributedDataParallel: "module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    OptimizedModule: "_orig_mod",
    CheckpointWrapper: "_checkpoint_wrapped_module",
}


def wrapper_paths(root: nn.Module) -> frozenset[str]:
    """Paths of modules that are there only because another one was wrapped: rules and names know the user's model."""
    return _wrapper_paths(root.named_modules(remove_duplicate=False))


def _wrapper_paths(modules: Iterable[tuple[str, nn.Module]]) -> frozenset[str]:
    found = set()
    for path, module in modules:
        for wrapper, child in _WRAPPERS.items():
            if isinstance(module, wrapper):
                found.add(joined(path, child))
    return frozenset(found)


def without_wrappers(path: str, wrapped: frozenset[str]) -> str:
    """`path` without the components that wrappers add."""
    if not wrapped:
        return path
    parts = path.split(".")
    return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in wrapped)
