"""Operations on many tensors at once, which the pass inserts so that a graph pays one launch instead of one per tensor.

Registered under `torch.ops.lowering` like those of `ops.py`, on import.
"""

from __future__ import annotations

import torch

from lowering import hardware, reference

_LIBRARY = torch.library.Library("lowering", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _multi_amax(xs: list[torch.Tensor]) -> torch.Tensor:
    """`amax` of each tensor: [n], float32."""
    if hardware.runs_kernels(xs[0].device):
        from lowering.kernels.multi_amax import multi_amax

        return multi_amax(xs)
    return torch.stack([reference.amax(x) for x in xs])


def _scales_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale_from_amax` and its reciprocal, shape of amax."""
    scale = reference.scale_from_amax(amax, dtype, margin, epsilon, power_of_2)
    return scale, scale.reciprocal()


def _record_partial_amax(amax: torch.Tensor, slots: torch.Tensor, parts: list[torch.Tensor], index: list[int]) -> None:
    """`record_amax` of the largest element of each tensor of `parts`, float32 of any shape.

    `.data` leaves the version counter alone: autograd holds this buffer for backward, and its content is nobody's
    input.
    """
    if hardware.runs_kernels(amax.device):
        from lowering.kernels.multi_amax import record_partial_amax

        record_partial_amax(amax.data, slots, parts, index)
    else:
        reference.record_amax(amax.data, slots, [reference.amax(p) for p in parts], index)


def _take(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    """x[index] of a vector x."""
    return x[torch.tensor(index, device=x.device)]


def _fake_take(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    return x.new_empty((len(index),))


def _fake_multi_amax(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0].new_empty((len(xs),), dtype=torch.float32)


def _fake_scales_from_amax(amax: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)


def _fake_in_place(*args: object) -> None:
    return None


def _register(name: str, schema: str, function, fake) -> None:  # type: ignore[no-untyped-def]
    _LIBRARY.define(name + schema, tags=_TAGS)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowering::{name}", fake, lib=_LIBRARY)


_register("take", "(Tensor x, int[] index) -> Tensor", _take, _fake_take)
_register("multi_amax", "(Tensor[] xs) -> Tensor", _multi_amax, _fake_multi_amax)
_register(
    "scales_from_amax",
    "(Tensor amax, ScalarType dtype, *, int margin=0, float epsilon=0.0, bool power_of_2=False) -> (Tensor, Tensor)",
    _scales_from_amax,
    _fake_scales_from_amax,
)
_register(
    "record_partial_amax",
    "(Tensor(a!) amax, Tensor slots, Tensor[] parts, int[] index) -> ()",
    _record_partial_amax,
    _fake_in_place,
)
