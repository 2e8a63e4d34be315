"""Small models for the passes of the rewrite, each with a product that plain models do not have."""

import torch
from torch import nn

from tests.support.models import Net
from tests.support.moe import Experts, offsets


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, 0] * 0).long()
        return self.head(self.up(self.embedding(tokens))) + self.head(x)


class Batched(nn.Module):
    """Products with one weight of a batch, with a stack of weights, and of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.stack = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(3, 48, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bsd,df->bsf", x, self.shared)
        return torch.bmm(h, self.stack) @ h.new_ones(40, 16)


def wide() -> Net:
    """More matrices that are ready together than one launch takes."""
    return Net(
        lambda self, x: torch.cat([layer(x) for layer in self.layers], -1),
        layers=nn.ModuleList(nn.Linear(48, 48 if i % 3 else 20) for i in range(20)),
    )


class SortedExperts(nn.Module):
    """Experts whose rows are sorted already, in groups of odd sizes, one of them empty; rows beyond the last belong to none."""

    def __init__(self, inputs: int = 48, outputs: int = 80) -> None:
        super().__init__()
        self.up, self.down = (Experts(4, k, n) for k, n in ((inputs, outputs), (outputs, inputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offs = offsets((5, 0, 33, 17))
        return self.down(torch.tanh(self.up(x, offs)), offs)


class Gathering(nn.Module):
    """A module that reads what both ranks have, along a dimension."""

    def __init__(self, inner: nn.Module, dim: int = 0) -> None:
        super().__init__()
        self.inner, self.dim = inner, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        return self.inner(all_gather_tensor_autograd(x, self.dim, torch.distributed.group.WORLD))
