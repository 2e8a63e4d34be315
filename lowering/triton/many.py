"""What launches over many matrices share: which matrices can share one, and the table that tells the kernel about them.

A table in device memory tells where each matrix and its copies are; a program finds its matrix by counting the matrices that
begin at or before its tile (`tile.find_matrix`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lowering.formats import GEMM_ALIGNMENT
from lowering.triton.launch import pinned_table
from lowering.triton.tile import ELEMENTS


def is_aligned(x: torch.Tensor) -> bool:
    """Whether rows of a matrix are contiguous, and its address, sizes and distance of rows multiples of 16."""
    (rows, cols), (stride_r, stride_c) = x.shape, x.stride()
    is_odd = rows % GEMM_ALIGNMENT or cols % GEMM_ALIGNMENT or stride_r % GEMM_ALIGNMENT or x.data_ptr() % GEMM_ALIGNMENT
    return stride_c == 1 and not is_odd


def groups(xs: Sequence[torch.Tensor], key: Callable[[torch.Tensor], Any]) -> Iterator[tuple[Any, Any, list[int]]]:
    """The tensors that one launch can take, of one dtype and with equal keys: Triton's dtype, the key, their positions. Empty
    tensors are left out."""
    found: dict[tuple[torch.dtype, Any], list[int]] = defaultdict(list)
    for i, x in enumerate(xs):
        if x.numel():
            found[x.dtype, key(x)].append(i)
    for (dtype, of_group), members in found.items():
        yield ELEMENTS[dtype], of_group, members


def table_of(rows: Iterable[tuple[int, Sequence[int]]], device: torch.device) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. rows: of each matrix the number of its tiles, and its fields."""
    first_tiles: list[int] = []
    fields: list[int] = []
    num_tiles = 0
    for tiles, of_matrix in rows:
        first_tiles.append(num_tiles)
        fields += of_matrix
        num_tiles += tiles
    return pinned_table(first_tiles + fields, device), num_tiles
