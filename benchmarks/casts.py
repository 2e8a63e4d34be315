"""Bandwidth of the hand-written casts, against a device-to-device copy of as many bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.common import device, main
from benchmarks.isolation import Bench, Row
from benchmarks.timing import in_turns
from benchmarks.variants import Launch, recorded
from lowering.formats import BLOCK, E4M3, E5M2, GEMM_ALIGNMENT, MX_BLOCK, Granularity
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

    def launches(self) -> list[Launch]:
        """All launches of the operation."""
        function = NAMESPACE.operations[self.operation].implementations()[-2]  # the last is the reference
        return recorded(function, *self.arguments, **self.options)


def hand_written(x: torch.Tensor) -> dict[str, HandWritten]:
    """The kernels by name, to be launched on the bfloat16 matrix x."""
    scale = torch.tensor(2.0, device=x.device)
    found: dict[str, HandWritten] = {}

    def add(name: str, store_bytes: float, operation: str, *arguments: Any, **options: Any) -> None:
        elements = sum(matrix.numel() for matrix in arguments[0]) if isinstance(arguments[0], list) else x.numel()
        found[name] = HandWritten(operation, arguments, options, elements, store_bytes)

    columnwise = {"rowwise": False, "columnwise": True}
    copies: dict[str, tuple[int, dict[str, Any]]] = {
        "both": (2, {"columnwise": True}), "rowwise": (1, {}), "columnwise": (1, columnwise),
    }  # fmt: skip
    for name, fp8 in _FP8:
        alone, many = ([x], [scale], fp8), ([x, x], [scale, scale], fp8)
        for amax in ("", "_amax"):
            how = {"with_amax": bool(amax)}
            add(f"cast{amax} {name}", 1, "cast", *alone, **how)
            add(f"cast{amax} columnwise {name}", 1, "cast", *alone, **columnwise, **how)
            add(f"cast_transpose{amax} {name}", 2, "cast", *alone, columnwise=True, **how)
            add(f"multi_cast{amax} rowwise {name}", 1, "cast", *many, **how)
            add(f"multi_cast{amax} columnwise {name}", 1, "cast", *many, **columnwise, **how)
        add(f"multi_cast_transpose_amax {name}", 2, "cast", *many, columnwise=True, with_amax=True)
        add(f"transposed_copy {name}", 1, "transposed_copy", x.view(torch.uint8)[:, : x.shape[1]].view(fp8))
        found[f"transposed_copy {name}"] = found[f"transposed_copy {name}"]._replace(load_bytes=1)
        add(f"quantize {name}", 1, "quantize", x, scale, fp8)
        for granularity, block in ((Granularity.BLOCK_1X128, "1x128"), (Granularity.BLOCK_128X128, "128x128")):
            scales = 4 / (BLOCK if granularity == Granularity.BLOCK_1X128 else BLOCK * BLOCK)
            for (kind, (num, copy)), (multi, xs) in itertools.product(copies.items(), (("", [x]), ("multi ", [x, x]))):
                store_bytes = num + num * scales
                label = f"blockwise {block} {multi}{kind} {name}"
                add(label, store_bytes, "cast_with_scales", xs, fp8, granularity=granularity.value, **copy)
        for block, square in (("1x32", False), ("32x32", True)):
            how = {"granularity": Granularity.BLOCK_1X32.value, "square": square}
            for kind, (num, copy) in copies.items():
                add(f"mxfp8 {block} {kind} {name}", num + num / MX_BLOCK, "cast_with_scales", [x], fp8, **how, **copy)
    add("amax", 0, "amaxes", [x])
    add("multi_amax", 0, "amaxes", [x, x])
    _add_rowwise(add, x)
    _add_grouped(add, found, x)
    return found


def _add_grouped(add: Callable[..., None], found: dict[str, HandWritten], x: torch.Tensor) -> None:
    """Casts of 8 matrices, and columnwise copies of rows in 8 groups, whose first launch says where each row goes."""
    batch, scales = x.view(8, -1, x.shape[1]), torch.ones(8, device=x.device)
    offs = (torch.arange(1, 9, device=x.device) * (x.shape[0] // 8)).int()
    index = torch.arange(x.shape[0], device=x.device)

    def add_columns(name: str, align: int, position: int, load_bytes: float, *call: Any, **options: Any) -> None:
        add(name, *call, offs, *[index] * ("rowwise" not in options), **options)
        elements = padded_width(x.shape[0], 8, align) * x.shape[1]
        found[name] = found[name]._replace(position=position, elements=elements, load_bytes=load_bytes)

    add("amax_batch", 0, "amaxes", [batch], per_matrix=True)
    for name, fp8 in _FP8:
        add(f"cast_batch_amax {name}", 1, "cast", [batch], [scales], fp8, with_amax=True)
        add(f"cast_batch columnwise {name}", 1, "cast", [batch], [scales], fp8, rowwise=False, columnwise=True)
        add(f"cast_transpose_batch_amax {name}", 2, "cast", [batch], [scales], fp8, columnwise=True, with_amax=True)
        block = {"granularity": Granularity.BLOCK_128X128.value}
        add(f"batch 128x128 both {name}", 2, "cast_with_scales", [batch], fp8, **block, columnwise=True)
        lines = f"cast_lines_rowwise batch both {name}"
        add(lines, 2, "cast_with_scales", [batch], fp8, granularity="row_wise", columnwise=True)
        found[lines] = found[lines]._replace(position=1)  # the amaxes come first
        found["amax_rowwise batch both"] = found[lines]._replace(position=0, store_bytes=0)
        cast = "cast_columns", x, fp8
        add_columns(f"columns 1x128 {name}", BLOCK, 1, 2, 1 + 4 / BLOCK, *cast, granularity="block_1x128")
        both = {"granularity": "block_1x128", "rowwise": True}
        add_columns(f"columns 1x128 and rows {name}", BLOCK, 1, 2, 2 + 8 / BLOCK, *cast, **both)
        add_columns(f"columns rowwise {name}", GEMM_ALIGNMENT, 2, 2, 1, *cast, granularity="row_wise")
    add_columns("columns moved", GEMM_ALIGNMENT, 1, 1, 1, "transposed_copy", x.view(torch.uint8)[:, : x.shape[1]].view(E4M3))


def _add_rowwise(add: Callable[..., None], x: torch.Tensor) -> None:
    """The two passes of the rowwise casts, of one matrix and of its halves."""
    halves = list(x.tensor_split(2))
    for kind, (rowwise, columnwise) in {"rows": (True, False), "columns": (False, True), "both": (True, True)}.items():
        lines = {"rowwise": rowwise, "columnwise": columnwise}
        for how, xs in (("", [x]), ("multi ", halves)):
            add(f"amax_rowwise {how}{kind}", 0, "amax_rowwise", xs, **lines)
            amaxes = torch.ones(sum(m.shape[0] * rowwise + m.shape[1] * columnwise for m in xs), device=x.device)
            for name, fp8 in _FP8:  # few programs store scales
                label = f"cast_lines_rowwise {how}{kind} {name}"
                add(label, rowwise + columnwise, "cast_lines_rowwise", xs, amaxes, fp8, **lines)


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
