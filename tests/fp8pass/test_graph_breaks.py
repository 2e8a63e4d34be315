"""Graph breaks and regional compilation: one graph serves many layers, each layer has its own histories and names."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import RuleError
from tests.support.models import BrokenLayers
from tests.support.numerics import sqnr
from tests.support.training import fp8, train
from tests.tolerances import SQNR_MODEL_OUTPUT

RECIPE = DelayedScaling(amax_history_len=4)
KINDS = ("input", "weight", "grad_output")


def test_layers_that_share_a_graph_have_their_own_histories():
    model = BrokenLayers(4, 32, 64)
    plain = copy.deepcopy(model)
    compiled, x = fp8(model, RECIPE), torch.randn(16, 32)
    *_, out = train(compiled, *[x.clone().requires_grad_()] * 3)
    view = state(compiled)
    assert set(view.tensors) == {f"layers.{i}.{linear}:{kind}" for i in range(4) for linear in ("up", "down") for kind in KINDS}
    view.step()
    for i, layer in enumerate(model.layers):
        assert view.scale(f"layers.{i}.up:weight") == torch.tensor(448.0) / layer.up.weight.abs().max()
    assert sqnr(plain(x), out) >= SQNR_MODEL_OUTPUT
    report = inspect(compiled)
    assert {g.module for g in report.gemms} == {f"layers.{i}.{linear}" for i in range(4) for linear in ("up", "down")}
    assert len(report.gemms) == 24
    assert all(g.quantized for g in report.gemms)
    assert len(report.graphs) == 2, "the halves of a block, for all layers"


class PutBack(nn.Module):
    """The effect of `self.up = self.up.to(dtype)` on Dynamo's names where it breaks the graph."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        up = self.up
        torch._dynamo.graph_break()
        self.up = up
        return self.up(x).relu()


PARAMS = {"w1": nn.Parameter(torch.randn(32, 64)), "w2": nn.Parameter(torch.randn(64, 32))}


@pytest.mark.parametrize(
    ("call", "args", "names"),
    [
        (nn.Sequential(PutBack(), PutBack()), (), {f"{i}.up:{kind}" for i in range(2) for kind in KINDS}),
        (
            lambda x, params: torch.relu(x @ params["w1"]) @ params["w2"],
            (PARAMS,),
            {f"params.{w}:{kind}" for w in PARAMS for kind in KINDS},
        ),
    ],
)
def test_modules_put_back_into_their_attributes_and_weights_of_a_function_have_their_own_histories(call, args, names):
    compiled = fp8(call, RECIPE)
    compiled(torch.randn(16, 32, requires_grad=True), *args).sum().backward()
    assert set(state(compiled).tensors) == names


def test_rules_that_part_layers_of_one_graph_are_refused():
    compiled = fp8_compile(BrokenLayers(4, 32, 64), RECIPE, rules={"layers.0.*": None}, backend="aot_eager")
    with pytest.raises(RuleError, match=r"layers\.0\.up and layers\.1\.up share one compiled graph"):
        compiled(torch.randn(16, 32, requires_grad=True))
