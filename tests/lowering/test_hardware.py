"""What a GPU has: FP8 GEMMs refused by its capability and CUDA; their paths, where what `path_of` says is what runs, on every
platform."""

import itertools
from unittest import mock

import pytest
import torch

from fp8pass.cost import H200, L40S
from lowering import deep_gemm, hardware
from lowering.blockwise import gemm as blockwise_gemm
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped.reference import GroupedGemm
from lowering.hardware import Gemm, Platform, refusal
from lowering.paths import GemmPath, path_of
from lowering.products import Product
from tests.lowering.test_gemm import expected_product, operands, provided
from tests.support.cases import each
from tests.tolerances import REFERENCE_MM, relative_error

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


G = Granularity
BF16, FP32 = torch.bfloat16, torch.float32
EVEN = {"m": 8, "n": 32, "k": 48}
BLOCKS = {"granularity_a": G.BLOCK_1X128, "granularity_b": G.BLOCK_128X128}
MX = {"granularity_a": G.BLOCK_1X32, "granularity_b": G.BLOCK_1X32}
ROWS = {"granularity_a": G.ROW_WISE, "granularity_b": G.ROW_WISE}


def grouped(*granularities, **options):
    return Gemm(E4M3, E4M3, *granularities, is_grouped=True, **options)


@each("device", [None, CPU])
@each(
    ("gemm", "reason"),
    [
        (Gemm(E4M3, E5M2, **EVEN), None),
        (Gemm(E5M2, E5M2), "no FP8 GEMM takes two E5M2 operands"),
        (Gemm(BF16, E4M3), "no FP8 GEMM takes bfloat16 operands"),
        (Gemm(E4M3, E4M3, out_dtype=torch.float64), "no FP8 GEMM has a float64 output"),
        (Gemm(E4M3, E4M3, **MX, m=7, n=16, k=64), None),
        (Gemm(E4M3, E4M3, G.BLOCK_128X128, G.BLOCK_128X128), "no FP8 GEMM takes 128x128 by 128x128 blocks"),
        (Gemm(E4M3, E4M3, G.TENSOR_WISE, G.BLOCK_1X128), "no FP8 GEMM takes tensor-wise by 1x128 scales"),
        (Gemm(E4M3, E4M3, m=7, n=33, k=48), "N is 33, not a multiple of 16"),
        (Gemm(E4M3, E4M3, **BLOCKS, m=6, n=32, k=48), "M is 6, not a multiple of 4"),
        (Gemm(E4M3, E4M3, **MX, m=7, n=16, k=48), "K is 48, not a multiple of 32"),
        (Gemm(E4M3, E4M3, m=8, n=16, k=0), "K is 0, so there is nothing to multiply"),
        (Gemm(E4M3, E4M3, out_dtype=FP32, bias_dtype=FP32), "a float32 bias does not fit a float32 output"),
        (grouped(G.BLOCK_1X128, G.BLOCK_128X128, m=6, n=32, k=48), None),
    ],
)
def test_without_a_gpu_the_rules_of_sm90_hold_and_those_of_sm100_for_1x32(gemm, reason, device):
    assert refusal(gemm, device) == reason


@each(
    ("device_capability", "cuda", "gemm", "reason"),
    [
        ((8, 0), "12.9", Gemm(E4M3, E4M3), "compute capability 8.0 has no FP8 tensor cores; they require 8.9"),
        ((9, 4), None, Gemm(E4M3, E4M3), "cuda:0 has no FP8 tensor cores that torch's GEMM uses"),
        ((9, 0), "12.8", Gemm(E4M3, E4M3, **BLOCKS), "blocks need compute capability 9.x and CUDA 12.9 or newer"),
        ((10, 0), "12.7", Gemm(E4M3, E4M3, **MX), "1x32 blocks need CUDA 12.8 or newer"),
        ((9, 0), "12.9", Gemm(E4M3, E4M3, **MX), "1x32 blocks need compute capability 10.0, this device has 9.0"),
        ((8, 9), "12.9", Gemm(E4M3, E4M3, **ROWS, out_dtype=FP32), "row-wise scales with an output of float32 need"),
        ((9, 0), "12.9", Gemm(E4M3, E4M3, **ROWS, out_dtype=FP32), None),
        ((9, 0), "12.8", Gemm(E4M3, E5M2, **ROWS), "row-wise scales with float8_e5m2 as the second operand need"),
        ((8, 0), "12.9", grouped(), "grouped FP8 GEMMs need compute capability 8.9"),
        ((10, 0), "12.9", grouped(G.BLOCK_1X32, G.BLOCK_1X32), "have no kernel for GPUs"),
    ],
)
def test_a_gpu_is_asked(machine, device_capability, cuda, gemm, reason):
    machine(device_capability, cuda)
    found = refusal(gemm, CUDA)
    assert found == reason if found is None or reason is None else reason in found


def test_grouped_gemms_of_torch_and_of_triton(machine, monkeypatch):
    """What torch's says of operands: tests/lowering/test_libraries.py."""
    machine((9, 0))
    assert hardware.cutlass_refusal(grouped(n=32, k=64), CUDA) is None
    assert "has no bias" in hardware.cutlass_refusal(grouped(bias_dtype=BF16), CUDA)
    monkeypatch.setattr(hardware, "triton_available", lambda: False)
    assert "Triton is not installed" in refusal(grouped(), CUDA)
    machine((10, 0))
    assert "needs compute capability 9.0" in hardware.cutlass_refusal(grouped(), CUDA)


# -- paths

NAMES = ("granularity_a", "granularity_b")
CAPABILITIES = (8, 9), (9, 0), (10, 0), (12, 0)
PLATFORMS = [Platform(*each) for each in itertools.product(CAPABILITIES, ((12, 6), (12, 8), (13, 0)), ((2, 11), (2, 13)))]
DTYPES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@pytest.fixture
def on(monkeypatch):
    """Pretend that CPU tensors are on a platform, and that every library is right."""

    def pretend(platform: Platform, has_deep_gemm: bool = False) -> None:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(hardware, "cuda_capability", lambda device: platform.capability)
        monkeypatch.setattr(hardware, "platform_of", lambda device: platform)
        monkeypatch.setattr(hardware, "is_present", lambda platform: True)
        library = mock.Mock(get_mk_alignment_for_contiguous_layout=lambda: 128) if has_deep_gemm else None
        monkeypatch.setattr(deep_gemm, "library", lambda: library)
        monkeypatch.setattr(hardware, "refusal", lambda gemm, device: refusal(gemm, device and platform))
        for module in (*blockwise_gemm.LIBRARIES.values(), *grouped_gemm.LIBRARIES.values()):
            monkeypatch.setattr(module.trial, "is_passed", lambda gemm: True)

    return pretend


@pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton")
@each("platform", PLATFORMS)
@each("dtypes", DTYPES)
@each("out_dtype", [BF16, FP32])
@each("fast_accum", [False, True])
def test_rows(platform, dtypes, out_dtype, fast_accum):
    arguments = operands(16, 32, 16, dtypes, by_lines=True)
    out, [(scale_a, _)] = provided(arguments, platform, out_dtype=out_dtype, fast_accum=fast_accum)
    assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[out_dtype]
    gemm = Gemm(*dtypes, G.ROW_WISE, G.ROW_WISE, out_dtype)
    assert path_of(gemm, platform, fast_accum=fast_accum) is (GemmPath.ROWS if scale_a.dim() else GemmPath.ROWS_AFTERWARDS)


@each("platform", PLATFORMS)
@each("dtypes", DTYPES)
@each("kinds", [(G.BLOCK_1X128, G.BLOCK_128X128), (G.BLOCK_1X128, G.BLOCK_1X128), (G.BLOCK_128X128, G.BLOCK_1X128)])
@each("has_deep_gemm", [False, True])
def test_blocks(on, platform, dtypes, kinds, has_deep_gemm):
    on(platform, has_deep_gemm)
    (a, b), names = (torch.zeros(128, 256, dtype=each) for each in dtypes), dict(zip(NAMES, kinds, strict=True))
    scales = [torch.ones(gemm_ready_scale_shape(128, 256, kind)) for kind in kinds]
    taken = blockwise_gemm.chosen(Product(a, b.t(), *scales, None, **names))
    path = path_of(Gemm(*dtypes, *kinds), platform, fast_accum=False)
    # What a scheme writes into the graph where the device has MXFP8, before `chosen` is asked (fp8pass/schemes/blocks.py).
    by_libraries = GemmPath.BLOCKS_BY_TRITON if taken == "triton" else GemmPath.BLOCKS
    assert path is (GemmPath.BLOCKS_BY_MXFP8 if hardware.has_mx_scaled_mm(torch.device("cuda")) else by_libraries)


@each("platform", PLATFORMS)
@each("dtypes", DTYPES[:2])
@each("kinds", [(G.TENSOR_WISE, G.TENSOR_WISE), (G.ROW_WISE, G.ROW_WISE), (G.BLOCK_1X128, G.BLOCK_128X128)])
@each(("fast_accum", "has_deep_gemm"), [(False, True), (True, False)])
def test_groups(on, platform, dtypes, kinds, fast_accum, has_deep_gemm):
    on(platform, has_deep_gemm)
    a, b = torch.zeros(1024, 4096, dtype=dtypes[0]), torch.zeros(2, 2048, 4096, dtype=dtypes[1]).mT
    shapes = {G.TENSOR_WISE: ((), (2,)), G.ROW_WISE: ((1024, 1), (2, 2048, 1)), G.BLOCK_1X128: ((1024, 32), (2, 16, 32))}
    scales, offs = [torch.ones(shape) for shape in shapes[kinds[0]]], torch.tensor([512, 1024], dtype=torch.int32)
    taken = grouped_gemm.chosen(GroupedGemm(a, b, *scales, offs, **dict(zip(NAMES, kinds, strict=True)), fast_accum=fast_accum))
    path = path_of(Gemm(*dtypes, *kinds, is_grouped=True), platform, fast_accum=fast_accum)
    assert path is (GemmPath.GROUPS_BY_TRITON if taken == "triton" else GemmPath.GROUPS)


@each("is_here", [False, True])
def test_another_machines_gpu_has_the_same_paths_whatever_is_installed_here(monkeypatch, is_here):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (8, 9))
    monkeypatch.setattr(hardware, "triton_available", lambda: False)
    monkeypatch.setattr(deep_gemm, "library", lambda: pytest.fail("asked for a package of this machine"))
    blocks = Gemm(E4M3, E4M3, G.BLOCK_1X128, G.BLOCK_128X128, is_grouped=True)
    assert path_of(blocks, H200.platform, fast_accum=True) is GemmPath.GROUPS_BY_TRITON
    assert (path_of(blocks, L40S.platform, fast_accum=True) is None) == is_here
