"""Graphs that others trace and own: `rewrite_graph` at work, and what it returns.

The passes are those of `fp8_compile`, on a copy of the graph. No call goes through torch.compile: the owner runs the graph,
hands it the state of delayed scaling as inputs behind its own, and says when a step ends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from fp8pass.errors import OptionError, UnsupportedError, preview
from fp8pass.graph import traces
from fp8pass.graph.gemms import GraphContext, GraphInput, gradients_in_joint
from fp8pass.graph.origin import Path, described_parameter
from fp8pass.graph.values import holds_tensor
from fp8pass.inputs import USUAL, InputsMissing, Needed, Placed, Records
from fp8pass.options import CompileOptions
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.runner import rewrite
from fp8pass.runtime.backend import check_device, device_of
from fp8pass.runtime.dynamo_graphs import with_extra_inputs
from fp8pass.runtime.instances import Placement
from fp8pass.runtime.session import CompiledGraph, Part, Session
from fp8pass.scales.reduction import reduction_covers
from fp8pass.scales.view import Fp8State
from fp8pass.schemes.emitter import FIRST_STEP
from fp8pass.tools.inspection import Inspection, make_inspection

aten = torch.ops.aten

#: The variable below which all modules are, as Dynamo would call the model.
_ROOT = "self"
#: The use of AOTAutograd's cache, which begins before the graph is traced.
_NOT_CACHED = "bypassed: rewrite_graph rewrites the graph at each start; its owner may cache the result"


class RewrittenGraph:
    """A graph with its GEMMs in FP8, as `rewrite_graph` returns it."""

    def __init__(self, graph: fx.GraphModule, first_step: fx.GraphModule | None, compiled: CompiledGraph, session: Session):
        self.graph: fx.GraphModule = graph
        """The rewritten graph: its inputs are those of the graph that was given, then `state_names`."""
        self.first_step: fx.GraphModule | None = first_step
        """The graph for calls that meet an empty amax history (`DelayedScaling(initial_scale="current")`): tensors take
        their scales from themselves. None where no call does."""
        self.state: Fp8State = Fp8State([Part(session)])
        """Scales and amax histories by name, their checkpoints, and `step()`, which ends a step: call it after each step of the
        optimizer, before the next call of the graph. Empty for recipes that keep no state."""
        self._session = session
        self._compiled = compiled
        session.every_graph[compiled] = {compiled.placement: None}
        assert compiled.rewrite is not None
        tensors, aliases = compiled.rewrite.tensors, compiled.rewrite.aliases
        self._bound = [
            provider.bind(Placed(compiled.device, given, tensors, aliases, compiled.placement.name_tensor))
            for provider, given in zip(session.providers, compiled.extra, strict=True)
            if given
        ]

    @property
    def state_names(self) -> list[str]:
        """Names of the inputs that hold the state, in order: none for recipes that keep none."""
        return [given.name for given in self._compiled.extra_inputs]

    @property
    def is_first_step(self) -> bool:
        """True if the next call must run `first_step`: an amax history is empty."""
        return self.first_step is not None and FIRST_STEP in self._variants()

    def _variants(self) -> frozenset[str]:
        """The variants of the next call. Raises UnsupportedError where it needs a graph that is not there."""
        found = USUAL.union(*(inputs.variants() for inputs in self._bound))
        if unknown := found - {FIRST_STEP}:
            raise UnsupportedError(
                f"a provider requests the variant {preview(sorted(unknown))}, which a rewritten graph does not have"
            )
        return found

    def state_tensors(self) -> list[torch.Tensor]:
        """The state as the next call of the graph takes it, one tensor per name in `state_names`. The graph records amaxes in
        them; `state.step()` makes the next scales of these, in place."""
        variants, trains = self._variants(), self._compiled.trains
        self._session.clock.recorded |= trains and any(inputs.is_read for inputs in self._bound)
        records: Records = "all" if trains else "backward"
        return [x for inputs in self._bound for x in inputs.tensors((), records, variants, None)]

    def __call__(self, *args: Any) -> Any:
        """Run the graph on its own inputs, with the state as it is now."""
        module = self.first_step if self.is_first_step else self.graph
        assert module is not None
        return module(*args, *self.state_tensors())

    def inspect(self) -> Inspection:
        """The table of the graph's GEMMs, as `fp8pass.inspect` returns it for a compiled model."""
        return make_inspection([Part(self._session)])

    def __str__(self) -> str:
        return str(self.inspect())


def rewritten(graph: fx.GraphModule, *, inputs: Sequence[str | None] | None, **options: Any) -> RewrittenGraph:
    """See `fp8pass.rewrite_graph`. options: those of `CompileOptions` that it has."""
    with unset_fake_temporarily():  # owners of joint graphs work in the mode of their trace, and the state is real
        session = Session(None, CompileOptions(**options, step="manual", backend="aot_eager"))
        return rewritten_in(session, graph, inputs)


def rewritten_in(
    session: Session, graph: fx.GraphModule, inputs: Sequence[str | None] | None, places: Mapping[str, int] | None = None
) -> RewrittenGraph:
    """The graph, rewritten by the rules of a session, with its state. places: the positions of inputs that the graph has for
    the state, by name; None: they are added behind its own. Raises OptionError where those are too small."""
    device = _check(graph)
    check_device(device)
    described, start = _described(graph, _names(graph, inputs)), len(_placeholders(graph))
    placement, needed = Placement({_ROOT: {"": ""}}, has_root=True), Needed()
    while True:
        extra = tuple(tuple(provider.inputs(device, needed)) for provider in session.providers)
        compiled = CompiledGraph("graph_0", session.key, described, graph, start, extra, device, placement, cache=_NOT_CACHED)
        try:
            usual = _rewrite(graph, compiled, session, USUAL, places)
        except InputsMissing as missing:
            if places is not None:
                raise OptionError(f"{missing}, and the graph's inputs have fewer; trace it with larger ones") from missing
            needed = missing.needed
            continue
        first = None
        if compiled.extra_inputs and any(recipe.initial_scale == "current" for recipe in session.stores.recipes):
            own = dataclasses.replace(compiled, name="graph_0_first_step", rewrite=None)
            first = _rewrite(graph, own, session, frozenset({FIRST_STEP}), places)
        return RewrittenGraph(usual, first, compiled, session)


def _rewrite(
    given: fx.GraphModule, compiled: CompiledGraph, session: Session, variants: frozenset[str], places: Mapping[str, int] | None
) -> fx.GraphModule:
    """A rewritten copy of the graph; `compiled` keeps the record."""
    examples = [n.meta.get("val") for n in _placeholders(given)]
    extra = compiled.extra_inputs
    module, _ = with_extra_inputs(given, examples, extra if places is None else (), compiled.device)
    state = _placeholders(module)[len(examples) :] if places is None else [_placeholders(module)[places[e.name]] for e in extra]
    inputs: dict[Hashable, fx.Node] = {each.key: node for each, node in zip(extra, state, strict=True)}
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen() if _is_nested(given) else given.graph._codegen)
    known = frozenset(graph.nodes)
    is_trace = not traces.is_partitioned(graph)
    gradients_of = traces.gradients_in_trace if is_trace else gradients_in_joint
    gradients = gradients_of(graph)
    if is_trace:
        traces.tag_sides(graph, gradients)
    positions = {node: i for i, node in enumerate(_placeholders(module))}
    context = GraphContext(
        compiled.inputs,
        compiled.placement.name_module,
        shares_scales=functools.partial(reduction_covers, session.options.amax_reduction_group),
        index_of=positions.get,
        gradients_of=gradients_of,
    )
    options = Options(trains=bool(gradients), contiguous_outputs=True, variants=variants)
    compiled.rewrite = rewrite(graph, context, session.rules, inputs, options)
    compiled.trains = bool(gradients)
    if is_trace:
        traces.untag_sides(graph, known)
    module.recompile()
    return module


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


# -- the graph that was given


def _check(given: object) -> torch.device:
    """The graph's device; raises OptionError for what cannot be rewritten."""
    if not isinstance(given, fx.GraphModule):
        raise OptionError(f"graph is a {type(given).__name__}; pass the torch.fx.GraphModule that make_fx returned")
    graph = given.graph
    if _is_nested(given) and not traces.is_partitioned(graph):
        raise OptionError(
            "graph takes and returns nested inputs and outputs (_PyTreeCodeGen); trace a function of flat ones, or call"
            " graph.graph.set_codegen(torch.fx.graph.CodeGen()) and pass flat inputs"
        )
    high_level = next((n for n in graph.nodes if n.op in ("call_module", "call_method")), None)
    if high_level is not None:
        raise OptionError(
            f"graph has {high_level.format_node()}, which is not an ATen operation; trace with"
            f" torch.fx.experimental.proxy_tensor.make_fx, not with torch.fx.symbolic_trace"
        )
    untyped = next((n for n in graph.nodes if n.op == "call_function" and "val" not in n.meta and n.users), None)
    if untyped is not None:
        raise OptionError(f"{untyped.name} has no fake value in meta['val']; trace with make_fx(..., tracing_mode='fake')")
    values = [n.meta["val"] for n in _placeholders(given) if holds_tensor(n)]
    try:
        is_fake = all(isinstance(v, FakeTensor) for v in values) and (not values or detect_fake_mode(values) is not None)
    except AssertionError:  # fake tensors of several modes
        is_fake = False
    if not is_fake:
        raise OptionError("the graph's inputs were not traced as fake tensors of one mode; pass make_fx tracing_mode='fake'")
    found = traces.changed_operand(graph)
    if found is not None:
        matmul, changing = found
        raise OptionError(
            f"{changing.format_node()} changes memory in place that {matmul.name} reads; trace"
            f" torch.func.functionalize(fn), so that the graph changes nothing that a GEMM reads"
        )
    return device_of(values)


def _is_nested(given: fx.GraphModule) -> bool:
    """Say whether inputs and outputs are nested, as a joint graph's (primals, tangents) are."""
    return isinstance(given.graph._codegen, fx.graph._PyTreeCodeGen)


def _names(graph: fx.GraphModule, inputs: Sequence[str | None] | None) -> list[str | None]:
    """The name of the Parameter or buffer that each input holds."""
    placeholders = _placeholders(graph)
    if inputs is None:
        return [described_parameter(node) for node in placeholders]
    names = list(inputs)
    wrong = next((n for n in names if not (n is None or isinstance(n, str))), None)
    if isinstance(inputs, str) or wrong is not None:
        raise OptionError(f"inputs holds {inputs if wrong is None else wrong!r}; use names such as 'wq.weight', or None")
    if len(names) > len(placeholders):
        extra = [str(n) for n in names[len(placeholders) :]]
        raise OptionError(f"inputs has {len(names)} names, and the graph {len(placeholders)} inputs; remove {preview(extra)}")
    return names + [None] * (len(placeholders) - len(names))


def _described(graph: fx.GraphModule, names: Sequence[str | None]) -> tuple[GraphInput, ...]:
    tables = {_behind_views(n.args[0]) for n in graph.graph.find_nodes(op="call_function", target=aten.embedding.default)}
    return tuple(
        GraphInput(None, None, False)
        if name is None
        else GraphInput(Path(_ROOT, name), Path(_ROOT, name.rpartition(".")[0]), True, is_embedding=node in tables)
        for node, name in zip(_placeholders(graph), names, strict=True)
    )


def _behind_views(node: Any) -> fx.Node:
    """The node that a chain of operations with one input each begins with, such as the views and casts of a Parameter."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
