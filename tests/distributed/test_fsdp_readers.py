"""What anybody but a compiled graph reads of a Parameter under `fsdp_gather="fp8"` is its own value, whenever it is read."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8pass import DelayedScaling, fp8_compile
from tests.distributed.fsdp2 import Block, batch, counted
from tests.distributed.support import on_ranks

pytestmark = pytest.mark.dist


class Fragile(Block):
    """Raises in its forward, when its weights are gathered."""

    is_broken = False

    def forward(self, x):
        if self.is_broken:
            raise ValueError("broken")
        return super().forward(x)


class Reads:
    """A model, and all that is computed with it and read of it."""

    def __init__(self, recipe, gather, reshard):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(Fragile(), Fragile())
        for block in self.model if reshard != "root alone" else ():
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(self.model)
        self.compiled = fp8_compile(self.model, recipe, backend="aot_eager", select="all", fsdp_gather=gather)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.found = []

    def read(self, what):
        for name, p in self.model.named_parameters():
            value = p.full_tensor() if isinstance(p, DTensor) else p
            self.found.append((f"{what}: {name}", value.detach().clone()))

    def note(self, what, value):
        self.found.append((what, value.detach().clone()))

    def forward(self, model, step, what):
        self.note(what, model(batch(step)))
        self.read(what)

    def step(self, step, what, *, last=True):
        loss = self.compiled(batch(step)).square().mean()
        self.read(f"{what}, before the backward")
        loss.backward()
        self.read(f"{what}, after the backward")
        if last:
            for p in self.model.parameters():
                self.note(what, p.grad.to_local())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.read(f"{what}, after the step")

    def run(self):
        for step in range(4):
            self.step(step, "training")
        with torch.no_grad():
            for step in (20, 21):
                self.forward(self.compiled, step, "evaluation")
                self.forward(self.model, step, "eager evaluation")
        self.step(4, "training after an evaluation")
        for is_last in (False, False, True):
            self.model.set_reshard_after_backward(is_last)
            self.model.set_requires_gradient_sync(is_last)
            self.step(5, "accumulation", last=is_last)
            with torch.no_grad():
                self.forward(self.model, 22, "eager in an accumulation")
        for grad in (False, True):
            self.model[1].is_broken = True
            with pytest.raises(ValueError, match="broken"), torch.set_grad_enabled(grad):
                self.compiled(batch(23))
            self.model[1].is_broken = False
            self.read("an exception")
            with torch.no_grad():
                self.forward(self.model[1], 24, "eager after an exception")
        self.step(6, "training after an exception")
        self.model.set_reshard_after_forward(False)
        with torch.no_grad():
            self.forward(self.compiled, 25, "kept from now on")
        self.step(7, "kept from now on")
        return self


CASES = [("current", True), ("current", False), ("current", "root alone"), (DelayedScaling(), True), (DelayedScaling(), False)]


@pytest.mark.parametrize(
    "cases", [CASES[:1], pytest.param([*CASES[1:], ("rowwise", True), ("blockwise", False)], marks=pytest.mark.exhaustive)]
)
@on_ranks(2)
def test_readers_find_the_parameters_own_values(rank, cases):
    for recipe, reshard in cases:
        runs, sent = [], []
        for gather in ("fp8", None):
            with counted() as (each, _):
                runs.append(Reads(recipe, gather, reshard).run())
            sent.append(sum(each))
        pairs = zip(*(run.found for run in runs), strict=True)
        assert [name for (name, a), (_, b) in pairs if not a.equal(b)] == [], (recipe, reshard)
        assert (sent[0] < sent[1]) == (reshard is True), (recipe, reshard)
