"""FSDP2 over a mesh of replicas and shards (HSDP): four ranks that see what two see compute what these do, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8pass import fp8_compile, state
from tests.distributed.support import run_on_ranks
from tests.distributed.test_fsdp2_gather import WIDTH, blocks, counted

pytestmark = pytest.mark.dist
SHARDS = 2


class Training:
    """Losses, gradients, scales and the bytes that gathers send, of shard r % 2 of a batch on rank r."""

    def __init__(self, gather):
        torch._dynamo.reset()
        replicas = dist.get_world_size() // SHARDS
        shape, names = ((SHARDS,), ("shard",)) if replicas == 1 else ((replicas, SHARDS), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = blocks()
        for block in self.model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.compiled = fp8_compile(self.model, "delayed", backend="aot_eager", select="all", fsdp_gather=gather)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.found, self.sent = [], []

    def steps(self, *steps):
        for step in steps:
            shard = dist.get_rank() % SHARDS
            x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * step + shard))
            with counted() as (sent, _):
                loss = self.compiled(x).float().square().mean()
                loss.backward()
            self.sent.append(sum(sent))
            self.found += [loss.detach().clone(), *(p.grad.to_local().clone() for p in self.model.parameters())]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def results(self):
        scales = state(self.compiled)
        return [*self.found, *(scales.scale(name).clone() for name in sorted(scales.tensors))]


def trained(rank, gather, folder):
    run = Training(gather).steps(0, 1, 2)
    if folder is not None:
        dcp.save({"model": run.model.state_dict(), "fp8": state(run.compiled)}, checkpoint_id=folder)
        run.found.clear()
    run.steps(3, 4)
    return run.results(), run.sent


def resumed(rank, gather, folder):
    run = Training(gather)
    weights = run.model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    run.model.load_state_dict(weights)
    state(run.compiled).load_checkpoint(folder)
    run.steps(3, 4)
    return run.results(), run.sent


def differing(ours, theirs):
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not a.equal(b)]


def test_four_ranks_train_as_two_do_and_resume(tmp_path):
    two, plain = run_on_ranks(trained, 2, "fp8", None), run_on_ranks(trained, 4, None, None)
    four = run_on_ranks(trained, 4, "fp8", None)
    for rank, (results, sent) in enumerate(four):
        assert differing(results, two[rank % SHARDS][0]) == []
        assert differing(results, plain[rank][0]) == []
        assert sent == two[rank % SHARDS][1]
        assert 2 * sent[-1] < 1.1 * plain[rank][1][-1]
    folder = str(tmp_path / "checkpoint")
    saved = run_on_ranks(trained, 4, "fp8", folder)
    for rank, (results, sent) in enumerate(run_on_ranks(resumed, 4, "fp8", folder)):
        assert differing(results, saved[rank][0]) == []
        assert sent[1] == saved[rank][1][-1] < sent[0], "FP8 travels again from the second step on"
