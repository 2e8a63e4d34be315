"""FP8 copies of matrices [R, C] and of batches of matrices [E, R, C]: their shapes, and what a cast returns in which order.

A copy is [outer, inner], contiguous; the GEMM contracts its inner dimension. The rowwise copy of a matrix is [R, C], the
columnwise one [C, R], the transpose. The inner dimension is padded with zeros to what GEMMs take, the outer one if that is
asked for: R of the rowwise copy by `pad_rows`, C of the columnwise one by `pad_cols`. A copy of a batch has those of its
matrices in one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import torch

from lowering.formats import GEMM_ALIGNMENT, Granularity, pad_to_alignment, round_up

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CastOptions:
    """The options of a cast, of whatever kind: the copies that it makes of each matrix, and how it quantizes."""

    rowwise: bool = True
    columnwise: bool = False
    pad_rows: bool = False
    pad_cols: bool = False
    with_amax: bool = False
    in_parts: bool = False
    granularity: str = Granularity.ROW_WISE
    power_of_2: bool = True
    epsilon: float = 0.0
    square: bool = False
    compact: bool = False
    inverse: str | None = None

    @classmethod
    @functools.cache
    def of(cls, **options: Any) -> Self:
        """The value of these options. It is made once: eager calls would wait for it."""
        return cls(**options)

    @property
    def is_square(self) -> bool:
        """True if one grid of blocks of 128 serves both copies."""
        return self.granularity == Granularity.BLOCK_128X128

    @property
    def sides(self) -> dict[str, bool]:
        """The options that tell which copies are made, by name."""
        return {name: getattr(self, name) for name in ("rowwise", "columnwise", "pad_rows", "pad_cols")}

    @functools.cached_property
    def wanted(self) -> list[tuple[bool, bool]]:
        """The copies, in the order in which they are returned: whether it is columnwise, whether its outer size is padded."""
        return [(False, self.pad_rows)] * self.rowwise + [(True, self.pad_cols)] * self.columnwise


def outer_and_inner(x: torch.Tensor, columnwise: bool, pad_outer: bool = False) -> tuple[int, int]:
    """The outer size of a copy of x, padded or not, and the inner one without padding."""
    *_, rows, cols = x.shape
    outer, inner = (cols, rows) if columnwise else (rows, cols)
    return pad_to_alignment(outer) if pad_outer else outer, inner


def empty_copy(
    x: torch.Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool, multiple: int = GEMM_ALIGNMENT
) -> torch.Tensor:
    """A copy of x to be filled. multiple: of which the inner size is one."""
    outer, inner = outer_and_inner(x, columnwise, pad_outer)
    return x.new_empty(*x.shape[:-2], outer, round_up(inner, multiple), dtype=dtype)


def padded(q: torch.Tensor, pad_outer: bool, multiple: int = GEMM_ALIGNMENT) -> torch.Tensor:
    """FP8 q [..., outer, inner] contiguous, with the padding of a copy; q itself if it is so already."""
    *batch, outer, inner = q.shape
    stored_outer, stored_inner = pad_to_alignment(outer) if pad_outer else outer, round_up(inner, multiple)
    if stored_outer == outer and stored_inner == inner:
        return dense(q) if not q.numel() or 1 in q.shape else q.contiguous()  # an empty transpose would be a view
    out = torch.zeros((*batch, stored_outer, stored_inner), dtype=torch.uint8, device=q.device)  # 0x00 is +0 in both formats
    out[..., :outer, :inner] = q.contiguous().view(torch.uint8)
    return out.view(q.dtype)


def dense(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy, also where a dimension has size 1: `contiguous` keeps its stride, unlike kernels and fakes."""
    return x.clone(memory_format=torch.contiguous_format)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x flattened to [rows, last]."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.reshape(rows, x.shape[-1])


def num_blocks(size: int, block: int) -> int:
    """Blocks of a length that cover `size` elements (ints or SymInts)."""
    return (size + block - 1) // block


def matrices(xs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Every matrix, those of batches included."""
    return [matrix for x in xs for matrix in (x.unbind() if x.dim() == 3 else (x,))]


def num_matrices(xs: Iterable[torch.Tensor]) -> int:
    """The number of `matrices`."""
    return sum(x.shape[0] if x.dim() == 3 else 1 for x in xs)


def copies_of(
    xs: Iterable[torch.Tensor], sides: CastOptions, copy: Callable[[torch.Tensor, bool, bool], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The results of a cast: of each side the copies of all xs, then their scales. copy: makes these of x, for a copy that is
    columnwise or not, and padded or not."""
    return [tensor for side in sides.wanted for tensor in by_output([copy(x, *side) for x in xs])]


def by_output(of_each: Iterable[Sequence[T]]) -> list[T]:
    """The first result of each matrix, then the second of each, and so on."""
    return [tensor for of_all in zip(*of_each, strict=True) for tensor in of_all]


def stacked(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 values and the scales of matrices as those of a batch. Values are stacked as bytes, as every device can."""
    values, scales = zip(*copies, strict=True)
    return torch.stack([q.view(torch.uint8) for q in values]).view(values[0].dtype), torch.stack(scales)


def is_column_major(x: torch.Tensor) -> bool:
    """True if columns of a matrix, or of those of a batch, are contiguous, and rows are not."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def without_gaps(x: torch.Tensor) -> torch.Tensor:
    """x itself if its elements fill memory without gaps, in whatever order; else a contiguous copy."""
    strides = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return x.contiguous()
        expected *= size
    return x
