"""Requests of torch that a compiled model cannot meet are refused in one sentence that says what to do."""

import pytest
import torch

from fp8pass import fp8_compile
from fp8pass.errors import Fp8Error, UnsupportedError
from tests.support.models import mlp


def make(**options):
    return fp8_compile(mlp(), "current", **{"backend": "aot_eager", **options})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_batches_of_gradients_are_refused_with_the_way_out(backend):
    compiled, x = make(backend=backend), torch.randn(16, 64, requires_grad=True)
    y = compiled(x)
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient") as error:
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)
    assert isinstance(error.value, Fp8Error)
    with pytest.raises(UnsupportedError, match="vectorize=True"):
        torch.autograd.functional.jacobian(compiled, x.detach()[:2], vectorize=True)
    each = [torch.autograd.grad(compiled(x), x, g)[0] for g in torch.randn(2, *y.shape)]
    assert all(g.isfinite().all() for g in each)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_nan_asserts_are_refused_where_a_graph_has_fp8_values(recipe):
    compiled = fp8_compile(mlp(), recipe, options={"nan_asserts": True})
    with pytest.raises(UnsupportedError, match="leave nan_asserts off"):
        compiled(torch.randn(16, 64)).sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_export_names_what_to_export_instead(in_place):
    compiled, x = make(in_place=in_place), torch.randn(16, 64)
    with pytest.raises(UnsupportedError, match=r"torch\.export\.export\(model, args\)"):
        torch.export.export(compiled, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.export\.export\(model, args\)"):
        torch.export.export(compiled, (x,), strict=True)
    compiled(x).sum().backward()
