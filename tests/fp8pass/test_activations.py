"""SiLU shares the sigmoid of its gradient: where it is found, that nothing else is touched, and with the same result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import inspect
from fp8pass.rewrite.runner import without
from fp8pass.rewrite.simplify import share_sigmoids, shared_sigmoids
from tests.support.joint import calls
from tests.support.models import Net
from tests.support.training import compiled_step

aten = torch.ops.aten


def silu(x):
    return x / (1 + torch.exp(-x))


def found(program, *inputs):
    """The number of nodes of a traced program that can share a sigmoid; the rewritten program is checked with numbers."""
    inputs = inputs or (torch.linspace(-30, 30, 301),)
    traced = make_fx(program, tracing_mode="fake")(*inputs)
    nodes = shared_sigmoids(traced.graph)
    expected = traced(*inputs)
    share_sigmoids(traced.graph, nodes)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), expected, rtol=1e-6, atol=0)
    assert not shared_sigmoids(traced.graph)
    return len(nodes)


def test_silus_whose_sigmoid_is_there():
    assert found(lambda x: silu(x) + torch.sigmoid(x)) == 1
    assert found(lambda x: silu(x) + silu(2 * x) + torch.sigmoid(x)) == 1
    assert found(lambda x: silu(x) + 1 / (1 + torch.exp(-x))) == 2, "reciprocal"
    assert found(lambda x: silu(x) + silu(2 * x) + torch.reciprocal(1 + torch.exp(-x))) == 2
    half = torch.linspace(-30, 30, 301, dtype=torch.bfloat16)
    convert = torch.ops.prims.convert_element_type.default
    assert found(lambda x: silu(convert(x, torch.float32)) + torch.sigmoid(convert(x, torch.float32)), half) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: silu(x),
        lambda x: torch.reciprocal(1 + torch.exp(-x)),
        lambda x: silu(x) + torch.sigmoid(-x),
        lambda x: x / (2 + torch.exp(-x)) + torch.sigmoid(x),
        lambda x: x / (1 + torch.exp(x)) + torch.sigmoid(x),
        lambda x: (2 * x) / (1 + torch.exp(-x)) + torch.sigmoid(x),
        lambda x: x / (1 + torch.exp2(-x)) + torch.sigmoid(x),
        lambda x: x / torch.add(torch.exp(-x), 1, alpha=2) + torch.sigmoid(x),
    ],
)
def test_what_is_no_silu_or_has_no_sigmoid(program):
    assert found(program) == 0


@pytest.mark.parametrize("rules", [None, {"*": None}])
def test_a_model_whose_activation_feeds_fp8(rules):
    """Inductor decomposes SiLU; where nothing is rewritten nothing is shared."""
    layers = {name: nn.Linear(64, 64, bias=False) for name in ("gate", "up", "down")}
    model, x = Net(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers), torch.randn(32, 64)

    def trained(*left_out):
        with without(*left_out):
            compiled, made = compiled_step(model, "current", x, backend="inductor", rules=rules, select="all")
        graph = inspect(compiled).graphs[0].after.graph
        return made.gradients, (len(calls(graph, aten.exp.default)), len(calls(graph, aten.sigmoid.default)))

    (ours, shared), (theirs, alone) = trained(), trained("share sigmoids")
    assert alone in ((1, 1), (2, 0)), "torch before 2.13 spells the gradient's sigmoid out"
    assert shared == ((0, 2) if rules is None else alone)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()
