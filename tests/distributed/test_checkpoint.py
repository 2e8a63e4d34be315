"""What several ranks leave behind: checkpoints from which training goes on, a cache that starts are warm by, and exports."""

import functools
import json
import os

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import DelayedScaling, export_fp8, fp8_compile, inspect, state, state_dict_fp8
from tests.distributed.models import loss_of, seeded, simple_fsdp, spread, train
from tests.distributed.support import RanksFailed, on_ranks, run_on_ranks
from tests.support.training import same
from tests.tolerances import RESHARDED_LOSS

pytestmark = pytest.mark.dist
SAVED_AT, STEPS = 4, 8
LONG = DelayedScaling(amax_history_len=3)


def build(kind, recipe, **options):
    """A model that is spread over the ranks in a way, what is compiled, and which part of a batch it gets, of how many."""
    torch._dynamo.reset()
    model, compile_ = seeded(), functools.partial(fp8_compile, recipe=recipe, **{"backend": "aot_eager"} | options)
    if kind in ("single", "simple fsdp"):
        return model, compile_(model if kind == "single" else simple_fsdp(model, init_device_mesh("cpu", (2,)))), 0, 1
    return model, *spread(model, kind, compile_)


# -- checkpoints


def trained(rank, kind, recipe, folder, resumes=False):
    """Losses after the checkpoint, and the state in the end, of a run that is not interrupted, or resumed from it."""
    model, compiled, *shards = build(kind, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not resumes:
        train(compiled, None, range(SAVED_AT), *shards, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": moments}
    if resumes:
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        state(compiled).load_checkpoint(folder)
    else:
        dcp.save(parts | {"fp8": state(compiled)}, checkpoint_id=folder)
    losses, view = train(compiled, None, range(SAVED_AT, STEPS), *shards, optimizer), state(compiled)
    return losses, {n: (view.amax_history(n)[1:], view.scale(n)) for n in view.tensors}


OWN = DelayedScaling(amax_history_len=3, reduce_amax=False)


@pytest.mark.parametrize(("kind", "recipe"), [("fsdp", LONG), ("tp", LONG), ("ddp", OWN)], ids=str)
def test_resume_on_as_many_ranks_is_bit_for_bit(tmp_path, kind, recipe):
    before = run_on_ranks(trained, 2, kind, recipe, str(tmp_path))
    assert same(run_on_ranks(trained, 2, kind, recipe, str(tmp_path), True), before)
    assert same(before[0][1], before[1][1]) == recipe.reduce_amax


@pytest.mark.parametrize(("kind", "num_ranks", "kind_after", "num_after"), [("ddp", 2, "single", 1), ("fsdp+tp", 4, "fsdp", 2)])
def test_resume_on_another_number_of_ranks(tmp_path, kind, num_ranks, kind_after, num_after):
    losses, scales = run_on_ranks(trained, num_ranks, kind, LONG, str(tmp_path))[0]
    for again, scales_again in run_on_ranks(trained, num_after, kind_after, LONG, str(tmp_path), True):
        assert losses == pytest.approx(again, rel=RESHARDED_LOSS)
        assert scales.keys() == scales_again.keys()


# -- warm starts

BYPASSED = "bypassed: torch caches no such graph: Won't cache a graph with fakify_first_call enabled"
#: How a model is spread, its recipe and options.
STARTS = [("fsdp", "current", {"fsdp_gather": "fp8"}), ("simple fsdp", "delayed", {})]


@pytest.mark.exhaustive
@on_ranks(2, fresh=True)
def test_two_ranks_share_a_cache_and_hit_on_their_second_start(rank, tmp_path):
    """With the same numbers and the same table."""
    for kind, recipe, options in STARTS:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / kind.replace(" ", "-"))
        uses, found = [], []
        with functorch_config.patch(enable_autograd_cache=True):
            for _ in range(2):
                model, compiled, *shards = build(kind, recipe, backend="inductor", **options)
                losses, seen = train(compiled, model.parameters(), range(3), *shards), inspect(compiled)
                uses.append(set(seen.cache.values()))
                found.append((losses, seen.to_dict()["gemms"]))
        assert uses[1] == {"hit"}, kind
        assert uses[0] <= {"miss", "hit", BYPASSED}, "a rank may find what the other has just written"
        assert same(*found), kind


# -- exports: shards are gathered, rank 0 writes, tensors are those of one process


def exported(rank, kind, recipe, folder):
    """(tensors after a step's forward and backward, files that this rank wrote, what is kept and why)."""
    # With FSDP2 the head runs between graphs.
    _, compiled, *shards = build(kind, recipe, rules=None if kind == "fsdp" else {"head": None})
    loss_of(compiled, 0, *shards).backward()
    tensors = {name: tensor.clone() for name, tensor in state_dict_fp8(compiled)}
    report = export_fp8(compiled, folder)
    dist.barrier()
    return {n: (t.dtype, t.flatten().view(torch.uint8).tolist()) for n, t in tensors.items()}, report.files, report.kept


@pytest.mark.parametrize(("kind", "recipe"), [("fsdp", "delayed"), ("ddp", "rowwise")])
def test_ranks_export_what_one_process_does(kind, recipe, tmp_path):
    ((single, *_),) = run_on_ranks(exported, 1, "single", recipe, tmp_path / "one")
    results = run_on_ranks(exported, 2, kind, recipe, tmp_path / kind)
    assert [files for _, files, _ in results] == [["model.safetensors"], []]
    for tensors, _, kept in results:
        assert tensors == single
        assert kept.keys() == {"emb.weight", "head.weight"}
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", kind)]
    assert files[0] == files[1]
    config = json.loads((tmp_path / kind / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["head"]


def test_shards_of_tensor_parallelism_are_refused(tmp_path):
    """A rank's GEMM reads a shard, with a scale of its own."""
    with pytest.raises(RanksFailed, match=r"reads \[32, 32\] of its \[64, 32\], a shard"):
        run_on_ranks(exported, 2, "tp", "current", tmp_path, fresh=True)
    assert not list(tmp_path.iterdir())
