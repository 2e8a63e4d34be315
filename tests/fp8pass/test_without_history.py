"""Delayed scaling of tensors for which no amax is ever recorded: they scale themselves in every call.

Oracle: current scaling, which computes just that in every step.
"""

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, state
from tests.fp8pass.test_first_step import MANY, RECIPE, check_equal, compiled_pair
from tests.support.numerics import sqnr


class Broken(nn.Module):
    """A part without gradients in front of a graph break, or under no_grad, and a head."""

    def __init__(self, std, how):
        super().__init__()
        self.backbone, self.head, self.how = nn.Linear(128, 128, bias=False), nn.Linear(128, 128), how
        nn.init.normal_(self.backbone.weight, std=std)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        if self.how == "teacher":
            with torch.no_grad():
                self.h = self.backbone(x)
        else:
            self.h = self.backbone(x)
            torch._dynamo.graph_break()
        return self.head(self.h)


@pytest.mark.parametrize("how", ["break", "teacher"])
@pytest.mark.parametrize("std", [2e-3, 5e-4, 1e-7])
def test_a_part_without_gradients_scales_itself_for_as_long_as_it_runs(how, std):
    model = Broken(std, how)
    delayed, twin, current = compiled_pair(model)
    for _ in range(MANY):
        x = torch.randn(32, 128)
        delayed(x).square().mean().backward()
        current(x).square().mean().backward()
        if how == "break":
            assert model.h.equal(twin.h)
        else:  # one graph: the backbone's tensors are recorded with the rest
            assert sqnr(model.backbone(x), model.h) > 20


def test_a_head_that_is_only_evaluated_scales_itself():
    model = nn.ModuleDict({"trunk": nn.Linear(64, 64), "head": nn.Linear(64, 64, bias=False)})
    nn.init.normal_(model["head"].weight, std=5e-4)

    def forward(x, with_head):
        h = model["trunk"](x)
        return model["head"](h) if with_head else h

    delayed = fp8_compile(forward, RECIPE, backend="aot_eager")
    for _ in range(MANY):
        x = torch.randn(24, 64)
        delayed(x, False).square().mean().backward()
        with torch.no_grad():
            assert sqnr(forward(x, True), delayed(x, True)) > 25


class Recomputed(torch.autograd.Function):
    """A block whose input is reconstructed in the backward, as those of reversible networks are."""

    @staticmethod
    def forward(ctx, x, block, *parameters):
        ctx.block = block
        with torch.no_grad():
            y = block(x.detach().clone())
        ctx.save_for_backward(y, x)
        return y

    @staticmethod
    def backward(ctx, grad):
        _, x = ctx.saved_tensors
        x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        found = torch.autograd.grad(y, (x, *ctx.block.parameters()), grad)
        return found[0], None, *found[1:]


@pytest.mark.parametrize("std", [2e-2, 1e-4])
def test_a_block_that_a_function_of_the_users_recomputes_records(std):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        nn.init.normal_(layer.weight, std=std)
    delayed, twin, current = compiled_pair(model)
    x = torch.randn(24, 64)
    for _ in range(MANY):
        found = [
            Recomputed.apply(x.clone().requires_grad_(), c, *m.parameters()) for c, m in ((delayed, model), (current, twin))
        ]
        assert found[0].equal(found[1])
        for m, y in zip((model, twin), found, strict=True):
            m.zero_grad()
            (1e-4 * y.square().mean()).backward()
        check_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})
    names = state(delayed).tensors
    assert len(names) == 6
    assert all(state(delayed).amax_history(n).count_nonzero() for n in names)
