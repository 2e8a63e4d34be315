"""Helpers of launch wrappers: the device guard, strided tensors seen as matrices, tables for the device."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence

import torch

from lowering.formats import E5M2, fp8_max

#: The largest stride of matrices that are cast by whole tiles, in elements.
MAX_STRIDE = 2**22


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Launch on the device of `x`; nothing to switch for CPU tensors, which Triton's interpreter takes."""
    return torch.cuda.device(x.get_device()) if x.is_cuda else _NO_SWITCH


_NO_SWITCH = contextlib.nullcontext()


def is_e5m2(dtype: torch.dtype) -> bool:
    """True for E5M2, False for E4M3; ValueError for every other dtype."""
    fp8_max(dtype)
    return dtype == E5M2


def cdiv(size: int, block: int) -> int:
    return (size + block - 1) // block


def is_whole(matrices: Sequence[torch.Tensor], block_r: int, block_c: int) -> bool:
    """True if matrices, or those of batches, are whole tiles of at most 128 x 128, in which int32 holds all distances."""
    return all(has_whole_tiles(block_r, block_c, *m.shape[-2:], *m.stride()[-2:]) for m in matrices)


def has_whole_tiles(block_r: int, block_c: int, rows: int, cols: int, stride_r: int, stride_c: int) -> bool:
    """`is_whole` of one matrix of these sizes and strides."""
    return rows % block_r == 0 and cols % block_c == 0 and max(stride_r, stride_c) <= MAX_STRIDE


def grid_of(x: torch.Tensor, num_tiles: int) -> tuple[int, ...]:
    """Programs for the tiles of a matrix; of a batch its matrices are the second dimension."""
    return (num_tiles, x.shape[0]) if x.dim() == 3 else (num_tiles,)


def batch_step(x: torch.Tensor) -> int:
    """From matrix to matrix of a batch, in elements; 0 of a matrix."""
    return x.stride(0) if x.dim() == 3 else 0


def as_matrices(*tensors: torch.Tensor) -> list[torch.Tensor] | None:
    """Tensors of one shape seen as matrices whose elements still correspond; None if two dimensions do not suffice. Dimensions
    are ordered by the first tensor's strides, largest first, and merged wherever every tensor allows it; a dense tensor of any
    number of dimensions becomes one row."""
    first = tensors[0]
    dims = [d for d in range(first.dim()) if first.shape[d] != 1]
    dims.sort(key=first.stride, reverse=True)
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for d in dims:
        size = first.shape[d]
        if sizes and all(s[-1] == t.stride(d) * size for t, s in zip(tensors, strides, strict=True)):
            sizes[-1] *= size
            for t, s in zip(tensors, strides, strict=True):
                s[-1] = t.stride(d)
        else:
            sizes.append(size)
            for t, s in zip(tensors, strides, strict=True):
                s.append(t.stride(d))
    if len(sizes) > 2:
        return None
    sizes = [1] * (2 - len(sizes)) + sizes
    # A row stride of 0, because any other that is not a multiple of 16 would cost the alignment of the one row.
    return [t.as_strided(sizes, [0] * (2 - len(s)) + s) for t, s in zip(tensors, strides, strict=True)]


def pinned_table(values: list[int], device: torch.device) -> torch.Tensor:
    """`values` as an int64 vector on `device`, copied without waiting for the device. Not to be written to. Addresses repeat
    from step to step, so a table of the same values is used again; the least recently used ones go. Under CUDA graph capture
    the copy is replayed from host memory: NOTE [tables of captured graphs]. While Inductor warms up a CUDA graph, nothing is
    kept: it does so in the graph's memory pool, and no tensor of that may outlive a call. Nor is anything of a call on paper
    (`ahead`)."""
    if device.type == "meta":
        return torch.empty(len(values), dtype=torch.int64, device=device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _of_graphs(values).to(device, non_blocking=True)
        _reserve()
    if _inductor_warms_up(device):
        return _on_device(values, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0  # the copy is ordered within it
    key = (device, stream, tuple(values))
    table = _TABLES.pop(key) if key in _TABLES else _on_device(values, device)
    _TABLES[key] = table  # the most recent one
    if len(_TABLES) > MOST_TABLES:
        del _TABLES[next(iter(_TABLES))]
    return table


_MANAGERS = "tree_manager_containers"


def _inductor_warms_up(device: torch.device) -> bool:
    """True if Inductor warms up a CUDA graph with this call: it runs them in a stream of their own. A thread has managers of
    CUDA graphs if it imported the module, or if autograd started it. To ask for them in another one is an error in torch
    2.11."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None:
        return False
    if not (hasattr(trees.local, _MANAGERS) or torch._C._is_key_in_tls(_MANAGERS)):
        return False
    manager = trees.get_manager(device.index, False)
    return manager is not None and torch.cuda.current_stream(device) == manager.stream


def _on_device(values: list[int], device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


# NOTE [tables of captured graphs] A replay copies them from host memory, which therefore lives as long as the process; graphs
# with equal tables share it. Capture forbids calls that may wait for the device, and the allocation of pinned memory is one:
# a capture takes its tables out of memory that was reserved before it began, by the warm-up.

#: Entries that are reserved at once: 512 KiB, the tables of a hundred layers. Less than half of it left is filled up.
_RESERVE = 1 << 16
_reserve_lock = threading.Lock()
_reserved: list[torch.Tensor] = []  # Pinned host memory that no table has yet; one vector, or none so far.
_TABLES_OF_GRAPHS: dict[tuple[int, ...], torch.Tensor] = {}


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, pin_memory=True)


def _reserve() -> None:
    """Keep host memory ready for later graphs."""
    if not _reserved or len(_reserved[0]) < _RESERVE // 2:
        with _reserve_lock:
            _reserved[:] = [_pinned(_RESERVE)]


def _of_graphs(values: list[int]) -> torch.Tensor:
    """The table of a graph that is being captured, in host memory."""
    key = tuple(values)
    with _reserve_lock:
        if key not in _TABLES_OF_GRAPHS:
            left, count = _reserved[0] if _reserved else torch.empty(0, dtype=torch.int64), len(values)
            if count <= len(left):
                table, _reserved[:] = left[:count], [left[count:]]
            else:
                table = _pinned(count)
            _TABLES_OF_GRAPHS[key] = table.copy_(torch.tensor(values, dtype=torch.int64))
        return _TABLES_OF_GRAPHS[key]


#: Tables that are kept: some ten call sites a layer, for a hundred layers.
MOST_TABLES = 1024
_TABLES: dict[tuple[torch.device, int, tuple[int, ...]], torch.Tensor] = {}
