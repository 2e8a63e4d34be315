"""Bandwidth of the hand-written casts, against a device-to-device copy of as many bytes: those of `benchmarks.kernel_cost`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common import device, main
from benchmarks.isolation import Bench, Row
from benchmarks.kernel_cost import HandWritten, hand_written
from benchmarks.timing import in_turns
from lowering.operation import NAMESPACE

#: Rows and columns of the matrix that all kernels read, and of those that the common ones read besides.
_SHAPE, _OTHERS = (16384, 14336), ((4096, 8192), (16384, 4096))
_COMMON = ("amax", "cast", "cast_amax", "cast_transpose", "cast_transpose_amax", "multi_cast_transpose_amax")


def _same(results: object, expected: object) -> bool:
    results, expected = ([r] if isinstance(r, torch.Tensor) else r for r in (results, expected))
    pairs = ((r.reshape(-1), e.reshape(-1)) for r, e in zip(results, expected, strict=True))
    return all(torch.equal(r.view(torch.uint8), e.view(torch.uint8)) for r, e in pairs)


def _is_common(name: str) -> bool:
    return name.split()[0] in _COMMON or (name.startswith("blockwise") and name.split()[2] == "both")


def _row(name: str, kernel: HandWritten, x: torch.Tensor, bench: Bench) -> Iterator[Row]:
    """The row of a kernel, unless it fails."""
    operation = NAMESPACE.operations[kernel.operation]
    what = f"{name} {x.shape[0]}x{x.shape[1]}"
    if bench.has_row(what):
        return

    def run() -> Any:
        return operation(*kernel.arguments, **kernel.options)

    def gate() -> bool:
        found, expected = run(), operation.reference(*kernel.arguments, **kernel.options)
        return bench.require(_same(found, expected), f"{what}: equal bit for bit")

    if not bench(what, gate):
        return
    moved = kernel.elements * (kernel.load_bytes + kernel.store_bytes)
    source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    names = {"copy": f"{what}, copy", "cast": what}
    calls = {"copy": lambda: target.copy_(source), "cast": run}
    # The copy is there to compare single calls with, and needs no seconds of its own.
    times = in_turns(calls, x.device, bench, names.__getitem__, seconds={"copy": 0.0})
    if len(times) < len(names):
        return
    copy_ms, ms = times["copy"].ms, times["cast"].ms
    yield {
        "what": what,
        # Where an operation has another large kernel, its time is not one that a copy can be compared with.
        "one kernel": "yes" if kernel.position == 0 and "batch both" not in name else "no",
        "transposes": "yes" if kernel.transposes else "no",
        "MB": moved / 1e6,
        "ms": ms,
        "back-to-back ms": times["cast"].back_to_back_ms,
        "GB/s": moved / ms / 1e6,
        "copy GB/s": moved / copy_ms / 1e6,
        "of copy": copy_ms / ms,
        **times["cast"].clocks,
    }


def _by_importance(kernels: dict[str, HandWritten]) -> dict[str, HandWritten]:
    """E4M3 first: a run that is stopped has those of forward and of one format whole."""
    return dict(sorted(kernels.items(), key=lambda item: item[0].endswith("e5m2")))


def run(bench: Bench) -> Iterator[Row]:
    """`quick`: a small matrix."""
    bench.baseline = "device-to-device copy that moves as many bytes"
    on = device(bench.quick)
    for shape in [(256, 256)] if bench.quick else [_SHAPE, *_OTHERS]:
        x = torch.randn(shape, device=on, dtype=torch.bfloat16)
        for name, kernel in _by_importance(hand_written(x)).items():
            if bench.quick or shape == _SHAPE or _is_common(name):
                yield from _row(name, kernel, x, bench)


if __name__ == "__main__":
    main("casts", run)
