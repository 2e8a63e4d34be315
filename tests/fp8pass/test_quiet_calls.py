"""Quiet calls take the short way, and everything that can be seen is as on the long one, whatever was written between calls."""

from unittest import mock

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.runtime.session import Session
from fp8pass.weights import released
from tests.support.models import mlp
from tests.support.training import same

WIDTH = 16


def batch(seed=0):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


class Scene:
    """A compiled model, and everything that was seen of it."""

    def __init__(self):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = mlp(WIDTH, WIDTH, WIDTH)
        recipe = fp8pass.DelayedScaling(amax_history_len=3)
        self.compiled = fp8pass.fp8_compile(self.model, recipe, select="all", backend="aot_eager")
        self.session = self.compiled._fp8pass_session
        self.seen = []

    def train(self, seed=0, scale=1.0):
        self.compiled(batch(seed) * scale).square().mean().backward()

    def evaluate(self, seed=0):
        with torch.no_grad():
            self.seen.append(self.compiled(batch(seed)))

    def look(self):
        self.seen.append(fp8pass.state(self.compiled).state_dict())
        self.seen.append((self.session.num_steps, self.session.clock.is_step_pending))
        self.seen.append([p.grad for p in self.model.parameters()])
        self.seen.append(fp8pass.inspect(self.compiled).to_dict())


def load(scene):
    state = fp8pass.state(scene.compiled)
    state.load_state_dict({k: v * 2 if k.endswith("scale") else v for k, v in state.state_dict().items()})


#: Those after which the next evaluation shows other numbers, or another state.
SEEN = {
    "train": lambda scene: scene.train(1, 2.0),
    "load": load,
    "rules": lambda scene: fp8pass.use_rules(scene.compiled, {"0": None}),
    "write": lambda scene: scene.model[0].weight.detach().mul_(1.5),
    "write data": lambda scene: scene.model[2].weight.data.mul_(0.5),
    "exchange": lambda scene: setattr(scene.model[0], "weight", nn.Parameter(scene.model[0].weight.detach() * 3)),
    "swap": lambda scene: torch.utils.swap_tensors(scene.model[0].weight, nn.Parameter(scene.model[0].weight.detach() * 2)),
}
WRITERS = {
    **SEEN,
    "mode": lambda scene: scene.model.eval(),
    "freeze": lambda scene: scene.model[0].weight.requires_grad_(False),
    "optimize": lambda scene: torch.optim.SGD(scene.model.parameters(), 0.1).step(),
    "reset": lambda scene: torch._dynamo.reset(),
    "watch": lambda scene: setattr(scene, "monitor", fp8pass.monitor(scene.compiled, every=1, log=scene.seen.append)),
}


def settled():
    scene = Scene()
    scene.train()
    for _ in range(3):
        scene.evaluate()
    return scene


#: These leave other calls, or other graphs, to whatever follows.
LAST = ["rules", "watch", "freeze", "reset", "mode"]
OTHERS = [writer for writer in WRITERS if writer not in LAST]


def written(*writers):
    scene = settled()
    for writer in writers:
        scene.evaluate()
        before = scene.seen[-1]
        WRITERS[writer](scene)
        for seed in range(2):
            scene.evaluate(seed)
        assert writer not in SEEN or not torch.equal(scene.seen[-2], before)
        scene.look()
        scene.train(5)
        scene.evaluate()
        scene.look()
    return scene.seen


def test_a_quiet_call_takes_the_short_way(monkeypatch):
    monkeypatch.setattr(released, "_is_used", False)  # an earlier test's model
    scene = settled()
    with mock.patch.object(Session, "begin_forward", side_effect=AssertionError):
        for seed in range(20):
            scene.evaluate(seed)
    assert scene.session.eager.found == {}


@pytest.mark.parametrize("writers", [(*OTHERS[i::5], last) for i, last in enumerate(LAST)], ids=" ".join)
def test_after_a_write_calls_are_as_on_the_long_way(writers):
    with mock.patch.object(Session, "takes_short_way", False):
        expected = written(*writers)
    assert same(written(*writers), expected)
