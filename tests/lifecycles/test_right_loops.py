"""Situations that were right when they were looked for: loops as operations, compiled autograd,
whole steps compiled, Inductor's options, other projects' weights."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from fp8pass import fp8_compile, inspect, state
from tests.lifecycles.harness import RECIPES, decibels
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, loss_of, mlp, sgd
from tests.tolerances import SQNR_MODEL_OUTPUT

# -- loops as operations


class Loop(nn.Module):
    """Applies a linear as often as its input says, then one that is not in the loop."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.again, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weight, bias = self.again.weight, self.again.bias

        def body(i, t):
            return i - 1, torch.tanh(t @ weight.T + bias)

        return self.out(while_loop(lambda i, t: i > 0, body, (torch.tensor(3), x))[1])


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.again, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def combine(carry, row):
            new = torch.tanh(self.again(carry) + row)
            return new, new.clone()

        return self.out(scan(combine, torch.zeros(8, WIDTH), x.reshape(-1, 8, WIDTH))[1].reshape(-1, WIDTH))


@pytest.mark.parametrize("make", [Loop, Scan])
def test_bodies_of_loops_stay_in_high_precision_and_say_so(make):
    model = make()
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")
    with torch.no_grad():
        assert decibels(compiled(batch(0)), model(batch(0))) > SQNR_MODEL_OUTPUT
    gemms = inspect(compiled).gemms
    assert [g.module for g in gemms if g.quantized] == ["out"]
    assert {g.reason.partition(":")[0] for g in gemms if not g.quantized} <= {"unsupported op"}


# -- what is compiled around the model


def trained(call, model, steps=4):
    optimizer, losses = sgd(model), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(call(batch(step)).detach())
        optimizer.step()
    return torch.stack(losses), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["short", "current"])
def test_compiled_autograd_trains_as_without(recipe):
    found = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = mlp()
        compiled = fp8_compile(model, RECIPES[recipe], backend="aot_eager", select="all")

        def call(x, compiled=compiled, is_compiled=is_compiled):
            loss = loss_of(compiled(x), x)
            if is_compiled:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
            else:
                loss.backward()
            return loss

        found.append((*trained(call, model), dict(state(compiled).state_dict())))
    (losses, weights, scales), (others, other_weights, other_scales) = found
    assert losses.equal(others)
    assert all(a.equal(b) for a, b in zip(weights, other_weights, strict=True))
    assert all(value.equal(other_scales[name]) for name, value in scales.items())


@pytest.mark.parametrize("recipe", ["short", "current"])
def test_a_whole_step_under_torch_compile_trains_as_without(recipe):
    """The compiled model is a graph break in it."""
    found = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = mlp()
        compiled = fp8_compile(model, RECIPES[recipe], backend="aot_eager", select="all")

        def call(x, compiled=compiled):
            loss = loss_of(compiled(x), x)
            loss.backward()
            return loss

        found.append(trained(torch.compile(call, backend="aot_eager") if is_compiled else call, model))
    assert found[0][0].equal(found[1][0])
    assert all(a.equal(b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_whole_step_compiles_while_another_model_has_released_parameters():
    """Both models have Dynamo call back before it traces; it must not trace that itself, within the backward."""
    other = mlp().requires_grad_(False)
    released = fp8_compile(other, "current", backend="aot_eager", select="all", release_frozen=True)
    released(batch(0))
    assert any(r.reason is None for r in inspect(released).released.values())
    torch._dynamo.reset()
    model = mlp()
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")

    def call(x):
        loss = loss_of(compiled(x), x)
        loss.backward()
        return loss

    losses, _ = trained(torch.compile(call, backend="aot_eager"), model)
    assert losses.isfinite().all()


# -- Inductor


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}, {"freezing": True}], ids=str
)
def test_modes_of_inductor(options):
    model = mlp()
    expected = fp8_compile(copy.deepcopy(model), "current", select="all")
    freezing = options == {"freezing": True}
    with torch.no_grad():
        want = expected(batch(0))
        torch._dynamo.reset()
        with torch._inductor.config.patch(freezing=freezing):
            compiled = fp8_compile(model, "current", select="all", **({} if freezing else options))
            for _ in range(2):
                assert decibels(compiled(batch(0)), want) > 60
            model[0].weight.mul_(0.5)
            expected._orig_mod[0].weight.mul_(0.5)
            if not freezing:  # which folds weights into the graph, as its users know
                assert decibels(compiled(batch(0)), expected(batch(0))) > 60


# -- other projects' weights


def test_weights_of_tensor_subclasses_are_left_to_their_project():
    from torch.utils._python_dispatch import return_and_correct_aliasing

    class Int8(torch.Tensor):
        """A weight in int8 with one scale, as torchao's are: it dequantizes itself in a linear."""

        @staticmethod
        def __new__(cls, values, scale):
            return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, requires_grad=False)

        def __init__(self, values, scale):
            self.values, self.scale = values, scale

        def __tensor_flatten__(self):
            return ["values", "scale"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, _, size, stride):
            return cls(inner["values"], inner["scale"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.alias.default):
                new = cls(func(args[0].values), args[0].scale)
                return return_and_correct_aliasing(func, args, kwargs or {}, new)
            plain = [a.values.float() * a.scale if isinstance(a, cls) else a for a in args]
            return func(*plain, **(kwargs or {}))

    model = mlp()
    weight = model[0].weight.detach()
    scale = weight.abs().max() / 127
    model[0].weight = nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")
    plain = model(batch(0))
    out = compiled(batch(0))
    assert decibels(out, plain) > SQNR_MODEL_OUTPUT
    loss_of(out, batch(0)).backward()
    assert model[2].weight.grad.shape == (WIDTH, HIDDEN)
