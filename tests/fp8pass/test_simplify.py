"""Simplifications: SiLU shares the sigmoid of its gradient, and batches are multiplied by one weight. With the same results."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import fp8_compile, inspect, state
from fp8pass.rewrite.simplify import share_sigmoids, shared_sigmoids
from tests.support.cases import each
from tests.support.joint import calls
from tests.support.training import same

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.lowering


def silu(x):
    return x / (1 + torch.exp(-x))


def wide(x):
    return prims.convert_element_type.default(x, torch.float32)


#: Program, and the number of its nodes that can share a sigmoid.
PROGRAMS = [
    (lambda x: silu(x) + torch.sigmoid(x), 1),
    (lambda x: silu(x) + silu(2 * x) + torch.reciprocal(1 + torch.exp(-x)), 2),
    (lambda x: silu(wide(x)) + torch.sigmoid(wide(x)), 1),
    (lambda x: silu(x), 0),
    (lambda x: x / (1 + torch.exp(x)) + torch.sigmoid(x), 0),
    (lambda x: x / torch.add(torch.exp(-x), 1, alpha=2) + torch.sigmoid(x), 0),
]


@each(("program", "count"), PROGRAMS)
def test_silus_whose_sigmoid_is_there(program, count):
    x = torch.linspace(-30, 30, 301, dtype=torch.bfloat16 if "wide" in program.__code__.co_names else torch.float32)
    traced = make_fx(program, tracing_mode="fake")(x)
    nodes, expected = shared_sigmoids(traced.graph), traced(x)
    assert len(nodes) == count
    share_sigmoids(traced.graph, nodes)
    traced.recompile()
    torch.testing.assert_close(traced(x), expected, rtol=1e-6, atol=0)
    assert not shared_sigmoids(traced.graph)


# -- batches that are multiplied by one weight


class Strided(nn.Module):
    """Linears whose inputs are no views of matrices, the second one of a transposed weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Parameter(torch.randn(96, 64) / 10)

    def forward(self, x):
        return self.up(x.transpose(0, 1)).relu()[:, 1:] @ self.down


@pytest.mark.parametrize(
    ("recipe", "rules", "dynamic"), [("delayed", None, True), ("blockwise", None, None), ("rowwise", {"up": None}, True)]
)
def test_a_frozen_weight_of_strided_rows_is_one_weight(recipe, rules, dynamic):
    """Outputs, gradients and scales are as where it is trained."""
    trained = Strided()
    frozen = copy.deepcopy(trained).requires_grad_(False)
    made = []
    for model in (trained, frozen):
        compiled = fp8_compile(model, recipe, rules=rules, select="all", dynamic=dynamic, backend="aot_eager")
        for i in range(3):
            x = torch.randn(6 + i % 2, 16, 64, generator=torch.Generator().manual_seed(i)).requires_grad_()
            out = compiled(x)
            out.square().sum().backward()
            made.append((out, x.grad))
        made.append({name: state(compiled).scale(name) for name in state(compiled).tensors})
        assert not any(calls(graph.after.graph, aten.bmm.default) for graph in inspect(compiled).graphs)
    assert all(same(a, b) for a, b in zip(made[:4], made[4:], strict=True))
