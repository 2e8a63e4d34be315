"""Small models that tests share. Plain PyTorch, as a user would write them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import LlamaBlock as LlamaBlock


def mlp(inputs: int = 64, hidden: int = 128, outputs: int = 64, bias: bool = True) -> nn.Sequential:
    """Two linears with a GELU between them: 6 GEMMs."""
    return nn.Sequential(nn.Linear(inputs, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, outputs, bias=bias))


class Net(nn.Module):
    """Modules and Parameters by name, and what `forward` makes of the model and its arguments."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(self, *args, **options)


class BrokenBlock(nn.Module):
    """Two Linears with a graph break between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).relu()
        torch._dynamo.graph_break()
        return x + self.down(h)


class BrokenLayers(nn.Module):
    """Blocks that share their graphs, between breaks."""

    def __init__(self, depth: int, dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BrokenBlock(dim, hidden) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.mean().item() > 1e6:
                x = x / 2
            x = layer(x)
        return x


class ResidualMlp(nn.Module):
    """Two Linears around a ReLU, added to their input."""

    def __init__(self, dim: int = 64, hidden: int = 96, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Layers one after another, and a head, if there is one.

    residual: whether the input of each layer is added to its result. options: of `checkpoint` around each layer; None is none.
    """

    def __init__(
        self, layers: Iterable[nn.Module], head: nn.Module | None = None, residual: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.layers, self.head, self.residual, self.options = nn.ModuleList(layers), head, residual, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = checkpoint(layer, x, **self.options) if self.options else layer(x)
            x = x + y if self.residual else y
        return x if self.head is None else self.head(x)


class Decoder(nn.Module):
    """Token embeddings, Llama blocks, a norm and a head. The loss is outside."""

    def __init__(self, layers: int = 2, dim: int = 32, vocabulary: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, dim), nn.Dropout(dropout)
        self.layers = nn.ModuleList(LlamaBlock(dim, 2 * dim, 2) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
