"""`torch.compiler.nested_compile_region`: each call of a region has GEMMs, rows and state of its own, as without regions."""

import pytest
import torch
from torch import nn
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

from fp8pass import fp8_compile, inspect, state
from tests.support.cases import rest

FAST = ("tied nested", "rowwise")
FORMS = ("plain", "nested", "twice", "tied nested", "checkpoint inside", "checkpoint outside, nested")


def model(form, region):
    torch.manual_seed(0)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(32, 32)

        def forward(self, x):
            return torch.tanh(self.proj(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.inner, self.down = nn.Linear(32, 64), Inner(), nn.Linear(64, 32)

        def body(self, x):
            return x + self.inner(self.down(torch.relu(self.up(x))))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False) if form == "checkpoint inside" else self.body(x)

    if "nested" in form:
        Inner.forward = region(Inner.forward)
    Block.forward = region(Block.forward)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(32, 48)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if "outside" in form else layer(x)
            return self.last(self.layers[1](x) if form == "twice" else x)

    found = Model()
    if "tied" in form:
        found.layers[1].up.weight, found.layers[2].inner.proj = found.layers[0].up.weight, found.layers[1].inner.proj
    return found


def trained(form, region, recipe, backend):
    """Results and gradients of two steps and of an evaluation, the table, the names in the state."""
    torch._dynamo.reset()
    found = model(form, region)
    compiled = fp8_compile(found, recipe, backend=backend)
    results = []
    for seed in range(2):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        found.zero_grad()
        out = compiled(x)
        out.square().sum().backward()
        results += [out.detach(), x.grad, *(p.grad.clone() for p in found.parameters())]
    if "tied" not in form:  # there torch.compile alone runs the wrong block after a training forward
        with torch.no_grad():
            results.append(compiled(x))
    gemms = sorted((g.module, g.role, g.m, g.n, g.k, str(g.reason)) for g in inspect(compiled).gemms)
    return results, gemms, sorted(state(compiled).tensors) if recipe == "delayed" else None


@pytest.mark.parametrize(
    ("form", "recipe", "backend"),
    [
        (*FAST, "aot_eager"),
        *rest((form, "rowwise" if i % 3 == 1 else "delayed", "aot_eager") for i, form in enumerate(FORMS)),
        *rest([("nested", "delayed", "inductor")]),
    ],
)
def test_a_region_is_as_its_calls_written_out(form, recipe, backend):
    expected, found = (trained(form, region, recipe, backend) for region in (lambda function: function, nested_compile_region))
    assert found[1:] == expected[1:]
    assert {reason for *_, reason in found[1]} == {"None"}
    exact = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {}
    for left, right in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(left, right, **exact)
