"""Python floats that change between calls are inputs of Dynamo's graph, which delayed scaling's first step traces again."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_MODEL_OUTPUT


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, factor: float, both: bool = True) -> torch.Tensor:
        x = self.first(x * factor)
        return self.second(x) if both else x


@pytest.fixture
def models():
    torch.manual_seed(0)
    return Scaled(), torch.randn(32, 64)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_evaluation_before_the_first_step(models, backend):
    model, x = models
    compiled = fp8_compile(copy.deepcopy(model), backend=backend)
    with torch.no_grad():
        for factor in (1.0, 2.0, 3.0):
            assert sqnr(model(x, factor), compiled(x, factor)) >= SQNR_MODEL_OUTPUT
    for factor in (4.0, 2.0, 1.5):
        out = compiled(x, factor)
        out.sum().backward()
        assert sqnr(model(x, factor), out) >= SQNR_MODEL_OUTPUT
    assert all(gemm.quantized for gemm in inspect(compiled).gemms)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_branch_that_runs_first_when_the_float_is_an_input_already(models, backend):
    model, x = models
    compiled = fp8_compile(copy.deepcopy(model), backend=backend)
    for factor, both in ((4.0, False), (3.0, False), (2.0, True), (1.0, True)):
        out = compiled(x, factor, both)
        out.sum().backward()
        assert sqnr(model(x, factor, both), out) >= SQNR_MODEL_OUTPUT
