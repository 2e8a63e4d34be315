"""Eager semantics of the operations on the state of delayed scaling, in plain torch. This is the specification: schemas
are inferred from these signatures, kernels and the CPU's provider are held against these results.

Formulas: docs/numerics.md. All functions run on any device.
Checks raise a ValueError that names the value and the fix.
"""

from __future__ import annotations

import torch

from lowering import scaling
from lowering.formats import FLOAT32_MAX


def load_scales(scale: torch.Tensor, slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of the first `count` slots, by value, and their reciprocals: [count], [count], float32."""
    taken = scale.index_select(0, slots[:count])
    return taken, taken.reciprocal()


def record_amax(
    amax: torch.Tensor, slots: torch.Tensor, observed: list[torch.Tensor], index: list[int], *, in_parts: bool = False
) -> None:
    """amax[slots[index[i]]] = max(itself, observed[i]), in place; NaN wins. A slot may be named more than once. All of
    `observed` may be vectors: the entries of observed[i] go to slots[index[i]], slots[index[i] + 1], ... in_parts: tensors of
    any shape without negative elements, each of which counts as its largest."""
    if not observed:
        return
    if in_parts:
        observed = [scaling.amax(part) for part in observed]
    where = torch.cat([slots[start : start + x.numel()] for start, x in zip(index, observed, strict=True)])
    values = (torch.cat if observed[0].dim() else torch.stack)(observed)
    # `.data` leaves the version counter alone: autograd holds this buffer for backward, and its content goes nowhere.
    amax.data.scatter_reduce_(0, where, values.to(amax.dtype), "amax")


def take(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    """x[index] of a vector x."""
    return x[torch.tensor(index, device=x.device)]


def update_scales(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    num_non_finite: torch.Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    """The step boundary of delayed scaling for n tensors at once, in place. amax_history [len, n], scale [n] and fp8_max [n]
    are float32; row 0 of the history is the staging row. `algo` is "max" or "most_recent". num_non_finite [n] int32, if given,
    counts the steps whose staged amax was inf or NaN; such a step leaves history and scale alone. Source: TransformerEngine's
    delayed scaling, with the differences named in docs/numerics.md."""
    rolled, window = rolled_history(amax_history)
    amax = window.amax(dim=0) if algo == "max" else window[0]
    update_from_amax(amax_history, rolled, scale, window[0], amax, scale_of(amax, fp8_max, margin), num_non_finite)


def scale_of(amax: torch.Tensor, fp8_max: torch.Tensor, margin: int) -> torch.Tensor:
    """(fp8_max / 2**margin) / amax in float32, the largest finite float32 if that is inf."""
    new = (fp8_max / 2.0**margin) / amax
    return torch.where(torch.isinf(new), FLOAT32_MAX, new)


def rolled_history(amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The history after the boundary, [0, h2, ..., a], and the window it sees, [a, h1, ..., hL-1]."""
    window = amax_history.clone()
    rolled = torch.roll(window, -1, dims=0)
    rolled[0] = 0
    return rolled, window


def update_from_amax(
    amax_history: torch.Tensor,
    rolled: torch.Tensor,
    scale: torch.Tensor,
    staged: torch.Tensor,
    amax: torch.Tensor,
    new_scale: torch.Tensor,
    num_non_finite: torch.Tensor | None,
) -> None:
    """The boundary with an amax and a scale computed by the caller from `rolled_history`, in place. History and scale change
    where the staged amax is finite and positive; elsewhere only the staging entry is cleared."""
    valid = torch.isfinite(staged) & (staged > 0)
    amax_history.copy_(torch.where(valid, rolled, amax_history))
    finish_boundary(amax_history, scale, staged, valid, amax, new_scale, num_non_finite)


def finish_boundary(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    staged: torch.Tensor,
    valid: torch.Tensor,
    amax: torch.Tensor,
    new_scale: torch.Tensor,
    num_non_finite: torch.Tensor | None,
) -> None:
    """Finish the step boundary once the history is rolled: steps counted, the staging row cleared, scales changed where there
    is an amax."""
    if num_non_finite is not None:
        num_non_finite += (~torch.isfinite(staged)).to(num_non_finite.dtype)
    amax_history[0] = 0
    scale.copy_(torch.where(valid & (amax > 0), new_scale, scale))


#: History rows that move together: few enough to stay in a core's cache, for a thousand tensors too.
_ROWS_PER_STEP = 64


def update_scales_on_cpu(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    num_non_finite: torch.Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    """`update_scales` on the CPU: history rows move a few at a time, so that each passes through the caches once."""
    length = amax_history.shape[0]
    staged = amax_history[0].clone()
    valid = torch.isfinite(staged) & (staged > 0)
    all_valid = bool(valid.all())  # one test of one vector saves a selection per element
    amax = torch.maximum(staged, amax_history[1]) if length > 1 else staged
    for start in range(1, length - 1, _ROWS_PER_STEP):
        target = amax_history[start : min(start + _ROWS_PER_STEP, length - 1)]
        moved = amax_history[start + 1 : start + 1 + target.shape[0]].clone()
        amax = torch.maximum(amax, moved.amax(dim=0))
        target.copy_(moved if all_valid else torch.where(valid, moved, target))
    if length > 1:
        amax_history[-1] = torch.where(valid, staged, amax_history[-1])
    amax = amax if algo == "max" else staged
    finish_boundary(amax_history, scale, staged, valid, amax, scale_of(amax, fp8_max, margin), num_non_finite)


def check_algo(algo: str) -> None:
    """`algo` is one that the operation knows; others are functions, which the caller computes."""
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is {algo!r}; use 'max' or 'most_recent'")


def check_history(
    amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, num_non_finite: torch.Tensor | None
) -> None:
    """history [len >= 1, n], scale [n] and fp8_max [n] are float32, num_non_finite [n] is int32."""
    if amax_history.dim() != 2 or amax_history.shape[0] < 1:
        raise ValueError(f"amax_history must be [len, n] with len >= 1, got shape {tuple(amax_history.shape)}")
    expected = {"amax_history": (amax_history, torch.float32, tuple(amax_history.shape))}
    columns = (amax_history.shape[1],)
    expected |= {"scale": (scale, torch.float32, columns), "fp8_max": (fp8_max, torch.float32, columns)}
    if num_non_finite is not None:
        expected["num_non_finite"] = (num_non_finite, torch.int32, columns)
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
