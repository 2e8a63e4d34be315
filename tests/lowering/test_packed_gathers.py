"""Values and scales of blocks in one buffer of bytes: what it holds, and what it costs in code for a GPU."""

import numpy as np
import torch

from benchmarks.cross_codegen import capture, report
from lowering.formats import E4M3, Granularity

ops = torch.ops.lowering
RANKS, ROWS, COLUMNS = 8, 512, 4096
BLOCK = Granularity.BLOCK_128X128.value


def test_it_is_the_bytes_one_after_another():
    parts = [torch.randn(3, 5).t(), torch.randn(4, dtype=torch.bfloat16), torch.arange(7, dtype=torch.uint8)]
    expected = b"".join(np.ascontiguousarray(p.view(torch.int16) if p.dtype is torch.bfloat16 else p).tobytes() for p in parts)
    assert ops.packed(parts).numpy().tobytes() == expected


def cast(x):
    return ops.cast_with_scales.default([x], E4M3, granularity=BLOCK, compact=True)


def sent(x):
    return ops.packed.default(cast(x))


def taken(buffer):
    """The copy for a forward GEMM of what arrived from all ranks."""
    of_ranks = buffer.view(RANKS, -1)
    data = of_ranks[:, : ROWS * COLUMNS].reshape(RANKS * ROWS, COLUMNS)
    scales = of_ranks[:, ROWS * COLUMNS :].reshape(-1, COLUMNS // 128 * 4).view(torch.float32)
    return ops.gemm_ready.default(data.view(E4M3), scales, granularity=BLOCK)


def kernels_of(function, *args):
    torch._dynamo.reset()
    with capture() as graphs, torch.no_grad():
        torch.compile(function)(*args)
    (found,) = report(graphs)
    return [k.num_bytes for k in found.kernels if "cast" not in k.name and "gemm_ready" not in k.name]


def test_what_packing_costs_on_an_h200():
    """Bytes that kernels besides the cast and `gemm_ready` read and write, of a weight of 4096 x 4096 on 8 ranks."""
    scales = ROWS * COLUMNS // 128**2 * 4
    buffer = ROWS * COLUMNS + scales
    (before,) = kernels_of(sent, torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16))
    assert before == 2 * buffer, "this rank's part, once"
    after = kernels_of(taken, torch.zeros(RANKS * buffer, dtype=torch.uint8))
    assert max(after) == 2 * RANKS * ROWS * COLUMNS, "all values, once"
    assert sum(after) - max(after) <= 4 * RANKS * scales
