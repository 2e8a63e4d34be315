"""Quantization: the format and the scales of an operand, as data. A recipe decides it; `fp8pass.schemes` makes the nodes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

import torch

from fp8pass.errors import RecipeError
from lowering.formats import FP8_MAX, Granularity


class ScaleFrom(enum.Enum):
    """The source of a scale."""

    VALUE = "value"
    """From the elements that share it."""
    SHARED = "shared"
    """One per-tensor scale, stored once per row for a row-wise GEMM. Only for ROW_WISE."""
    STATE = "state"
    """From the amaxes of earlier steps, which the state keeps. Only for TENSOR_WISE, and for DelayedScaling and its
    subclasses."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A format and its scales. Copies of one tensor with equal quantizations are made by one cast."""

    dtype: torch.dtype
    """torch.float8_e4m3fn or torch.float8_e5m2."""
    granularity: Granularity
    """The elements that share a scale, as the GEMM reads it."""
    square: bool = False
    """Square blocks share a scale: 32x32 values, which the GEMM reads as 32 equal scales. Only for BLOCK_1X32."""
    scale_from: ScaleFrom = ScaleFrom.VALUE
    power_of_2: bool = False
    """Scales are rounded down to powers of two. MXFP8's always are."""
    epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    inverse: Literal["multiply", "divide"] | None = None
    """As inference engines quantize: scale_inv is amax / fp8_max, rounded once, and elements are multiplied by its reciprocal
    or divided by it. None: the scale is fp8_max / amax, and scale_inv its reciprocal. "divide" only for rows and blocks of 128,
    neither for BLOCK_1X32."""
    fused: bool = False
    """Weights of projections that engines fuse have one scale, of the largest amax among them: q, k and v; gate and up
    (`fp8pass.rewrite.plan`). Only for one scale of a whole weight."""
    margin: int = 0
    """A scale from the state leaves 2**margin of headroom."""
    same_on_ranks: bool = True
    """All ranks have the same scale of a tensor in their states."""

    def __post_init__(self) -> None:
        lines = (Granularity.ROW_WISE, Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
        is_of_lines = self.granularity in lines and self.scale_from is ScaleFrom.VALUE
        is_own = is_of_lines or (self.is_of_tensor and self.inverse == "multiply")
        has_inverse = self.inverse is None or (is_own and not self.power_of_2)
        alone = {ScaleFrom.SHARED: Granularity.ROW_WISE, ScaleFrom.STATE: Granularity.TENSOR_WISE}
        has_scale = self.granularity is alone.get(self.scale_from, self.granularity)
        wrong = (
            (self.dtype not in FP8_MAX, f"dtype={self.dtype}: use one of {', '.join(map(str, FP8_MAX))}"),
            (self.square and self.granularity is not Granularity.BLOCK_1X32, "square=True requires BLOCK_1X32"),
            (not has_inverse, f"inverse={self.inverse!r} does not go with {self.granularity!r} or power_of_2"),
            (not has_scale, f"scale_from={self.scale_from} does not go with {self.granularity!r}"),
            (self.fused and not self.is_of_tensor, "fused=True is for one scale of a whole tensor, from the tensor itself"),
        )
        for is_wrong, why in wrong:
            if is_wrong:
                raise RecipeError(f"Quantization({why})")

    @property
    def is_of_tensor(self) -> bool:
        """True if the whole tensor, of a batch each matrix, has one scale, from its own amax."""
        is_whole = self.granularity is Granularity.TENSOR_WISE and self.scale_from is ScaleFrom.VALUE
        return is_whole or self.scale_from is ScaleFrom.SHARED

    @property
    def has_state(self) -> bool:
        """True if the scale comes from the state of delayed scaling."""
        return self.scale_from is ScaleFrom.STATE

    @property
    def has_one_scale(self) -> bool:
        """True if the whole tensor, of a batch of weights each matrix, has one scale."""
        return self.is_of_tensor or self.has_state

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, in the orientation of the copy; None for whole rows or tensors."""
        block = self.granularity.block
        return (max(block), max(block)) if block is not None and self.square else block
