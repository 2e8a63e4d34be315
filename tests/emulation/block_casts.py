"""Blockwise casts that join the code before them: the H200's code, executed on the CPU, equals the reference bit for bit.

A check raises, or returns how many results it compared.
"""

import functools
import pathlib
from typing import Any

import torch

from lowering import casts as reference
from lowering.formats import E4M3, E5M2, Granularity
from tests.emulation.support import emulated, same_bits
from tests.support.copies import one_copy

ops = torch.ops.lowering
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
#: Every dtype and every format.
NAMES = ("bfloat16 e4m3", "bfloat16 e5m2", "float32 e4m3", "float16 e5m2")
LINES = {"granularity": Granularity.BLOCK_1X128.value}


def values(dtype: torch.dtype) -> torch.Tensor:
    """[256, 384] whose blocks, along both dimensions, hold everything that a scale or an element may trip over."""
    torch.manual_seed(0)
    x = torch.randn(256, 384) * torch.exp2(torch.randint(-20, 12, (256, 384)).float())
    x[:, :128] *= torch.exp2(torch.arange(256) % 40 - 20.0)[:, None]
    x[3, :128], x[:128, 140] = 0.0, -0.0
    x[5, 130], x[200, 9], x[7, 11] = torch.inf, -torch.inf, torch.nan
    x[9, 128:256] = 0.4375 * torch.exp2(torch.arange(128) % 7 - 3.0)  # amaxes with the mantissa of fp8_max
    x[11, 256:] *= 2.0**-30
    if dtype == torch.float16:
        x = torch.where(x.isfinite(), x.clamp(-3e4, 3e4), x)  # twice of which is no infinity
    else:
        x[13, 256:] = 2.0**-130  # whose quotient is infinite
        x[15, 256:], x[15, 300] = 1e-3, 1.5e38
    return x.to(dtype)


def casts(xs: list[torch.Tensor], dtype: torch.dtype, module: Any) -> list[torch.Tensor]:
    """Every cast, each of a matrix of its own."""
    a, b, c, d, batch, *rest = xs
    made = [
        *module.cast_with_scales([a], dtype, **one_copy(**LINES)),
        *module.cast_with_scales([b], dtype, **one_copy(columnwise=True, pad_outer=True, epsilon=1e-4, **LINES)),
        *module.cast_with_scales([c], dtype, pad_cols=True, **LINES, columnwise=True),
        *module.cast_with_scales([d], dtype, epsilon=0.3, **LINES, columnwise=True),
    ]
    data, scale_inv = module.cast_with_scales([batch], dtype, **one_copy(**LINES))
    made += [data, scale_inv.mT]  # by blocks, which is contiguous
    made += module.cast_with_scales(rest[:2], dtype, **one_copy(columnwise=True, **LINES))
    return made + module.cast_with_scales(rest[2:], dtype, **LINES, columnwise=True)


def check(name: str, folder: pathlib.Path) -> int:
    """Raises unless casts that join a doubling give what the reference gives. Returns how many results were compared."""
    dtype, fp8 = name.split()
    x = values(DTYPES[dtype])
    xs = [x, x, x, x, x[None], x, x[:128], x, x[:, :256]]
    xs = [part.clone() for part in xs]  # of one matrix, that many casts would have a product written

    def doubled(xs: list[torch.Tensor], module: Any = ops) -> list[torch.Tensor]:
        return casts([x * 2 for x in xs], FORMATS[fp8], module)

    found, emulation = emulated(doubled, xs, folder=folder)
    (code,) = emulation.code
    assert "_blockwise.default(" not in code, "a cast is a launch of its own"
    assert "R0_BLOCK: tl.constexpr = 128" in code, "blocks are not held in registers"
    return same_bits(found, doubled(xs, reference))


def check_groups(folder: pathlib.Path) -> int:
    """Rows in groups, cast as a batch of one, and their statistics join a doubling. Returns how many results were compared."""
    x, offs = values(torch.bfloat16), torch.tensor([40, 40, 199], dtype=torch.int32)
    blocks = {**LINES, "power_of_2": True, "rowwise": True, "columnwise": False}

    def doubled(x: torch.Tensor, offs: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        data, scale_inv = ops.cast_with_scales([y.unsqueeze(0)], E4M3, **blocks)
        return [data, scale_inv.mT, *ops.quantization_statistics(y, E4M3, offs=offs, **blocks)]

    found, emulation = emulated(doubled, x, offs, folder=folder)
    (code,) = emulation.code
    assert "quantization_statistics.default(" not in code, "statistics read their matrix again"
    wanted = doubled(x, offs)
    assert torch.allclose(found[2], wanted[2], rtol=1e-12, equal_nan=True)
    return 1 + same_bits(found[:2], wanted[:2])


CHECKS = {name: functools.partial(check, name) for name in NAMES} | {"groups": check_groups}
