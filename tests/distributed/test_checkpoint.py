"""torch.distributed.checkpoint of model, optimizer and FP8 state, and training that goes on from it."""

import contextlib

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fp8pass import DelayedScaling, Format, fp8_compile, state
from fp8pass.errors import CheckpointMismatchError
from tests.distributed.models import loss_of, seeded, spread, train
from tests.distributed.support import run_on_ranks
from tests.support.cases import rest
from tests.support.training import same
from tests.tolerances import RESHARDED_LOSS

pytestmark = pytest.mark.dist
SAVED_AT, STEPS = 4, 8


def build(kind, recipe):
    model = seeded()
    compile_ = lambda m: fp8_compile(m, recipe, backend="aot_eager")  # noqa: E731
    compiled, shard, num_shards = (compile_(model), 0, 1) if kind == "single" else spread(model, kind, compile_)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, compiled, optimizer, shard, num_shards


def snapshot(compiled):
    view = state(compiled)
    return {n: (view.amax_history(n)[1:], view.scale(n)) for n in view.tensors}


def trained(rank, kind, recipe, folder, resumes=False, warm=False):
    """Losses after the checkpoint, and the state in the end, of a run that is not interrupted, or resumed from it: warm, where
    the model has trained already."""
    model, compiled, optimizer, *shards = build(kind, recipe)
    if not resumes or warm:
        train(compiled, None, range(2 if resumes else SAVED_AT), *shards, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": moments} | ({} if resumes and not warm else {"fp8": state(compiled)})
    if resumes:
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        if not warm:
            state(compiled).load_checkpoint(folder)
    else:
        dcp.save(parts, checkpoint_id=folder)
    losses = train(compiled, None, range(SAVED_AT, STEPS), *shards, optimizer)
    return losses, snapshot(compiled)


@pytest.mark.parametrize(
    ("kind", "recipe", "warm"),
    [
        ("ddp", DelayedScaling(amax_history_len=3), False),
        ("fsdp", DelayedScaling(amax_history_len=3), False),
        ("tp", DelayedScaling(amax_history_len=3), True),
        ("ddp", DelayedScaling(amax_history_len=3, reduce_amax=False), False),
    ],
)
def test_resume_on_as_many_ranks_is_bit_for_bit(tmp_path, kind, recipe, warm):
    before = run_on_ranks(trained, 2, kind, recipe, str(tmp_path))
    assert same(run_on_ranks(trained, 2, kind, recipe, str(tmp_path), True, warm), before)
    assert same(before[0][1], before[1][1]) == recipe.reduce_amax


@pytest.mark.parametrize(
    ("kind", "num_ranks", "kind_after", "num_ranks_after"),
    [
        ("ddp", 2, "single", 1),
        ("fsdp", 2, "fsdp", 4),
        *rest([("sp", 2, "single", 1), ("fsdp+tp", 4, "fsdp", 2)]),
    ],
)
def test_resume_on_another_number_of_ranks(tmp_path, kind, num_ranks, kind_after, num_ranks_after):
    recipe = DelayedScaling(amax_history_len=3)
    losses, scales = run_on_ranks(trained, num_ranks, kind, recipe, str(tmp_path))[0]
    for again, scales_again in run_on_ranks(trained, num_ranks_after, kind_after, recipe, str(tmp_path), True):
        assert losses == pytest.approx(again, rel=RESHARDED_LOSS)
        assert scales.keys() == scales_again.keys()


def with_two_formats(rank, folder, reduce_amax, resumes):
    """Output gradients in E5M2 for one GEMM and in E4M3 for the other. What is saved after two steps, and the state of a run
    that goes on for another two."""
    options = {"amax_history_len": 3, "reduce_amax": reduce_amax}
    rules = {"*:grad_weight": DelayedScaling(fp8_format=Format.E4M3, **options)}
    compiled = fp8_compile(seeded(), DelayedScaling(**options), rules=rules, backend="aot_eager", select="all")
    if resumes:
        state(compiled).load_checkpoint(folder)
    else:
        for step in range(2):
            loss_of(compiled, step, rank, 2).backward()
        dcp.save({"fp8": state(compiled)}, checkpoint_id=folder)
    saved = state(compiled).state_dict()
    for step in range(2, 4):
        loss_of(compiled, step, rank, 2).backward()
    return saved, state(compiled).state_dict()


@pytest.mark.parametrize(("num_ranks", "reduce_amax"), [(2, True), (2, False)])
def test_a_tensor_in_two_formats_resumes_bit_for_bit(tmp_path, num_ranks, reduce_amax):
    straight, again = (run_on_ranks(with_two_formats, num_ranks, str(tmp_path), reduce_amax, resumes) for resumes in (0, 1))
    owner = "" if reduce_amax else "@0"
    assert {f"head:grad_output.scale{owner}", f"head:grad_output@recipe1.scale{owner}"} <= straight[0][0].keys()
    for (saved, end), (loaded, end_again) in zip(straight, again, strict=True):
        assert saved.keys() == loaded.keys()
        assert end.keys() == end_again.keys()
        # Where ranks reduce, each has the largest staged amax of all ranks after loading: what the boundary makes of them.
        assert all(saved[k].equal(loaded[k]) for k in saved if ".staged" not in k)
        assert all(end[k].equal(end_again[k]) for k in end)


def own_state():
    return fp8_compile(seeded(), DelayedScaling(reduce_amax=False), backend="aot_eager")


def save_own_state(rank, folder):
    compiled = own_state()
    loss_of(compiled, 0).backward()
    dcp.save({"fp8": state(compiled)}, checkpoint_id=folder)


def load_on_more_ranks(rank, folder):
    lacks = pytest.raises(CheckpointMismatchError, match=f"none for rank {rank}")
    with lacks if rank > 1 else contextlib.nullcontext():
        state(own_state()).load_checkpoint(folder)


def load_too_early(rank, folder):
    with pytest.raises(Exception, match="load_checkpoint"):
        dcp.load({"fp8": state(own_state())}, checkpoint_id=folder)


def test_states_of_single_ranks_need_as_many_ranks_and_a_state_to_load_into(tmp_path):
    run_on_ranks(save_own_state, 2, str(tmp_path))
    run_on_ranks(load_on_more_ranks, 4, str(tmp_path))
    run_on_ranks(save_own_state, 1, str(tmp_path / "one"))
    run_on_ranks(load_too_early, 1, str(tmp_path / "one"))
