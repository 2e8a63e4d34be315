"""The paths of GEMMs: what `path_of` says is what runs, on every platform, and the cost model has a price for each."""

import itertools
from unittest import mock

import pytest
import torch

from fp8pass.cost import B200, H100, H200, L40S, RTX_4090, RTX_5090, GemmShape, gemm_seconds
from lowering import deep_gemm, hardware
from lowering.blockwise import gemm as blockwise_gemm
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped.reference import GroupedGemm
from lowering.hardware import Platform
from lowering.paths import GemmPath, path_of
from lowering.products import Product
from tests.lowering.test_gemm import expected_product, operands, provided
from tests.support.cases import each
from tests.tolerances import REFERENCE_MM, relative_error

G = Granularity
BF16, FP32 = torch.bfloat16, torch.float32
CAPABILITIES = (8, 9), (9, 0), (10, 0), (12, 0)
PLATFORMS = [Platform(*each) for each in itertools.product(CAPABILITIES, ((12, 6), (12, 8), (13, 0)), ((2, 11), (2, 13)))]
DTYPES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
DEVICES = {(8, 9): (L40S, RTX_4090), (9, 0): (H100, H200), (10, 0): (B200,), (12, 0): (RTX_5090,)}
REFUSAL = hardware.refusal
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton")


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
        monkeypatch.setattr(hardware, "refusal", lambda gemm, device: REFUSAL(gemm, device and platform))
        for module in (*blockwise_gemm.LIBRARIES.values(), *grouped_gemm.LIBRARIES.values()):
            monkeypatch.setattr(module.trial, "is_passed", lambda gemm: True)

    return pretend


@needs_triton
@each("platform", PLATFORMS)
@each("dtypes", DTYPES)
@each("out_dtype", [BF16, FP32])
@each("fast_accum", [False, True])
def test_rows(platform, dtypes, out_dtype, fast_accum):
    arguments = operands(16, 32, 16, dtypes, by_lines=True)
    out, [(scale_a, _)] = provided(arguments, platform, out_dtype=out_dtype, fast_accum=fast_accum)
    assert relative_error(out, expected_product(*arguments)) <= REFERENCE_MM[out_dtype]
    gemm = hardware.Gemm(*dtypes, G.ROW_WISE, G.ROW_WISE, out_dtype)
    assert path_of(gemm, platform, fast_accum=fast_accum) is (GemmPath.ROWS if scale_a.dim() else GemmPath.ROWS_AFTERWARDS)


def blocks(dtypes, kinds, out_dtype) -> Product:
    a, b = torch.zeros(128, 256, dtype=dtypes[0]), torch.zeros(128, 256, dtype=dtypes[1]).t()
    scales = [torch.ones(gemm_ready_scale_shape(128, 256, kind)) for kind in kinds]
    names = {"granularity_a": kinds[0].value, "granularity_b": kinds[1].value}
    return Product(a, b, *scales, None, **names, out_dtype=out_dtype)


@each("platform", PLATFORMS)
@each("dtypes", DTYPES)
@each("kinds", [(G.BLOCK_1X128, G.BLOCK_128X128), (G.BLOCK_1X128, G.BLOCK_1X128), (G.BLOCK_128X128, G.BLOCK_1X128)])
@each("has_deep_gemm", [False, True])
def test_blocks(on, platform, dtypes, kinds, has_deep_gemm):
    on(platform, has_deep_gemm)
    taken = blockwise_gemm.chosen(blocks(dtypes, kinds, BF16))
    path = path_of(hardware.Gemm(*dtypes, *kinds), platform, fast_accum=False)
    # What a scheme writes into the graph where the device has MXFP8, before `chosen` is asked (fp8pass/schemes/blocks.py).
    if hardware.has_mx_scaled_mm(torch.device("cuda")):
        assert path is GemmPath.BLOCKS_BY_MXFP8
    else:
        assert path is (GemmPath.BLOCKS_BY_TRITON if taken == "triton" else GemmPath.BLOCKS)


@each("platform", PLATFORMS)
@each("dtypes", DTYPES[:2])
@each("kinds", [(G.TENSOR_WISE, G.TENSOR_WISE), (G.ROW_WISE, G.ROW_WISE), (G.BLOCK_1X128, G.BLOCK_128X128)])
@each("fast_accum", [False, True])
@each("has_deep_gemm", [False, True])
def test_groups(on, platform, dtypes, kinds, fast_accum, has_deep_gemm):
    on(platform, has_deep_gemm)
    a, b = torch.zeros(1024, 4096, dtype=dtypes[0]), torch.zeros(2, 2048, 4096, dtype=dtypes[1]).mT
    shapes = {G.TENSOR_WISE: ((), (2,)), G.ROW_WISE: ((1024, 1), (2, 2048, 1)), G.BLOCK_1X128: ((1024, 32), (2, 16, 32))}
    scales = [torch.ones(shape) for shape in shapes[kinds[0]]]
    names = {"granularity_a": kinds[0].value, "granularity_b": kinds[1].value}
    offs = torch.tensor([512, 1024], dtype=torch.int32)
    taken = grouped_gemm.chosen(GroupedGemm(a, b, *scales, offs, **names, fast_accum=fast_accum))
    path = path_of(hardware.Gemm(*dtypes, *kinds, is_grouped=True), platform, fast_accum=fast_accum)
    assert path is (GemmPath.GROUPS_BY_TRITON if taken == "triton" else GemmPath.GROUPS)


KINDS = [
    (G.TENSOR_WISE, G.TENSOR_WISE),
    (G.ROW_WISE, G.ROW_WISE),
    (G.BLOCK_1X128, G.BLOCK_128X128),
    (G.BLOCK_1X128, G.BLOCK_1X128),
    (G.BLOCK_1X32, G.BLOCK_1X32),
]


def test_every_path_is_reached_and_has_a_price():
    reached = set()
    sizes = {"m": 16384, "n": 14336, "k": 4096}
    for platform, kinds, dtypes, fast, is_grouped in itertools.product(PLATFORMS, KINDS, DTYPES, (False, True), (False, True)):
        path = path_of(hardware.Gemm(*dtypes, *kinds, is_grouped=is_grouped), platform, fast_accum=fast)
        if path is None:  # MXFP8 before Blackwell, and in groups
            assert G.BLOCK_1X32 in kinds
            continue
        reached.add(path)
        finest = Granularity.finest(kinds)
        for device in DEVICES[platform.capability]:
            gemm = GemmShape(**sizes, groups=8 if is_grouped else 1)
            seconds = gemm_seconds(gemm, device, finest, fast_accum=fast, path=path)
            assert seconds > 0, (path, device)
    assert reached == set(GemmPath)


@each("is_here", [False, True])
def test_another_machines_gpu_has_the_same_paths_whatever_is_installed_here(monkeypatch, is_here):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (8, 9))
    monkeypatch.setattr(hardware, "triton_available", lambda: False)
    monkeypatch.setattr(deep_gemm, "library", lambda: pytest.fail("asked for a package of this machine"))
    blocks = hardware.Gemm(E4M3, E4M3, G.BLOCK_1X128, G.BLOCK_128X128, is_grouped=True)
    assert path_of(blocks, H200.platform, fast_accum=True) is GemmPath.GROUPS_BY_TRITON
    assert (path_of(blocks, L40S.platform, fast_accum=True) is None) == is_here


def test_scales_of_rows_afterwards_cost_six_bytes_per_element():
    sizes = {"m": 16384, "n": 14336, "k": 4096}
    product = gemm_seconds(GemmShape(**sizes, out_bytes=4), H100, "tensor_wise", fast_accum=False)
    seconds = gemm_seconds(GemmShape(**sizes), H100, "row_wise", fast_accum=False, path=GemmPath.ROWS_AFTERWARDS)
    assert seconds - product == pytest.approx(6 * 16384 * 14336 / H100.memory_bandwidth + H100.kernel_latency)


def test_a_device_is_on_the_platform_of_the_torch_that_runs(monkeypatch):
    for cuda, expected in (((12, 6), (12, 6)), ((), (13, 0))):
        monkeypatch.setattr(hardware, "cuda_version", lambda cuda=cuda: cuda)
        assert RTX_5090.platform == Platform((12, 0), expected, hardware.torch_version())
