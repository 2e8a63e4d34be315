"""Programs that differ in who writes the weights when: optimizers compiled, fused, in backward, with closures and scalers."""

from typing import Any

import torch
from torch import nn

from tests.lifecycles.harness import STEPS, program
from tests.lifecycles.parts import batch, learn, loss_of, mlp, sgd
from tests.lifecycles.teachers import STALE

KEPT = ("cache", "save")


def _with(fp8: Any, make: Any, compiles_step: bool = False) -> None:
    """An optimizer that `make` makes of Parameters. Its own rounding is torch's, compiled or not."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), make(model.parameters())
    step_of = torch.compile(optimizer.step, backend="aot_eager") if compiles_step else optimizer.step
    for step in range(STEPS):
        x = batch(step)
        loss = loss_of(compiled(x), x)
        loss.backward()
        fp8.note(loss=loss, gradient=model)
        step_of()
        optimizer.zero_grad(set_to_none=False)
        fp8.end_step(compiled)
        with torch.no_grad():
            fp8.note(evaluation=compiled(batch(60)))


@program(options=KEPT)
def adamw_fused(fp8: Any) -> None:
    """One kernel for all Parameters, which raises no version counter where it is compiled."""
    _with(fp8, lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, fused=True))


@program(options=KEPT)
def adamw_fused_and_compiled(fp8: Any) -> None:
    """S2's instance."""
    _with(fp8, lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, fused=True), compiles_step=True)


@program(options=KEPT)
def sgd_foreach_and_compiled(fp8: Any) -> None:
    """All Parameters in lists."""
    _with(fp8, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), compiles_step=True)


@program(options=KEPT, recipes=("short", "current", "rowwise"), refused=STALE)
def adamw_by_hand(fp8: Any) -> None:
    """torch's fused operation, called by the user's own optimizer."""
    model = mlp()
    compiled = fp8.compile(model)
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    steps = [torch.tensor(0.0) for _ in parameters]
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-3, "amsgrad": False, "maximize": False}
    for step in range(STEPS):
        x = batch(step)
        model.zero_grad()
        loss = loss_of(compiled(x), x)
        loss.backward()
        fp8.note(loss=loss, gradient=model)
        with torch.no_grad():
            torch._foreach_add_(steps, 1)
            grads = [p.grad for p in parameters]
            torch._fused_adamw_(parameters, grads, first, second, [], steps, lr=0.02, **numbers)
            fp8.note(evaluation=compiled(batch(60)))
        fp8.end_step(compiled)


@program(options=("cache", "save", "manual", "monitor"))
def optimizer_in_backward(fp8: Any) -> None:
    """Each Parameter is updated as soon as its gradient is there, and has none afterwards."""
    model = mlp()
    compiled = fp8.compile(model)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05)

        def update(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        x = batch(step)
        loss = loss_of(compiled(x), x)
        loss.backward()
        fp8.note(loss=loss, weight=model[0].weight, bias=model[2].bias)
        fp8.end_step(compiled)


@program(options=("cache", "manual", "by name"))
def accumulation(fp8: Any) -> None:
    """Three microbatches a step, forward and backward in turn. With automatic steps, each forward ends a step."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            x = batch(3 * step + part)
            (loss_of(compiled(x), x) / 3).backward()
        fp8.note(gradient=model)
        optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


@program(recipes=("short", "delayed"), options=("manual",))  # with state: current scaling has no boundary
def evaluation_before_the_first_boundary(fp8: Any) -> None:
    """Two microbatches with an evaluation in between, in the first step as in all others; small weights."""
    model = mlp(std=5e-4)
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            x = batch(2 * step + part)
            loss_of(compiled(x), x).backward()
            with torch.no_grad():
                fp8.note(evaluation=compiled(batch(62)))
        fp8.note(gradient=model)
        optimizer.step()
        fp8.end_step(compiled)


@program(options=("manual", "by name"))
def microbatches_before_backward(fp8: Any) -> None:
    """Two forwards, then two backwards: a boundary falls between a forward and its backward."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step), batch(300 + step)
        first, second = loss_of(compiled(x), x), loss_of(compiled(y), y)
        first.backward()
        second.backward()
        fp8.note(first=first, second=second, gradient=model)
        optimizer.step()
        fp8.end_step(compiled)


@program(options=("cache", "manual"))
def scaler_with_overflow(fp8: Any) -> None:
    """A loss scale that overflows in some steps: these leave the weights and the histories as they are."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        scale = 2.0**10 if step % 3 else float("inf")
        loss = loss_of(compiled(x), x)
        (loss * scale).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        fp8.note(loss=loss, finite=float(finite))
        if finite:
            for parameter in model.parameters():
                parameter.grad.div_(scale)
            fp8.note(gradient=model)
            optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


@program(options=("cache", "manual"))
def sharpness_aware(fp8: Any) -> None:
    """SAM: the weights climb, a second gradient, and they come back."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        loss_of(compiled(x), x).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = [(p, p.grad * (0.05 / norm)) for p in model.parameters()]
        with torch.no_grad():
            for p, by in moved:
                p.add_(by)
        optimizer.zero_grad()
        loss = loss_of(compiled(x), x)
        loss.backward()
        fp8.note(loss=loss, gradient=model)
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        optimizer.step()
        fp8.end_step(compiled)


@program(options=("cache",), refused=STALE)
def zeroth_order(fp8: Any) -> None:
    """MeZO: two forwards without gradients per step, at weights that are moved by `.data` and back."""
    model = mlp()
    compiled = fp8.compile(model)

    def move(seed: int, by: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=by)

    for step in range(STEPS):
        x = batch(step)
        with torch.no_grad():
            move(step, 0.05)
            up = loss_of(compiled(x), x)
            move(step, -0.1)
            down = loss_of(compiled(x), x)
            move(step, 0.05)
        fp8.note(up=up, down=down)
        move(step, -0.01 * float(torch.sign(up - down)))


@program(recipes=("current", "short"), options=("cache",))
def lbfgs(fp8: Any) -> None:
    """A closure that is called several times per step."""
    model = mlp()
    compiled = fp8.compile(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)
    x = batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(compiled(x), x)
        loss.backward()
        fp8.note(loss=loss)
        return loss

    for _ in range(STEPS // 2):
        optimizer.step(closure)


@program(options=("cache", "manual"))
def clipped_and_decayed(fp8: Any) -> None:
    """Clipping and a schedule of the learning rate."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step, also=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        schedule.step()
