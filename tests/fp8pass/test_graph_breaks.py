"""Graph breaks and regional compilation: one graph serves many layers, each layer has its own histories and names."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8FallbackWarning, RuleError
from tests.support.models import BrokenLayers, mlp
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_MODEL_OUTPUT

RECIPE = DelayedScaling(amax_history_len=4)
KINDS = ("input", "weight", "grad_output")


def expected_names(depth, linears=("up", "down"), prefix="layers."):
    return {f"{prefix}{i}.{linear}:{kind}" for i in range(depth) for linear in linears for kind in KINDS}


def test_layers_that_share_a_graph_have_their_own_histories():
    model = BrokenLayers(4, 32, 64)
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    x = torch.randn(16, 32)
    for _ in range(3):
        model.zero_grad()
        out = compiled(x.clone().requires_grad_())
        out.square().sum().backward()
    view = state(compiled)
    assert set(view.tensors) == expected_names(4)
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
    """What `self.up = self.up.to(dtype)` does to Dynamo's names where it breaks the graph."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        up = self.up
        torch._dynamo.graph_break()
        self.up = up
        return self.up(x).relu()


def test_modules_put_back_into_their_attributes_have_their_own_histories():
    compiled = fp8_compile(nn.Sequential(PutBack(), PutBack()), RECIPE, backend="aot_eager")
    compiled(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert set(state(compiled).tensors) == expected_names(2, ("up",), "")


def test_blocks_compiled_one_by_one_share_graphs_and_not_state():
    blocks = nn.ModuleList(mlp(32, 64, 32) for _ in range(12))  # more than Dynamo's recompile limit
    compiled = [fp8_compile(block, RECIPE, backend="aot_eager") for block in blocks]
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        h = x
        for block in compiled:
            h = block(h)
        h.sum().backward()
    for block, original in zip(compiled, blocks, strict=True):
        view = state(block)
        assert set(view.tensors) == {f"{i}:{kind}" for i in (0, 2) for kind in KINDS}
        assert view.scale("0:weight") == torch.tensor(448.0) / original[0].weight.abs().max()
        assert len(inspect(block).gemms) == 6


def test_function_of_weights_names_them():
    def functional(x, params):
        return torch.relu(x @ params["w1"]) @ params["w2"]

    params = {"w1": nn.Parameter(torch.randn(32, 64)), "w2": nn.Parameter(torch.randn(64, 32))}
    compiled = fp8_compile(functional, RECIPE, backend="aot_eager")
    compiled(torch.randn(16, 32, requires_grad=True), params).sum().backward()
    assert set(state(compiled).tensors) == {f"params.{w}:{kind}" for w in params for kind in KINDS}


def test_rules_that_part_layers_of_one_graph_are_refused():
    compiled = fp8_compile(BrokenLayers(4, 32, 64), RECIPE, rules={"layers.0.*": None}, backend="aot_eager")
    with pytest.raises(RuleError, match=r"layers\.0\.up and layers\.1\.up share one compiled graph"):
        compiled(torch.randn(16, 32, requires_grad=True))


class Untraced(nn.Module):
    """Dynamo traces nothing of it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)

    @torch._dynamo.disable
    def forward(self, x):
        return self.up(x)


class Recurrent(nn.Module):
    """Dynamo gives the whole forward up for its LSTM."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.up = nn.LSTM(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.up(self.recurrent(x)[0])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("model", "cause"), [(Untraced, "torch._dynamo.disable"), (Recurrent, "nn.LSTM")])
def test_an_eager_run_is_reported_at_the_callers_line_and_in_the_inspection(model, cause, in_place):
    compiled = fp8_compile(model(), "current", backend="aot_eager", in_place=in_place)
    assert not inspect(compiled).ran_eagerly
    with pytest.warns(Fp8FallbackWarning, match=cause) as warned:
        compiled(torch.randn(16, 64))
    assert [w.filename for w in warned] == [__file__]
    report = inspect(compiled)
    assert report.ran_eagerly
    assert report.to_dict()["ran_eagerly"]
    assert "torch.compile ran the model eagerly" in str(report)
    assert "call the model once" not in str(report)


def test_fullgraph_breaks_nothing():
    compiled = fp8_compile(mlp(), RECIPE, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(16, 64)).sum().backward()
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_compiled_block_inside_a_compiled_model_keeps_fp8():
    inner = fp8_compile(mlp(), RECIPE, backend="aot_eager")

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x * 2) + 1

    torch.compile(Outer(), backend="aot_eager")(torch.randn(16, 64)).sum().backward()
    assert len(state(inner).tensors) == 6
