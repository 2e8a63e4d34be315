"""The kernel behind a GEMM: bit for bit the reference in Triton's interpreter (this file as a script), and what it spares."""

import itertools
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from lowering import hardware, products
from lowering.formats import E4M3
from lowering.products import LineProduct

ROOT = pathlib.Path(__file__).parents[2]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 16), (9, 70), (13, 513), (40, 1040))


def cases(device: str):
    """Sums [m, padded n] of a GEMM, and the product that they are of."""
    for (m, n), out_dtype, bias_dtype in itertools.product(SHAPES, FLOATS, (None, *FLOATS)):
        generator = torch.Generator().manual_seed(m * n)
        sums = (torch.randn(m, n + -n % 16, generator=generator) * 300).to(device)
        sums[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e38])
        a, b = (torch.zeros(size, 16, dtype=E4M3, device=device) for size in (m, n))
        lines = [torch.rand(size, 1, generator=generator).to(device) * 1e-3 for size in (m, n)]
        scalar = torch.tensor(0.37, device=device)
        bias = None if bias_dtype is None else torch.randn(2 * n, generator=generator).to(device, bias_dtype)[::2]
        for scales in (lines, [lines[0], scalar], [scalar, lines[1]]):
            yield sums, LineProduct(a, b.t(), *scales, bias, out_dtype=out_dtype)


def check(device: str) -> None:
    from lowering.triton import epilogue

    for sums, product in cases(device):
        n = product.b.shape[1]
        for scales_lines, reference in ((True, products.scaled_lines), (False, products.finished)):
            expected = reference(sums[:, :n].clone(), product)
            out = epilogue.launch(sums.clone(), n, product, scales_lines)
            assert out.dtype == product.out_dtype
            assert out.is_contiguous()
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_on_a_gpu():
    check("cuda")


@pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton")
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_result_is_written_over_its_sums_where_they_have_the_same_form(monkeypatch, dtype):
    from lowering.triton import epilogue

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(epilogue, "epilogue_kernel", Launched())
    sums, product = next((s, p) for s, p in cases("cpu") if p.out_dtype == dtype and s.shape[1] == p.b.shape[1])
    out = epilogue.launch(sums, product.b.shape[1], product, True)
    assert (out is sums) is (dtype == torch.float32)


if __name__ == "__main__":
    from tests.support.interpreter import exact_interpreter

    with exact_interpreter():
        check("cpu")
