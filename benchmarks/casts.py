"""Bandwidth of the hand-written casts and of the step boundary, against a device-to-device copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import Result, device, main, milliseconds, require
from lowering.formats import E4M3, E5M2
from lowering.tensorwise import reference

ops = torch.ops.lowering


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
            lambda: ops.multi_cast_transpose_amax(list(x.chunk(8)), scale.expand(8).contiguous(), dtype),
            lambda: reference.multi_cast_transpose_amax(list(x.chunk(8)), scale.expand(8), dtype),
            size + 2,
        ),
    ]


def run(quick: bool) -> Result:
    on = device(quick)
    sizes = [(512, 512)] if quick else [(4096, 8192), (16384, 4096), (16384, 14336)]
    rows, checks = [], []
    scale = torch.tensor(3.0, device=on)
    for rows_, cols in sizes:
        for dtype in (E4M3, E5M2):
            x = torch.randn(rows_, cols, device=on, dtype=torch.bfloat16)
            for name, op, expected, per_element in _cases(x, scale, dtype):
                label = f"{name} {str(dtype)[12:16]} {rows_}x{cols}"
                require(_same(op(), expected()), f"{label}: bit for bit equal to the reference", checks)
                moved = x.numel() * per_element
                source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=on)
                target = torch.empty_like(source)
                copy_ms = milliseconds(lambda s=source, t=target: t.copy_(s), on)
                ms = milliseconds(op, on)
                rows.append(
                    {
                        "what": label,
                        "MB": moved / 1e6,
                        "ms": ms,
                        "GB/s": moved / ms / 1e6,
                        "copy GB/s": moved / copy_ms / 1e6,
                        "of copy": copy_ms / ms,
                    }
                )
    return Result(rows, "device-to-device copy that moves as many bytes", checks)


if __name__ == "__main__":
    main("casts", run)
