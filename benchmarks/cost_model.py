"""The cost model against published measurements: how often it names the faster one, and how far off its speed-ups are."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.common import main
from benchmarks.isolation import Bench, Row
from fp8pass.cost import H100, H200, CastShape, Device, GemmShape, cast_seconds, estimate_gemm, gemm_seconds, graph_speedup
from lowering.formats import Granularity

# torchao, row-wise scaling, H100, torch 2.8.0a0+git48807d5: forward and backward of LayerNorm -> Linear -> sigmoid, GPU time.
# https://github.com/pytorch/ao/blob/4c8086744/docs/static/fp8-rowwise-perf.png (in torchao/float8/README.md of that commit).
# Rows: M, and for each M the values of K; columns: N.
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
_ROW_WISE = """
0.42 0.42 0.50 0.51 0.56 0.56   0.40 0.38 0.42 0.50 0.50 0.56   0.48 0.43 0.46 0.53 0.57 0.60
0.45 0.48 0.54 0.62 0.60 0.62   0.46 0.48 0.54 0.60 0.60 0.61   0.45 0.50 0.55 0.60 0.62 0.65
0.43 0.43 0.48 0.55 0.62 0.65   0.38 0.45 0.58 0.65 0.72 0.75   0.43 0.50 0.68 0.78 0.81 0.82
0.46 0.58 0.73 0.82 0.87 0.89   0.48 0.62 0.75 0.83 0.84 0.85   0.50 0.64 0.75 0.84 0.83 0.99
0.45 0.47 0.57 0.66 0.72 0.76   0.43 0.53 0.70 0.83 0.90 0.91   0.44 0.64 0.84 1.01 1.01 1.04
0.53 0.72 0.91 1.01 1.07 1.13   0.53 0.74 0.92 1.05 1.10 1.18   0.54 0.75 0.93 1.02 1.17 1.18
0.48 0.52 0.65 0.77 0.83 0.84   0.45 0.64 0.82 1.01 1.03 1.06   0.52 0.76 1.00 1.13 1.17 1.19
0.59 0.85 1.05 1.20 1.31 1.41   0.58 0.82 1.03 1.22 1.37 1.40   0.59 0.82 1.04 1.30 1.36 1.46
0.48 0.58 0.73 0.86 0.85 0.89   0.51 0.70 0.90 1.05 1.07 1.15   0.57 0.79 1.02 1.20 1.26 1.40
0.61 0.87 1.08 1.33 1.39 1.49   0.59 0.83 1.07 1.34 1.42 1.55   0.60 0.85 1.16 1.35 1.48 1.72
0.51 0.62 0.77 0.87 0.88 0.94   0.54 0.73 0.91 1.08 1.14 1.27   0.59 0.81 1.04 1.28 1.35 1.49
0.63 0.87 1.11 1.41 1.50 1.62   0.60 0.83 1.16 1.39 1.49 1.73   0.63 0.93 1.16 1.48 1.70 1.52
"""
TORCHAO_ROW_WISE = dict(
    zip(((m, k, n) for m in SIZES for k in SIZES for n in SIZES), map(float, _ROW_WISE.split()), strict=True)
)

# torchao, dynamic tensor-wise scaling, H100, the same module with M = K = N: column fp8_dyn_sp in the message of commit
# dec031314, https://github.com/pytorch/ao/pull/940. (The tensor-wise table over M, K and N in torchao's documentation is an
# image outside its repository: https://github.com/user-attachments/assets/e46c671a-ed35-41b4-b17c-50caf1629ecb.)
_TENSOR_WISE = (0.465634, 0.489556, 0.734123, 0.815678, 1.236320, 1.432213, 1.803456, 1.696376)
TORCHAO_TENSOR_WISE = {(256 * 2**i,) * 3: speedup for i, speedup in enumerate(_TENSOR_WISE)}

# torchao's filter for tensor-wise scaling, drawn from that table, leaves a Linear in bfloat16 if K <= 4096 and N <= 1024 at any
# M: https://github.com/pytorch/ao/blob/36027d82d/torchao/float8/float8_linear_utils.py (_auto_filter_for_tensorwise).
FILTERED = {(k, n): k <= 4096 and n <= 1024 for k in SIZES for n in SIZES}

# TransformerEngine on an H200 NVL, the GEMMs of one transformer layer with quantization, hidden 4096, ffn 16384, 15872 tokens,
# forward and backward: https://nvidia.github.io/TransformerEngine/examples/gemm_profiling/gemm_profiling.html
TE_LAYER = {"GEMMs alone": 1.90, "delayed": 1.69, "current": 1.58, "blockwise": 1.40}


def torchao_machine(transpose_bandwidth: float) -> Device:
    """The H100 that torchao measured on: slower memory than the 80 GB product's. torchao's roofline_utils.py has pointwise
    Triton kernels on Meta's variant of the H100, of 2.4 TB/s."""
    return dataclasses.replace(H100, memory_bandwidth=2.2e12, transpose_bandwidth=transpose_bandwidth)


# What Inductor's kernels reached there, by the same author at the time of each table.
TENSOR_WISE_MACHINE = torchao_machine(1.4e12)  # pytorch/pytorch issue 133242: cast and transpose, 1.4 TB/s
ROW_WISE_MACHINE = torchao_machine(0.65e12)  # pytorch/pytorch issue 149982: scaling along dim 1, 0.6 to 0.7 TB/s


def expected_tensor_wise(m: int, k: int, n: int, device: Device = TENSOR_WISE_MACHINE) -> float:
    """The model's speed-up of LayerNorm -> Linear -> sigmoid; casts as in torchao's roofline_utils.py, "tensorwise", fused."""

    def cast(read: int, written: int, num_kernels: int, transposes: bool = False) -> float:
        return cast_seconds(read, written, device, num_kernels=num_kernels, transposes=transposes)

    def activation(numel: int) -> float:  # the amax is fused, its end is a kernel
        return cast(0, 0, 1) + cast(2 * numel, 2 * numel, 1, transposes=True)

    weight = cast(2 * k * n, 0, 2) + cast(2 * k * n, k * n, 1) + cast(2 * k * n, k * n, 1, transposes=True)
    return _speedup(m, k, n, device, "tensor_wise", (True, False, False), activation(m * k) + weight + activation(m * n))


def expected_row_wise(m: int, k: int, n: int, device: Device = ROW_WISE_MACHINE) -> float:
    """The model's speed-up of that module with row-wise scaling; casts as in torchao's roofline_utils.py, "rowwise", fused."""

    def cast(read: int, written: int, transposes: bool = False) -> float:
        return cast_seconds(read, written, device, transposes=transposes)

    def activation(numel: int) -> float:  # FP8 and a transposed bfloat16 copy, then FP8 of that
        return cast(0, 3 * numel, transposes=True) + cast(2 * numel, numel)

    weight = cast(2 * k * n, k * n) + cast(2 * k * n, 2 * k * n, transposes=True) + cast(2 * k * n, k * n)
    return _speedup(m, k, n, device, "row_wise", (True, True, True), activation(m * k) + weight + activation(m * n))


def _speedup(m: int, k: int, n: int, device: Device, kind: str, fast_accum: tuple[bool, ...], casts: float) -> float:
    around = sum(cast_seconds(read * 2, 2 * numel, device) for numel in (m * k, m * n) for read in (numel, 2 * numel))
    gemms = [GemmShape(m=m, n=n, k=k), GemmShape(m=m, n=k, k=n), GemmShape(m=k, n=n, k=m)]
    bf16 = sum(gemm_seconds(gemm, device, "bf16") for gemm in gemms)
    fp8 = sum(gemm_seconds(g, device, kind, fast_accum=fast) for g, fast in zip(gemms, fast_accum, strict=True))
    return (around + bf16) / (around + casts + fp8)


#: Recipe -> what shares a scale, and how often a cast reads its source.
RECIPES = {
    "delayed": (Granularity.TENSOR_WISE, 1),
    "current": (Granularity.TENSOR_WISE, 2),
    "blockwise": (Granularity.BLOCK_1X128, 1),
    "rowwise": (Granularity.ROW_WISE, 2),
}


def speedup_of_linears(recipe: str, m: int, linears: Iterable[tuple[int, int]], device: Device) -> float:
    """Of output, grad_input and grad_weight of linears K -> N together. Each cast writes two copies, for two GEMMs; of "GEMMs
    alone" there is none."""
    granularity, reads = RECIPES.get(recipe, RECIPES["delayed"])

    def cast(elements: int) -> CastShape:
        return CastShape(elements=elements, copies=2, transposes=True, reads=reads, num_readers=2)

    estimates = []
    for k, n in linears:
        x, weight, gradient = cast(m * k), cast(k * n), cast(m * n)
        gemms = [GemmShape(m=m, n=n, k=k), GemmShape(m=m, n=k, k=n), GemmShape(m=n, n=k, k=m)]
        for i, (gemm, casts) in enumerate(zip(gemms, ((x, weight), (gradient, weight), (gradient, x)), strict=True)):
            estimates.append(estimate_gemm(gemm, casts if recipe in RECIPES else (), device, granularity, fast_accum=i == 0))
    speedup = graph_speedup(estimates)
    assert speedup is not None
    return speedup


def expected_te_layer(recipe: str, device: Device) -> float:
    """The model's speed-up of the layer of `TE_LAYER`."""
    return speedup_of_linears(recipe, 15872, ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)), device)


# -- the comparison

_NOTES = [
    "columns 4 to 6: expected / published",
    "torchao's rows: casts at bandwidths reported for Inductor's kernels on torchao's machine, which in row-wise scaling are"
    " far below the H100's own constants, those of hand-written casts (benchmarks/cost_model.py)",
]


def agreement(table: dict[Any, float], expected: Callable[[Any], float]) -> tuple[int, int]:
    """The number of cells outside 0.95 to 1.05 that the model puts on the right side of 1, and how many there are."""
    clear = [cell for cell, speedup in table.items() if not 0.95 <= speedup <= 1.05]
    return sum((expected(cell) > 1) == (table[cell] > 1) for cell in clear), len(clear)


def run(bench: Bench) -> Iterator[Row]:
    """`quick` changes nothing: no GPU is needed."""
    bench.baseline, bench.notes = "the published figure", _NOTES
    bench.checks.append("nothing is timed: figures of a model")
    tables: tuple[tuple[str, dict[Any, float], Callable[[Any], float]], ...] = (
        ("torchao tensor-wise, M = K = N", TORCHAO_TENSOR_WISE, lambda cell: expected_tensor_wise(*cell)),
        ("torchao row-wise", TORCHAO_ROW_WISE, lambda cell: expected_row_wise(*cell)),
        ("TransformerEngine, layer on an H200", TE_LAYER, functools.partial(expected_te_layer, device=H200)),
    )
    for what, table, expected in tables:
        yield from bench.row(what, _row, what, table, expected)


def _row(what: str, table: dict[Any, float], expected: Callable[[Any], float]) -> Row:
    right, clear = agreement(table, expected)
    ratios = sorted(expected(cell) / speedup for cell, speedup in table.items())
    at = (len(ratios) - 1) / 20
    spread = {"5 %": ratios[round(at)], "median": statistics.median(ratios), "95 %": ratios[round(19 * at)]}
    return {"what": what, "clear cells": clear, "same verdict": right} | spread


if __name__ == "__main__":
    main("cost_model", run)
