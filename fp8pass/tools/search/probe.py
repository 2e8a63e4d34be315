"""A backend of torch.compile that runs a model in high precision and measures, at each GEMM that would run in FP8, what
quantization does to it. GEMMs are found and decided as the rewrite does, on the joint graph; nothing is rewritten."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config

from fp8pass.graph.kinds import kind_of, offs_of, operands_of, operation_of
from fp8pass.graph.sites import GemmSite, GraphContext
from fp8pass.graph.values import resolve
from fp8pass.rewrite.discover import discover
from fp8pass.rewrite.plan import Decision, make_plan
from fp8pass.rewrite.report import GemmRecord, gemm_records
from fp8pass.rewrite.select import select
from fp8pass.rules import Rules
from fp8pass.runtime.backend import check_device
from fp8pass.runtime.dynamo_graphs import describe_inputs, real_inputs, surroundings_of, without_regions
from fp8pass.runtime.instances import ModuleNames, Placement
from fp8pass.tools.search.rounding import Rounding, product_error

TAG = "fp8pass_gemm"
"""Where a node's `meta` has the number of its GEMM; the partitioner copies it to the graphs that it makes."""

Key = tuple[str, str]
"""Module and role."""


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One GEMM of a graph."""

    record: GemmRecord
    roundings: tuple[Rounding, Rounding] | None
    """Of both operands; None if it stays in high precision."""
    forward: int | None
    """Of a gradient: the number of its forward GEMM."""
    of_operand: int = 0
    """Of a gradient: which operand of the forward GEMM it is the gradient of."""
    gradient_at: int = 0
    """Of a gradient: which of its operands is the gradient of the forward GEMM's result."""

    @property
    def is_turned(self) -> bool:
        """Of a gradient: whether it reads and computes transposes. dA = dY Bᵀ and dB = Aᵀ dY are not turned."""
        return self.of_operand != self.gradient_at


@dataclasses.dataclass
class Effect:
    """Sums over the rows of a GEMM's result of gradient times error."""

    total: float = 0.0
    squares: float = 0.0
    measured: bool = False
    """Whether any gradient reached the GEMM."""

    def add(self, sensitivity: torch.Tensor, error: torch.Tensor) -> None:
        """Both of the result's shape."""
        rows = (sensitivity.double() * error.double()).sum(-1)
        self.total += float(rows.sum())
        self.squares += float(rows.square().sum())
        self.measured = True


class Probe:
    """What is measured in a pass, and what was found. One pass at a time."""

    def __init__(self) -> None:
        self.effects: dict[Key, Effect] = {}
        self.flops: Counter[Key] = Counter()
        self.unknown: set[Key] = set()
        """Those with a dynamic size."""
        self.records: dict[Key, GemmRecord] = {}
        self.outputs = False
        """Whether this pass measures forward GEMMs."""
        self.keeps_operands = False
        """Whether this pass keeps the operands of forward GEMMs."""
        self.gradient_scale = 0.0
        """What tangents are multiplied by for the effects of gradients; 0 if this pass does not measure them."""
        self.toggled: Key | None = None
        """The GEMM that runs in FP8 in this pass."""
        self.kept: dict[tuple[int, int, int], torch.Tensor] = {}
        self.step_size = 1.0
        """By which a tangent was multiplied when operands were kept."""
        self.num_calls = 0
        self.pass_number = 0

    def begin(self, **settings: Any) -> None:
        """Set up a pass: what is not given is off."""
        self.outputs = self.keeps_operands = False
        self.gradient_scale, self.toggled, self.num_calls = 0.0, None, 0
        self.pass_number += 1
        for name, value in settings.items():
            setattr(self, name, value)


class ProbeBackend:
    """What torch.compile calls with each graph."""

    def __init__(self, model: nn.Module, rules: Rules, probe: Probe):
        self.model = model
        self.rules = rules
        self.probe = probe
        self.names = ModuleNames(lambda: model)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
        device = next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))
        check_device(device)
        inputs = describe_inputs(gm.graph, self.model)
        placement = self.names.place(inputs, real_inputs(gm.graph))
        context = GraphContext(inputs, placement.name_module, surroundings_of(gm, self.model))
        gm = without_regions(gm)
        graph = _Graph(self.probe)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            graph.gemms = _tagged(joint.graph, context, self.rules, device)
            graph.inputs = frozenset(n.name for n in joint.graph.find_nodes(op="placeholder"))
            return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

        backend = aot_autograd(
            fw_compiler=lambda module, _: graph.runner(module, is_backward=False),
            bw_compiler=lambda module, _: graph.runner(module, is_backward=True),
            inference_compiler=lambda module, _: graph.runner(module, is_backward=False),
            partition_fn=partition,
        )
        with functorch_config.patch(enable_autograd_cache=False):
            function = backend(gm, example_inputs)

        def run(*args: Any) -> Any:
            graph.enter(self.names.place(inputs, args), self.probe)
            return function(*args)

        return run


def _tagged(graph: fx.Graph, context: GraphContext, rules: Rules, device: torch.device) -> list[Gemm | None]:
    """The GEMMs of a joint graph by number, None for what is not measured; their nodes are tagged."""
    sites = discover(graph, context)
    plan = make_plan(sites, rules, device, {} if rules.select == "all" else dict(select(graph, sites, context).reasons))
    number = {decision.site.node: i for i, decision in enumerate(plan.decisions)}
    found: list[Gemm | None] = []
    sites_of = {d.site.node: d.site for d in plan.decisions}
    for i, (decision, record) in enumerate(zip(plan.decisions, gemm_records(plan, ()), strict=True)):
        gemm = _gemm(decision, record, sites_of, number)
        found.append(gemm)
        if gemm is not None:
            decision.site.node.meta[TAG] = i
    return found


def _gemm(decision: Decision, record: GemmRecord, sites: dict[fx.Node, GemmSite], number: dict[fx.Node, int]) -> Gemm | None:
    """What the probe knows of a GEMM; None for operations of other libraries."""
    site, kind = decision.site, kind_of(decision.site.node)
    if not site.operands or kind is None or any(kind.transposes) or operation_of(site.node) is not site.node:
        return None
    made = [Rounding(c.quantization, o.kind, c.recipe) for c, o in zip(decision.copies, site.operands, strict=False)]
    of = (made[0], made[1]) if made else None
    gradients = [i for i, operand in enumerate(site.operands) if operand.kind == "grad_output"]
    mate = None if site.forward is None else sites[site.forward]
    if mate is None or not mate.operands or len(gradients) != 1:
        return Gemm(record, of, None)
    other = site.operands[1 - gradients[0]].value
    return Gemm(record, of, number[mate.node], 1 if other == mate.operands[0].value else 0, gradients[0])


@dataclasses.dataclass
class _Call:
    """One call of a graph: its backward comes later."""

    index: int
    placement: Placement
    errors: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    tangents: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)


class _Graph:
    """Runs the graphs of one of Dynamo's. The backward belongs to the latest call that has had none."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.gemms: list[Gemm | None] = []
        self.inputs: frozenset[str] = frozenset()
        """The inputs of the joint graph by name: what a cast reads in the dtype that it has in memory."""
        self.calls: list[_Call] = []
        self.pass_of_calls = -1

    def enter(self, placement: Placement, probe: Probe) -> None:
        if self.pass_of_calls != probe.pass_number:
            self.calls, self.pass_of_calls = [], probe.pass_number
        self.calls.append(_Call(probe.num_calls, placement))
        probe.num_calls += 1

    def runner(self, module: fx.GraphModule, *, is_backward: bool) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

        def run(*args: Any) -> Any:
            call = self.calls.pop() if is_backward else self.calls[-1]
            with torch.no_grad():
                return _Runner(module, self, call, is_backward).run(*args)

        return make_boxed_func(run)


class _Runner(fx.Interpreter):
    """Runs a graph node by node; at a GEMM it measures."""

    def __init__(self, module: fx.GraphModule, graph: _Graph, call: _Call, is_backward: bool):
        super().__init__(module)
        self.owner = graph
        self.call = call
        self.is_backward = is_backward
        self.inputs: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        number = n.meta.get(TAG)
        result = super().run_node(n)
        if n.op == "placeholder" and n.name in self.owner.inputs:
            self.inputs[n] = result
        gemm = None if number is None else self.owner.gemms[number]
        if number is None or gemm is None or (gemm.record.role != "output") != self.is_backward:
            return result  # not a GEMM, or a forward one that backward computes again
        operands = [self.env[o] if isinstance(o, fx.Node) else o for o in operands_of(n)]
        if not self.is_backward:
            self._keep(number, operands)
        return self._measured(n, number, gemm, operands, result)

    def _keep(self, number: int, operands: Sequence[torch.Tensor]) -> None:
        """The operands of a forward GEMM, or how much they change along the gradient."""
        probe = self.owner.probe
        for i, operand in enumerate(operands):
            place = (self.call.index, number, i)
            if probe.keeps_operands:
                probe.kept[place] = operand.to("cpu", torch.float32, copy=True)
            elif probe.gradient_scale and place in probe.kept:
                change = probe.kept.pop(place) - operand.to("cpu", torch.float32)
                self.call.tangents[number, i] = change / probe.step_size

    def _measured(self, n: fx.Node, number: int, gemm: Gemm, operands: Sequence[torch.Tensor], result: Any) -> Any:
        probe = self.owner.probe
        key = (self.call.placement.name_module(gemm.record.path), gemm.record.role)
        if probe.outputs and self.is_backward:
            self._finish_output(gemm, operands)
        if gemm.roundings is None:
            return result
        if probe.outputs:
            self._note(key, gemm.record)
        measures = probe.outputs if not self.is_backward else bool(probe.gradient_scale)
        if not measures and probe.toggled != key:
            return result
        offs = offs_of(n)
        read = [self._read(node, x) for node, x in zip(operands_of(n), operands, strict=True)]
        error = product_error(read[0], read[1], *gemm.roundings, None if offs is None else self.env[offs])
        if measures and not self.is_backward:
            self.call.errors[number] = error.to("cpu")
        elif measures and gemm.forward is not None:
            tangent = self.call.tangents.get((gemm.forward, gemm.of_operand))
            if tangent is not None:
                turned = tangent.mT if gemm.is_turned else tangent
                probe.effects[key].add(probe.gradient_scale * turned, error.to("cpu").view(turned.shape))
        return result + error.view(result.shape).to(result.dtype) if probe.toggled == key else result

    def _read(self, node: fx.Node, operand: torch.Tensor) -> torch.Tensor:
        """What a cast in place of an operand reads: of an input of the graph, such as a Parameter under autocast, the input."""
        value, is_transposed = resolve(node, is_batched=operand.dim() == 3)
        given = self.inputs.get(value.root)
        if given is None:
            return operand
        matrix = given.reshape(operand.mT.shape if is_transposed else operand.shape)
        return matrix.mT if is_transposed else matrix

    def _note(self, key: Key, record: GemmRecord) -> None:
        probe = self.owner.probe
        probe.effects.setdefault(key, Effect())
        probe.records.setdefault(key, dataclasses.replace(record, module=key[0]))
        if record.flops is None:
            probe.unknown.add(key)
        else:
            probe.flops[key] += record.flops

    def _finish_output(self, gemm: Gemm, operands: Sequence[torch.Tensor]) -> None:
        """The effect of the forward GEMM, now that the gradient of its result is known."""
        if gemm.forward is None:
            return
        error = self.call.errors.pop(gemm.forward, None)
        mate = self.owner.gemms[gemm.forward]
        if error is not None and mate is not None:
            gradient = operands[gemm.gradient_at].to("cpu")
            gradient = gradient.mT if gemm.is_turned else gradient
            key = (self.call.placement.name_module(mate.record.path), mate.record.role)
            self.owner.probe.effects[key].add(gradient, error.view(gradient.shape))
