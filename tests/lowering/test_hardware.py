"""lowering.hardware: versions parsed, devices judged by their capability, FP8 GEMMs refused; nothing asked at import."""

import pytest
import torch

from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.hardware import Gemm, refusal
from tests.support.cases import each

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """Pretend that torch was built with a CUDA toolkit and that cuda:0 has a capability."""

    def forget() -> None:
        for cached in (hardware.cuda_version, hardware.torch_version, hardware._capability_of):
            cached.cache_clear()

    def pretend(device_capability: tuple[int, int], cuda: str | None = "12.9", version: str = "2.13.0") -> None:
        forget()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: device_capability)

    yield pretend
    monkeypatch.undo()
    forget()


def test_the_version_of_cuda(machine):
    for version, expected in (("12.9", (12, 9)), ("13.0", (13, 0)), (None, ())):
        machine((9, 0), version)
        assert hardware.cuda_version() == expected


@each(
    ("device_capability", "cuda", "has"),
    [
        ((8, 0), "12.9", ""),
        ((8, 6), "12.9", ""),
        ((8, 9), "12.9", "fp8"),
        ((9, 0), "12.9", "fp8 rows"),
        ((9, 0), "13.0", "fp8 rows"),
        ((9, 0), "12.8", "fp8"),
        ((10, 0), "12.7", "fp8"),
        ((10, 0), "12.8", "fp8 mx"),
        ((10, 0), "13.0", "fp8 mx"),
        ((12, 0), "13.0", "fp8 mx"),
    ],
)
def test_what_tensor_cores_and_libraries_have(machine, device_capability, cuda, has):
    machine(device_capability, cuda)
    assert hardware.has_fp8_tensor_cores(CUDA) is ("fp8" in has)
    assert hardware.runs_kernels(CUDA) is ("fp8" in has and hardware.triton_available())
    assert hardware.platform_of(CUDA).has_cublaslt_rows is ("rows" in has)
    assert hardware.has_mx_scaled_mm(CUDA) is ("mx" in has)
    assert not hardware.has_fp8_tensor_cores(CPU)
    assert not hardware.has_mx_scaled_mm(CPU)
    assert hardware.platform_of(CPU) is None


def test_other_vendors_have_no_cuda_capability(machine):
    machine((9, 4), cuda=None)
    assert hardware.cuda_capability(CUDA) is None
    assert not hardware.runs_kernels(CUDA)


def test_a_device_without_index_is_the_current_one(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0))
    assert hardware.has_fp8_tensor_cores(torch.device("cuda"))
    assert asked == [3]


G = Granularity
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVEN = {"m": 8, "n": 32, "k": 48}
BLOCKS = {"granularity_a": G.BLOCK_1X128, "granularity_b": G.BLOCK_128X128}
MX = {"granularity_a": G.BLOCK_1X32, "granularity_b": G.BLOCK_1X32}
ROWS = {"granularity_a": G.ROW_WISE, "granularity_b": G.ROW_WISE}


@each("device", [None, CPU])
@each(
    ("gemm", "reason"),
    [
        (Gemm(E4M3, E4M3), None),
        (Gemm(E5M2, E4M3, **EVEN), None),
        (Gemm(E4M3, E5M2, **EVEN), None),
        (Gemm(E5M2, E5M2), "no FP8 GEMM takes two E5M2 operands"),
        (Gemm(BF16, E4M3), "no FP8 GEMM takes bfloat16 operands"),
        (Gemm(E4M3, torch.float8_e4m3fnuz), "no FP8 GEMM takes float8_e4m3fnuz operands"),
        (Gemm(E4M3, E4M3, out_dtype=torch.float64), "no FP8 GEMM has a float64 output"),
        # Scales that meet.
        (Gemm(E4M3, E4M3, **BLOCKS), None),
        (Gemm(E4M3, E4M3, G.BLOCK_128X128, G.BLOCK_1X128), None),
        (Gemm(E4M3, E4M3, G.BLOCK_1X128, G.BLOCK_1X128), None),
        (Gemm(E4M3, E4M3, **ROWS), None),
        (Gemm(E4M3, E4M3, **ROWS, out_dtype=FP32), None),
        (Gemm(E4M3, E4M3, G.BLOCK_128X128, G.BLOCK_128X128), "no FP8 GEMM takes 128x128 by 128x128 blocks"),
        (Gemm(E4M3, E4M3, G.TENSOR_WISE, G.BLOCK_1X128), "no FP8 GEMM takes tensor-wise by 1x128 scales"),
        (Gemm(E4M3, E4M3, G.ROW_WISE, G.TENSOR_WISE), "no FP8 GEMM takes row-wise by tensor-wise scales"),
        (Gemm(E4M3, E4M3, G.BLOCK_1X32, G.BLOCK_1X128), "no FP8 GEMM takes 1x32 by 1x128 blocks"),
        (Gemm(E4M3, E4M3, **MX), None),
        # Sizes.
        (Gemm(E4M3, E4M3, m=7, n=32, k=48), None),
        (Gemm(E4M3, E4M3, m=7, n=33, k=48), "N is 33, not a multiple of 16"),
        (Gemm(E4M3, E4M3, m=7, n=32, k=50), "K is 50, not a multiple of 16"),
        (Gemm(E4M3, E4M3, **BLOCKS, m=8, n=32, k=48), None),
        (Gemm(E4M3, E4M3, **BLOCKS, m=6, n=32, k=48), "M is 6, not a multiple of 4"),
        (Gemm(E4M3, E4M3, **MX, m=7, n=16, k=64), None),
        (Gemm(E4M3, E4M3, **MX, m=7, n=16, k=48), "K is 48, not a multiple of 32"),
        (Gemm(E4M3, E4M3, m=8, n=16, k=0), "K is 0, so there is nothing to multiply"),
        (Gemm(E4M3, E4M3, m=0, n=16), "M is 0, so there is nothing to multiply"),
        # The epilogue.
        (Gemm(E4M3, E4M3, bias_dtype=BF16), None),
        (Gemm(E4M3, E4M3, out_dtype=FP16, bias_dtype=FP16), None),
        (Gemm(E4M3, E4M3, bias_dtype=FP32), "a float32 bias does not fit a bfloat16 output"),
        (Gemm(E4M3, E4M3, out_dtype=FP16, bias_dtype=BF16), "a bfloat16 bias does not fit a float16 output"),
        (Gemm(E4M3, E4M3, out_dtype=FP32, bias_dtype=FP32), "a float32 bias does not fit a float32 output"),
    ],
)
def test_without_a_gpu_the_rules_of_sm90_hold_and_those_of_sm100_for_1x32(gemm, reason, device):
    assert refusal(gemm, device) == reason


def grouped(*granularities, **options):
    return Gemm(options.pop("a", E4M3), E4M3, *granularities, is_grouped=True, **options)


@each(
    ("device_capability", "cuda", "gemm", "reason"),
    [
        ((8, 9), "12.8", Gemm(E4M3, E4M3), None),
        ((8, 0), "12.9", Gemm(E4M3, E4M3), "compute capability 8.0 has no FP8 tensor cores; they require 8.9"),
        ((9, 4), None, Gemm(E4M3, E4M3), "cuda:0 has no FP8 tensor cores that torch's GEMM uses"),
        ((9, 0), "12.9", Gemm(E4M3, E4M3, **BLOCKS), None),
        ((9, 0), "12.8", Gemm(E4M3, E4M3, **BLOCKS), "blocks need compute capability 9.x and CUDA 12.9 or newer"),
        ((8, 9), "12.9", Gemm(E4M3, E4M3, **BLOCKS), "blocks need compute capability 9.x and CUDA 12.9 or newer"),
        ((10, 0), "13.0", Gemm(E4M3, E4M3, **BLOCKS), "blocks need compute capability 9.x and CUDA 12.9 or newer"),
        ((10, 0), "13.0", Gemm(E4M3, E4M3, **MX), None),
        ((10, 0), "12.7", Gemm(E4M3, E4M3, **MX), "1x32 blocks need CUDA 12.8 or newer"),
        ((9, 0), "12.9", Gemm(E4M3, E4M3, **MX), "1x32 blocks need compute capability 10.0, this device has 9.0"),
        ((9, 4), None, Gemm(E4M3, E4M3, **MX), "cuda:0 has no FP8 tensor cores that torch's GEMM uses"),
        ((8, 9), "12.9", Gemm(E4M3, E4M3, **ROWS), None),
        ((8, 9), "12.9", Gemm(E4M3, E4M3, **ROWS, out_dtype=FP32), "row-wise scales with an output of float32 need"),
        ((9, 0), "12.9", Gemm(E4M3, E4M3, **ROWS, out_dtype=FP32), None),
        ((9, 0), "12.9", Gemm(E4M3, E5M2, **ROWS), None),
        ((9, 0), "12.8", Gemm(E4M3, E5M2, **ROWS), "row-wise scales with float8_e5m2 as the second operand need"),
        ((12, 0), "13.0", Gemm(E4M3, E5M2, **ROWS), "row-wise scales with float8_e5m2 as the second operand need"),
        ((12, 0), "13.0", Gemm(E5M2, E4M3, **ROWS), None),
        ((9, 0), "12.9", Gemm(E5M2, E5M2), "no FP8 GEMM takes two E5M2 operands"),
        (None, None, grouped(), None),
        (None, None, grouped(a=E5M2), None),
        (None, None, Gemm(E5M2, E5M2, is_grouped=True), "no FP8 GEMM takes two E5M2 operands"),
        (None, None, grouped(G.ROW_WISE, G.TENSOR_WISE), None),
        (None, None, grouped(G.BLOCK_128X128, G.BLOCK_128X128), "128x128 by 128x128"),
        (None, None, grouped(G.BLOCK_1X32, G.BLOCK_1X32), None),
        (None, None, grouped(G.BLOCK_1X128, G.BLOCK_128X128, m=6, n=32, k=48), None),
        (None, None, grouped(n=24), "N is 24, not a multiple of 16"),
        ((8, 9), "12.9", grouped(G.BLOCK_1X128, G.BLOCK_128X128), None),
        ((9, 0), "12.9", grouped(G.ROW_WISE, G.ROW_WISE, out_dtype=FP32), None),
        ((10, 0), "12.9", grouped(), None),
        ((8, 0), "12.9", grouped(), "grouped FP8 GEMMs need compute capability 8.9"),
        ((10, 0), "12.9", grouped(G.BLOCK_1X32, G.BLOCK_1X32), "have no kernel for GPUs"),
    ],
)
def test_a_gpu_is_asked(machine, device_capability, cuda, gemm, reason):
    if device_capability:
        machine(device_capability, cuda)
    assert_refused(refusal(gemm, CUDA if device_capability else None), reason)


def assert_refused(got: str | None, reason: str | None) -> None:
    assert got == reason if got is None or reason is None else reason in got


@each("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cu126"])
@each(("cuda", "of_hopper"), [("12.6", False), ("12.8", False), ("13.0", True)])
@each("fast_accum", [False, True])
def test_which_row_wise_gemms_are_torchs(machine, version, cuda, of_hopper, fast_accum):
    """On Ada and, before CUDA 12.9, on Hopper only with fast accumulation; on Ada from torch 2.12 on."""
    expected = {
        (8, 9): fast_accum and "2.11" not in version,
        (9, 0): fast_accum or of_hopper,
        (10, 0): True,
        (10, 3): True,
        (12, 0): True,
    }
    for capability, is_taken in expected.items():
        machine(capability, cuda, version)
        reason = hardware.rows_refusal(Gemm(E5M2, E4M3, **ROWS), CUDA, fast_accum)
        assert (reason is None) is is_taken, (capability, reason)


def test_grouped_gemms_need_triton(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(hardware, "triton_available", lambda: False)
    assert "Triton is not installed" in refusal(grouped(), CUDA)


@each(
    ("device_capability", "gemm", "reason"),
    [
        ((9, 0), grouped(n=32, k=64), None),
        ((8, 9), grouped(), "needs compute capability 9.0"),
        ((10, 0), grouped(), "needs compute capability 9.0"),
        ((9, 0), grouped(bias_dtype=BF16), "has no bias"),
        ((9, 0), grouped(n=24), "N is 24"),
    ],
)
def test_torchs_grouped_gemm(machine, device_capability, gemm, reason):
    """What it says of operands: tests/lowering/test_libraries.py."""
    machine(device_capability)
    assert_refused(hardware.cutlass_refusal(gemm, CUDA), reason)


def test_symbolic_sizes_are_not_checked():
    import sympy

    assert refusal(Gemm(E4M3, E4M3, m=sympy.Symbol("m"), n=sympy.Symbol("n"), k=None), None) is None
