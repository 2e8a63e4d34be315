"""DDP's and FSDP2's options as programs set them: each trains bit for bit as without the option, scales included."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fp8pass import fp8_compile, inspect, state
from tests.distributed.support import everyone, on_ranks

pytestmark = pytest.mark.dist
STEPS = 6
OPTIONS = {
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


class Model(nn.Module):
    """A perceptron with a layer that no forward calls, and a scale that FSDP2 may ignore."""

    def __init__(self, has_unused):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.gain = nn.Parameter(torch.ones(64))
        if has_unused:
            self.unused = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(x)))


def seeded(has_unused=False):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model(has_unused)


def trained(compiled, optimizer):
    """Losses, scales and how many GEMMs ran in FP8, of STEPS steps."""
    losses = []
    for step in range(STEPS):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (compiled(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = state(compiled)
    scales = {name: tensors.scale(name).item() for name in tensors.tensors}
    return losses, scales, sum(g.quantized for g in inspect(compiled).gemms)


@functools.cache
def with_option(option):
    """The ranks of this file keep what they find without one."""
    model = DistributedDataParallel(seeded(option == "unused parameters"), **OPTIONS.get(option, {}))
    compiled = fp8_compile(model, "delayed", backend="aot_eager", select="all")
    if option == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(compiled, optimizer)


@pytest.mark.parametrize("option", [*OPTIONS, "zero"])
@on_ranks(2)
def test_an_option_of_ddp_changes_nothing(rank, option):
    losses, scales, num_quantized = found = with_option(option)
    assert found == with_option(None)
    assert num_quantized == 5, "the input of the model has no gradient"
    assert everyone(scales) == [scales] * 2
    assert scales
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_a_parameter_that_fsdp2_ignores(rank):
    found = []
    for ignores in (False, True):
        model = seeded()
        fully_shard(model, ignored_params={model.gain} if ignores else None)
        model.gain.requires_grad_(False)  # an ignored Parameter's gradients are its owner's to reduce
        compiled = fp8_compile(model, "delayed", backend="aot_eager", select="all")
        found.append(trained(compiled, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)))
    assert found[0] == found[1]
    assert found[0][2] > 0
