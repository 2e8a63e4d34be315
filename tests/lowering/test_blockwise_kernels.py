"""The blockwise Triton kernels: in Triton's interpreter (this file as a script), compiled for SM90, and on a GPU."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowering import hardware
from lowering.blockwise import cublaslt, reference
from lowering.blockwise.reference import BlockwiseGemm
from lowering.formats import E4M3, E5M2, Granularity
from tests.support.copies import one_copy

ROOT = Path(__file__).parents[2]
#: What a cast makes: both copies, one, both for data that travel, one of these.
CAST_NAMES = ("both", "one", "both compact", "compact")
ONE, TWO = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
PAIRS = [(ONE, TWO), (TWO, ONE), (ONE, ONE)]


def awkward(rows: int, cols: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Values over many binades, blocks of zeros, and where there is room inf, -inf and NaN in blocks of their own."""
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(3 * torch.randn(rows, cols, generator=generator))
    x[:, 128:130] *= 1e-30
    x[rows // 2 :, 256:384] = 0
    if rows >= 100:
        x[0, 0], x[3, 140 % cols], x[50, 5] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype).to(device)


def every_exponent() -> torch.Tensor:
    """A row for each power of two of float32, subnormal ones included, and for what lies around 1.75 times it, where the
    scale's exponent changes: 128 columns, of which the last has the largest magnitude."""
    powers = torch.cat([torch.arange(1, 255).int() << 23, 1 << torch.arange(0, 23).int(), torch.tensor([0]).int()])
    around = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]).int()
    largest = (powers[:, None] | around).view(torch.float32).reshape(-1, 1)
    x = torch.cat([(largest / 3).expand(-1, 127), -largest], 1)
    return torch.cat([x, x[: -len(x) % 128]])  # whole tiles


def cast_calls(name: str, x: torch.Tensor, dtype: torch.dtype, granularity: Granularity, power_of_2: bool):
    """Every way to make these copies of x: arguments and options of `cast_blockwise`."""
    how: dict = {"power_of_2": power_of_2, "epsilon": 0.0 if power_of_2 else 1e-3, "granularity": granularity.value}
    if "compact" in name:
        return [(([x], dtype), how | {"compact": True, "columnwise": name == "both compact"})]
    choices = itertools.product((False, True), repeat=2)
    if name == "both":
        return [(([x], dtype), how | {"columnwise": True, "pad_rows": rows, "pad_cols": cols}) for rows, cols in choices]
    return [(([x], dtype), how | one_copy(columnwise=columnwise, pad_outer=pad)) for columnwise, pad in choices]


def assert_scales_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but for the sign of a NaN, which `tile.fp8_bits` does not keep."""
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    bits = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(bits[0].masked_fill(nan, 0), bits[1].masked_fill(nan, 0))


def gemm_operands(m: int, n: int, k: int, pair: tuple[int, int], dtypes=(E4M3, E4M3), device: str = "cpu"):
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    a, scale_inv_a = reference.cast_blockwise([x], dtypes[0], granularity=pair[0], power_of_2=False)
    b, scale_inv_b = reference.cast_blockwise([w], dtypes[1], granularity=pair[1], power_of_2=False)
    return a, b.t(), scale_inv_a, scale_inv_b


def options_of(pair: tuple[Granularity, Granularity]) -> dict[str, str]:
    return {"granularity_a": pair[0].value, "granularity_b": pair[1].value}


def dequantized_product(a, b, scale_inv_a, scale_inv_b, pair):
    a = reference.dequantize(a, scale_inv_a, pair[0]).double()
    return a @ reference.dequantize(b.t(), scale_inv_b, pair[1]).double().t()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


# In the interpreter.


def check_in_interpreter() -> None:
    from lowering.blockwise.kernels import gemm
    from lowering.blockwise.kernels.cast import cast_blockwise

    shapes = [(1, 130), (129, 257), (100, 150), (0, 7)]
    scalings = [(ONE, True, E4M3), (ONE, False, E5M2), (TWO, False, E4M3), (TWO, True, E5M2)]
    for (i, shape), (j, (granularity, power_of_2, dtype)) in itertools.product(enumerate(shapes), enumerate(scalings)):
        x = awkward(*shape, dtype=torch.float32 if power_of_2 else torch.bfloat16)
        for name, oriented in itertools.product(CAST_NAMES, (x, x.t()) if shape == (100, 150) else (x,)):
            calls = cast_calls(name, oriented, dtype, granularity, power_of_2)
            for arguments, options in calls[(i + j) % 2 :: 2] if len(calls) > 1 else calls:  # by turns
                expected = reference.cast_blockwise(*arguments, **options)
                for got, want in zip(cast_blockwise(*arguments, **options), expected, strict=True):
                    (assert_scales_equal if want.dtype == torch.float32 else assert_same_bits)(got, want)

    x = awkward(256, 384, torch.bfloat16)  # whole tiles, one of zeros
    x[:, 7], x[:128, 200], x[128:, 201] = 0, -0.0, torch.inf
    for name, granularity, dtype in itertools.product(CAST_NAMES[::2], (ONE, TWO), (E4M3, E5M2)):
        options = {"granularity": granularity.value, "columnwise": True, "compact": "compact" in name}
        expected = reference.cast_blockwise([x], dtype, **options)
        for got, want in zip(cast_blockwise([x], dtype, **options), expected, strict=True):
            (assert_scales_equal if want.dtype == torch.float32 else assert_same_bits)(got, want)

    x = every_exponent()
    for dtype, epsilon in itertools.product((E4M3, E5M2), (0.0, 3e-5)):
        options = {"granularity": ONE.value, "power_of_2": True, "epsilon": epsilon}
        expected = reference.cast_blockwise([x], dtype, **options, columnwise=True)
        for got, want in zip(cast_blockwise([x], dtype, **options, columnwise=True), expected, strict=True):
            (assert_scales_equal if want.dtype == torch.float32 else assert_same_bits)(got, want)

    for (m, n, k), pair in itertools.product([(3, 5, 7), (130, 70, 200), (64, 128, 256), (4, 3, 0)], PAIRS):
        operands = gemm_operands(m, n, k, pair, (E5M2, E4M3))
        bias = torch.randn(n)
        out = gemm.scaled_mm_blockwise(BlockwiseGemm(*operands, bias, **options_of(pair), out_dtype=torch.float32))
        assert relative_error(out, dequantized_product(*operands, pair) + bias.double()) < 1e-5


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_int32_holds_every_distance_inside_a_whole_tile():
    pytest.importorskip("triton")
    from lowering.triton.launch import MAX_STRIDE, is_whole

    def matrix(*strides: int) -> torch.Tensor:
        return torch.empty_strided((256, 128), strides, device="meta")

    far = matrix(MAX_STRIDE, MAX_STRIDE)
    assert sum(stride * (128 - 1) for stride in far.stride()) < 2**31
    assert is_whole([far, matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(MAX_STRIDE + 1, 1), matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(1, MAX_STRIDE + 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(128, 1)[:255]], 128, 128)


# Compiled for SM90, with no GPU.


def compile_for_sm90(kernel, types: dict[str, str], constants: dict[str, object], **options) -> str:
    """PTX of a kernel with arguments of these `types`, pointers and integers all multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or signature[name] == "i32"]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]


def spilled_bytes(ptx: str, tmp_path: Path) -> int:
    from triton import knobs

    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))


@pytest.mark.parametrize(
    ("granularity", "rowwise", "columnwise", "dtype", "power_of_2"),
    [
        (ONE, True, True, E4M3, True),
        (ONE, True, True, E5M2, False),
        (ONE, True, False, E4M3, True),
        (ONE, False, True, E4M3, True),
        (TWO, True, True, E4M3, True),
        (TWO, True, False, E5M2, False),
    ],
)
def test_cast_compiles_for_sm90(granularity, rowwise, columnwise, dtype, power_of_2, tmp_path):
    pytest.importorskip("triton")
    from benchmarks.variants import compile_launch, recorded
    from lowering.blockwise.kernels.cast import cast_blockwise

    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    options = {"granularity": granularity.value, "power_of_2": power_of_2}
    (launch,) = recorded(cast_blockwise, [x], dtype, rowwise=rowwise, columnwise=columnwise, **options)
    ptx = compile_launch(launch, 90).asm["ptx"]
    assert ("div.rn.f32" in ptx) is not power_of_2
    assert ".ftz" not in ptx
    assert "st.global.v4.b32" in ptx
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize(
    ("pair", "m", "even_k"),
    [(pair, m, (i + j) % 2 == 0) for i, pair in enumerate(PAIRS) for j, m in enumerate((32, 4096))],
)
def test_gemm_compiles_for_sm90(pair, m, even_k, tmp_path):
    pytest.importorskip("triton")
    from lowering.blockwise.kernels import gemm
    from lowering.triton import limits

    kernel = gemm.scaled_mm_blockwise_kernel.jit
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"a": "*fp8e4nv", "b": "*fp8e5", "scale_inv_a": "*fp32", "scale_inv_b": "*fp32"}
    types |= {"bias": "*bf16", "out": "*bf16"}
    options = limits.tile_of_gemm(m, limits.BY_CAPABILITY[9, 0])
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "BLOCK_DIMS_A": 1 if pair[0] is ONE else 2,
        "BLOCK_DIMS_B": 1 if pair[1] is ONE else 2,
        "HAS_BIAS": True,
        "EVEN_K": even_k,
    }
    constants |= {"BLOCK_K": 128, "GROUP_M": gemm.GROUP_M, **options}
    ptx = compile_for_sm90(kernel, types, constants, **launch)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2" in ptx
    assert spilled_bytes(ptx, tmp_path) == 0


# On a GPU.

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and hardware.has_fp8_tensor_cores(torch.device("cuda"))),
    reason="no GPU with FP8 tensor cores",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(1, 130), (129, 257), (100, 150), (0, 7), (5, 0)])
@pytest.mark.parametrize("granularity", [ONE, TWO])
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_on_a_gpu(shape, granularity, power_of_2, dtype, input_dtype):
    from lowering.blockwise.kernels.cast import cast_blockwise

    x = awkward(*shape, dtype=input_dtype)
    for name, transposed in itertools.product(CAST_NAMES, (False, True)):
        for arguments, options in cast_calls(name, x.t() if transposed else x, dtype, granularity, power_of_2):
            expected = reference.cast_blockwise(*arguments, **options)
            on_gpu = ([arguments[0][0].cuda()], *arguments[1:])
            for got, want in zip(cast_blockwise(*on_gpu, **options), expected, strict=True):
                (assert_scales_equal if want.dtype == torch.float32 else assert_same_bits)(got.cpu(), want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("granularity", [ONE, TWO])
def test_a_large_cast_on_a_gpu(granularity):
    from lowering.blockwise.kernels.cast import cast_blockwise

    x = awkward(4096, 11008, torch.bfloat16, "cuda")
    expected = reference.cast_blockwise([x], E4M3, granularity=granularity, columnwise=True)
    for got, want in zip(cast_blockwise([x], E4M3, granularity=granularity, columnwise=True), expected, strict=True):
        (assert_scales_equal if want.dtype == torch.float32 else assert_same_bits)(got, want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (130, 70, 200), (256, 384, 640), (2048, 1000, 4096), (0, 4, 5)])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize(("out_dtype", "bound"), [(torch.float32, 3e-3), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_gemm_on_a_gpu(shape, pair, dtypes, out_dtype, bound):
    from lowering.blockwise.kernels import gemm

    m, n, k = shape
    operands = gemm_operands(m, n, k, pair, dtypes, "cuda")
    product = dequantized_product(*operands, pair)
    for bias in (None, torch.randn(n, device="cuda")):
        out = gemm.scaled_mm_blockwise(BlockwiseGemm(*operands, bias, **options_of(pair), out_dtype=out_dtype))
        assert out.shape == (m, n)
        assert out.dtype == out_dtype
        if m:
            assert relative_error(out, product if bias is None else product + bias.double()) < bound
    if cublaslt.refusal(BlockwiseGemm(*operands, **options_of(pair), out_dtype=out_dtype)) is None:
        out = cublaslt.scaled_mm_blockwise(BlockwiseGemm(*operands, None, **options_of(pair), out_dtype=out_dtype))
        assert relative_error(out, product) < bound


if __name__ == "__main__":
    from tests.support.interpreter import exact_interpreter

    with exact_interpreter():
        check_in_interpreter()
