"""Code that Inductor generates for GPUs: operands of FP8 GEMMs as cuBLASLt takes them, which no CPU checks; the width of
accesses, the sigmoid, what packing costs, and how many kernels there are."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.virtualized import V

from benchmarks import cross_codegen as gpu
from benchmarks.contestants import steady
from benchmarks.cross_codegen import Event, launched, report
from benchmarks.traffic import distinct, reports_of_stack
from fp8pass import Float8BlockScaling, fp8_compile
from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.inductor import elementwise, register_lowerings
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


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=E4M3)


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


def gemms(graphs: gpu.Capture) -> list[Event]:
    """The FP8 GEMMs that the code launches."""
    return [event for _, events in launched(graphs) for event in events if event.name in LEGAL]


def test_a_copy_that_inductor_would_lay_out_like_its_source():
    """`clone(permute(q))` is column-major unless someone asks for rows."""

    def function(x, w):
        q, k = (ops.cast([y * 2], [ONE], E4M3)[0] for y in (x, w))
        a, b = (y.t().clone(memory_format=torch.contiguous_format) for y in (q, k))
        return ops.scaled_mm(a, b.t(), ONE, ONE)

    (event,) = gemms(plain(function, zeros(256, 512), zeros(256, 128)))
    assert [shape for _, shape in event.shapes[:2]] == [(512, 256), (256, 128)]
    require_legal(event)


@pytest.mark.parametrize("kind", ["tensor_wise", "row_wise"])
def test_a_bias_that_begins_anywhere(kind):
    for start, step in ((0, 1), (3, 1), (8, 1), (0, 2)):

        def function(a, b, biases, where=slice(start, start + 64 * step, step)):
            return ops.scaled_mm(a, b.t(), ONE, ONE, biases[where], **both(kind))

        (event,) = gemms(plain(function, fp8(32, 48), fp8(64, 48), zeros(160)))
        assert event.shapes[4] == (BF16, (64,))
        require_legal(event)


def test_a_bias_that_is_an_unaligned_input():
    graphs = plain(lambda a, b, bias: ops.scaled_mm(a, b.t(), ONE, ONE, bias), fp8(32, 48), fp8(64, 48), zeros(65)[1:])
    ((_, events),) = launched(graphs)
    assert [event.name for event in events].index("aten::_scaled_mm") == 1, "a kernel copies the bias first"


@pytest.mark.parametrize(("kind", "length", "copies"), [("tensor_wise", 80, 1), ("tensor_wise", 65537, 9), ("row_wise", 80, 9)])
def test_scales_that_begin_anywhere(kind, length, copies):
    """Scalars are elements of a vector, which is copied once for all of them unless it is long."""

    def function(a, b, scales):
        def part(start, lines):
            return scales[start] if kind == "tensor_wise" else scales[start : start + lines].unsqueeze(1)

        return [ops.scaled_mm(a, b.t(), part(i, 32), part(i + 1, 64), **both(kind)) for i in range(6)]

    ((_, events),) = launched(plain(function, fp8(32, 48), fp8(64, 48), torch.ones(length)))
    found = [event for event in events if event.name in LEGAL]
    assert len(found) == 6
    for event in found:
        require_legal(event)
    assert len(events) - len(found) == copies


@pytest.mark.parametrize("columns", [slice(0, 48), slice(16, 64), slice(8, 56)])
def test_operands_within_wider_matrices(columns):
    graphs = plain(lambda a, b: ops.scaled_mm(a[:, columns], b[:, columns].t(), ONE, ONE), fp8(32, 64), fp8(16, 72))
    (event,) = gemms(graphs)
    require_legal(event)


#: dim, ffn, heads and tokens: blocks are whole, so that casts join their producers; blocks are ragged.
WHOLE, RAGGED = (256, 384, 4, 128), (192, 320, 3, 80)


@pytest.mark.parametrize(
    ("recipe", "sizes", "name"),
    [
        *((recipe, WHOLE, "aten::_scaled_mm") for recipe in ("delayed", "rowwise")),
        *((recipe, sizes, "lowering::scaled_mm") for recipe, sizes in (("blockwise", WHOLE), ("mxfp8", RAGGED))),
        *rest([("current", WHOLE, "aten::_scaled_mm")]),
        *rest((recipe, sizes, "lowering::scaled_mm") for recipe, sizes in (("blockwise", RAGGED), ("mxfp8", WHOLE))),
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
    compiled = fp8_compile(mlp(256, 512, 256).bfloat16(), recipe, match=engine, select="all")
    graphs = captured(lambda: compiled(zeros(256, 256)).sum().backward())
    code = "".join(generated.code for generated in report(graphs))
    assert re.findall(r"lowering\.(\w+)\.default\([^\n]*inverse=", code) == casts


@pytest.mark.parametrize(
    ("device", "fast_accum", "is_rowwise"),
    [
        (gpu.H200, False, True),
        (gpu.H200_CUDA_12_8, True, True),
        (gpu.H200_CUDA_12_8, False, False),
        (gpu.RTX_4090, False, False),
        (gpu.RTX_5090, False, True),
    ],
    ids=lambda value: f"{value.name} {value.cuda}" if hasattr(value, "cuda") else str(value),
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_of_rows_join_the_code_behind_the_gemm(device, fast_accum, is_rowwise, has_bias):
    """One generated kernel reads the float32 of a per-tensor GEMM: 6 bytes per element, and none of eager code."""

    def function(a, b, scale_a, scale_b, bias):
        options = {"fast_accum": fast_accum, **both("row_wise")}
        return F.silu(ops.scaled_mm(a, b.t(), scale_a, scale_b, bias if has_bias else None, **options))

    m, n, k = 256, 128, 512
    graphs = plain(function, fp8(m, k), fp8(n, k), torch.zeros(m, 1), torch.zeros(n, 1), torch.zeros(n))
    (generated,) = report(graphs, gpu=device)
    names = [kernel.name for kernel in generated.kernels]
    assert not any("lowering" in name for name in names)
    assert sum("_scaled_mm" in name for name in names) == 1
    found = [kernel.num_bytes for kernel in generated.elementwise if kernel.num_bytes > 8]
    if is_rowwise and not has_bias:
        assert found == [m * n * (2 + 2)]
    else:  # the epilogue of torch's GEMM takes no float32 bias
        assert found == [m * n * (4 + 2) + 4 * (m + n) + 4 * n * has_bias]


# -- kernels


def widths(ptx: str, instruction: str) -> Counter:
    return Counter(re.findall(rf"{instruction}\.global(?:\.L1::\w+|\.L2::\w+)*((?:\.v\d)?\.b\d+)", ptx))


@pytest.mark.parametrize("target", [89, 90])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_tile_is_stored_sixteen_bytes_at_a_time_in_both_layouts(dtype, target, tmp_path):
    graphs = plain(
        lambda x, scale: ops.cast([F.silu(x)], [scale], dtype, columnwise=True, with_amax=True), zeros(1024, 2048), ONE
    )
    kernels = gpu.compile_kernels(report(graphs)[0].code, tmp_path, target)
    (tile,) = (ptx for name, (ptx, *_) in kernels.items() if "silu" in name and len(widths(ptx, "st")) > 1)
    assert widths(tile, "st")[".v4.b32"] == 2
    assert ".v4.b32" in widths(tile, "ld")
    assert "st.local" not in tile, "registers spilled"


def test_no_generated_kernel_transposes_what_a_row_kernel_stores(tmp_path):
    def function(x, scale):
        return ops.cast([F.rms_norm(x, (1024,))], [scale], E4M3, columnwise=True, with_amax=True)

    kernels = gpu.compile_kernels(report(plain(function, zeros(2048, 1024), ONE))[0].code, tmp_path, 90)
    assert kernels
    assert not any(name.startswith("triton_poi") for name in kernels)


def test_what_packing_costs_on_an_h200():
    """Bytes that kernels besides the cast and `gemm_ready` read and write, of a weight of 4096 x 4096 on 8 ranks."""
    ranks, rows, columns, kind = 8, 512, 4096, {"granularity": "block_128x128"}
    scales = rows * columns // 128**2 * 4
    buffer = rows * columns + scales

    def taken(buffer):
        """The copy for a forward GEMM of what arrived from all ranks."""
        of_ranks = buffer.view(ranks, -1)
        data = of_ranks[:, : rows * columns].reshape(ranks * rows, columns)
        factors = of_ranks[:, rows * columns :].reshape(-1, columns // 128 * 4).view(torch.float32)
        return ops.gemm_ready.default(data.view(E4M3), factors, **kind)

    def bytes_of(function, x):
        with torch.no_grad():
            (found,) = report(captured(torch.compile(function), x))
        return [k.num_bytes for k in found.kernels if "cast" not in k.name and "gemm_ready" not in k.name]

    def sent(x):
        return ops.packed.default(ops.cast_with_scales.default([x], E4M3, **kind, compact=True))

    assert bytes_of(sent, zeros(rows, columns)) == [2 * buffer], "this rank's part, once"
    after = bytes_of(taken, torch.zeros(ranks * buffer, dtype=torch.uint8))
    assert max(after) == 2 * ranks * rows * columns, "all values, once"
    assert sum(after) - max(after) <= 4 * ranks * scales


@functools.cache
def codes(recipe: str | None, layers: int) -> list[str]:
    """The generated code of forward and of backward of so many layers."""
    compile_model = torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))
    return [graph.code for graph in reports_of_stack(compile_model, layers, (64, 128, 2, 64))]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_five_layers_have_the_kernels_of_three(recipe):
    """Generated code does not grow with the layers: equal layers share their kernels. The first and the last are special, and
    so is the last of the launches that make scales, of 16 weights each."""
    growth = {}
    for name in (None, recipe):
        three, five = ([distinct(code) for code in codes(name, layers)] for layers in (3, 5))
        assert min(three) >= 3
        growth[name] = [more - less for less, more in zip(three, five, strict=True)]
    assert all(ours <= theirs for ours, theirs in zip(growth[recipe], growth[None], strict=True)), growth


def test_a_scale_is_a_pointer_of_its_own():
    """Whatever its slot: no launch makes it one, and its alignment, which is part of a kernel's code, is not taken for more
    than an element's."""
    forward, _ = codes("delayed", 2)
    views = dict(re.findall(r"^ +(buf\d+) = reinterpret_tensor\((\w+), \(\), \(\), \d+\)  # alias", forward, re.MULTILINE))
    calls = re.findall(r"^ +triton_\w+\.run\((.*), stream=", forward, re.MULTILINE)
    used = [name for call in calls for name in call.split(", ") if name in views]
    assert len(used) == len(set(used)) == 6, "the inputs of q, gate and down in both layers"
    (scales,) = set(views.values())
    readers = [call for call in calls if scales in call.split(", ")]
    assert len(readers) <= 2, "where they are loaded, and the vectors of several casts' scales"


# -- the sigmoid that takes the place of aten's


class Eager:
    """Inductor's virtual operations, computed at once."""

    add, mul, exp2, rsqrt = (staticmethod(f) for f in (torch.add, torch.mul, torch.exp2, torch.rsqrt))
    constant = staticmethod(lambda value, dtype: torch.tensor(value, dtype=dtype))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    with V.set_ops_handler(Eager()):
        return elementwise.sigmoid(x).value


def test_the_sigmoid_errs_by_a_few_units_in_the_last_place():
    # Below -10 the rounding of x / ln 2 is a relative error of the exponential, in every form of the function.
    usual, low = torch.cat([torch.linspace(-10, 100, 100_001), torch.randn(10_000) * 3]), torch.linspace(-80, -10, 10_001)
    for function, x, bound in ((sigmoid, usual, 2**-20), (sigmoid, low, 2**-16), (torch.sigmoid, low, 2**-16)):
        exact = torch.sigmoid(x.double())
        assert ((function(x).double() - exact).abs() / exact).max() < bound
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -3.4e38])
    expected = torch.tensor([1.0, 0.0, torch.nan, 0.5, 0.5, 1.0, 0.0])
    torch.testing.assert_close(sigmoid(x), expected, rtol=1e-7, atol=0, equal_nan=True)


def test_models_without_fp8_keep_their_sigmoid():
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.SiLU()).bfloat16())
    for generated in report(captured(lambda: model(zeros(64, 64).requires_grad_()).sum().backward())):
        assert "exp2(" not in generated.code
