"""The sigmoid that takes the place of aten's in code for GPUs: its error, and where it runs."""

import pytest
import torch

from benchmarks.contestants import contestants
from benchmarks.cross_codegen import capture, report
from benchmarks.models import block
from lowering import hardware
from lowering.inductor import elementwise

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


class Eager:
    """Inductor's virtual operations, computed at once."""

    add, mul, exp2, rsqrt = (staticmethod(f) for f in (torch.add, torch.mul, torch.exp2, torch.rsqrt))

    @staticmethod
    def constant(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    from torch._inductor.virtualized import V

    with V.set_ops_handler(Eager()):
        computed: torch.Tensor = elementwise.sigmoid(x).value
        return computed


def test_error_is_a_few_units_in_the_last_place():
    # Below -10 the rounding of x / ln 2 is a relative error of the exponential, in every form of the function.
    x = torch.cat([torch.linspace(-10, 100, 100_001), torch.randn(10_000) * 3])
    exact = torch.sigmoid(x.double())
    error = (sigmoid(x).double() - exact).abs() / exact
    assert error.max() < 2**-20
    x = torch.linspace(-80, -10, 10_001)
    exact = torch.sigmoid(x.double())
    ours, theirs = ((f(x).double() - exact).abs().div(exact).max() for f in (sigmoid, torch.sigmoid))
    assert ours < 2**-16
    assert theirs < 2**-16


def test_special_values():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -3.4e38])
    expected = torch.tensor([1.0, 0.0, torch.nan, 0.5, 0.5, 1.0, 0.0])
    torch.testing.assert_close(sigmoid(x), expected, rtol=1e-7, atol=0, equal_nan=True)


def codes(name: str) -> list[str]:
    torch._dynamo.reset()
    model, x = block(256, 512, 4, 1, 256)
    compiled = contestants((name,) if name != "bf16" else (), with_peers=False)[name](model)
    with capture() as graphs:
        compiled(x).sum().backward()
    return [graph.code for graph in report(graphs)]


@needs_triton
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise", "mxfp8"])
def test_no_other_sigmoid_is_left(recipe):
    for code in codes(recipe):
        assert "exp2(" in code
        assert "sigmoid(" not in code
        assert "exp(" not in code


@needs_triton
def test_models_without_fp8_keep_theirs():
    for code in codes("bf16"):
        assert "exp2(" not in code
