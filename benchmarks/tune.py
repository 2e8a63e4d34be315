"""Choices that were made without a GPU, tried on one: fast accumulation, cuBLASLt against Triton, and the tiles of casts.

A row per choice; `chosen` is what the code does today. GEMMs are those of TransformerEngine's layer (`benchmarks.gemm_layer`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.common import SkipBenchmark, device, main
from benchmarks.correctness import FAST_ERROR, GEMM_ERROR, relative_error
from benchmarks.gemm_layer import LINEARS, TOKENS
from benchmarks.isolation import Bench, Row
from benchmarks.timing import columns, in_turns
from lowering.blockwise import gemm
from lowering.blockwise import reference as blockwise
from lowering.formats import E4M3, E5M2, Granularity
from lowering.products import Product
from lowering.tensorwise import reference

ops = torch.ops.lowering
#: Rows, columns and warps of a tile of `cast_transpose`.
TILES = ((128, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (256, 64, 8), (128, 32, 4))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Ways to compute the same."""

    what: str
    chosen: str
    """The one that the code takes today."""
    calls: Mapping[str, Callable[[], Any]]
    check: Callable[[str, Any], bool]
    """Raises where the result of one, by its name, is not right."""
    flops: int = 0
    num_bytes: int = 0
    """Moved by a cast, whose time is compared with a copy's; 0 for a GEMM."""


def _row(choice: Choice, on: torch.device, bench: Bench) -> Iterator[Row]:
    """Time every way that is right."""
    if bench.has_row(choice.what):
        return
    right: dict[str, Callable[[], Any]] = {}
    if choice.num_bytes:
        right["copy"] = torch.empty(choice.num_bytes // 2, dtype=torch.uint8, device=on).clone

    def is_right(name: str, call: Callable[[], Any]) -> bool | None:
        return bench(f"{choice.what}, {name}", lambda: choice.check(name, call()))

    right |= {name: call for name, call in choice.calls.items() if is_right(name, call)}
    times = in_turns(right, on, bench, lambda name: f"{choice.what}, {name}")
    row: Row = {"what": choice.what, "chosen": choice.chosen}
    copy = times.pop("copy", None)
    for name, timing in times.items():
        if choice.flops:
            row |= columns(name, timing) | {f"{name} TFLOP/s": choice.flops / timing.back_to_back_ms / 1e9}
        elif copy is not None:
            row[f"{name} of copy"] = copy.ms / timing.ms
    if choice.flops or copy is not None:
        yield row


def _accumulation(name: str, m: int, n: int, k: int, on: torch.device, bench: Bench) -> Choice:
    """A per-tensor GEMM with and without fast accumulation."""
    one, is_output = torch.ones((), device=on), name.endswith("output")
    a, b = torch.randn(m, k, device=on).to(E4M3 if is_output else E5M2), torch.randn(n, k, device=on).to(E4M3).t()
    calls = {how: functools.partial(ops.scaled_mm, a, b, one, one, fast_accum=how == "fast") for how in ("fast", "accurate")}
    bounds = {"fast": FAST_ERROR, "accurate": GEMM_ERROR}
    check = _within(name, a.float() @ b.float(), bounds, bench)
    return Choice(f"per tensor, {name} {m}x{n}x{k}", "fast" if is_output else "accurate", calls, check, 2 * m * n * k)


def _within(name: str, expected: torch.Tensor, bounds: Mapping[str, float], bench: Bench) -> Callable[[str, Any], bool]:
    """The gate of a GEMM."""

    def check(label: str, found: torch.Tensor) -> bool:
        error, bound = relative_error(found, expected), bounds.get(label, GEMM_ERROR)
        return bench.require(error <= bound, f"{name}, {label}: relative error {error:.1e} <= {bound:g}")

    return check


def _implementation(name: str, m: int, n: int, k: int, on: torch.device, bench: Bench) -> Choice:
    """A blockwise GEMM by Triton, and by the libraries that have it."""
    one, two = Granularity.BLOCK_1X128.value, Granularity.BLOCK_128X128.value
    of_b = one if name.endswith("grad_weight") else two
    a, scale_a = ops.cast_with_scales([torch.randn(m, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=one)
    b, scale_b = ops.cast_with_scales([torch.randn(n, k, device=on, dtype=torch.bfloat16)], E4M3, granularity=of_b)
    expected = blockwise.dequantize(a, scale_a, one) @ blockwise.dequantize(b, scale_b, of_b).t()
    scaling = {"granularity_a": one, "granularity_b": of_b}
    asked = Product(a, b.t(), scale_a, scale_b, **scaling)
    legal = (kind for kind, library in gemm.LIBRARIES.items() if library.refusal(asked) is None)
    run = functools.partial(ops.scaled_mm, a, b.t(), scale_a, scale_b, **scaling)
    kinds = ["triton", *legal] if on.type == "cuda" else ["reference"]
    calls = {kind: functools.partial(run, implementation=kind) for kind in kinds}
    check = _within(f"blockwise {name}", expected, {}, bench)
    return Choice(f"blockwise, {name} {m}x{n}x{k}", gemm.chosen(asked), calls, check, 2 * m * n * k)


def _tiles(dtype: torch.dtype, rows: int, cols: int, on: torch.device, bench: Bench) -> Choice:
    """`cast_transpose` with other tiles than its own; without a GPU, the operation alone."""
    x, scale = torch.randn(rows, cols, device=on, dtype=torch.bfloat16), torch.tensor(3.0, device=on)
    expected = reference.cast([x], [scale], dtype, columnwise=True)
    what = f"cast_transpose {dtype} {rows}x{cols}"

    def check(label: str, found: Any) -> bool:
        same = all(torch.equal(f.view(torch.uint8), e.view(torch.uint8)) for f, e in zip(found, expected, strict=True))
        return bench.require(same, f"{what}, {label}: bit for bit equal to the reference")

    if on.type != "cuda":
        calls = {"operation": functools.partial(ops.cast, [x], [scale], dtype, columnwise=True)}
        return Choice(what, "operation", calls, check, num_bytes=4 * x.numel())
    from lowering.tensorwise import kernels

    def call(tile: tuple[int, int, int]) -> Any:
        with mock.patch.multiple(kernels, BLOCK_R=tile[0], BLOCK_C=tile[1], NUM_WARPS=tile[2]):
            return kernels.cast([x], [scale], dtype, columnwise=True)

    own, label = (kernels.BLOCK_R, kernels.BLOCK_C, kernels.NUM_WARPS), "{}x{}, {} warps".format
    calls = {label(*tile): functools.partial(call, tile) for tile in dict.fromkeys((own, *TILES))}
    return Choice(what, label(*own), calls, check, num_bytes=4 * x.numel())


def run(bench: Bench) -> Iterator[Row]:
    on = device(bench.quick)
    bench.baseline = "each other"
    if on.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        raise SkipBenchmark("TF32 is on: float32 products, which GEMMs are compared with, would be less exact than they")
    tokens, shrink = (64, 64) if bench.quick else (TOKENS, 1)
    makers: list[tuple[str, Callable[..., Choice], tuple[Any, ...]]] = []
    for kind, make in (("per tensor", _accumulation), ("blockwise", _implementation)):
        for name, (inputs, outputs) in LINEARS.items():
            k, n = inputs // shrink, outputs // shrink
            shapes = {"output": (tokens, n, k), "grad_input": (tokens, k, n), "grad_weight": (n, k, tokens)}
            makers += [(f"{kind}, {name} {role}", make, (f"{name} {role}", *shape)) for role, shape in shapes.items()]
    rows, cols = (512, 512) if bench.quick else (TOKENS, 4096)
    makers += [(f"cast_transpose {dtype}", _tiles, (dtype, rows, cols)) for dtype in (E4M3, E5M2)]
    for what, make_choice, arguments in makers:
        choice = bench(what, make_choice, *arguments, on, bench)
        if choice is not None:
            yield from _row(choice, on, bench)


if __name__ == "__main__":
    main("tune", run)
