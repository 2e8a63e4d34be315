"""The GEMM of GPUs, torch's with its conditions met. torch's CPU GEMM stands in for it here."""

from unittest import mock

import pytest
import torch

from lowering import hardware
from lowering.formats import E4M3, E5M2
from lowering.products import Product
from tests.support.cases import each
from tests.support.copies import both
from tests.tolerances import FAST_SCALED_MM, REFERENCE_MM, SCALED_MM, relative_error

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="the other kernels need Triton")
on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and hardware.has_fp8_tensor_cores(torch.device("cuda"))),
    reason="no GPU with FP8 tensor cores",
)
SHAPES = [(32, 64, 48), (33, 50, 17), (1, 130, 16), (7, 16, 5), (0, 32, 16), (16, 0, 32), (16, 32, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(m: int, k: int, n: int, dtypes=(E5M2, E4M3), device: str = "cpu", by_lines: bool = False):
    a, b = torch.randn(m, k, device=device).to(dtypes[0]), torch.randn(n, k, device=device).to(dtypes[1]).t()
    if by_lines:
        return a, b, torch.rand(m, 1, device=device) + 0.1, torch.rand(n, 1, device=device) + 0.1
    return a, b, torch.tensor(0.3, device=device), torch.tensor(1.7, device=device)


def expected_product(a, b, scale_inv_a, scale_inv_b, bias=None) -> torch.Tensor:
    out = (a.double() * scale_inv_a.double()) @ (b.double() * scale_inv_b.double().reshape(1, -1))
    return out if bias is None else out + bias.double()


def scaled_mm(*arguments, **options):
    """The GEMM of tensor cores, as strict as SM90's about layouts and biases."""
    from lowering import tensor_cores

    lenient = torch._scaled_mm

    def strict(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert a.stride(1) == 1
        assert b.stride(0) == 1
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert a.stride(0) % 16 == b.stride(1) % 16 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert 0 not in (*a.shape, *b.shape)
        assert scale_a.shape == scale_b.shape == ()
        assert bias is None or (bias.dtype == out_dtype != torch.float32 and bias.shape == (b.shape[1],))
        assert bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 16 == 0)
        return lenient(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    with mock.patch.object(torch, "_scaled_mm", strict):
        return tensor_cores.of_tensors(Product(*arguments, **options))(*arguments)


@each("shape", SHAPES)
@each("out_dtype", DTYPES)
@each("bias_dtype", [None, *DTYPES])
def test_against_float64(shape, out_dtype, bias_dtype):
    arguments = operands(*shape)
    bias = None if bias_dtype is None else torch.randn(shape[2]).to(bias_dtype)
    out = scaled_mm(*arguments, bias, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert out.shape == (shape[0], shape[2])
    assert out.is_contiguous()
    assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[out_dtype]


def test_operands_of_any_strides():
    a, b, *scales = operands(48, 64, 32)
    expected = expected_product(a, b, *scales)
    wide = torch.zeros(48, 80, dtype=torch.uint8)
    wide[:, 3:67] = a.view(torch.uint8)
    off = wide.view(a.dtype)[:, 3:67]
    for left in (a, a.t().contiguous().t(), off):
        for right in (b, b.contiguous()):
            out = scaled_mm(left, right, *scales, None, out_dtype=torch.float32)
            assert relative_error(out, expected) <= REFERENCE_MM[torch.float32]


def test_aligned_operands_are_not_copied():
    a, b, *scales = operands(32, 64, 48)
    with mock.patch.object(torch, "_scaled_mm", return_value=torch.zeros(32, 48)) as called:
        from lowering import tensor_cores

        given = a, b, *scales, None
        tensor_cores.of_tensors(Product(*given, out_dtype=torch.float32, fast_accum=True))(*given)
    left, right, *_ = called.call_args.args
    assert (left.data_ptr(), right.data_ptr()) == (a.data_ptr(), b.data_ptr())
    assert called.call_args.kwargs["use_fast_accum"] is True


def test_a_float32_bias_is_rounded_once():
    """out = bf16(product + bias), not bf16(bf16(product) + bias): the two differ for this product and bias."""
    a = torch.tensor([[1.0] + [0.0] * 15]).to(E4M3)
    b = torch.tensor([[1.0] + [0.0] * 15] * 16).to(E4M3).t()
    scale = torch.tensor(1 + 2.0**-8)  # half a unit in bfloat16's last place above 1: alone it would be rounded away
    out = scaled_mm(a, b, scale, torch.tensor(1.0), torch.full((16,), 2.0**-8), out_dtype=torch.bfloat16)
    assert out.unique().item() == 1 + 2.0**-7


@pytest.mark.parametrize(
    "view", [lambda b: b[::2], lambda b: b[1:49], lambda b: b[:1].expand(48)], ids=["strided", "odd", "expanded"]
)
def test_any_view_is_a_bias(view):
    arguments, bias = operands(32, 64, 48), view(torch.randn(96).bfloat16())
    out = scaled_mm(*arguments, bias, out_dtype=torch.bfloat16)
    assert relative_error(out, expected_product(*arguments, bias)) <= REFERENCE_MM[torch.bfloat16]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096, 4096), (512, 16384, 1024)])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("by_lines", [False, True])
def test_on_a_gpu(shape, out_dtype, bias_dtype, fast_accum, dtypes, by_lines):
    arguments = operands(*shape, dtypes, "cuda", by_lines)
    bias = None if bias_dtype is None else torch.randn(shape[2], device="cuda").to(bias_dtype)
    kinds = both("row_wise" if by_lines else "tensor_wise")
    out = torch.ops.lowering.scaled_mm(*arguments, bias, **kinds, out_dtype=out_dtype, fast_accum=fast_accum)
    assert out.dtype == out_dtype
    assert out.shape == (shape[0], shape[2])
    bounds = FAST_SCALED_MM if fast_accum else SCALED_MM
    assert relative_error(out, expected_product(*arguments, bias)) <= bounds[out_dtype]
