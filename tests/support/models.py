"""Small models that tests share. Plain PyTorch, as a user would write them."""

import torch
from torch import nn

from benchmarks.models import LlamaBlock as LlamaBlock


def mlp(inputs: int = 64, hidden: int = 128, outputs: int = 64, bias: bool = True) -> nn.Sequential:
    """Two linears with a GELU between them: 6 GEMMs."""
    return nn.Sequential(nn.Linear(inputs, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, outputs, bias=bias))


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

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))
