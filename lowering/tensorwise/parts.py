"""Partial amaxes: the tiles of a matrix whose largest magnitudes its casts leave, one per program."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Rows and columns of a tile of a row-major matrix of which the rowwise copy alone is made, and of one with a columnwise copy.
ROWWISE_TILE = (64, 128)
COLUMNWISE_TILE = (128, 64)


def tile_of(x: torch.Tensor, rowwise: bool, columnwise: bool) -> tuple[int, int]:
    """Rows and columns, as x has them, of a tile of the matrix x. Both copies of a column-major one are those of its
    transpose."""
    is_column_major = x.stride(0) == 1 and x.stride(1) != 1
    return COLUMNWISE_TILE if columnwise and not (rowwise and is_column_major) else ROWWISE_TILE


def num_parts(x: torch.Tensor, rowwise: bool, columnwise: bool) -> torch.types.IntLikeType:
    """How many tiles cover x; 1 for an empty matrix, whose amax is 0."""
    rows, cols = tile_of(x, rowwise, columnwise)
    count = ((x.shape[0] + rows - 1) // rows) * ((x.shape[1] + cols - 1) // cols)
    return torch.sym_max(count, 1)


def tiles(x: torch.Tensor, rowwise: bool, columnwise: bool) -> Iterator[torch.Tensor]:
    """The tiles themselves."""
    rows, cols = tile_of(x, rowwise, columnwise)
    for band in x.split(rows):
        yield from band.split(cols, dim=1)
