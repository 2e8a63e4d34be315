"""Statistics that join the code of casts: the H200's code, executed on the CPU, counts what the reference counts, and a
measured step computes what others compute, bit for bit.

A check raises, or returns how many results it compared.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.contestants import steady
from fp8pass import fp8_compile, monitor
from lowering.formats import E4M3, E5M2, Granularity
from lowering.statistics import ERRORS, quantization_statistics
from tests.emulation.block_casts import values
from tests.emulation.support import emulated, emulated_h200, same_bits
from tests.emulation.tensor_casts import row_flagged
from tests.support.models import LlamaBlock

ops = torch.ops.lowering
SCALE = torch.tensor(3.7)
ONE_SCALE = {"granularity": Granularity.TENSOR_WISE.value}
LINES = {"granularity": Granularity.BLOCK_1X128.value, "power_of_2": True, "epsilon": 0.01}
ROWS = {"granularity": Granularity.ROW_WISE.value, "power_of_2": True, "epsilon": 0.01}
#: Ends of groups; the rows behind count nowhere.
ENDS = torch.tensor([20, 49], dtype=torch.int32)
#: Order of addition in float64.
SUMS = 1e-12


def _tensors(dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    return [values(dtype)[:rows, :128].clone() for _ in range(5)]


Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def _of_tensors(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, module: Any) -> Results:
    """Tiles, rows, and what a norm computes; what is in memory, what no cast reads, ragged tiles. Statistics, and copies."""
    tiled, lined, normed, given, alone = xs[0] * 2, xs[1] * 2, row_flagged(xs[2]), xs[3], xs[4] * 2
    copies = [
        *module.cast([tiled], [scale], dtype, columnwise=True, with_amax=True),
        *module.cast([lined], [scale], dtype, with_amax=True),
        *module.cast([normed], [scale], dtype, columnwise=True, with_amax=True),
        *module.cast([given], [scale], dtype),
    ]
    each, inverse = [tiled, lined, normed, given, alone, given[:33]], scale.reciprocal()
    found = [module.quantization_statistics(x, dtype, scale, inverse, **ONE_SCALE)[0] for x in each]
    return [*found, *module.quantization_statistics(lined, dtype, scale, inverse, ENDS, **ONE_SCALE)], copies


def _of_blocks(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, module: Any) -> Results:
    """Both copies of what is computed and of what is in memory."""
    both = {"granularity": LINES["granularity"], "columnwise": True}
    computed = xs[0] * 2
    copies = [y for x in (computed, xs[1]) for y in module.cast_with_scales([x], dtype, **both, epsilon=0.01)]
    each = [module.quantization_statistics(x, dtype, **LINES, columnwise=True) for x in (computed, xs[1])]
    return [vector for vectors in each for vector in vectors], copies


def _of_rows(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, module: Any) -> Results:
    """Both copies of what is computed, of what a norm computes and of what is in memory; rows in groups."""
    each = xs[0] * 2, row_flagged(xs[1]), xs[2]
    options = {"granularity": ROWS["granularity"], "power_of_2": True, "epsilon": 0.01}
    copies = [y for x in each for y in module.cast_with_scales([x], dtype, **options, columnwise=True)]
    found = [vector for x in each for vector in module.quantization_statistics(x, dtype, **ROWS, columnwise=True)]
    grouped = xs[3] * 2
    copies += module.cast_with_scales([grouped], dtype, **options)
    return [*found, *module.quantization_statistics(grouped, dtype, None, None, ENDS, **ROWS)], copies


class _Reference:
    """The casts do nothing: their results are compared elsewhere."""

    quantization_statistics = staticmethod(quantization_statistics)

    @staticmethod
    def cast(*args: Any, **options: Any) -> list[torch.Tensor]:
        return []

    cast_with_scales = cast


def check(what: Callable[..., Results], dtype: torch.dtype, fp8: torch.dtype, num_calls: int, folder: pathlib.Path) -> int:
    """Raises unless counts are equal, and sums to `SUMS`. num_calls: of the operation itself in the code."""
    xs = _tensors(dtype, rows=64 if what is _of_tensors else 128)  # whole blocks, and a norm's rows that one kernel holds

    def of_operations(xs: list[torch.Tensor], scale: torch.Tensor) -> Results:
        return what(xs, scale, fp8, ops)

    (found, _), emulation = emulated(of_operations, xs, SCALE, folder=folder)
    assert sum(code.count("ops.lowering.quantization_statistics.default(") for code in emulation.code) == num_calls
    wanted, _ = what(xs, SCALE, fp8, _Reference)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours[:4], theirs[:4]), (i, ours, theirs)
        assert torch.allclose(ours, theirs, rtol=SUMS, atol=0), (i, ours, theirs)
        assert theirs[ERRORS] > 0
    return len(found)


def check_training(recipe: str, folder: pathlib.Path) -> int:
    """Two steps, which one model measures and the other does not."""
    results = []
    for every in (0, 1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: nn.Module = LlamaBlock(32, 64, 2).to(torch.bfloat16)
        place = folder / str(every)
        place.mkdir()
        with emulated_h200(place) as emulation:
            compiled = fp8_compile(model, steady(recipe), dynamic=False)
            watching = monitor(compiled, every=every) if every else None
            for _ in range(2):
                model.zero_grad()
                x = torch.randn(1, 32, 32, dtype=torch.bfloat16).requires_grad_()
                out = compiled(x)
                out.square().sum().backward()
        assert len(emulation.graphs) == 2
        results.append([out, x.grad, *(p.grad for p in model.parameters())])
    assert watching is not None
    assert watching.latest is not None
    assert watching.latest.step == 1
    assert all(10 < tensor.sqnr < 60 for tensor in watching.latest.tensors), str(watching)
    return same_bits([t.contiguous() for t in results[0]], [t.contiguous() for t in results[1]])


CHECKS: dict[str, Callable[[pathlib.Path], int]] = {
    "one scale": functools.partial(check, _of_tensors, torch.float32, E4M3, 1),
    "blocks": functools.partial(check, _of_blocks, torch.bfloat16, E5M2, 1),
    "rows": functools.partial(check, _of_rows, torch.float32, E4M3, 1),
    "training": functools.partial(check_training, "delayed"),
}
