"""Two ranks: transformers.Trainer and Lightning with DistributedDataParallel, by their callbacks and by the backend's name."""

import os
import warnings

import pytest
import torch.distributed as dist

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.distributed.support import everyone, on_ranks
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


def assert_agreed(found):
    """Weights and states of both ranks are the same; and those of the second training, which is resumed, as of the first."""
    for mine, theirs in zip(found, everyone(found)[dist.get_rank() - 1], strict=True):
        for part in (0, 1):
            assert_same_tensors(mine[part], theirs[part])
    for part in (0, 1):
        assert_same_tensors(found[1][part], found[0][part])


@on_ranks(2, fresh=True)
def test_two_ranks_agree_and_resume_bit_for_bit(rank, tmp_path):
    from fp8pass.errors import Fp8FallbackWarning

    warnings.simplefilter("error", Fp8FallbackWarning)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    whole = train(rank, tmp_path / "whole")
    rest = train(rank, tmp_path / "rest", tmp_path / "whole" / "checkpoint-3")
    named = train(rank, tmp_path / "named", by_name=True)
    assert_agreed((whole, rest, named))
    for *_, modules in (whole, rest, named):
        assert len(modules) == 7
        assert all(module.startswith("model.layers.0.") for module in modules)
    assert sorted(name.partition(".amax")[0] for name in named[1]) == sorted(name.partition(".amax")[0] for name in whole[1])


@on_ranks(2, fresh=True)
def test_lightning_on_two_ranks(rank, tmp_path):
    """Six steps in two epochs, and the second epoch again from its checkpoint."""
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer, callbacks
    from torch.utils.data import DataLoader

    from fp8pass import inspect, state
    from tests.integrations.support import token_data
    from tests.integrations.test_lightning import Language, callback

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    outcomes = []
    for checkpoint in (None, tmp_path / "step=3.ckpt"):
        module = Language()
        out = tmp_path if checkpoint is None else tmp_path / "resumed"
        saver = callbacks.ModelCheckpoint(dirpath=out, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 6}
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback(print_table=False), saver], **options
        )
        trainer.fit(module, DataLoader(token_data(12), batch_size=2), ckpt_path=checkpoint)
        assert trainer.world_size == 2
        assert {g.module for g in inspect(module).gemms if g.quantized} == {"model.up", "model.down"}, "not the head"
        saved = {name: value for name, value in state(module).state_dict().items() if not name.endswith(f"@{rank}")}
        outcomes.append((dict(module.state_dict()), saved))
    assert_agreed(outcomes)
