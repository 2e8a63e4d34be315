"""Operands of FP8 GEMMs in generated H200 code: strides, addresses and scales as cuBLASLt takes them, which no CPU checks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contestants import steady
from benchmarks.cross_codegen import H200, H200_CUDA_12_8, RTX_4090, RTX_5090, Event, capture, launched, report
from fp8pass import Float8BlockScaling, fp8_compile
from lowering import hardware
from lowering.formats import E4M3, Granularity
from lowering.inductor import register_lowerings
from tests.support.copies import both
from tests.support.models import LlamaBlock

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

ops = torch.ops.lowering
BF16 = torch.bfloat16


def events_of(run: Callable[[], Any]) -> list[Event]:
    """What the compiled code launches."""
    torch._dynamo.reset()
    with capture() as graphs:
        run()
    return [event for _, events in launched(graphs) for event in events]


def gemms(run: Callable[[], Any]) -> list[Event]:
    """The FP8 GEMMs among that."""
    return [event for event in events_of(run) if event.name in LEGAL]


def require_legal(event: Event) -> None:
    (a, at_a), (b, at_b) = event.layouts[:2]
    assert a[1] == b[0] == 1, "a is row-major, b is column-major"
    assert a[0] % 16 == b[1] % 16 == 0
    assert at_a == at_b == 0
    if len(event.layouts) == 6:  # a, b, two scales, the bias, the output
        assert event.layouts[4] == ((1,), 0)


def require_legal_blocks(event: Event) -> None:
    """Both operands without gaps along K, and GEMM-ready scales: see NOTE [scale layouts] in lowering/blockwise/reference.py
    and in lowering/mxfp8/reference.py, whose shapes are written out again here."""
    (a_dtype, (m, k)), (b_dtype, (_, n)), *scales = event.shapes
    (a, _), (b, _), *scale_layouts = event.layouts
    assert (a, b) == ((k, 1), (1, k)), "a is row-major, b is column-major"
    assert n % 16 == 0
    kinds = [Granularity(event.options[f"granularity_{side}"]) for side in "ab"]
    assert k % (32 if Granularity.BLOCK_1X32 in kinds else 16) == 0
    assert all(at == 0 for _, at in event.layouts)
    expected = [gemm_ready(kind, outer, k) for kind, outer in zip(kinds, (m, n), strict=True)]
    assert scales == [(dtype, shape) for dtype, shape, _ in expected]
    assert [strides for strides, _ in scale_layouts] == [strides for _, _, strides in expected]
    assert hardware.refusal(hardware.Gemm(a_dtype, b_dtype, *kinds, m=m, n=n, k=k), None) is None


def gemm_ready(granularity: Granularity, outer: int, inner: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """Type, shape and strides of the scales of a copy [outer, inner]."""
    lines, blocks = -(-outer // 128), -(-inner // 128)
    if granularity is Granularity.BLOCK_1X32:
        return torch.uint8, (lines, blocks, 32, 16), (blocks * 512, 512, 16, 1)
    rows, width = (blocks, outer) if granularity is Granularity.BLOCK_1X128 else (lines, blocks)
    width = -(-width // 4) * 4
    return torch.float32, (rows, width), (width, 1)


#: What a GEMM demands.
LEGAL = {
    "aten::_scaled_mm": require_legal,
    "lowering::scaled_mm": require_legal_blocks,
}


def compiled(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> Callable[[], torch.Tensor]:
    register_lowerings()
    return lambda: torch.compile(function, fullgraph=True)(*args)


ONE = torch.ones(())


def test_a_copy_that_inductor_would_lay_out_like_its_source():
    """`clone(permute(q))` is column-major unless someone asks for rows."""

    def function(x, w):
        q = ops.cast([x * 2], [ONE], E4M3)[0]
        k = ops.cast([w * 2], [ONE], E4M3)[0]
        a = q.t().clone(memory_format=torch.contiguous_format)
        b = k.t().clone(memory_format=torch.contiguous_format).t()
        return ops.scaled_mm(a, b, ONE, ONE)

    x, w = torch.zeros(256, 512, dtype=BF16), torch.zeros(256, 128, dtype=BF16)
    (event,) = gemms(compiled(function, x, w))
    assert [shape for _, shape in event.shapes[:2]] == [(512, 256), (256, 128)]
    require_legal(event)


@pytest.mark.parametrize(
    ("kind", "start", "step"),
    [
        ("tensor_wise", 0, 1),
        ("tensor_wise", 3, 1),
        ("tensor_wise", 0, 2),
        ("row_wise", 1, 1),
        ("row_wise", 8, 1),
        ("row_wise", 0, 2),
    ],
)
def test_a_bias_that_begins_anywhere(kind, start, step):
    def function(a, b, biases):
        bias = biases[start : start + 64 * step : step]
        return ops.scaled_mm(a, b.t(), ONE, ONE, bias, **both(kind))

    a, b = torch.zeros(32, 48, dtype=E4M3), torch.zeros(64, 48, dtype=E4M3)
    (event,) = gemms(compiled(function, a, b, torch.zeros(160, dtype=BF16)))
    assert event.shapes[4] == (BF16, (64,))
    require_legal(event)


def test_a_bias_that_is_an_unaligned_input():
    def function(a, b, bias):
        return ops.scaled_mm(a, b.t(), ONE, ONE, bias)

    a, b = torch.zeros(32, 48, dtype=E4M3), torch.zeros(64, 48, dtype=E4M3)
    bias = torch.zeros(65, dtype=BF16)[1:]
    events = events_of(compiled(function, a, b, bias))
    (event,) = (e for e in events if e.name == "aten::_scaled_mm")
    assert events.index(event) == 1, "a kernel copies the bias first"


@pytest.mark.parametrize("columns", [slice(0, 48), slice(16, 64), slice(8, 56)])
def test_operands_within_wider_matrices(columns):
    def function(a, b):
        return ops.scaled_mm(a[:, columns], b[:, columns].t(), ONE, ONE)

    a, b = torch.zeros(32, 64, dtype=E4M3), torch.zeros(16, 72, dtype=E4M3)
    (event,) = gemms(compiled(function, a, b))
    require_legal(event)


#: dim, ffn, heads and tokens: blocks are whole, so that casts join their producers; blocks are ragged.
WHOLE, RAGGED = (256, 384, 4, 128), (192, 320, 3, 80)


@pytest.mark.parametrize(
    ("recipe", "sizes", "name"),
    [
        *((recipe, WHOLE, "aten::_scaled_mm") for recipe in ("delayed", "current", "rowwise")),
        *((recipe, sizes, "lowering::scaled_mm") for recipe in ("blockwise", "mxfp8") for sizes in (WHOLE, RAGGED)),
    ],
)
def test_every_gemm_of_a_block(recipe, sizes, name):
    dim, ffn, heads, tokens = sizes
    model, x = LlamaBlock(dim, ffn, heads).bfloat16(), torch.zeros(1, tokens, dim, dtype=BF16, requires_grad=True)
    events = gemms(lambda: fp8_compile(model, steady(recipe))(x).sum().backward())
    assert [event.name for event in events] == 21 * [name]
    for event in events:
        LEGAL[name](event)


@pytest.mark.parametrize(
    ("recipe", "engine", "casts"),
    [
        ("rowwise", "hf", ["cast_with_scales"] * 4),
        (Float8BlockScaling(use_f32_scales=True), "vllm", ["cast_with_scales"] * 3),  # the two weights share one
        ("current", "vllm", ["cast_with_scales", "scales_from_amax"] * 2),
    ],
    ids=["rowwise", "blockwise", "current"],
)
def test_casts_as_engines_make_them_are_called(recipe, engine, casts):
    """They have no kernel, so that no generated code takes their place."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    compiled = fp8_compile(model, recipe, match=engine, select="all")
    with capture() as graphs:
        compiled(torch.zeros(256, 256, dtype=BF16)).sum().backward()
    code = "".join(generated.code for generated in report(graphs))
    assert re.findall(r"lowering\.(\w+)\.default\([^\n]*inverse=", code) == casts


@pytest.mark.parametrize(
    ("gpu", "fast_accum", "is_rowwise"),
    [
        (H200, False, True),
        (H200_CUDA_12_8, True, True),
        (H200_CUDA_12_8, False, False),
        (RTX_4090, False, False),
        (RTX_5090, False, True),
    ],
    ids=lambda value: f"{value.name} {value.cuda}" if hasattr(value, "cuda") else str(value),
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_of_rows_join_the_code_behind_the_gemm(gpu, fast_accum, is_rowwise, has_bias):
    """One generated kernel reads the float32 of a per-tensor GEMM: 6 bytes per element, and none of eager code."""

    def function(a, b, scale_a, scale_b, bias):
        options = {"fast_accum": fast_accum, **both("row_wise")}
        out = ops.scaled_mm(a, b.t(), scale_a, scale_b, bias if has_bias else None, **options)
        return torch.nn.functional.silu(out)

    m, n, k = 256, 128, 512
    fp8 = [torch.zeros(rows, k, dtype=E4M3) for rows in (m, n)]
    scales = [torch.zeros(rows, 1) for rows in (m, n)]
    torch._dynamo.reset()
    with capture() as graphs:
        compiled(function, *fp8, *scales, torch.zeros(n))()
    (generated,) = report(graphs, gpu=gpu)
    names = [kernel.name for kernel in generated.kernels]
    assert not any("lowering" in name for name in names)
    assert sum("_scaled_mm" in name for name in names) == 1
    others = [kernel for kernel in generated.elementwise if kernel.num_bytes > 8]
    if is_rowwise and not has_bias:
        assert [kernel.num_bytes for kernel in others] == [m * n * (2 + 2)]
    else:  # the epilogue of torch's GEMM takes no float32 bias
        assert [kernel.num_bytes for kernel in others] == [m * n * (4 + 2) + 4 * (m + n) + 4 * n * has_bias]
