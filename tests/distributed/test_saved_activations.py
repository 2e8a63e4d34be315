"""`saved_activations="fp8"` on two ranks: bit for bit what averaging the gradients of both by hand gives."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8pass import fp8_compile, inspect
from tests.distributed.support import on_ranks
from tests.support.cases import rest

pytestmark = pytest.mark.dist


class Model(nn.Module):
    """A norm and a perceptron around which the input is added; the backward reads the sum and the input of GELU."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(64, 128), nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        x = self.embed(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(model, recipe, average):
    """Parameters after two steps, and the modules whose values are saved in FP8. average: what to do to gradients."""
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, backend="aot_eager", saved_activations="fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        for parameter in model.parameters() if average else ():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
        optimizer.step()
    modules = {v.module for graph in inspect(compiled).graphs for v in graph.saved if v.quantized}
    held = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in held], modules


@pytest.mark.parametrize(
    ("wrapper", "recipe"), [("ddp", None), ("fsdp2", "blockwise"), *rest([("ddp", "blockwise"), ("fsdp2", None)])], ids=str
)
@on_ranks(2)
def test_ranks_train_as_by_hand(rank, wrapper, recipe):
    torch.manual_seed(0)
    by_hand = Model()
    model = copy.deepcopy(by_hand)
    model = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    expected, modules = trained(by_hand, recipe, average=True)
    found, ours = trained(model, recipe, average=False)
    assert all(map(torch.equal, found, expected))
    assert {name.rpartition(".")[2] for name in ours} == {name.rpartition(".")[2] for name in modules} >= {"up"}
