"""Training in FP8 written once more: each operand is quantized afresh at each call, from docs/numerics.md alone.

Nothing here is imported from `fp8pass` or `lowering`: no cast, no scale, no history, no kept copy. A model runs eagerly, and a
TorchFunctionMode replaces its linears by `_Linear`, so that a program reads the same with the product and with the reference.
"""

import contextlib
import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.support import models

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
LARGEST = torch.finfo(torch.float32).max
ROLES = ("output", "grad_input", "grad_weight")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the reference needs to know of a recipe."""

    kind: str
    """"delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8"."""
    history: int = 1024
    most_recent: bool = False
    margin: int = 0
    starts_with_one: bool = False
    """Whether a tensor without a history has scale 1, instead of one from itself."""


RECIPES = {
    "delayed": Recipe("delayed"),
    "short": Recipe("delayed", history=3),
    "recent": Recipe("delayed", history=4, most_recent=True, margin=1),
    "one": Recipe("delayed", history=2, starts_with_one=True),
    **{kind: Recipe(kind) for kind in ("current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")},
}


# -- scales and casts


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 values of x * scale, as float32: rounded to nearest even, finite overflow saturated, inf and NaN visible."""
    x = x.float().contiguous()  # as a copy lies in memory: the order of a GEMM's additions follows from it
    q = (x * scale).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype).float()
    odd = torch.where(x.isinf(), x if dtype is E5M2 else torch.full_like(x, torch.nan), q)
    return torch.where(x.isnan(), x, odd)


def quotient(limit: float, amax: torch.Tensor) -> torch.Tensor:
    """limit / amax. torch divides a number by a tensor as number * reciprocal, which rounds twice."""
    return torch.full_like(amax, limit) / amax


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool = False, margin: int = 0) -> torch.Tensor:
    """FP8_MAX / amax, 1 where that is 0 or not finite; `power_of_2` clears the mantissa."""
    scale = quotient(LIMIT[dtype] / 2**margin, amax).clamp(max=LARGEST)
    scale = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)
    return torch.ldexp(torch.full_like(scale, 0.5), torch.frexp(scale).exponent) if power_of_2 else scale


def of_tensor(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 values, scale_inv) with one scale."""
    return cast(x, scale, dtype), scale.reciprocal()


def of_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With one power of two per row."""
    scale = scale_of(x.float().abs().amax(1, keepdim=True), E4M3, power_of_2=True)
    return cast(x, scale, E4M3), scale.reciprocal()


def of_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Dequantized values with one power of two per `rows` x 128 values."""
    amax = _pooled(x.float().abs(), rows, 128)
    largest = torch.finfo(x.dtype).max
    scale = torch.where(amax * largest < LIMIT[E4M3], torch.tensor(largest), quotient(LIMIT[E4M3], amax))
    scale = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)
    scale = _spread(torch.ldexp(torch.full_like(scale, 0.5), torch.frexp(scale).exponent), x.shape, rows, 128)
    return cast(x, scale, E4M3) * scale.reciprocal()


def of_32(x: torch.Tensor) -> torch.Tensor:
    """Dequantized MXFP8 values: one E8M0 scale per 32 values of a row, rounded up."""
    mantissa, exponent = torch.frexp(_pooled(x.float().abs(), 1, 32) / LIMIT[E4M3])
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = _spread(up.clamp(-127, 127).float(), x.shape, 1, 32)
    return torch.ldexp(cast(torch.ldexp(x.float(), -power), torch.tensor(1.0), E4M3), power)


def _pooled(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The largest value of each block; blocks at the edges are cut."""
    return nn.functional.max_pool2d(x[None, None], (rows, cols), ceil_mode=True)[0, 0]


def _spread(x: torch.Tensor, shape: torch.Size, rows: int, cols: int) -> torch.Tensor:
    return x.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]


# -- a linear


Scales = Mapping[str, torch.Tensor]
"""Operand -> the scale that delayed scaling gave it at the time of the forward; none: it scales itself."""


def multiply(
    recipe: Recipe, role: str, a: torch.Tensor, b: torch.Tensor, kinds: tuple[str, str], scales: Scales
) -> torch.Tensor:
    """a [M, K] @ b [N, K].T in FP8; float32. kinds: "input", "weight" or "grad_output" of both."""
    if role == "grad_weight" and recipe.kind == "rowwise_with_gw_hp":
        return a.float() @ b.float().t()
    if recipe.kind in ("delayed", "current"):
        (qa, sa), (qb, sb) = (_with_one_scale(recipe, x, kind, scales) for x, kind in zip((a, b), kinds, strict=True))
        return (qa @ qb.t()) * (sa * sb)
    if recipe.kind == "rowwise_with_gw_hp" and role == "grad_input":
        (qa, sa), shared = of_rows(a), scale_of(b.float().abs().max(), E4M3, power_of_2=True)
        qb, sb = of_tensor(b, E4M3, shared)
        return (qa @ qb.t()) * sa * sb
    if recipe.kind.startswith("rowwise"):
        (qa, sa), (qb, sb) = of_rows(a), of_rows(b)
        return (qa @ qb.t()) * sa * sb.t()
    if recipe.kind == "blockwise":
        return of_blocks(a, 1) @ of_blocks(b, 128 if kinds[1] == "weight" else 1).t()
    return of_32(a) @ of_32(b).t()


def _with_one_scale(recipe: Recipe, x: torch.Tensor, kind: str, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = E5M2 if kind == "grad_output" else E4M3
    scale = scales.get(kind)
    if scale is None:
        scale = scale_of(x.float().abs().max(), dtype, margin=recipe.margin if recipe.kind == "delayed" else 0)
    return of_tensor(x, dtype, scale)


class _Linear(torch.autograd.Function):
    """x [..., K] @ weight [N, K].T + bias with the three GEMMs in FP8, but for the roles in `high`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, recipe: Any, scales: Any, high: Any, record: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = recipe, scales, high, record
        ctx.has_bias = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        if "output" in high:
            return nn.functional.linear(x, weight, bias)
        out = multiply(recipe, "output", rows, weight, ("input", "weight"), scales)
        out = out if bias is None else out + bias.float()
        return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), (recipe, scales, high, record) = ctx.saved_tensors, ctx.how
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        in_fp8 = {role for role, needed in (("grad_input", needs_x), ("grad_weight", needs_weight)) if needed} - high
        if in_fp8 and not (recipe.kind == "rowwise_with_gw_hp" and in_fp8 == {"grad_weight"}):
            record("grad_output", grads)
        if "output" in high:  # else the forward has recorded what it casts
            for role, kind, operand in (("grad_weight", "input", rows), ("grad_input", "weight", weight)):
                if role in in_fp8:
                    record(kind, operand)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = self_or_fp8("grad_input", high, recipe, grads, weight.t(), ("grad_output", "weight"), scales)
            grad_x = grad_x.to(x.dtype).reshape(x.shape)
        if needs_weight:
            grad_weight = self_or_fp8("grad_weight", high, recipe, grads.t(), rows.t(), ("grad_output", "input"), scales)
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grads.sum(0) if ctx.has_bias else None, None, None, None, None


def self_or_fp8(
    role: str, high: Any, recipe: Recipe, a: torch.Tensor, b: torch.Tensor, kinds: Any, scales: Any
) -> torch.Tensor:
    """`multiply`, or the plain product of a role in `high`."""
    return a @ b.t() if role in high else multiply(recipe, role, a, b, kinds, scales)


# -- histories

Rules = Mapping[str, None]
"""Globs of modules, or of modules and roles, "a:grad_weight", whose GEMMs stay in high precision."""


@dataclasses.dataclass
class History:
    """One tensor's: the newest amax last."""

    limit: float
    amaxes: list[torch.Tensor] = dataclasses.field(default_factory=list)
    staged: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    """None while the history is empty."""


class State:
    """Delayed scaling's, of one compiled model."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.histories: dict[str, History] = {}
        self.is_pending = False
        self.num_steps = 0
        self.rules: Rules = {}
        self.next_rules: Rules | None = None
        self.lock = threading.Lock()

    def scales_for(self, key: str, weight: str) -> dict[str, torch.Tensor]:
        """The scales of a linear's operands, of those that have one. weight: the key of its weight."""
        if self.recipe.kind != "delayed":
            return {}
        found = {kind: self.histories.get(f"{key}:{kind}") for kind in ("input", "grad_output")}
        found["weight"] = self.histories.get(f"{weight}:weight")
        scales = {kind: h.scale for kind, h in found.items() if h is not None and h.scale is not None}
        return {kind: torch.tensor(1.0) for kind in found} | scales if self.recipe.starts_with_one else scales

    def record(self, key: str, kind: str, x: torch.Tensor) -> None:
        """A cast of a tensor: the staged amax is the largest of the step."""
        amax = x.detach().float().abs().max()
        with self.lock:
            limit = LIMIT[E5M2 if kind == "grad_output" else E4M3]
            history = self.histories.setdefault(f"{key}:{kind}", History(limit))
            history.staged = amax if history.staged is None else torch.maximum(history.staged, amax)

    def end_step(self) -> None:
        """What a step boundary does: histories take what is staged, scales follow from them."""
        self.is_pending = False
        self.num_steps += 1
        self.use_rules(self.rules if self.next_rules is None else self.next_rules)
        for history in self.histories.values():
            amax, history.staged = history.staged, None
            if amax is None or not amax.isfinite() or amax == 0:
                continue
            history.amaxes = [*history.amaxes, amax][-self.recipe.history :]
            newest = amax if self.recipe.most_recent else torch.stack(history.amaxes).max()
            history.scale = quotient(history.limit / 2**self.recipe.margin, newest).clamp(max=LARGEST)

    def use_rules(self, rules: "Rules") -> None:
        """They hold from the next step boundary on, or from now on if nothing has trained since the last one."""
        self.next_rules = rules if self.is_pending else None
        self.rules = self.rules if self.is_pending else rules

    def saved(self) -> Any:
        """For `load`; a later step changes nothing in it."""
        return {n: dataclasses.replace(h) for n, h in self.histories.items()}, self.is_pending, self.num_steps

    def load(self, saved: Any) -> None:
        """Continue from `saved`."""
        histories, self.is_pending, self.num_steps = saved
        self.histories = {n: dataclasses.replace(h) for n, h in histories.items()}


# -- a compiled model


class Reference:
    """A model whose linears run in FP8, called as the model is.

    step: "auto" and "manual" as in `fp8_compile`; "graphs": a step ends at the first training forward after a backward, as it
        does for models that were compiled by the backend's name; "ranks": evaluations end none.
    schedule: number of ended steps -> roles in high precision from there on.
    """

    def __init__(self, call: Callable[..., Any], model: Any, recipe: Recipe, step: str = "auto", schedule: Any = None):
        self.call, self.model, self.recipe, self.step, self.schedule = call, model, recipe, step, schedule or {}
        self.state = State(recipe)
        self.modules: dict[str, nn.Module] = {}
        self.away: dict[nn.Module, dict[str, History]] = {}
        self.went_backward = False
        self._depth = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains, depth = torch.is_grad_enabled(), getattr(self._depth, "value", 0)
        is_recomputed = torch._C._current_graph_task_id() != -1  # by a user's Function in its backward
        if depth == 0 and not is_recomputed and self._ends_a_step(trains):
            self.state.end_step()
            self.went_backward = False
        self.follow()
        self._depth.value = depth + 1
        parameters = self.model.parameters() if isinstance(self.model, nn.Module) else ()
        segment = Segment(self.state, any(p.requires_grad for p in parameters))
        try:
            with _Calls(self, segment), _breaks(segment):
                return self.call(*args, **kwargs)
        finally:
            segment.end()
            self._depth.value = depth

    def follow(self) -> None:
        """Histories are those of modules, not of paths."""
        if not isinstance(self.model, nn.Module):
            return
        before, self.modules = self.modules, dict(self.model.named_modules())
        places = {module: path for path, module in self.modules.items()}
        histories, self.state.histories = self.state.histories, {}
        for name, history in histories.items():
            path, _, rest = name.partition(":")
            path, _, count = path.partition("#")
            module = before.get(path)
            if module is None or self.modules.get(path) is module:
                self.state.histories[name] = history
            elif module in places:
                self.state.histories[f"{places[module]}{'#' * bool(count)}{count}:{rest}"] = history
            else:
                self.away.setdefault(module, {})[f"{'#' * bool(count)}{count}:{rest}"] = history
        for module in [module for module in self.away if module in places]:
            for rest, history in self.away.pop(module).items():
                self.state.histories[f"{places[module]}{rest}"] = history

    def _ends_a_step(self, trains: bool) -> bool:
        if self.step == "graphs":
            return trains and self.went_backward
        return self.state.is_pending and (self.step == "auto" or (self.step == "ranks" and trains))

    def high(self, path: str) -> frozenset[str]:
        """The roles of a module that the schedule and the rules leave in high precision in this step."""
        passed = [step for step in self.schedule if step <= self.state.num_steps]
        found = set(self.schedule[max(passed)]) if passed else set()
        for glob in self.state.rules:
            module, _, role = glob.partition(":")
            if fnmatch.fnmatchcase(path, module):
                found.update([role] if role else ROLES)
        return frozenset(found)

    def names(self) -> dict[int, str]:
        """id(weight) -> path of the first module that owns it."""
        if not isinstance(self.model, nn.Module):
            return {}
        found: dict[int, str] = {}
        for path, parameter in self.model.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), path.rpartition(".")[0])
        return found


class Segment:
    """The linears between two graph breaks: they record if one of them has a gradient, for then the graph trains. Where none
    has one in a model that trains, a frozen part, those record that have a scale from before."""

    def __init__(self, state: State, of_trained: bool):
        self.state, self.of_trained = state, of_trained
        self.seen: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
        self.trains = self.is_frozen_part = False

    def note(self, key: str, of_weight: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, high: Any) -> None:
        """A linear ran. of_weight: the key of its weight. high: its roles in high precision."""
        if "output" not in high:
            self.seen.append((key, of_weight, x.detach(), weight.detach().clone()))
        self.trains |= out.requires_grad
        self.is_frozen_part |= self.of_trained and torch.is_grad_enabled()

    def end(self) -> None:
        """At a graph break and at the end of the call."""
        seen = self.seen if self.trains else []
        if self.is_frozen_part and not self.trains:
            seen = [each for each in self.seen if len(self.state.scales_for(*each[:2])) > 1]
        for key, of_weight, x, weight in seen:
            self.state.is_pending = True
            self.state.record(key, "input", x)
            self.state.record(of_weight, "weight", weight)
        self.state.is_pending |= self.trains
        self.seen, self.trains, self.is_frozen_part = [], False, False


class _Calls(TorchFunctionMode):
    """Linears of a call are the reference's."""

    def __init__(self, of: Reference, segment: Segment):
        super().__init__()
        self.of, self.segment, self.names = of, segment, of.names()
        self.counts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return self.linear(*args, **(kwargs or {}))
        if func is torch.bmm:
            return self.batched(*args)
        return func(*args, **(kwargs or {}))

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """F.linear. A module that is called again in one call has another history."""
        path = self.names.get(id(weight), "matmul") or "self"
        self.counts[path] = self.counts.get(path, -1) + 1
        return self._product(f"{path}#{self.counts[path]}" if self.counts[path] else path, x, weight, bias)

    def batched(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """torch.bmm of x [E, T, K] and weights [E, K, N]: a linear each. Inputs share a history, and so do gradients; those of
        weights end with the number of matrices. First scales are those of each matrix: programs pass equal ones."""
        many, histories = len(weights), self.of.state.histories
        for gone in [name for name in histories if name.startswith("matrix") and f" of {many}:" not in name]:
            del histories[gone]
        keys = [f"matrix {i} of {many}" for i in range(many)]
        return torch.stack([self._product("batch", x[i], weights[i].mT, None, of_weight=key) for i, key in enumerate(keys)])

    def _product(
        self, key: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, of_weight: str = ""
    ) -> torch.Tensor:
        of, segment, of_weight = self.of, self.segment, of_weight or key
        high = of.high(key.partition("#")[0])

        def record(kind: str, grads: torch.Tensor) -> None:
            of.went_backward = True
            if of.recipe.kind == "delayed":
                of.state.record(of_weight if kind == "weight" else key, kind, grads)

        with torch._C.DisableTorchFunction():
            scales = of.state.scales_for(key, of_weight)
            out = _Linear.apply(x, weight, bias, of.recipe, scales, high, record)
            segment.note(key, of_weight, x, weight, out, high)
            return out


@contextlib.contextmanager
def _breaks(segment: Segment) -> Iterator[None]:
    """`torch._dynamo.graph_break()` ends the segment."""

    def end(*_: Any, **__: Any) -> None:
        segment.end()

    with mock.patch.object(torch._dynamo, "graph_break", end):
        yield


@contextlib.contextmanager
def without_checkpointing() -> Iterator[None]:
    """`torch.utils.checkpoint.checkpoint(f, *args)` is f(*args): what recomputation must not change."""

    def run(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        return function(*args, **{k: v for k, v in kwargs.items() if k not in ("context_fn", "preserve_rng_state")})

    with mock.patch.object(torch.utils.checkpoint, "checkpoint", run), mock.patch.object(models, "checkpoint", run):
        yield


class ReferenceModule(nn.Module):
    """What compiling a module beside itself gives."""

    def __init__(self, reference: Reference):
        super().__init__()
        self._orig_mod, self.reference = reference.model, reference

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


def compile_reference(model: Any, recipe: Recipe, *, step: str, schedule: Any, in_place: bool) -> Any:
    """What `fp8_compile` returns, of the reference."""
    if in_place:
        model._compiled_call_impl = Reference(model._call_impl, model, recipe, step, schedule)
        return model
    reference = Reference(model, model, recipe, step, schedule)
    return ReferenceModule(reference) if isinstance(model, nn.Module) else reference


def reference_of(compiled: Any) -> Reference:
    """Of what `compile_reference` returned."""
    if isinstance(compiled, ReferenceModule):
        return compiled.reference
    return compiled if isinstance(compiled, Reference) else compiled._compiled_call_impl
