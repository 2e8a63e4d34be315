"""Bandwidth of the hand-written casts, against a device-to-device copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.common import device, main
from benchmarks.isolation import Bench, Row
from benchmarks.timing import in_turns
from lowering.formats import BLOCK, E4M3, E5M2, GEMM_ALIGNMENT, MX_BLOCK
from lowering.grouped.reference import padded_width
from lowering.operation import NAMESPACE

#: Rows and columns of the matrix that all kernels read, and of those that the common ones read besides.
_SHAPE, _OTHERS = (16384, 14336), ((4096, 8192), (16384, 4096))
_COMMON = ("amax", "cast", "cast_amax", "cast_transpose", "cast_transpose_amax", "multi_cast_transpose_amax")

_FP8 = (("e4m3", E4M3), ("e5m2", E5M2))


class HandWritten(NamedTuple):
    """A kernel: the call of an operation that launches it on a bfloat16 matrix or on one of FP8, and what it moves."""

    operation: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    elements: int
    """Elements of the matrix."""
    store_bytes: float
    """Per element."""
    load_bytes: float = 2
    position: int = 0
    """The kernel's place among the operation's launches."""

    @property
    def transposes(self) -> bool:
        """True if a copy is written in the other layout."""
        return bool(self.options.get("columnwise")) or "transposed" in self.operation or "columns" in self.operation


#: Copies that casts make, with their number.
_COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "rowwise": (1, {}), "columnwise": (1, {"rowwise": False, "columnwise": True}), "both": (2, {"columnwise": True}),
}  # fmt: skip
_LINES = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def hand_written(x: torch.Tensor) -> dict[str, HandWritten]:
    """The kernels by name, to be launched on the bfloat16 matrix x, on it twice, on its halves, on 8 matrices, and on rows in 8
    groups, whose first launch says where each row goes."""
    found: dict[str, HandWritten] = {}
    rows, cols, on = *x.shape, x.device
    scale, batch, scales = torch.tensor(2.0, device=on), x.view(8, -1, cols), torch.ones(8, device=on)
    offs, index = (torch.arange(1, 9, device=on) * (rows // 8)).int(), torch.arange(rows, device=on)

    def add(
        name: str, store_bytes: float, operation: str, *args: Any, load_bytes: float = 2, position: int = 0, **options: Any
    ) -> None:
        elements = sum(matrix.numel() for matrix in args[0]) if isinstance(args[0], list) else x.numel()
        found[name] = HandWritten(operation, args, options, elements, store_bytes, load_bytes, position)

    def add_columns(name: str, align: int, store_bytes: float, *call: Any, **options: Any) -> None:
        add(name, store_bytes, *call, offs, *[index] * ("rowwise" not in options), **{"position": 1} | options)
        found[name] = found[name]._replace(elements=padded_width(rows, 8, align) * cols)

    add("amax", 0, "amaxes", [x])
    add("multi_amax", 0, "amaxes", [x, x])
    add("amax_batch", 0, "amaxes", [batch], per_matrix=True)
    for name, fp8 in _FP8:
        bytes_of_fp8 = x.view(torch.uint8)[:, :cols].view(fp8)
        add(f"quantize {name}", 1, "quantize", x, scale, fp8)
        add(f"transposed_copy {name}", 1, "transposed_copy", bytes_of_fp8, load_bytes=1)
        for (side, (num, copy)), with_amax in itertools.product(_COPIES.items(), (False, True)):
            amax = "_amax" * with_amax
            alone = {"rowwise": f"cast{amax}", "columnwise": f"cast{amax} columnwise", "both": f"cast_transpose{amax}"}[side]
            many = f"multi_cast_transpose{amax}" if side == "both" else f"multi_cast{amax} {side}"
            add(f"{alone} {name}", num, "cast", [x], [scale], fp8, with_amax=with_amax, **copy)
            if side != "both" or with_amax:
                add(f"{many} {name}", num, "cast", [x, x], [scale, scale], fp8, with_amax=with_amax, **copy)
        for (side, (num, copy)), (block, kind, per_scale) in itertools.product(
            _COPIES.items(), (("1x128", "block_1x128", BLOCK), ("128x128", "block_128x128", BLOCK * BLOCK))
        ):
            for multi, xs in (("", [x]), ("multi ", [x, x])):
                label = f"blockwise {block} {multi}{side} {name}"
                add(label, num + num * 4 / per_scale, "cast_with_scales", xs, fp8, granularity=kind, **copy)
        for (side, (num, copy)), square in itertools.product(_COPIES.items(), (False, True)):
            how, block = {"granularity": "block_1x32", "square": square, **copy}, "32x32" if square else "1x32"
            add(f"mxfp8 {block} {side} {name}", num + num / MX_BLOCK, "cast_with_scales", [x], fp8, **how)
        add(f"cast_batch_amax {name}", 1, "cast", [batch], [scales], fp8, with_amax=True)
        add(f"cast_batch columnwise {name}", 1, "cast", [batch], [scales], fp8, **_COPIES["columnwise"][1])
        add(f"cast_transpose_batch_amax {name}", 2, "cast", [batch], [scales], fp8, columnwise=True, with_amax=True)
        add(f"batch 128x128 both {name}", 2, "cast_with_scales", [batch], fp8, granularity="block_128x128", columnwise=True)
        lines = f"cast_lines_rowwise batch both {name}"  # the amaxes come first
        add(lines, 2, "cast_with_scales", [batch], fp8, granularity="row_wise", columnwise=True, position=1)
        found["amax_rowwise batch both"] = found[lines]._replace(position=0, store_bytes=0)
        add_columns(f"columns 1x128 {name}", BLOCK, 1 + 4 / BLOCK, "cast_columns", x, fp8, granularity="block_1x128")
        both = {"granularity": "block_1x128", "rowwise": True}
        add_columns(f"columns 1x128 and rows {name}", BLOCK, 2 + 8 / BLOCK, "cast_columns", x, fp8, **both)
        add_columns(f"columns rowwise {name}", GEMM_ALIGNMENT, 1, "cast_columns", x, fp8, granularity="row_wise", position=2)
        if fp8 == E4M3:
            add_columns("columns moved", GEMM_ALIGNMENT, 1, "transposed_copy", bytes_of_fp8, load_bytes=1)
    for (kind, (rowwise, columnwise)), (how, xs) in itertools.product(
        _LINES.items(), (("", [x]), ("multi ", list(x.tensor_split(2))))
    ):
        sides = {"rowwise": rowwise, "columnwise": columnwise}
        add(f"amax_rowwise {how}{kind}", 0, "amax_rowwise", xs, **sides)
        amaxes = torch.ones(sum(m.shape[0] * rowwise + m.shape[1] * columnwise for m in xs), device=on)
        for name, fp8 in _FP8:  # few programs store scales
            add(f"cast_lines_rowwise {how}{kind} {name}", rowwise + columnwise, "cast_lines_rowwise", xs, amaxes, fp8, **sides)
    return found


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
