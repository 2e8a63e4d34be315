"""FSDP2 over a mesh of replicas and shards (HSDP): four ranks that see what two see compute what these do, bit for bit."""

import pytest
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import state
from tests.distributed.fsdp2 import Run, differing, load, sgd, sharded
from tests.distributed.support import run_on_ranks

pytestmark = pytest.mark.dist
SHARDS = 2


def trained(rank, gather, saves="", resumes=""):
    """All that a run of shard r % 2 of a batch on rank r computes, its scales, and the bytes that it sent in each step."""
    replicas = dist.get_world_size() // SHARDS
    shape, names = ((SHARDS,), ("shard",)) if replicas == 1 else ((replicas, SHARDS), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    run = Run("delayed", gather, sharded(mesh=mesh), rank % SHARDS, sgd, select="all")
    if resumes:
        load(run, resumes)
    else:
        run.steps(0, 1, 2)
    if saves:
        dcp.save({"model": run.model.state_dict(), "fp8": state(run.compiled)}, checkpoint_id=saves)
        run.results.clear()
    run.steps(3, 4)
    scales = state(run.compiled)
    return [*run.results, *(scales.scale(name).clone() for name in sorted(scales.tensors))], [*map(sum, run.sent)]


def test_four_ranks_train_as_two_do_and_resume(tmp_path):
    two, plain = run_on_ranks(trained, 2, "fp8"), run_on_ranks(trained, 4, None)
    for rank, (found, sent) in enumerate(run_on_ranks(trained, 4, "fp8")):
        assert differing(found, two[rank % SHARDS][0]) == []
        assert differing(found, plain[rank][0]) == []
        assert sent == two[rank % SHARDS][1]
        assert 2 * sent[-1] < 1.1 * plain[rank][1][-1]
    folder = str(tmp_path / "checkpoint")
    saved = run_on_ranks(trained, 4, "fp8", folder)
    for rank, (found, sent) in enumerate(run_on_ranks(trained, 4, "fp8", "", folder)):
        assert differing(found, saved[rank][0]) == []
        assert sent[1] == saved[rank][1][-1] < sent[0], "FP8 travels again from the second step on"
