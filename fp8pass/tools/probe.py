"""The measurements of `suggest_rules`. A backend of torch.compile, and the passes of the user's step with it.

The backend runs a model in high precision and measures, at GEMMs that would run in FP8, what quantization does to it. The model
is left unchanged. GEMMs are found and decided as the rewrite does, on the joint graph; nothing is rewritten.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor

from fp8pass.errors import Fp8Error, OptionError
from fp8pass.graph.cursor import always_recompute
from fp8pass.graph.gemms import GemmSite, GraphContext, kind_of, offs_of, operands_of, operation_of
from fp8pass.graph.values import resolve, size_hint
from fp8pass.rewrite.discover import discover
from fp8pass.rewrite.launches import plan_recomputation
from fp8pass.rewrite.plan import Decision, make_plan
from fp8pass.rewrite.report import GemmRecord, gemm_records
from fp8pass.rewrite.saved import SavedRecord, SavedValue, plan_saved, saved_records
from fp8pass.rewrite.select import select
from fp8pass.rules import SAVED, Rules
from fp8pass.runtime.backend import check_device, device_of
from fp8pass.runtime.dynamo_graphs import (
    describe_inputs,
    module_variables,
    modules_in_call,
    placement_in_trace,
    surroundings_of,
    traced_code,
    without_regions,
)
from fp8pass.runtime.instances import ModuleNames, Placement
from fp8pass.schemes.eager import rounded
from fp8pass.schemes.scheme import scaling
from lowering import ops

TAG = "fp8pass_gemm"  # The key of a GEMM's number in a node's `meta`; the partitioner copies it to the graphs that it makes.

Key = tuple[str, str]  # Module and role.
#: The share of the loss that the step of gradient descent takes away to first order, after which effects of gradients are told.
DESCENT = 0.01
#: Dynamo's limit of compilations per function: a search compiles the model anew, and beyond the limit it would run eagerly.
_COMPILATIONS = 1024
#: The distance by which parameters move for tangents, relative to their norm: further where they have fewer digits.
_MOVE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
#: Two runs of the step in high precision may differ by this share of the loss: atomics of a GPU.
REPEATABLE = 1e-4


Rounding = Callable[..., torch.Tensor]  # `rounded` of an operand.


@dataclasses.dataclass(frozen=True)
class Probed:
    """One GEMM of a graph."""

    record: GemmRecord
    roundings: tuple[Rounding, Rounding] | None  # The roundings of both operands; None if it is in high precision.
    forward: int | None  # For a gradient: the number of its forward GEMM.
    of_operand: int = 0  # For a gradient: which operand of the forward GEMM it is the gradient of.
    gradient_at: int = 0  # For a gradient: which of its operands is the gradient of the forward GEMM's result.

    def transposed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a gradient reads or computes it: transposed, except in dA = dY Bᵀ and dB = Aᵀ dY."""
        return tensor.mT if self.of_operand != self.gradient_at else tensor


@dataclasses.dataclass
class Effect:
    """Sums over the rows of a GEMM's result of gradient times error."""

    total: float = 0.0
    squares: float = 0.0
    measured: bool = False  # A gradient reached the GEMM.

    def add(self, sensitivity: torch.Tensor, error: torch.Tensor) -> None:
        """Both of the result's shape."""
        rows = (sensitivity.double() * error.double()).sum(-1)
        self.total += float(rows.sum())
        self.squares += float(rows.square().sum())
        self.measured = True


class Probe:
    """A backend of torch.compile with what a pass is to measure, and what was found. One pass at a time."""

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self.model = model
        self.rules = rules
        self.names = ModuleNames(lambda: model)
        self.effects: dict[Key, Effect] = {}
        self.flops: Counter[Key] = Counter()
        self.saves = False  # Find the values that are saved in FP8 with `saved_activations`.
        self.saved: Counter[Key] = Counter()  # The bytes that saving these values in FP8 takes away, by module.
        self.unknown: set[Key] = set()  # GEMMs with a dynamic size.
        self.outputs = False  # Measure forward GEMMs in this pass.
        self.keeps_operands = False  # Keep the operands of forward GEMMs in this pass.
        self.gradient_scale = 0.0  # The factor of tangents for the effects of gradients; 0 if this pass does not measure them.
        self.toggled: Key | None = None  # The GEMM, or the module's saved values, in FP8 in this pass.
        # By the number of a call and of a GEMM, and by operand: operands; the errors of results; tangents.
        self.kept: dict[tuple[int, int, int], torch.Tensor] = {}
        self.errors: dict[tuple[int, int], torch.Tensor] = {}
        self.tangents: dict[tuple[int, int, int], torch.Tensor] = {}
        self.step_size = 1.0  # The factor by which a tangent was multiplied when operands were kept.
        self.num_calls = 0
        self.pass_number = 0

    def begin(self, **settings: Any) -> None:
        """Set up a pass: what is not given is off."""
        self.outputs = self.keeps_operands = False
        self.gradient_scale, self.toggled, self.num_calls = 0.0, None, 0
        self.pass_number += 1
        self.errors, self.tangents = {}, {}
        for name, value in settings.items():
            setattr(self, name, value)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        device = device_of(example_inputs)
        if self.rules.has_gemms:
            check_device(device)
        inputs = describe_inputs(gm.graph, self.model)
        code, variables = traced_code(), module_variables(gm.graph, inputs)
        placement = placement_in_trace(gm, inputs, self.names)
        context = GraphContext(inputs, placement.name_module, surroundings_of(gm, self.model))
        gm = without_regions(gm)
        graph = _Graph(self)

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            graph.gemms = _tagged(joint.graph, context, self.rules, device, self.saves)
            graph.inputs = frozenset(n.name for n in joint.graph.find_nodes(op="placeholder"))
            forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
            if self.saves:
                graphs = forward.graph, backward.graph
                plan = plan_saved(*graphs, kwargs["num_fwd_outputs"], self.rules, context, may_multiply=True)
                made = zip(plan, saved_records(plan), strict=True)
                graph.saved = {value.read.name: (value, record) for value, record in made if record.quantized}
            return forward, backward

        backend = aot_autograd(
            fw_compiler=lambda module, _: graph.runner(module, is_backward=False),
            bw_compiler=lambda module, _: graph.runner(module, is_backward=True),
            inference_compiler=lambda module, _: graph.runner(module, is_backward=False),
            partition_fn=partition,
        )
        with functorch_config.patch(enable_autograd_cache=False):
            function = backend(gm, example_inputs)

        def run(*args: Any) -> Any:
            held = () if self.names.is_told(inputs, args) else modules_in_call(code, variables)
            graph.enter(self.names.place(inputs, args, held))
            return function(*args)

        return run


def _tagged(graph: fx.Graph, context: GraphContext, rules: Rules, device: torch.device, saves: bool) -> list[Probed | None]:
    """The GEMMs of a joint graph by number, None for what is not measured; their nodes are tagged. saves: the backward computes
    operands again from what is saved, as it does with `saved_activations`."""
    sites = discover(graph, context)
    plan = make_plan(sites, rules, device, {} if rules.select == "all" else select(graph, sites, context)[0])
    chains = plan_recomputation(graph, plan, "auto", with_operands=True).recomputed.values() if saves else ()
    for node in itertools.chain.from_iterable(chains):
        always_recompute(node)
    number = {decision.site.node: i for i, decision in enumerate(plan.decisions)}
    sites_of = {d.site.node: d.site for d in plan.decisions}
    found: list[Probed | None] = []
    for i, (decision, record) in enumerate(zip(plan.decisions, gemm_records(plan, ()), strict=True)):
        gemm = _gemm(decision, record, sites_of, number)
        found.append(gemm)
        if gemm is not None:
            decision.site.node.meta[TAG] = i
    return found


def _gemm(decision: Decision, record: GemmRecord, sites: dict[fx.Node, GemmSite], number: dict[fx.Node, int]) -> Probed | None:
    """The GEMM of a decision; None for operations of other libraries."""
    site, kind = decision.site, kind_of(decision.site.node)
    if not site.operands or kind is None or any(kind.transposes) or operation_of(site.node) is not site.node:
        return None
    made = [
        functools.partial(rounded, recipe=c.recipe, quantization=c.quantization, kind=o.kind)
        for c, o in zip(decision.copies, site.operands, strict=False)
    ]
    of = (made[0], made[1]) if made else None
    gradients = [i for i, operand in enumerate(site.operands) if operand.kind == "grad_output"]
    mate = None if site.forward is None else sites[site.forward]
    if mate is None or not mate.operands or len(gradients) != 1:
        return Probed(record, of, None)
    other = site.operands[1 - gradients[0]].value
    return Probed(record, of, number[mate.node], 1 if other == mate.operands[0].value else 0, gradients[0])


def product_error(
    a: torch.Tensor, b: torch.Tensor, of_a: Rounding, of_b: Rounding, offs: torch.Tensor | None = None
) -> torch.Tensor:
    """The error that quantizing both operands adds to a [m, k] @ b [k, n], or to their batched product: float32, of its shape.
    offs: where the groups of a grouped product end, among the rows of a, or, of two matrices, along what is summed over. Rows
    behind the last group are zeros."""
    if offs is None:
        return of_a(a) @ of_b(b.mT).mT - a.float() @ b.float()
    ends = [int(end) for end in offs.tolist()]
    if b.dim() == 2:
        a, b = a[:, : ends[-1]], b[: ends[-1]]
        near_a, near_b = of_a(a, parts=_parts(ends)), of_b(b.mT, parts=_parts(ends)).mT
    else:
        a = a.clone()
        a[ends[-1] :] = 0  # they reach no amax that other rows share
        near_a, near_b = of_a(a), of_b(b.mT).mT
    return _grouped(near_a, near_b, ends) - _grouped(a.float(), b.float(), ends)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    if b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in _parts(ends)])
    product = a.new_zeros(len(a), b.shape[-1])
    for part, matrix in zip(_parts(ends), b, strict=True):
        product[part] = a[part] @ matrix
    return product


def _parts(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class _Graph:
    """Runs the graphs of one of Dynamo's. The backward belongs to the latest call that has had none."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.gemms: list[Probed | None] = []
        self.saved: dict[str, tuple[SavedValue, SavedRecord]] = {}  # What is saved in FP8, by the backward's inputs.
        self.inputs: frozenset[str] = frozenset()  # The joint graph's inputs by name, which casts read as they are.
        self.calls: list[tuple[int, Placement]] = []  # The number of a call in this pass, and whose it is.
        self.pass_of_calls = -1

    def enter(self, placement: Placement) -> None:
        if self.pass_of_calls != self.probe.pass_number:
            self.calls, self.pass_of_calls = [], self.probe.pass_number
        self.calls.append((self.probe.num_calls, placement))
        self.probe.num_calls += 1

    def runner(self, module: fx.GraphModule, *, is_backward: bool) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

        def run(*args: Any) -> Any:
            call = self.calls.pop() if is_backward else self.calls[-1]
            with torch.no_grad():
                return _Runner(module, self, call, is_backward).run(*args)

        return make_boxed_func(run)


class _Runner(fx.Interpreter):
    """Runs a graph node by node; at a GEMM it measures."""

    def __init__(self, module: fx.GraphModule, graph: _Graph, call: tuple[int, Placement], is_backward: bool):
        super().__init__(module)
        self.owner = graph
        self.call, self.placement = call
        self.is_backward = is_backward
        self.inputs: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        number = n.meta.get(TAG)
        result = super().run_node(n)
        if self.is_backward and n.op == "placeholder" and (saved := self.owner.saved.get(n.name)) is not None:
            return self._saved(*saved, result)
        if n.op == "placeholder" and n.name in self.owner.inputs:
            self.inputs[n] = result
        gemm = None if number is None else self.owner.gemms[number]
        if number is None or gemm is None or (gemm.record.role != "output") != self.is_backward:
            return result  # not a GEMM, or a forward one that backward computes again
        operands = [self.env[o] if isinstance(o, fx.Node) else o for o in operands_of(n)]
        if not self.is_backward:
            probe = self.owner.probe
            for i, operand in enumerate(operands):
                place = (self.call, number, i)
                if probe.keeps_operands:
                    probe.kept[place] = operand.to("cpu", torch.float32, copy=True)
                elif probe.gradient_scale and place in probe.kept:
                    change = probe.kept.pop(place) - operand.to("cpu", torch.float32)
                    probe.tangents[place] = change / probe.step_size
        return self._measured(n, number, gemm, operands, result)

    def _saved(self, value: SavedValue, record: SavedRecord, x: torch.Tensor) -> torch.Tensor:
        """A value that is saved in FP8, rounded in the pass that is to."""
        probe = self.owner.probe
        key = self.placement.name_module(record.path), SAVED
        if probe.outputs:
            probe.saved[key] += size_hint(value.bytes_before) - size_hint(value.bytes_after)
        if probe.toggled != key:
            return x
        assert value.quantization is not None  # else it would not be among the saved ones
        q, scale_inv = ops.save_activation(x.permute(value.order), **scaling(value.quantization))
        back = sorted(range(len(value.order)), key=value.order.__getitem__)
        return ops.load_activation(q, scale_inv, dtype=x.dtype).permute(back)

    def _measured(self, n: fx.Node, number: int, gemm: Probed, operands: Sequence[torch.Tensor], result: Any) -> Any:
        probe = self.owner.probe
        key = (self.placement.name_module(gemm.record.path), gemm.record.role)
        if probe.outputs and self.is_backward:
            self._finish_output(gemm, operands)
        if gemm.roundings is None:
            return result
        if probe.outputs:
            probe.effects.setdefault(key, Effect())
            if gemm.record.flops is None:
                probe.unknown.add(key)
            else:
                probe.flops[key] += gemm.record.flops
        measures = probe.outputs if not self.is_backward else bool(probe.gradient_scale)
        if not measures and probe.toggled != key:
            return result
        offs = offs_of(n)
        read = [self._read(node, x) for node, x in zip(operands_of(n), operands, strict=True)]
        error = product_error(read[0], read[1], *gemm.roundings, None if offs is None else self.env[offs])
        if measures and not self.is_backward:
            probe.errors[self.call, number] = error.to("cpu")
        elif measures and gemm.forward is not None:
            tangent = probe.tangents.get((self.call, gemm.forward, gemm.of_operand))
            if tangent is not None:
                read_as = gemm.transposed(tangent)
                probe.effects[key].add(probe.gradient_scale * read_as, error.to("cpu").view(read_as.shape))
        return result + error.view(result.shape).to(result.dtype) if probe.toggled == key else result

    def _read(self, node: fx.Node, operand: torch.Tensor) -> torch.Tensor:
        """The tensor that a cast in place of an operand reads: for a Parameter under autocast, such as it is, the Parameter."""
        value, is_transposed = resolve(node, is_batched=operand.dim() == 3)
        given = self.inputs.get(value.root)
        if given is None:
            return operand
        matrix = given.reshape(operand.mT.shape if is_transposed else operand.shape)
        return matrix.mT if is_transposed else matrix

    def _finish_output(self, gemm: Probed, operands: Sequence[torch.Tensor]) -> None:
        """The effect of the forward GEMM, now that the gradient of its result is known."""
        if gemm.forward is None:
            return
        error = self.owner.probe.errors.pop((self.call, gemm.forward), None)
        mate = self.owner.gemms[gemm.forward]
        if error is not None and mate is not None:
            gradient = gemm.transposed(operands[gemm.gradient_at].to("cpu"))
            key = (self.placement.name_module(mate.record.path), mate.record.role)
            self.owner.probe.effects[key].add(gradient, error.view(gradient.shape))


# -- passes of the step


class StepPasses:
    """Runs the step. Every pass begins with the same parameters, buffers, modes and random numbers. A context manager, which
    leaves the model as it was, whatever happens."""

    def __init__(self, model: nn.Module, step: Callable[[Any], torch.Tensor], rules: Rules, saves: bool = False):
        """saves: also values that are saved for the backward are measured."""
        self.model = model
        self.step = step
        self.probe = Probe(model, rules)
        self.probe.saves = saves
        self.compiled = torch.compile(model, backend=self.probe, dynamic=False)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.restore = restorer(model)
        self.own_gradients = [(p, p.grad) for p in model.parameters()]
        self.gradients: list[torch.Tensor | None] = []
        self.first_gradients: list[torch.Tensor | None] = []  # The gradients in high precision.
        self.learning_rate = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        for parameter, gradient in self.own_gradients:
            parameter.grad = gradient

    def run(self, *, backward: bool = True, descend: list[torch.Tensor | None] | None = None, **settings: Any) -> float:
        """The loss of one pass, with gradients in `self.gradients`. descend: gradients that parameters are moved along before,
        by the learning rate."""
        self.restore()
        for p in self.trained:
            p.grad = None
        if descend is not None:
            with torch.no_grad():
                for p, g in zip(self.trained, descend, strict=True):
                    if g is not None:
                        p.add_(g.to(p.dtype), alpha=-self.learning_rate)
        self.probe.begin(**settings)
        versions = [p._version for p in self.model.parameters()]
        with torch.enable_grad(), torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
            try:
                loss = self.step(self.compiled)
            except BackendCompilerFailed as failure:
                if isinstance(failure.inner_exception, Fp8Error):
                    raise failure.inner_exception from None
                raise
        self._check(loss, versions)
        mean = mean_of(float(loss.detach()))
        if not math.isfinite(mean):
            raise OptionError(f"the loss of step is {mean} in high precision; effects need a finite loss")
        if backward:
            loss.backward()
            self.gradients = average([p.grad for p in self.trained])
        return mean

    def _check(self, loss: object, versions: list[int]) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dim() > 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise OptionError(f"step returned {given}; return the loss, a scalar tensor, before its backward")
        if any(p.grad is not None for p in self.trained):
            raise OptionError("step ran a backward; return the loss and leave the backward to suggest_rules")
        if [p._version for p in self.model.parameters()] != versions:
            raise OptionError("step changed parameters; leave optimizer.step() out and return the loss")
        if not loss.requires_grad:
            raise OptionError(
                "the loss of step has no gradient; run the model without torch.no_grad, with parameters that train"
            )

    def effects(self) -> float:
        """Fill the probe's effects; returns the loss in high precision."""
        loss = self.run(outputs=True)
        if not mean_of(len(self.probe.effects) + len(self.probe.saved)):
            raise OptionError(
                "nothing of the step would be in FP8: step must call the model that it is given, and inspect(compiled) says"
                " why GEMMs run in high precision"
            )
        gradients = [None if g is None else g.clone() for g in self.gradients]
        self.first_gradients = gradients
        norm = _norm(gradients)
        if norm == 0.0:
            raise OptionError("the gradients of the step are 0, so no effect on the loss can be computed")
        self.learning_rate = DESCENT * abs(loss) / norm**2
        move = max(_MOVE.get(p.dtype, 1e-3) for p in self.trained)
        distance = move * max(_norm([p.detach() for p in self.trained]), 1e-6) / norm
        rate, self.learning_rate = self.learning_rate, -distance
        self.run(backward=False, keeps_operands=True, descend=gradients)
        self.learning_rate = rate
        self.probe.step_size = distance
        again = self.run(gradient_scale=-rate)
        self.probe.kept.clear()
        average_effects(self.probe)
        if abs(again - loss) > REPEATABLE * abs(loss):
            raise OptionError(
                f"step is not repeatable: its loss was {loss:.8g}, then {again:.8g} with the same parameters and random"
                f" numbers. Use the same batch in each call"
            )
        return loss

    def effect_of_saved(self, key: Key) -> float:
        """The first-order effect of a module's saved values on the loss after the step of gradient descent."""
        self.run(toggled=key)
        pairs = zip(self.first_gradients, self.gradients, strict=True)
        products = (g.double() * (other.double() - g.double()) for g, other in pairs if g is not None and other is not None)
        return -self.learning_rate * sum(float(product.sum()) for product in products)

    def measured(self, key: Key, loss: float, baselines: dict[str, float]) -> float:
        """The effect of one GEMM, or of the saved values of a module, in FP8 alone; see `suggest_rules`."""
        if key[1] == "output":
            return self.run(backward=False, toggled=key) - loss
        if "descended" not in baselines:
            baselines["descended"] = self.run(backward=False, descend=self.first_gradients)
        self.run(toggled=key)
        changed = [None if g is None else g.clone() for g in self.gradients]
        return self.run(backward=False, descend=changed) - baselines["descended"]


def _norm(tensors: list[torch.Tensor | None] | list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors if t is not None))


def restorer(model: nn.Module) -> Callable[[], None]:
    """A function that restores what a pass could change of a model, but for gradients, and the random number generators."""
    tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    modes = [(m, m.training) for m in model.modules()]
    random = torch.get_rng_state()
    devices = sorted({t.device.index or 0 for t, _ in tensors if t.device.type == "cuda"})
    random_of_devices = [(d, torch.cuda.get_rng_state(d)) for d in devices]

    def restore() -> None:
        with torch.no_grad():
            for tensor, saved in tensors:
                tensor.copy_(saved)
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(random)
        for device, found in random_of_devices:
            torch.cuda.set_rng_state(found, device)

    return restore


# -- ranks of data-parallel training: each measures its own batch, and all add the numbers of all in the same order


def num_ranks() -> int:
    """The size of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_ranks(model: nn.Module) -> None:
    """Raises OptionError on every rank unless all of them have the model, whole and with the same parameters."""
    if num_ranks() == 1:
        return
    is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    sums = [float(p.detach().double().sum()) for p in model.parameters() if not isinstance(p, DTensor)]
    found = _of_all((is_wrapped, sharded[:1], sums))
    if any(wrapped for wrapped, _, _ in found):
        raise OptionError("model is a DistributedDataParallel; pass its module, and suggest_rules averages over the ranks")
    if any(names for _, names, _ in found):
        name = next(names[0] for _, names, _ in found if names)
        raise OptionError(f"the parameter {name} is sharded; run suggest_rules on the whole model, before it is sharded")
    if any(str(other) != str(found[0][2]) for _, _, other in found):
        raise OptionError(
            "parameters differ between ranks; suggest_rules needs the same model on each, such as before DDP trains"
        )


def mean_of(value: float) -> float:
    """The mean of the ranks' values."""
    return value if num_ranks() == 1 else sum(_of_all(value)) / num_ranks()


def average(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The mean of the ranks' gradients, each a new tensor; one that a rank does not have counts as zeros."""
    if num_ranks() == 1:
        return list(gradients)
    described = _of_all([None if g is None else (g.shape, g.dtype) for g in gradients])
    found: list[torch.Tensor | None] = []
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    for g, of_ranks in zip(gradients, zip(*described, strict=True), strict=True):
        known = next((one for one in of_ranks if one is not None), None)
        if known is None:
            found.append(None)
            continue
        if g is None:
            total = torch.zeros(known[0], dtype=torch.float32, device=device)
        else:
            total = g.detach().to(torch.float32, copy=True)
        dist.all_reduce(total)
        found.append((total / num_ranks()).to(known[1]))
    return found


def average_effects(probe: Probe) -> None:
    """Give each rank's probe the effects on the mean loss, and the FLOPs of all ranks."""
    if num_ranks() == 1:
        return
    own = {key: (dataclasses.astuple(effect), probe.flops[key], key in probe.unknown) for key, effect in probe.effects.items()}
    of_ranks = _of_all(own)
    for key in dict.fromkeys(key for of_rank in of_ranks for key in of_rank):
        parts = [of_rank[key] for of_rank in of_ranks if key in of_rank]
        total = sum(effect[0] for effect, _, _ in parts) / num_ranks()
        squares = sum(effect[1] for effect, _, _ in parts) / num_ranks() ** 2
        probe.effects[key] = Effect(total, squares, any(effect[2] for effect, _, _ in parts))
        probe.flops[key] = sum(flops for _, flops, _ in parts)
        if any(is_unknown for _, _, is_unknown in parts):
            probe.unknown.add(key)


def _of_all(value: Any) -> list[Any]:
    """The ranks' values, by rank."""
    found: list[Any] = [None] * num_ranks()
    dist.all_gather_object(found, value)
    return found
