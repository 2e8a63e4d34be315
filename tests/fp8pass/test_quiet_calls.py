"""Quiet calls take the short way, and everything that can be seen is as on the long one, whatever was written between calls."""

import contextlib
import gc
import random
import threading
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.runtime.session import Session
from fp8pass.weights import released
from tests.support.cases import rest
from tests.support.training import same

WIDTH = 16
GIVEN = {"select": "all", "backend": "aot_eager"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def batch(seed=0, rows=WIDTH):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


class Scene:
    """A compiled model, and everything that was seen of it."""

    def __init__(self, recipe="delayed", **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Model()
        recipe = fp8pass.DelayedScaling(amax_history_len=3) if recipe == "delayed" else recipe
        self.compiled = fp8pass.fp8_compile(self.model, recipe, **GIVEN, **options)
        self.session = self.compiled._fp8pass_session
        self.seen, self.monitors, self.saved = [], [], None

    def train(self, seed=0, scale=1.0):
        self.compiled(batch(seed) * scale).square().mean().backward()

    def evaluate(self, seed=0, rows=WIDTH, wants=False):
        with torch.no_grad():
            self.seen.append(self.compiled(batch(seed, rows).requires_grad_(wants)))

    def look(self):
        self.seen.append(fp8pass.state(self.compiled).state_dict())
        self.seen.append((self.session.num_steps, self.session.clock.is_step_pending))
        self.seen.append([p.grad for p in self.model.parameters()])
        self.seen.append(fp8pass.inspect(self.compiled).to_dict())


# -- writers: what may be written between two calls


def of_state(call):
    return lambda scene, number: call(fp8pass.state(scene.compiled))


def weight(change, name="a"):
    """A change of the Parameter, which may give another one."""
    return lambda scene, number: change(getattr(scene.model, name).weight)


def load(scene, number):
    state = fp8pass.state(scene.compiled)
    state.load_state_dict(scene.saved or {k: v * 2 if k.endswith("scale") else v for k, v in state.state_dict().items()})


def watch(scene, number):
    if scene.monitors:
        scene.monitors.pop().stop()
    else:
        scene.monitors.append(fp8pass.monitor(scene.compiled, every=1, log=scene.seen.append))


def hooks(scene, number):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        scene.evaluate(number)
        scene.train(number)


def recompute(scene, number):
    x = batch(number).requires_grad_()
    checkpoint(scene.compiled, x, use_reentrant=bool(number % 2)).square().mean().backward()
    scene.seen.append(x.grad)


def eager(scene, number):
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        scene.evaluate(number)
    scene.seen.append([str(w.message)[:60] for w in found])


def compile_child(scene, number):
    if fp8pass.runtime.wrap.is_in_place(scene.model.act):
        fp8pass.fp8_uncompile(scene.model.act)
    else:
        fp8pass.fp8_compile(scene.model.act, "current", in_place=True, **GIVEN)


def thread(scene, number):
    runs = threading.Thread(target=lambda: scene.evaluate(number))
    runs.start()
    runs.join()


def in_a_backward(scene, number):
    y = batch(number).requires_grad_() * 2
    y.register_hook(lambda _: scene.evaluate(number))
    y.sum().backward()


def failing(scene, number):
    with contextlib.suppress(RuntimeError), torch.no_grad():
        scene.compiled(torch.randn(3, WIDTH + 1))


def tangent(scene, number):
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        x = torch.autograd.forward_ad.make_dual(batch(number), batch(1))
        with pytest.raises(fp8pass.errors.ForwardModeError):
            scene.compiled(x)


def inference(scene, number):
    with torch.inference_mode():
        scene.seen.append(scene.compiled(batch(number)).clone())


def forget(scene, number):
    scene.model.b.weight.data.mul_(8)
    fp8pass.state(scene.compiled).forget_weights()


def rules(scene, number):
    fp8pass.use_rules(scene.compiled, [None, {"a": None}, {"b": "current"}, {"*": None}][number % 4])


#: Those after which the next evaluation shows other numbers, or another state.
SEEN = {
    "train": lambda scene, number: scene.train(number, 1 + number % 5),
    "load": load,
    "rules": rules,
    "write": weight(lambda w: w.detach().mul_(1.5)),
    "write data": weight(lambda w: w.data.mul_(0.5), "b"),
    "exchange data": weight(lambda w: setattr(w, "data", w.data * 2), "b"),
    "exchange": lambda scene, _: setattr(scene.model.a, "weight", nn.Parameter(scene.model.a.weight.detach() * 3)),
    "swap": weight(lambda w: torch.utils.swap_tensors(w, nn.Parameter(w.detach() * 2))),
}
WRITERS = {
    **SEEN,
    "forward alone": lambda scene, number: scene.compiled(batch(number)),
    "step": of_state(lambda state: state.step()),
    "save": lambda scene, number: setattr(scene, "saved", fp8pass.state(scene.compiled).state_dict()),
    "forget": forget,
    "refresh": of_state(lambda state: state.refresh_weights()),
    "restore": of_state(lambda state: state.restore_weights()),
    "watch": watch,
    "manual": lambda scene, _: scene.session.use_steps("manual" if scene.session.clock.mode == "auto" else "auto"),
    "mode": lambda scene, number: scene.model.train(not scene.model.training),
    "freeze": weight(lambda w: w.requires_grad_(not w.requires_grad)),
    "optimize": lambda scene, number: torch.optim.SGD(scene.model.parameters(), 0.1).step(),
    "other rows": lambda scene, number: scene.evaluate(number, 8 + number % 3),
    "wanting input": lambda scene, number: scene.evaluate(number, wants=True),
    "reset": lambda scene, number: torch._dynamo.reset(),
    **{f.__name__: f for f in (inference, hooks, recompute, eager, compile_child, thread, in_a_backward, failing, tangent)},
}


def long_way():
    return mock.patch.object(Session, "takes_short_way", False)


def settled(recipe, **options):
    scene = Scene(recipe, **options)
    scene.train()
    for _ in range(3):
        scene.evaluate()
    return scene


#: These leave other calls, or other graphs, to whatever follows.
LAST = ["rules", "watch", "manual", "compile_child", "freeze", "reset", "mode", "tangent"]
OTHERS = [writer for writer in WRITERS if writer not in LAST]


def written(*writers):
    scene = settled("delayed")
    for writer in writers:
        scene.evaluate()
        before = scene.seen[-1]
        WRITERS[writer](scene, 1)
        for seed in range(2):
            scene.evaluate(seed)
        assert writer not in SEEN or not torch.equal(scene.seen[-2], before)
        scene.look()
        scene.train(5)
        scene.evaluate()
        scene.look()
    return scene.seen


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_quiet_call_takes_the_short_way(recipe, monkeypatch):
    monkeypatch.setattr(released, "_is_used", False)  # an earlier test's model
    scene = settled(recipe)
    with mock.patch.object(Session, "begin_forward", side_effect=AssertionError):
        for seed in range(20):
            scene.evaluate(seed)
    assert scene.session.eager.found == {}


@pytest.mark.parametrize(
    "writers",
    [*((*OTHERS[i::7], last) for i, last in enumerate(LAST[:-1])), LAST[-1:]],
    ids=" ".join,
)
def test_after_a_write_calls_are_as_on_the_long_way(writers):
    with long_way():
        expected = written(*writers)
    assert same(written(*writers), expected)


def wandering(seed):
    choose = random.Random(seed)
    scene = settled(choose.choice(["delayed", "current"]), weight_copies=choose.choice(["auto", "auto", "cache"]))
    for _ in range(12):
        with contextlib.suppress(fp8pass.errors.StaleWeightError):
            if choose.random() < 0.5:
                scene.evaluate(choose.randrange(3))
            else:
                choose.choice(list(WRITERS.values()))(scene, choose.randrange(100))
    scene.look()
    return scene.seen


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
@pytest.mark.parametrize("seed", [*range(3), *rest(range(3, 8))])
def test_random_writes_and_calls_are_as_on_the_long_way(seed):
    with long_way():
        expected = wandering(seed)
    assert same(wandering(seed), expected)


def test_parameters_are_free_when_the_model_lets_go_of_them():
    scene = settled("delayed")
    scene.evaluate()
    model, first, second = (
        weakref.ref(scene.model),
        *(StorageWeakRef(m.weight.untyped_storage()) for m in (scene.model.a, scene.model.b)),
    )
    scene.model.b.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    gc.collect()
    assert second.expired()
    assert not first.expired()
    del scene
    gc.collect()
    assert first.expired()
    assert model() is None


def test_a_thousand_parameters_are_known_by_their_identities():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(40)]), nn.Linear(WIDTH, WIDTH)])

    def run(x):
        for parameter in model[0]:
            x = x + parameter.sum()
        return model[1](x)

    compiled = fp8pass.fp8_compile(run, "current", **GIVEN)
    with torch.no_grad():
        for _ in range(3):
            before = compiled(batch())
        model[0][30] = nn.Parameter(torch.full((2,), 5.0))
        after = compiled(batch())
        assert not torch.equal(before, after)
        assert torch.equal(after, fp8pass.fp8_compile(run, "current", **GIVEN)(batch()))
