"""Warm starts on two ranks that share a cache: each way to spread a model hits on its second start, or says why not."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8pass import fp8_compile, inspect
from tests.distributed import models
from tests.distributed.support import on_ranks
from tests.support.models import ResidualMlp
from tests.support.training import same

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive]

DDP = "bypassed: torch caches no such graph: Won't cache a graph with fakify_first_call enabled"


def ddp(model, mesh):
    """Several buckets, at which DDP's optimizer cuts the graph."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000
    return fp8_compile(DistributedDataParallel(model, bucket_cap_mb=0.02), "delayed"), model


def ddp_of_one_bucket(model, mesh):
    return fp8_compile(DistributedDataParallel(model), "delayed"), model


def group(model, mesh):
    return fp8_compile(model, "delayed", amax_reduction_group=dist.group.WORLD), model


def fsdp(model, mesh):
    """In place, so that eager code runs between the blocks."""
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return fp8_compile(model, "current", in_place=True, fsdp_gather="fp8"), model


def tensor_parallel(model, mesh):
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fp8_compile(model, "delayed"), model


def simple_fsdp(model, mesh):
    return fp8_compile(models.simple_fsdp(model, mesh), "delayed"), model


WAYS = {
    "ddp with several buckets": (ddp, DDP),
    "ddp of one bucket": (ddp_of_one_bucket, "hit"),
    "amax_reduction_group": (group, "hit"),
    "FSDP2 with gathers in FP8": (fsdp, "hit"),
    "tensor parallelism": (tensor_parallel, "hit"),
    "SimpleFSDP": (simple_fsdp, "hit"),
}


def numbers_of(compiled, model, rank):
    """Outputs and gradients of three steps."""
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(3):
        out = compiled(torch.randn(16, 64))
        out.square().sum().backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        found += [out.detach().clone(), *(g.clone() for g in grads)]
        model.zero_grad()
    return found


@pytest.mark.parametrize("way", list(WAYS))
@on_ranks(2, fresh=True)
def test_two_ranks_share_a_cache_and_hit_on_their_second_start(rank, way, tmp_path):
    """With the same numbers and the same table."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    make, expected = WAYS[way]
    uses, found = [], []
    with functorch_config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            torch.manual_seed(0)
            mesh = init_device_mesh("cpu", (2,))
            compiled, model = make(nn.Sequential(*(ResidualMlp() for _ in range(2))), mesh)
            numbers, seen = numbers_of(compiled, model, rank), inspect(compiled)
            uses.append(set(seen.cache.values()))
            found.append((numbers, seen.to_dict()["gemms"]))
    assert uses[1] == {expected}
    assert uses[0] <= {"miss", "hit", DDP}, "a rank may find what the other has just written"
    assert same(*found)


@on_ranks(2, fresh=True)
def test_other_ranks_of_the_amax_reduction_group_miss(rank, tmp_path):
    """In starts with one group after the other."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    found = []
    with functorch_config.patch(enable_autograd_cache=True):
        for ranks in (dist.group.WORLD, dist.group.WORLD, alone, alone):
            torch._dynamo.reset()
            torch.manual_seed(0)
            compiled = fp8_compile(ResidualMlp(), "delayed", amax_reduction_group=ranks)
            for _ in range(2):
                compiled(torch.randn(16, 64)).square().sum().backward()
            found.append(set(inspect(compiled).cache.values()))
    assert found[0] <= {"miss", "hit"}, "a rank may find what the other has just written"
    assert found[1:] == [{"hit"}, {"miss"}, {"hit"}]
