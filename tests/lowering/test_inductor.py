"""Code that Inductor generates for GPUs: operands of FP8 GEMMs as cuBLASLt takes them, which no CPU checks;
the sigmoid."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cross_codegen as gpu
from benchmarks.contestants import steady
from benchmarks.cross_codegen import Event, launched, report
from fp8pass import fp8_compile
from lowering import hardware
from lowering.formats import E4M3, Granularity
from lowering.inductor import register_lowerings
from tests.support.cases import rest
from tests.support.copies import both
from tests.support.models import LlamaBlock, mlp

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

ops = torch.ops.lowering
BF16 = torch.bfloat16
ONE = torch.ones(())


def captured(function: Callable[..., Any], *args: Any) -> gpu.Capture:
    """The graphs that a call compiles; of a plain function, its own."""
    torch._dynamo.reset()
    register_lowerings()
    with gpu.capture() as graphs:
        function(*args)
    return graphs


def plain(function: Callable[..., Any], *args: Any) -> gpu.Capture:
    return captured(torch.compile(function, fullgraph=True, dynamic=False), *args)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


# -- operands of GEMMs


def require_legal(event: Event) -> None:
    (a, at_a), (b, at_b) = event.layouts[:2]
    assert a[1] == b[0] == 1, "a is row-major, b is column-major"
    assert a[0] % 16 == b[1] % 16 == 0
    assert at_a == at_b == 0
    assert all(at == 0 for _, at in event.layouts[2:4]), "cuBLAS 13 refuses scales at other addresses"
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
LEGAL = {"aten::_scaled_mm": require_legal, "lowering::scaled_mm": require_legal_blocks}


def test_a_copy_that_inductor_would_lay_out_like_its_source():
    """`clone(permute(q))` is column-major unless someone asks for rows."""

    def function(x, w):
        q, k = (ops.cast([y * 2], [ONE], E4M3)[0] for y in (x, w))
        a, b = (y.t().clone(memory_format=torch.contiguous_format) for y in (q, k))
        return ops.scaled_mm(a, b.t(), ONE, ONE)

    ((_, events),) = launched(plain(function, zeros(256, 512), zeros(256, 128)))
    (event,) = [event for event in events if event.name in LEGAL]
    assert [shape for _, shape in event.shapes[:2]] == [(512, 256), (256, 128)]
    require_legal(event)


#: dim, ffn, heads and tokens: blocks are whole, so that casts join their producers; blocks are ragged.
WHOLE, RAGGED = (256, 384, 4, 128), (192, 320, 3, 80)


@pytest.mark.parametrize(
    ("recipe", "sizes", "name"),
    [
        ("rowwise", WHOLE, "aten::_scaled_mm"),
        ("mxfp8", RAGGED, "lowering::scaled_mm"),
        *rest([("delayed", WHOLE, "aten::_scaled_mm"), ("blockwise", WHOLE, "lowering::scaled_mm")]),
    ],
)
def test_every_gemm_of_a_block(recipe, sizes, name):
    """And no sigmoid is left but that of lowering/inductor/elementwise.py."""
    dim, ffn, heads, tokens = sizes
    model, x = LlamaBlock(dim, ffn, heads).bfloat16(), zeros(1, tokens, dim).requires_grad_()
    found = list(launched(captured(lambda: fp8_compile(model, steady(recipe))(x).sum().backward())))
    events = [event for _, events in found for event in events if event.name in LEGAL]
    assert [event.name for event in events] == 21 * [name]
    for event in events:
        LEGAL[name](event)
    for generated, _ in found:
        assert "exp2(" in generated.code
        assert "sigmoid(" not in generated.code
        assert "exp(" not in generated.code


def test_casts_as_engines_make_them_are_called():
    """They have no kernel, so that no generated code takes their place."""
    compiled = fp8_compile(mlp(256, 512, 256).bfloat16(), "current", match="vllm", select="all")
    graphs = captured(lambda: compiled(zeros(256, 256)).sum().backward())
    code = "".join(generated.code for generated in report(graphs))
    found = re.findall(r"lowering\.(\w+)\.default\([^\n]*inverse=", code)
    assert found == ["cast_with_scales", "scales_from_amax"] * 2


@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_of_rows_join_the_code_behind_a_gemm_that_does_not_take_them(has_bias):
    """As that of torch, where there is a float32 bias. Generated code reads the float32 of a per-tensor GEMM instead."""

    def function(a, b, scale_a, scale_b, bias):
        return F.silu(ops.scaled_mm(a, b.t(), scale_a, scale_b, bias if has_bias else None, **both("row_wise")))

    m, n = 256, 128
    a, b = (torch.zeros(rows, 512, dtype=E4M3) for rows in (m, n))
    (generated,) = report(plain(function, a, b, torch.zeros(m, 1), torch.zeros(n, 1), torch.zeros(n)))
    found = [kernel.num_bytes for kernel in generated.elementwise if kernel.num_bytes > 8]
    assert found == [m * n * (4 + 2) + 4 * (m + 2 * n) if has_bias else m * n * (2 + 2)]
    assert not any("lowering" in kernel.name for kernel in generated.kernels)


@pytest.mark.parametrize(("kind", "as_bytes"), [("tensor_wise", False), ("block_1x128", False), ("block_128x128", True)])
def test_what_is_saved_measured_and_cast_is_computed_in_loops(kind, as_bytes):
    """Generated code calls no operation but what sums parts up. GPUs without FP8 instructions save bytes."""

    def function(x):
        y = F.silu(x)
        saved = ops.save_activation(y, as_bytes=as_bytes)
        if kind == "tensor_wise":
            measured = ops.cast([y], [ONE], E4M3, with_amax=True)
        else:
            measured = ops.quantization_statistics(y, E4M3, granularity=kind, power_of_2=True)
        return ops.load_activation(*saved, dtype=BF16) * 2, measured

    names = [kernel.name for kernel in report(plain(function, zeros(256, 512)))[0].kernels]
    assert names
    assert [name for name in names if "lowering" in name and "statistics_of_parts" not in name] == []


def test_columns_of_what_a_row_kernel_computes_and_rows_of_a_vector_are_copied_in_loops():
    def function(x, vector):
        made = ops.cast([F.rms_norm(x, (512,))], [ONE], E4M3, rowwise=False, columnwise=True, with_amax=True)
        return made, ops.take(vector, [0, 1, 4, 5, 9])

    (generated,) = report(plain(function, zeros(250, 512), torch.zeros(10)))
    assert "((512, 256), (256, 1), torch.float8_e4m3fn)" in generated.code, "it is padded"
    assert not any("lowering" in kernel.name for kernel in generated.kernels)
