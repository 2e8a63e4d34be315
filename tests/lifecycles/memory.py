"""Programs about what backward reads: hooks on saved tensors, offloading, checkpointing, recomputed blocks."""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.lifecycles.harness import ALL_RECIPES, STEPS, program
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, learn, loss_of, mlp, sgd

Around = Callable[[], contextlib.AbstractContextManager[Any]]
STATEFUL = ("delayed", "short", "recent", "one")


def _train(fp8: Any, around: Around, model: nn.Module | None = None, scale: float = 1e-3) -> None:
    """Small losses, as a mean over many tokens gives: gradients need their own scales. around: set for each forward."""
    model = mlp() if model is None else model
    compiled, optimizer = fp8.compile(model), sgd(model, lr=50.0)
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        with around():
            out = compiled(x)
        loss = scale * loss_of(out, x)
        loss.backward()
        fp8.note(loss=loss, gradient=model)
        optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


def _cloned() -> Any:
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


@program(recipes=ALL_RECIPES, options=("monitor", "manual", "in place", "save", "recompute", "strict"))
def hooks_that_clone(fp8: Any) -> None:
    """S1's instance."""
    _train(fp8, _cloned)


@program(recipes=("short", "one", "current"))
def hooks_that_copy_to_the_cpu(fp8: Any) -> None:
    """Offloading as frameworks write it."""
    _train(fp8, lambda: saved_tensors_hooks(lambda t: (t.device, t.to("cpu", copy=True)), lambda kept: kept[1].to(kept[0])))


@program(recipes=("short", "delayed", "mxfp8"))
def hooks_to_bytes(fp8: Any) -> None:
    """Everything becomes bytes of numpy, and a new tensor."""

    def pack(t: torch.Tensor) -> Any:
        return t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.clone(), t.shape, t.dtype

    def unpack(kept: Any) -> torch.Tensor:
        data, shape, dtype = kept
        return data if isinstance(data, torch.Tensor) else torch.frombuffer(bytearray(data), dtype=dtype).view(shape)

    _train(fp8, lambda: saved_tensors_hooks(pack, unpack))


@program(recipes=("recent", "delayed"))
def hooks_to_disk(fp8: Any) -> None:
    """A round trip through torch.save."""

    def pack(t: torch.Tensor) -> bytes:
        file = io.BytesIO()
        torch.save(t, file)
        return file.getvalue()

    _train(fp8, lambda: saved_tensors_hooks(pack, lambda kept: torch.load(io.BytesIO(kept))))


@program(recipes=("short", "delayed"))
def hooks_by_size(fp8: Any) -> None:
    """Only what is as large as the state of the smallest model."""

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t.clone() if t.numel() * t.element_size() >= 64 else t

    _train(fp8, lambda: saved_tensors_hooks(pack, lambda t: t))


@program(recipes=("short", "delayed", "rowwise"), options=("monitor",))
def nested_hooks(fp8: Any) -> None:
    """The inner pair applies."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with saved_tensors_hooks(lambda t: t, lambda t: t), _cloned():
            yield

    _train(fp8, around)


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Hooked(nn.Module):
    """Dynamo runs its frame eagerly because of the hooks, and compiles those of the modules that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _Wrapped(nn.Linear(WIDTH, HIDDEN)), _Wrapped(nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return self.down(self.up(x).relu())


@program(recipes=("short", "delayed", "current"))
def hooks_inside_the_model(fp8: Any) -> None:
    """Around one of its linears."""
    torch.manual_seed(0)
    _train(fp8, contextlib.nullcontext, _Hooked())


class _Parts(nn.Module):
    """Its parts are compiled, it is not."""

    def __init__(self, fp8: Any, around: Around) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(seed) for seed in range(2))
        self.calls, self.around = [fp8.compile(block) for block in self.blocks], around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in self.calls:
            with self.around():
                x = x + call(x)
        return x


@program(recipes=("short", "delayed", "blockwise"))
def hooks_around_blocks(fp8: Any) -> None:
    """An eager model of compiled blocks, each with hooks of its own."""
    model = _Parts(fp8, _cloned)
    optimizer = sgd(model)
    for step in range(STEPS):
        learn(fp8, model, model, optimizer, step)
    for call in model.calls:
        fp8.scales(call)


@program(recipes=("short", "delayed", "rowwise_with_gw_hp"))
def saved_on_the_cpu(fp8: Any) -> None:
    """`save_on_cpu`, which copies even on a CPU where memory is pinned; here as torch does it."""
    _train(fp8, lambda: save_on_cpu(pin_memory=False))


def _checkpointed(fp8: Any, use_reentrant: bool, around: Around = contextlib.nullcontext) -> None:
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        x = batch(step).requires_grad_()
        optimizer.zero_grad()
        with around():
            out = torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=use_reentrant)
        loss = loss_of(out, x.detach())
        loss.backward()
        fp8.note(loss=loss, gradient=model, dx=x.grad)
        optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


@program(options=("manual", "in place", "cache", "monitor"))
def checkpoint_around_the_model(fp8: Any) -> None:
    """Non-reentrant: backward runs the forward again."""
    _checkpointed(fp8, use_reentrant=False)


@program(recipes=("delayed", "short", "recent", "current"))
def reentrant_checkpoint_around_the_model(fp8: Any) -> None:
    """The first run has no gradients, the recomputation records."""
    _checkpointed(fp8, use_reentrant=True)


@program(recipes=("delayed", "short", "current"))
def checkpoint_and_hooks(fp8: Any) -> None:
    """Activation checkpointing with offloading, as TRL combines them."""
    _checkpointed(fp8, use_reentrant=False, around=_cloned)


class _CheckpointInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(seed) for seed in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


@program(options=("save", "recompute", "cache", "manual", "by name"))
def checkpoint_inside_the_model(fp8: Any) -> None:
    """Recomputation in the graph: the partitioner's."""
    torch.manual_seed(0)
    model = _CheckpointInside()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
    fp8.scales(compiled)


class _Reversible(torch.autograd.Function):
    """y1 = x1, y2 = x2 + f(x1); backward computes x2 from the outputs, and f again."""

    @staticmethod
    def forward(ctx: Any, x1: torch.Tensor, x2: torch.Tensor, f: Any, *parameters: Any) -> Any:
        ctx.f, ctx.parameters = f, parameters
        with torch.no_grad():
            y2 = x2 + f(x1)
        ctx.save_for_backward(x1.detach(), y2)
        return x1.clone(), y2

    @staticmethod
    def backward(ctx: Any, g1: torch.Tensor, g2: torch.Tensor) -> Any:
        x1, _ = ctx.saved_tensors
        with torch.enable_grad():
            x1 = x1.detach().clone().requires_grad_()
            out = ctx.f(x1)
        grads = torch.autograd.grad(out, [x1, *ctx.parameters], g2)
        return g1 + grads[0], g2, None, *grads[1:]


@program(recipes=(*STATEFUL[:2], "current", "rowwise", "blockwise"), options=("cache",))
def reversible_blocks(fp8: Any) -> None:
    """RevNet's: a custom Function runs compiled blocks without gradients, and in its backward again, on other tensors."""
    blocks = [mlp(seed, std=5e-4) for seed in range(2)]
    compiled = [fp8.compile(block) for block in blocks]
    optimizer = torch.optim.SGD([p for b in blocks for p in b.parameters()], lr=1e-3)
    for step in range(STEPS + 4):
        optimizer.zero_grad()
        x1, x2 = batch(step), batch(step + 200)
        for block, call in zip(blocks, compiled, strict=True):
            x1, x2 = _Reversible.apply(x2.requires_grad_(), x1.requires_grad_(), call, *block.parameters())
        (1e-4 * (x1 + x2)).square().mean().backward()
        fp8.note(out=x2, first=blocks[0], second=blocks[1])
        optimizer.step()
