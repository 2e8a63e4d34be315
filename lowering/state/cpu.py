"""The step boundary on the CPU: history rows move a few at a time, so that each passes through the caches once."""

import torch

from lowering.state.reference import finish_boundary, scale_of

#: History rows that move together: few enough to stay in a core's cache, for a thousand tensors too.
_ROWS_PER_STEP = 64


def update_scales(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    num_non_finite: torch.Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    """`reference.update_scales`, in place."""
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
