"""Two ranks: transformers.Trainer and Lightning with DistributedDataParallel, by their callbacks and by the backend's name."""

import os
import warnings

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.distributed.support import run_on_ranks
from tests.integrations.support import assert_same_tensors

pytestmark = pytest.mark.dist


def train(rank, folder, resume=None, by_name=False):
    """The weights, the FP8 state and the quantized modules after six steps, or after three from a checkpoint."""
    from accelerate.state import AcceleratorState
    from torch.nn.parallel import DistributedDataParallel

    from fp8pass import DelayedScaling, inspect, state
    from fp8pass.runtime import named_backend as named
    from tests.integrations.support import llama, trainer_of
    from tests.support.backend import register_backend

    AcceleratorState._reset_state()
    recipe, model = DelayedScaling(amax_history_len=4), llama()
    options = {"ddp_backend": "gloo", "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    if by_name:
        register_backend()
        named.prepare(model, recipe=recipe, backend="aot_eager")
        import fp8pass.integrations.accelerate  # noqa: F401

        options["torch_compile_backend"] = "fp8pass"
    trainer = trainer_of(folder, model, recipe=None if by_name else recipe, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    compiled = trainer.model_wrapped if by_name else model
    assert isinstance(compiled._orig_mod if by_name else trainer.model_wrapped, DistributedDataParallel)
    saved = {name: value for name, value in state(compiled).state_dict().items() if not name.endswith(f"@{rank}")}
    quantized = {g.module for g in inspect(compiled).gemms if g.quantized}
    return dict(model.state_dict()), saved, quantized


def train_all(rank, folder):
    from fp8pass.errors import Fp8FallbackWarning

    warnings.simplefilter("error", Fp8FallbackWarning)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    whole = train(rank, folder / "whole")
    rest = train(rank, folder / "rest", folder / "whole" / "checkpoint-3")
    return whole, rest, train(rank, folder / "named", by_name=True)


def test_two_ranks_agree_and_resume_bit_for_bit(tmp_path):
    (whole, rest, named), other = run_on_ranks(train_all, 2, tmp_path, fresh=True)
    for mine, theirs in zip((whole, rest, named), other, strict=True):
        assert_same_tensors(mine[0], theirs[0])
        assert_same_tensors(mine[1], theirs[1])
        assert len(mine[2]) == 7
        assert all(module.startswith("model.layers.0.") for module in mine[2])
    assert_same_tensors(rest[0], whole[0])
    assert_same_tensors(rest[1], whole[1])
    assert sorted(name.partition(".amax")[0] for name in named[1]) == sorted(name.partition(".amax")[0] for name in whole[1])


def fit(rank, folder):
    """Train by Lightning: six steps in two epochs, and the second epoch again from its checkpoint; results as of `train`."""
    from lightning.pytorch import Trainer, callbacks
    from torch.utils.data import DataLoader

    from fp8pass import inspect, state
    from tests.integrations.support import token_data
    from tests.integrations.test_lightning import Language, callback

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    outcomes = []
    for checkpoint in (None, folder / "step=3.ckpt"):
        module = Language()
        out = folder if checkpoint is None else folder / "resumed"
        saver = callbacks.ModelCheckpoint(dirpath=out, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 6}
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback(print_table=False), saver], **options
        )
        trainer.fit(module, DataLoader(token_data(12), batch_size=2), ckpt_path=checkpoint)
        assert trainer.world_size == 2
        saved = {name: value for name, value in state(module).state_dict().items() if not name.endswith(f"@{rank}")}
        outcomes.append((dict(module.state_dict()), saved, {g.module for g in inspect(module).gemms if g.quantized}))
    return outcomes


def test_lightning_on_two_ranks(tmp_path):
    pytest.importorskip("lightning")
    (whole, rest), other = run_on_ranks(fit, 2, tmp_path, fresh=True)
    for mine, theirs in zip((whole, rest), other, strict=True):
        assert_same_tensors(mine[0], theirs[0])
        assert_same_tensors(mine[1], theirs[1])
        assert mine[2] == {"model.up", "model.down"}, "not the head"
    assert_same_tensors(rest[0], whole[0])
    assert_same_tensors(rest[1], whole[1])
