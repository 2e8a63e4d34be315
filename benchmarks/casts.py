"""Bandwidth of the hand-written casts and of the step boundary, against a device-to-device copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import Result, device, main, require
from benchmarks.timing import in_turns
from lowering.blockwise import reference as blockwise
from lowering.formats import E4M3, E5M2, Granularity
from lowering.tensorwise import reference

ops = torch.ops.lowering
#: As `benchmarks.kernel_cost` names them.
FORMATS = {E4M3: "e4m3", E5M2: "e5m2"}


def _same(results: object, expected: object) -> bool:
    results, expected = ([r] if isinstance(r, torch.Tensor) else r for r in (results, expected))
    pairs = ((r.reshape(-1), e.reshape(-1)) for r, e in zip(results, expected, strict=True))
    return all(torch.equal(r.view(torch.uint8), e.view(torch.uint8)) for r, e in pairs)


def _cases(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> list[tuple[str, Callable, Callable, float]]:
    """name, op, reference, bytes moved per element of x."""
    size = x.element_size()
    return [
        ("amax", lambda: ops.amax(x), lambda: reference.amax(x), size),
        ("cast", lambda: ops.cast(x, scale, dtype), lambda: reference.cast(x, scale, dtype), size + 1),
        ("cast_amax", lambda: ops.cast_amax(x, scale, dtype), lambda: reference.cast_amax(x, scale, dtype), size + 1),
        (
            "cast_transpose",
            lambda: ops.cast_transpose(x, scale, dtype),
            lambda: reference.cast_transpose(x, scale, dtype),
            size + 2,
        ),
        (
            "cast_transpose_amax",
            lambda: ops.cast_transpose_amax(x, scale, dtype),
            lambda: reference.cast_transpose_amax(x, scale, dtype),
            size + 2,
        ),
        (
            "multi_cast_transpose_amax of 8",
            lambda: ops.multi_cast_transpose_amax(list(x.chunk(8)), [scale] * 8, dtype),
            lambda: reference.multi_cast_transpose_amax(list(x.chunk(8)), [scale] * 8, dtype),
            size + 2,
        ),
        *_blockwise(x, dtype),
    ]


def _blockwise(x: torch.Tensor, dtype: torch.dtype) -> list[tuple[str, Callable, Callable, float]]:
    cases = []
    for granularity in (Granularity.BLOCK_1X128.value, Granularity.BLOCK_128X128.value):
        options = {"granularity": granularity}
        cases.append(
            (
                f"blockwise {granularity.removeprefix('block_')} both",
                lambda o=options: ops.cast_transpose_blockwise(x, dtype, **o),
                lambda o=options: blockwise.cast_transpose_blockwise(x, dtype, **o),
                x.element_size() + 2 + (8 / 128 if granularity == Granularity.BLOCK_1X128 else 0),
            )
        )
    return cases


def _rows(quick: bool, on: torch.device, checks: list[str]) -> Iterator[dict[str, Any]]:
    scale = torch.tensor(3.0, device=on)
    for rows, cols in [(512, 512)] if quick else [(4096, 8192), (16384, 4096), (16384, 14336)]:
        for dtype in (E4M3, E5M2):
            x = torch.randn(rows, cols, device=on, dtype=torch.bfloat16)
            for name, op, expected, per_element in _cases(x, scale, dtype):
                label = f"{name} {FORMATS[dtype]} {rows}x{cols}"
                require(_same(op(), expected()), f"{label}: bit for bit equal to the reference", checks)
                moved = x.numel() * per_element
                source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=on)
                target = torch.empty_like(source)
                times = in_turns({"copy": lambda s=source, t=target: t.copy_(s), "op": op}, on)
                copy_ms, ms = times["copy"].ms, times["op"].ms
                yield {
                    "what": label,
                    "MB": moved / 1e6,
                    "ms": ms,
                    "back-to-back ms": times["op"].back_to_back_ms,
                    "GB/s": moved / ms / 1e6,
                    "copy GB/s": moved / copy_ms / 1e6,
                    "of copy": copy_ms / ms,
                }


def run(quick: bool) -> Result:
    checks: list[str] = []
    return Result(_rows(quick, device(quick), checks), "device-to-device copy that moves as many bytes", checks)


if __name__ == "__main__":
    main("casts", run)
