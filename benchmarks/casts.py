"""Bandwidth of the hand-written casts, against a device-to-device copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.common import device, main
from benchmarks.isolation import Bench, Row
from benchmarks.timing import in_turns
from lowering.formats import BLOCK, E4M3, E5M2, MX_BLOCK
from lowering.operation import NAMESPACE

#: Rows and columns of the matrices that are read.
_SHAPES = ((16384, 14336), (4096, 8192), (16384, 4096))
#: Copies that casts make, with their number.
_COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "rowwise": (1, {}), "columnwise": (1, {"rowwise": False, "columnwise": True}), "both": (2, {"columnwise": True}),
}  # fmt: skip
#: Kinds of scales: the operation's options, and elements that share a scale.
_BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "blockwise 1x128": ({"granularity": "block_1x128"}, BLOCK),
    "blockwise 128x128": ({"granularity": "block_128x128"}, BLOCK * BLOCK),
    "mxfp8 1x32": ({"granularity": "block_1x32"}, 4 * MX_BLOCK),  # whose scales are bytes
    "mxfp8 32x32": ({"granularity": "block_1x32", "square": True}, 4 * MX_BLOCK),
}


class Cast(NamedTuple):
    """The call of an operation that launches a kernel, and the bytes that it moves for each element of a matrix."""

    operation: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    num_bytes: float


def casts(x: torch.Tensor) -> Iterator[tuple[str, Cast]]:
    """The kernels by name, to be launched on the bfloat16 matrix x, on 8 matrices, and on rows in 8 groups. E4M3 first: a run
    that is stopped has those of one format whole."""
    rows, cols, on = *x.shape, x.device
    scale, batch, scales = torch.tensor(2.0, device=on), x.view(8, -1, cols), torch.ones(8, device=on)
    offs, index = (torch.arange(1, 9, device=on) * (rows // 8)).int(), torch.arange(rows, device=on)
    sides = {"rows": {"columnwise": False}, "columns": {"rowwise": False, "columnwise": True}, "both": {"columnwise": True}}
    yield "amax", Cast("amaxes", ([x],), {}, 2)
    for side, how in sides.items():
        yield f"amax of {side}", Cast("amax_rowwise", ([x],), {"rowwise": True, **how}, 2)
    for name, fp8 in (("e4m3", E4M3), ("e5m2", E5M2)):
        yield f"quantize {name}", Cast("quantize", (x, scale, fp8), {}, 3)
        for side, (num, copy) in _COPIES.items():
            for with_amax in (False, True):
                label = f"cast {side}{' with amax' * with_amax} {name}"
                yield label, Cast("cast", ([x], [scale], fp8), {"with_amax": with_amax, **copy}, 2 + num)
            for block, (how, per_scale) in _BLOCKS.items():
                moved = 2 + num + num * 4 / per_scale
                yield f"{block} {side} {name}", Cast("cast_with_scales", ([x], fp8), {**how, **copy}, moved)
        both = {"columnwise": True, "with_amax": True}
        yield f"cast of a batch, both {name}", Cast("cast", ([batch], [scales], fp8), both, 4)
        for (side, how), num in zip(sides.items(), (1, 1, 2), strict=True):
            amaxes = torch.ones(rows * (side != "columns") + cols * (side != "rows"), device=on)
            call = ([x], amaxes, fp8), {"rowwise": True, **how}
            yield f"lines of {side} {name}", Cast("cast_lines_rowwise", *call, 2 + num)
        for kind, per_element in (("block_1x128", 3 + 4 / BLOCK), ("row_wise", 3)):
            given = (x, fp8, offs, index)
            yield f"columns of groups {kind} {name}", Cast("cast_columns", given, {"granularity": kind}, per_element)
    yield "columns of groups moved", Cast("transposed_copy", (x.view(torch.uint8)[:, :cols].view(E4M3), offs, index), {}, 2)


def _same(results: object, expected: object) -> bool:
    results, expected = ([r] if isinstance(r, torch.Tensor) else r for r in (results, expected))
    pairs = ((r.reshape(-1), e.reshape(-1)) for r, e in zip(results, expected, strict=True))
    return all(torch.equal(r.view(torch.uint8), e.view(torch.uint8)) for r, e in pairs)


def _row(what: str, cast: Cast, x: torch.Tensor, bench: Bench) -> Iterator[Row]:
    """The row of a kernel, unless it fails."""
    operation = NAMESPACE.operations[cast.operation]

    def run() -> Any:
        return operation(*cast.arguments, **cast.options)

    def gate() -> bool:
        found, expected = run(), operation.reference(*cast.arguments, **cast.options)
        return bench.require(_same(found, expected), f"{what}: equal bit for bit")

    if not bench(what, gate):
        return
    moved = x.numel() * cast.num_bytes
    source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    names = {"copy": f"{what}, copy", "cast": what}
    calls = {"copy": lambda: target.copy_(source), "cast": run}
    # The copy is there to compare single calls with, and needs no seconds of its own.
    times = in_turns(calls, x.device, bench, names.__getitem__, seconds={"copy": 0.0})
    if len(times) == len(names):
        copy_ms, ms = times["copy"].ms, times["cast"].ms
        rates = {"GB/s": moved / ms / 1e6, "copy GB/s": moved / copy_ms / 1e6, "of copy": copy_ms / ms}
        yield {"what": what, "MB": moved / 1e6, "ms": ms, "back-to-back ms": times["cast"].back_to_back_ms, **rates}


def run(bench: Bench) -> Iterator[Row]:
    """`quick`: a small matrix."""
    bench.baseline = "device-to-device copy that moves as many bytes"
    on = device(bench.quick)
    for rows, cols in [(256, 256)] if bench.quick else _SHAPES:
        x = torch.randn(rows, cols, device=on, dtype=torch.bfloat16)
        for name, cast in casts(x):
            yield from _row(f"{name} {rows}x{cols}", cast, x, bench)


if __name__ == "__main__":
    main("casts", run)
