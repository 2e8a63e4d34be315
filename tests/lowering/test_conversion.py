"""The conversion to FP8 as it is compiled: PTX executed after the PTX ISA, for every bfloat16, against the reference."""

import numpy as np
import pytest
import torch

from lowering import hardware
from lowering.formats import E5M2, PACK, ptx_to_fp8
from lowering.tensorwise import reference
from tests.lowering.kernel_cases import EDGE_SCALES, FP8
from tests.support.fp8 import VALUES, every_bfloat16
from tests.support.ptx_machine import execute, run_kernel, run_piece

THREADS, BLOCK = 128, 1024


def same_but_for_signs_of_nan(found: np.ndarray, expected: torch.Tensor) -> bool:
    nan, codes = expected.float().isnan().numpy(), expected.view(torch.uint8).numpy()
    return bool((found[~nan] == codes[~nan]).all() and (found[nan] == 0x7F).all())


@pytest.mark.parametrize("dtype", FP8)
def test_one_piece_is_torchs_cast_of_every_bfloat16_and_of_what_lies_beside_ties(dtype):
    finite = torch.tensor(VALUES[dtype]).float()
    middles = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(towards)) for towards in (-torch.inf, torch.inf)]
    values = torch.cat([every_bfloat16().float(), finite, middles, *beside])
    for x in (values, -values):
        limited = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)  # NaN stays
        assert same_but_for_signs_of_nan(run_piece(ptx_to_fp8(dtype), [x.numpy()], PACK), limited.to(dtype))


@pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")
@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("dtype", FP8)
def test_compiled_code_quantizes_every_bfloat16_as_the_reference_does(dtype, arch):
    """`fp8_bits` with what Triton compiles around it. Infinities of E5M2, which its callers store, saturate."""
    from tests.support.small_kernels import compiled_conversion

    x = every_bfloat16()
    ptx = compiled_conversion(x, dtype, arch, BLOCK, THREADS)
    for scale in EDGE_SCALES:
        memory = [x.view(torch.uint8).numpy().copy(), np.float32([scale]).view(np.uint8), np.full(x.numel(), 0xAA, np.uint8)]
        run_kernel(ptx, x.numel() // BLOCK, THREADS, memory)
        expected = reference.quantize(x, torch.tensor(scale), dtype)
        if dtype == E5M2:
            most, finite = torch.finfo(dtype).max, x.isfinite()
            saturated = expected.float().clamp(-most, most).to(dtype)
            assert torch.equal(expected[finite].float(), saturated[finite].float())
            expected = saturated
        assert same_but_for_signs_of_nan(memory[2], expected), scale


def test_what_the_machine_does_not_know_raises():
    with pytest.raises(NotImplementedError, match=r"cvt\.rz\.f16\.f32"):
        execute("cvt.rz.f16.f32 %r1, %r2;", {"%r2": np.zeros(1, np.uint64)})
    one, half = (np.array([np.float32(v).view(np.uint32)], np.uint64) for v in (1.0, 0.5))
    with pytest.raises(NotImplementedError, match="addend"):
        execute("fma.rn.f32 %r3, %r1, %r1, %r2;", {"%r1": one, "%r2": half})
