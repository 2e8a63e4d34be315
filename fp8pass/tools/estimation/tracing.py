"""What every recipe makes of a model's graphs: decisions, expected seconds and saved bytes, without code generation.

Dynamo traces the model once, on tensors without content, AOTAutograd makes one joint graph of it, and each recipe gets a copy.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.cost import Device, Estimate
from fp8pass.graph.origin import Path, input_index, is_gradient, module_path
from fp8pass.graph.sites import GraphContext, GraphInput, Surroundings
from fp8pass.graph.snapshot import Snapshot
from fp8pass.inputs import CapacityExceeded, ExtraInput, Needed
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.runner import planned, rewrite, without
from fp8pass.runtime.dynamo_graphs import (
    copied,
    describe_inputs,
    find_extra_inputs,
    real_inputs,
    surroundings_of,
    with_extra_inputs,
    without_regions,
)
from fp8pass.runtime.instances import Placement
from fp8pass.runtime.session import Session
from fp8pass.tools.estimation.fakes import attention_flops, fake, keep_attention_whole
from fp8pass.tools.estimation.repeats import Kept, copies_of, cut_repeats, num_copies
from fp8pass.tools.inspection.report import saved_memory

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class GemmEstimate:
    """One GEMM of the model under one recipe."""

    record: GemmRecord
    """What is decided about it."""
    expected: Estimate | None
    """Its expected seconds; None where a size is dynamic, or the device has no such GEMM."""


@dataclasses.dataclass
class Traced:
    """The GEMMs of a model under one recipe, and what the forward saves for the backward."""

    gemms: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """As the recipe has them."""
    chosen: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """With `min_speedup=1.0`: those that are expected to be slower stay in high precision."""
    saved_bytes: int = 0


@dataclasses.dataclass
class TracedModel:
    """What tracing a model found."""

    by_recipe: dict[str, Traced]
    high_precision: Traced = dataclasses.field(default_factory=Traced)
    """Without any recipe."""
    attention: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    """FLOPs of each attention, and whether it is a gradient."""
    has_masks: bool = False
    """Whether an attention has one: then the whole square of its scores counts."""
    num_graphs: int = 0


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    sessions: Mapping[str, Session],
    baseline: Session,
    device: Device,
) -> TracedModel:
    """Trace one call of a model of fake tensors. sessions: by the name of the recipe; baseline: that of high precision."""
    tracer = _Tracer(model, mode, sessions, baseline, device)

    def call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return model(*args, **kwargs)

    # Dynamo counts how often code is compiled: a copy of the code leaves the counts of the user's models alone.
    own = types.FunctionType(call.__code__.replace(co_name="estimated"), globals())
    torch.compile(own, backend=tracer, dynamic=False)(model, list(args), dict(kwargs))
    return tracer.found


class _Planned(BaseException):
    """Ends a compilation: everything is known."""


class _Tracer:
    """What torch.compile calls with each graph of Dynamo's. Its graphs compute nothing."""

    compiler_name = "fp8pass estimate"

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode,
        sessions: Mapping[str, Session],
        baseline: Session,
        device: Device,
    ):
        self.found = TracedModel({name: Traced() for name in sessions})
        self._model, self._mode, self._sessions, self._baseline, self._device = model, mode, sessions, baseline, device

    def __call__(self, gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.found.num_graphs += 1
        results = [_value(node) for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        outputs = [fake(value, self._mode) if isinstance(value, torch.Tensor) else value for value in results]
        needed = Needed()
        while True:
            try:
                self._trace(gm, examples, needed)
                return lambda *args: outputs
            except CapacityExceeded as exceeded:
                needed = Needed(entries=exceeded.needed)

    def _trace(self, gm: fx.GraphModule, examples: list[Any], needed: Needed) -> None:
        inputs = describe_inputs(gm.graph, self._model)
        placement = self._baseline.names.place(inputs, real_inputs(gm.graph))
        surroundings = surroundings_of(gm, self._model)
        gm = without_regions(gm)
        reduced = copied(gm)
        kept = cut_repeats(reduced.graph)
        positions = _erase_unused(reduced.graph, gm.graph)
        keep_attention_whole(reduced.graph)
        reduced.recompile()
        inputs, examples = tuple(inputs[i] for i in positions), [examples[i] for i in positions]
        extra = {
            name: [given for provider in session.providers for given in provider.inputs(_CPU, needed)]
            for name, session in self._sessions.items()
        }
        module, examples = with_extra_inputs(reduced, examples, [e for given in extra.values() for e in given], _CPU)
        graph = _Graph(self.found, self._sessions, self._baseline, self._device, kept, inputs, placement, surroundings, extra)
        _aot(module, examples, graph)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _erase_unused(graph: fx.Graph, whole: fx.Graph) -> list[int]:
    """Erase the inputs that only removed layers read; the positions of the others."""
    placeholders = list(zip(graph.find_nodes(op="placeholder"), whole.find_nodes(op="placeholder"), strict=True))
    positions = [i for i, (node, before) in enumerate(placeholders) if node.users or not before.users]
    for i, (node, _) in enumerate(placeholders):
        if i not in positions:
            graph.erase_node(node)
    return positions


def _aot(module: fx.GraphModule, examples: list[Any], graph: _Graph) -> None:
    """Trace the joint graph, or that of inference, and hand it over."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def joint(traced: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        graph.estimate(traced, inputs, kwargs)
        raise _Planned

    def inference(traced: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        graph.estimate(traced, inputs, None)
        raise _Planned

    backend = aot_autograd(
        fw_compiler=boxed_nop, inference_compiler=inference, partition_fn=joint, keep_inference_input_mutations=True
    )
    fake_mode = detect_fake_mode(examples)
    try:
        with functorch_config.patch(enable_autograd_cache=False), tracing(TracingContext(fake_mode)):
            backend(module, examples)
    except _Planned:
        return


@dataclasses.dataclass(frozen=True)
class _Graph:
    """One graph of Dynamo's, whose joint graph every recipe gets a copy of."""

    found: TracedModel
    sessions: Mapping[str, Session]
    baseline: Session
    device: Device
    kept: Kept
    inputs: tuple[GraphInput, ...]
    placement: Placement
    surroundings: Surroundings
    extra: Mapping[str, Sequence[ExtraInput]]

    def estimate(self, traced: fx.GraphModule, inputs: Any, partition: Mapping[str, Any] | None) -> None:
        """partition: the arguments of the partitioner; None in inference."""
        start = len(self.inputs)
        for name, session in self.sessions.items():
            given = self.extra[name]
            self._estimate(self.found.by_recipe[name], session, traced, inputs, partition, start, given)
            start += len(given)
        self._estimate(self.found.high_precision, self.baseline, traced, inputs, partition, start, ())
        for node, flops, is_backward, has_mask in attention_flops(traced.graph):
            self.found.attention += [(flops, is_backward)] * num_copies(module_path(node), self.kept)
            self.found.has_masks |= has_mask

    def _estimate(
        self,
        found: Traced,
        session: Session,
        traced: fx.GraphModule,
        inputs: Any,
        partition: Mapping[str, Any] | None,
        start: int,
        extra: Sequence[ExtraInput],
    ) -> None:
        given, trains = session.options, partition is not None
        context = GraphContext(self.inputs, self.placement.name_module, self.surroundings)
        options = Options(trains=trains, contiguous_outputs=True, given=given, device=self.device)

        def run(runner: Callable[..., Any], graph: fx.Graph, rules: Any) -> Any:
            return runner(graph, context, rules, find_extra_inputs(graph, start, extra, input_index), options)

        choosing = dataclasses.replace(given.first_rules, min_speedup=1.0)
        joint = Snapshot.take(traced.graph)
        found.chosen += self._all_layers(*run(planned, joint.restore(), choosing))
        graph = joint.restore()
        with without("verify"):
            rewritten = run(rewrite, graph, given.first_rules)
        found.gemms += self._all_layers(rewritten.gemms, rewritten.estimates)
        if partition is not None:
            found.saved_bytes += self._saved_bytes(fx.GraphModule(traced, graph), inputs, partition)

    def _all_layers(self, gemms: Sequence[GemmRecord], estimates: Sequence[Estimate | None]) -> list[GemmEstimate]:
        """With those of the layers that the graph's stand for."""
        found = []
        for record, expected in zip(gemms, estimates, strict=True):
            paths: Sequence[Path | None] = copies_of(record.path, self.kept) or [record.path]
            for path in paths:
                name = record.module if path == record.path else self.placement.name_module(path)
                found.append(GemmEstimate(dataclasses.replace(record, module=name, path=path), expected))
        return found

    def _saved_bytes(self, joint: fx.GraphModule, inputs: Any, partition: Mapping[str, Any]) -> int:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        num_outputs = sum(not is_gradient(described) for described in joint.graph.output_node().meta["desc"])
        forward, _ = min_cut_rematerialization_partition(joint, inputs, **partition)
        results: Any = forward.graph.output_node().args[0]
        placeholders = forward.graph.find_nodes(op="placeholder")
        saved = saved_memory([r if isinstance(r, fx.Node) else None for r in results], placeholders, num_outputs)
        return sum(size * num_copies(_layer_of(node), self.kept) for node, size in saved)


def _layer_of(node: fx.Node) -> Path | None:
    """The module that made a node, or what the node was made of."""
    while (path := module_path(node)) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return path
