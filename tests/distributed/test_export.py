"""Exports of models that are spread over ranks: shards are gathered, rank 0 writes, tensors are those of one process."""

import errno
import functools
import json
import pathlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8pass import export_fp8, fp8_compile, state_dict_fp8
from fp8pass.errors import ExportError
from fp8pass.tools.export.contents import Layer
from tests.distributed.models import loss_of, seeded, spread
from tests.distributed.support import RanksFailed, everyone, on_ranks, outcomes_on_ranks, run_on_ranks
from tests.support.cases import rest

pytestmark = pytest.mark.dist


def exported(rank, kind, recipe, folder):
    """(tensors after a step's forward and backward, files that this rank wrote, what is kept and why)."""
    rules = None if kind == "fsdp" else {"head": None}  # with FSDP2 the head runs between graphs
    compile_ = functools.partial(fp8_compile, recipe=recipe, backend="aot_eager", rules=rules)
    if kind == "one":
        model, shard, count = compile_(seeded()), 0, 1
    else:
        model, shard, count = spread(seeded(), kind, compile_)
    loss_of(model, 0, shard, count).backward()
    tensors = {name: tensor.clone() for name, tensor in state_dict_fp8(model)}
    report = export_fp8(model, folder)
    dist.barrier()
    return {n: (t.dtype, t.flatten().view(torch.uint8).tolist()) for n, t in tensors.items()}, report.files, report.kept


@pytest.mark.parametrize(("kind", "recipe"), [("fsdp", "delayed"), ("ddp", "rowwise")])
def test_ranks_export_what_one_process_does(kind, recipe, tmp_path):
    ((single, files, _),) = run_on_ranks(exported, 1, "one", recipe, tmp_path / "one")
    assert files == ["model.safetensors"]
    results = run_on_ranks(exported, 2, kind, recipe, tmp_path / kind)
    assert [files for _, files, _ in results] == [["model.safetensors"], []]
    for tensors, _, kept in results:
        assert tensors == single
        assert kept.keys() == {"emb.weight", "head.weight"}
    files = [pathlib.Path(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", kind)]
    assert files[0] == files[1]
    config = json.loads((tmp_path / kind / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["head"]


def test_all_ranks_learn_that_the_folder_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    outcomes = outcomes_on_ranks(exported, 2, "fsdp", "current", tmp_path / "file", group_timeout=30)
    assert ["is a file; pass a folder" in outcome.error for outcome in outcomes] == [True, True], outcomes


@pytest.mark.parametrize("num_tensors", [0, 2, *rest([1, 5])])
@on_ranks(2, group_timeout=30)
def test_all_ranks_learn_that_the_disk_is_full(rank, num_tensors, tmp_path):
    """Rank 0 can write so many tensors. What is left to gather is gathered: the other ranks neither wait nor take the folder
    for whole."""
    model, _, _ = spread(seeded(), "fsdp", functools.partial(fp8_compile, recipe="rowwise", backend="aot_eager"))
    loss_of(model, 0, rank, 2).backward()
    made, tensors, full = [], Layer.tensors, "[Errno 28] No space left on device"

    def until_full(layer, gather):
        for each in tensors(layer, gather):
            made.append(each)
            if len(made) > num_tensors:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield each

    error, text = (ExportError, f"rank 0 could not write the export: OSError: {full}") if rank else (OSError, full)
    with mock.patch.object(Layer, "tensors", until_full), pytest.raises(error, match=re.escape(text)):
        export_fp8(model, tmp_path)
    assert everyone(rank) == [0, 1], "ranks go on together"
    assert not list(tmp_path.iterdir())


def test_shards_of_tensor_parallelism_are_refused(tmp_path):
    """A rank's GEMM reads a shard, with a scale of its own."""
    with pytest.raises(RanksFailed, match=r"reads \[32, 32\] of its \[64, 32\], a shard"):
        run_on_ranks(exported, 2, "tp", "current", tmp_path, fresh=True)
    assert not list(tmp_path.iterdir())
