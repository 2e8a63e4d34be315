"""Models and batches that programs share. Widths are small, and 160 is more than a block of 128."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS, WIDTH, HIDDEN = 32, 64, 160


def mlp(
    seed: int = 0, inputs: int = WIDTH, hidden: int = HIDDEN, outputs: int = WIDTH, std: float | None = None
) -> nn.Sequential:
    """Two linears and a GELU. std: of the weights, where not torch's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
    for module in model if std is not None else ():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    return model


def batch(step: int, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    """The same numbers at each run; their size differs between steps."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 + step)) * (1 + step % 3)


def target(x: torch.Tensor) -> torch.Tensor:
    """What a model of the same width is to learn."""
    return x.roll(1, -1).tanh()


def loss_of(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (out - target(x)).square().mean()


def learn(
    fp8: Any, compiled: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, step: int, also: Any = None
) -> torch.Tensor:
    """A step of training with its loss and gradients noted. also: called between backward and the optimizer's step."""
    x = batch(step)
    optimizer.zero_grad()
    loss = loss_of(compiled(x), x)
    loss.backward()
    fp8.note(loss=loss, gradient=model)
    if also is not None:
        also()
    optimizer.step()
    fp8.end_step(compiled)
    return loss.detach()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Without moments, so that what differs stays as small as it is."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
