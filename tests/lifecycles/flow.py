"""Programs that differ in what is called when: several models, evaluations in between, exceptions, threads, nesting."""

import contextlib
import threading
from typing import Any

import torch
from torch import nn
from torch.compiler import nested_compile_region
from torch.func import functional_call

from tests.lifecycles.harness import STEPS, program
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, learn, loss_of, mlp, sgd


@program(options=("manual", "in place", "cache", "by name", "monitor"))
def gan(fp8: Any) -> None:
    """A generator and a critic, each trained on what the other one gives."""
    generator, critic = mlp(0), mlp(1, outputs=32)
    makes, judges = fp8.compile(generator), fp8.compile(critic)
    first, second = sgd(generator, 0.02), sgd(critic, 0.02)
    for step in range(STEPS):
        noise, real = batch(step), batch(400 + step)
        second.zero_grad()
        loss = judges(makes(noise).detach()).mean() - judges(real).mean() + judges(real).square().mean()
        loss.backward()
        fp8.note(critic=critic, critic_loss=loss)
        second.step()
        fp8.end_step(judges)
        first.zero_grad()
        loss = -judges(makes(noise)).mean()
        loss.backward()
        fp8.note(generator=generator, loss=loss)
        first.step()
        fp8.end_step(makes)


@program(options=("manual", "in place", "cache"))
def evaluation_before_backward(fp8: Any) -> None:
    """Reinforcement learning: the model acts without gradients between a forward and its backward."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        out = compiled(x)
        with torch.no_grad():
            action = compiled(batch(500 + step))
        loss = loss_of(out, x) + (out * action).mean()
        loss.backward()
        fp8.note(action=action, loss=loss, gradient=model)
        optimizer.step()
        fp8.end_step(compiled)


@program(options=("in place", "manual"))
def several_models(fp8: Any) -> None:
    """Three models in one process, by turns; two of them share their code."""
    models = [mlp(0), mlp(1), mlp(2, hidden=96)]
    compiled = [fp8.compile(m) for m in models]
    optimizers = [sgd(m) for m in models]
    for step in range(STEPS):
        for i in ((0, 1, 2), (2, 0), (1,))[step % 3]:
            x = batch(step)
            optimizers[i].zero_grad()
            loss_of(compiled[i](x), x).backward()
            fp8.note(**{f"gradient{i}": models[i]})
            optimizers[i].step()
            fp8.end_step(compiled[i])
    for call in compiled:
        with torch.no_grad():
            fp8.note(out=call(batch(80)))


class _Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x).relu()).relu())


@program(options=("manual",))
def compiled_inside_compiled(fp8: Any) -> None:
    """A module that is compiled in place lies in another that is compiled."""
    torch.manual_seed(0)
    inner = mlp(1)
    fp8.compile(inner, in_place=True)
    model = _Outer(inner)
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        fp8.end_step(inner)


@program(recipes=("current", "short"))
def compiled_inside_a_sequential(fp8: Any) -> None:
    """The same in an nn.Sequential, whose forward is torch's: the outer linears run in FP8, too."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    fp8.compile(inner, in_place=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), inner, nn.Linear(WIDTH, WIDTH))
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)


@program(options=("manual", "strict"))
def compiled_blocks(fp8: Any) -> None:
    """An eager model whose blocks are compiled in place, and called in a loop."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(mlp(seed) for seed in range(3))
    for block in blocks:
        fp8.compile(block, in_place=True)
    optimizer = sgd(blocks)
    for step in range(STEPS):
        x = y = batch(step)
        optimizer.zero_grad()
        for block in blocks:
            y = y + block(y)
        loss_of(y, x).backward()
        fp8.note(gradient=blocks)
        optimizer.step()
        for block in blocks:
            fp8.end_step(block)


class _Broken(nn.Module):
    """Graphs between breaks, and a refusal behind the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).relu()
        torch._dynamo.graph_break()
        return self.down(h)


@program(options=("in place", "manual", "monitor"))
def graph_break(fp8: Any) -> None:
    """Two graphs of one model."""
    torch.manual_seed(0)
    model = _Broken()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
    fp8.scales(compiled)


class _Interrupted(Exception):
    """A user's."""


@program(options=("in place", "cache"))
def exception_after_the_forward(fp8: Any) -> None:
    """The step is given up between forward and backward, caught, and training goes on."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        with contextlib.suppress(_Interrupted):
            x = batch(step)
            optimizer.zero_grad()
            loss = loss_of(compiled(x), x)
            if step in (2, 5):
                raise _Interrupted
            loss.backward()
            fp8.note(loss=loss, gradient=model)
            optimizer.step()
    fp8.scales(compiled)


@program(options=("in place", "manual"))
def exception_in_backward(fp8: Any) -> None:
    """A hook of the user's raises in the middle of backward."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)

    def stop(_: Any) -> None:
        raise _Interrupted

    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        out = compiled(x)
        if step in (2, 5):
            out.register_hook(stop)
        loss = loss_of(out, x)
        with contextlib.suppress(_Interrupted):
            loss.backward()
            fp8.note(loss=loss, gradient=model)
            optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


@program(options=("save", "recompute", "manual"))
def retained_graph(fp8: Any) -> None:
    """Two backwards through one forward."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    torch._functorch.config.donated_buffer = False  # what torch asks for with retain_graph
    try:
        for step in range(STEPS):
            x = batch(step)
            optimizer.zero_grad()
            out = compiled(x)
            out.mean().backward(retain_graph=True)
            loss_of(out, x).backward()
            fp8.note(gradient=model)
            optimizer.step()
            fp8.end_step(compiled)
    finally:
        torch._functorch.config.donated_buffer = True
    fp8.scales(compiled)


@program(recipes=("current", "rowwise", "recent"), options=("in place",))
def two_threads(fp8: Any) -> None:
    """Two threads call one model, one after the other: a thread's autograd state is its own."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        thread = threading.Thread(target=learn, args=(fp8, compiled, model, optimizer, step))
        thread.start()
        thread.join()


@program(options=("manual",))
def functional_weights(fp8: Any) -> None:
    """MAML's inner step: the compiled function is called with weights that are no Parameters of the model."""
    model = mlp()

    def call(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (x,))

    compiled = fp8.compile(call)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for step in range(STEPS):
        x = batch(step)
        loss = loss_of(compiled(weights, x), x)
        grads = torch.autograd.grad(loss, list(weights.values()))
        fp8.note(loss=loss, **dict(zip((n.replace(".", "_") for n in weights), grads, strict=True)))
        weights = {n: (p - 0.05 * g).detach().requires_grad_() for (n, p), g in zip(weights.items(), grads, strict=True)}
        fp8.end_step(compiled)


@program(options=("in place", "manual", "cache"))
def tied_autoencoder(fp8: Any) -> None:
    """One weight, which is read as it is and transposed."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(nn.functional.linear(x, self.weight).relu(), self.weight.t())

    model = Tied()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)


@program(options=("in place", "manual", "cache"))
def other_shapes(fp8: Any) -> None:
    """The number of rows differs between steps, and is 1 in evaluations."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        x = batch(step, rows=(32, 48, 33)[step % 3])
        optimizer.zero_grad()
        loss_of(compiled(x), x).backward()
        fp8.note(gradient=model)
        optimizer.step()
        fp8.end_step(compiled)
        with torch.no_grad():
            fp8.note(one=compiled(batch(81, rows=1)))


class _Region(nn.Module):
    """A block that Dynamo traces once for all of its calls."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = mlp(seed)

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


class _Regions(nn.Module):
    """A region of regions, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Region(0), _Region(1)

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(self.first(x)).tanh())


@program(options=("manual", "save", "recompute"))
def regions_in_regions(fp8: Any) -> None:
    """Nested compile regions, frozen in part, with an evaluation after each step."""
    model = nn.Sequential(_Region(2), _Regions(), _Region(3))
    model[0].block[0].requires_grad_(False)
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS // 2):
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(out=compiled(batch(82)))
