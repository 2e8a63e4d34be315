"""transformers.Trainer with the callback, in one process and on two ranks."""

import logging
import os
import warnings

import pytest

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.state import AcceleratorState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from fp8pass import DelayedScaling, fp8_compile, fp8_uncompile, inspect, state  # noqa: E402
from fp8pass.errors import CheckpointMismatchError, Fp8FallbackWarning, OptionError, RecipeError  # noqa: E402
from fp8pass.integrations.transformers import FILE, Fp8Callback  # noqa: E402
from tests.distributed.support import everyone, on_ranks  # noqa: E402
from tests.integrations import support  # noqa: E402
from tests.integrations.support import assert_same_tensors, llama, num_updates  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft's own use of transformers
]

RECIPE = DelayedScaling(amax_history_len=4)
WEIGHT = "model.layers.0.mlp.up_proj:weight"


def trainer(folder, callback=None, model=None, **options):
    usual = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps"}
    return support.trainer_of(folder, model or llama(), callback=callback, **usual | options)


def callback(recipe=RECIPE, rules=None, print_table=False, **options):
    return Fp8Callback(recipe, rules, backend="aot_eager", print_table=print_table, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps at once with gradient accumulation, evaluations and checkpoints: (folder, Trainer, arguments)."""
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "bf16": True}
    folder = tmp_path_factory.mktemp("run")
    whole = trainer(folder, callback(), **options)
    whole.train()
    return folder, whole, options


def losses_of_evaluations(trainer):
    return {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}


def test_six_steps_equal_three_and_three_and_checkpoints_are_the_plain_models(run, tmp_path):
    """All linears but the head run in FP8, and a step spans the micro-batches of an optimizer step."""
    folder, whole, options = run
    gemms, view = inspect(whole.model).gemms, state(whole.model)
    assert {g.module for g in gemms if not g.quantized} == {"lm_head"}
    assert len({g.module for g in gemms if g.quantized}) == 7
    assert num_updates(whole.model) == 6
    assert view.amax_history(WEIGHT)[0] == 0
    assert list(whole.model.state_dict()) == list(llama().state_dict())
    plain = LlamaForCausalLM.from_pretrained(folder / "checkpoint-6")
    assert_same_tensors(plain.state_dict(), whole.model.state_dict())
    rest = trainer(tmp_path, callback(), **options)
    rest.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert_same_tensors(rest.model.state_dict(), whole.model.state_dict())
    assert_same_tensors(state(rest.model).state_dict(), view.state_dict())
    assert_same_tensors(load_file(tmp_path / "checkpoint-6" / FILE), load_file(folder / "checkpoint-6" / FILE))
    assert losses_of_evaluations(rest)[6] == losses_of_evaluations(whole)[6]
    other = trainer(tmp_path, callback(DelayedScaling(amax_history_len=8), {"*.down_proj": None}), **options)
    message = r"checkpoint-3 was trained with another recipe\. .*amax_history_len=4.*in the checkpoint.*amax_history_len=8"
    with pytest.raises(CheckpointMismatchError, match=message + r".*\*.down_proj: no rule in the checkpoint, high precision"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-3"))


@pytest.mark.parametrize("event", ["on_substep_end", "on_optimizer_step"])
def test_checkpoints_on_a_signal_hold_the_fp8_state(tmp_path, event):
    """A stop of the Trainer at the second step, as after a SIGTERM."""
    stopped = trainer(tmp_path, callback(), enable_jit_checkpoint=True, gradient_accumulation_steps=2)

    def ask(args, state, control, **_):
        callbacks = stopped.callback_handler.callbacks
        manager = next(m for c in callbacks if (m := getattr(c, "jit_manager", None)))
        manager.is_checkpoint_requested = state.global_step == 2

    preemption = transformers.TrainerCallback()
    setattr(preemption, event, ask)
    stopped.callback_handler.callbacks.insert(0, preemption)
    stopped.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    assert stopped.state.global_step < 6
    saved = load_file(folder / FILE)
    pending = event == "on_substep_end"  # the Trainer saves before the optimizer steps, else after it
    assert (saved[f"{WEIGHT}.amax_history"][0] > 0) == bool(saved["recorded"]) == pending


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(OptionError, match="step='manual': the callback sets step itself"):
        Fp8Callback("delayed", step="manual")
    with pytest.raises(OptionError, match=r"'selects'='all' is unknown\. Did you mean 'select'"):
        Fp8Callback("delayed", selects="all")
    with pytest.raises(RecipeError, match="Did you mean 'delayed'"):
        Fp8Callback("delaid", dynamic=False)
    by_both = trainer(tmp_path, callback(), torch_compile_backend="eager")
    with pytest.raises(OptionError, match="would both compile the model"):
        by_both.train()
    two_gpus = trainer(tmp_path, callback())
    two_gpus.args._n_gpu = 2
    with pytest.raises(OptionError, match="torchrun --nproc-per-node 2"):
        two_gpus.callback_handler.on_train_begin(two_gpus.args, two_gpus.state, two_gpus.control)
    compiled = trainer(tmp_path, callback(), model=fp8_compile(llama(), in_place=True))
    with pytest.raises(OptionError, match="compiled in place already"):
        compiled.train()


def test_the_monitors_numbers_go_to_the_reporters(tmp_path):
    class Kept(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "fp8/step" in logs:
                kept.append((state.global_step, logs))

    kept, watched = [], callback(monitor=2)
    run = trainer(tmp_path, watched, max_steps=5)
    run.add_callback(Kept())
    run.train()
    assert [numbers["fp8/step"] for _, numbers in kept] == [0, 2, 4]
    assert kept[-1][1] == watched.monitor.latest.to_dict()
    assert "fp8/model.layers.0.mlp.up_proj/weight/underflow" in kept[0][1]
    assert not any("fp8/step" in entry for entry in run.state.log_history)


# -- checkpoints and evaluations with the state that belongs to them, and without


def test_an_evaluation_in_a_fresh_process_runs_in_fp8_with_the_state_of_its_checkpoint(run, tmp_path):
    folder, whole, options = run
    model = LlamaForCausalLM.from_pretrained(folder / "checkpoint-3")
    fresh = trainer(tmp_path, callback(), model=model, bf16=options["bf16"])
    assert fresh.evaluate()["eval_loss"] == losses_of_evaluations(whole)[3]
    assert any(g.quantized for g in inspect(model).gemms)
    fresh.predict(support.token_data(4))
    fresh.train()
    assert len(state(model).tensors) == len(state(whole.model).tensors)


def test_what_has_no_state_is_said(tmp_path, caplog):
    """A checkpoint of another training, the best model that was saved alone, an evaluation before the callback was there."""
    caplog.set_level(logging.WARNING, logger="fp8pass")
    trainer(tmp_path / "plain", max_steps=2, save_steps=1).train()
    resumed = trainer(tmp_path / "fp8", callback(), max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))
    assert "trained without Fp8Callback" in caplog.text
    assert (state(resumed.model).amax_history(WEIGHT) > 0).sum() == 1
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    done = trainer(tmp_path, callback(), max_steps=4, **options, **best)
    done.train()
    assert "has the best weights and no fp8_state.safetensors" in caplog.text
    assert not state(done.model).amax_history(WEIGHT).any()
    assert state(done.model).amax_history(WEIGHT.replace("weight", "input")).any()
    late = trainer(tmp_path)
    late.add_callback(callback())
    late.evaluate()
    late.evaluate()
    assert caplog.text.count("is evaluated in high precision") == 1


# -- one training after another


def test_a_callback_takes_over_what_is_compiled_alike_and_names_what_is_not(tmp_path):
    """And what no Trainer has run."""
    model = llama()
    trainer(tmp_path, callback("current"), model=model)
    for turn in range(2):
        trainer(tmp_path, callback(), model=model, max_steps=2).train()
        assert num_updates(model) == 2 * (turn + 1)
    assert {g.recipe for g in inspect(model).gemms if g.quantized} == {"delayed"}
    by_hand = fp8_compile(llama(), RECIPE, backend="aot_eager", in_place=True)
    trainer(tmp_path, callback(), model=by_hand, max_steps=2).train()
    assert num_updates(by_hand) == 2
    for other, message in (
        (callback("current"), r"by default: DelayedScaling\(.* so far, Float8CurrentScaling\(.* in this callback"),
        (callback(weight_copies="cache"), "weight_copies: 'auto' so far, 'cache' in this callback"),
        (callback(strict=True), "schedule or strict"),
    ):
        with pytest.raises(OptionError, match=rf"{message}.*fp8_uncompile"):
            trainer(tmp_path, other, model=model, max_steps=1).train()
    fp8_uncompile(model)
    made = trainer(tmp_path, callback("current"), model=model, max_steps=1)
    fp8_uncompile(model)
    made.train()
    assert {g.recipe for g in inspect(model).gemms if g.quantized} == {"current"}


# -- two ranks with DistributedDataParallel


def trained_on_ranks(rank, folder, resume=None):
    """The weights and the FP8 state after six steps, or after three from a checkpoint."""
    AcceleratorState._reset_state()
    model, options = llama(), {"ddp_backend": "gloo", "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = support.trainer_of(folder, model, recipe=RECIPE, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert len({g.module for g in inspect(model).gemms if g.quantized}) == 7
    saved = {name: value for name, value in state(model).state_dict().items() if not name.endswith(f"@{rank}")}
    return {**model.state_dict(), **saved}


@pytest.mark.dist
@on_ranks(2, fresh=True)
def test_two_ranks_agree_and_resume_bit_for_bit(rank, tmp_path):
    warnings.simplefilter("error", Fp8FallbackWarning)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="2")
    whole = trained_on_ranks(rank, tmp_path / "whole")
    rest = trained_on_ranks(rank, tmp_path / "rest", tmp_path / "whole" / "checkpoint-3")
    assert_same_tensors(whole, everyone(whole)[1 - rank])
    assert_same_tensors(rest, whole)
