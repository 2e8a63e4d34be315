"""transformers.Trainer: the callback, and the backend by its name."""

import logging
import os

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

import fp8pass.integrations.accelerate  # noqa: E402, F401
from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, fp8_uncompile, inspect, state  # noqa: E402
from fp8pass.errors import CheckpointMismatchError, Fp8Warning, OptionError, RecipeError  # noqa: E402
from fp8pass.integrations.transformers import FILE, Fp8Callback  # noqa: E402
from fp8pass.runtime import named_backend  # noqa: E402
from tests.integrations.support import VOCABULARY, assert_same_tensors, llama, num_updates, token_data  # noqa: E402
from tests.support.backend import register_backend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning")

RECIPE = DelayedScaling(amax_history_len=4)


def trainer(folder, callback=None, model=None, **options):
    """A Trainer with its default arguments but for those that keep it short and quiet."""
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "use_cpu": True, **options}
    args = TrainingArguments(output_dir=str(folder), report_to="none", disable_tqdm=True, **options)
    data = token_data()
    callbacks = None if callback is None else [callback]
    return Trainer(model or llama(), args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def callback(recipe=RECIPE, rules=None, **options):
    return Fp8Callback(recipe, rules, backend="aot_eager", **options)


SCHEDULE = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps at once with gradient accumulation, evaluations and checkpoints: (folder, Trainer, arguments)."""
    folder, options = tmp_path_factory.mktemp("run"), {**SCHEDULE, "bf16": True}
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
    assert view.amax_history("model.layers.0.mlp.up_proj:weight")[0] == 0
    assert list(whole.model.state_dict()) == list(llama().state_dict())
    plain = LlamaForCausalLM.from_pretrained(folder / "checkpoint-6")
    assert_same_tensors(plain.state_dict(), whole.model.state_dict())
    rest = trainer(tmp_path, callback(), **options)
    rest.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert_same_tensors(rest.model.state_dict(), whole.model.state_dict())
    assert_same_tensors(state(rest.model).state_dict(), view.state_dict())
    assert_same_tensors(load_file(tmp_path / "checkpoint-6" / FILE), load_file(folder / "checkpoint-6" / FILE))
    assert losses_of_evaluations(rest)[6] == losses_of_evaluations(whole)[6]


@pytest.mark.parametrize(
    ("other", "rules", "message"),
    [
        (Float8CurrentScaling(), None, r"by default: DelayedScaling\(.*in the checkpoint, Float8CurrentScaling\("),
        (DelayedScaling(amax_history_len=8), None, r"amax_history_len=4.*in the checkpoint.*amax_history_len=8"),
        (RECIPE, {"*.down_proj": None}, r"\*.down_proj: no rule in the checkpoint, high precision now"),
    ],
    ids=["recipe", "option", "rules"],
)
def test_another_recipe_is_refused_on_resume(run, tmp_path, other, rules, message):
    checkpoint = run[0] / "checkpoint-3"
    with pytest.raises(CheckpointMismatchError, match=rf"checkpoint-3 was trained with another recipe\. .*{message}"):
        trainer(tmp_path, callback(other, rules), **run[2]).train(resume_from_checkpoint=str(checkpoint))


def test_the_table_is_printed_once_and_only_the_model_is_saved_if_asked_for(tmp_path, capsys):
    short = trainer(tmp_path, callback("current"), max_steps=1, save_steps=1, save_only_model=True)
    for num_tables in (1, 0):
        short.train()
        assert capsys.readouterr().out.count("GEMMs run in FP8") == num_tables
    assert FILE not in os.listdir(tmp_path / "checkpoint-1")


class Preemption(transformers.TrainerCallback):
    """A stop of the Trainer at the second step, as after a SIGTERM."""

    def __init__(self, event):
        setattr(self, event, self.ask)

    def ask(self, args, state, control, **_):
        manager = next(m for c in self.trainer.callback_handler.callbacks if (m := getattr(c, "jit_manager", None)))
        manager.is_checkpoint_requested = state.global_step == 2


@pytest.mark.parametrize("event", ["on_substep_end", "on_optimizer_step"])
def test_checkpoints_on_a_signal_hold_the_fp8_state(tmp_path, event):
    stopped = trainer(tmp_path, callback(print_table=False), enable_jit_checkpoint=True, gradient_accumulation_steps=2)
    preemption = Preemption(event)
    preemption.trainer = stopped
    stopped.callback_handler.callbacks.insert(0, preemption)
    stopped.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    assert stopped.state.global_step < 6
    saved = load_file(folder / FILE)
    pending = event == "on_substep_end"  # the Trainer saves before the optimizer steps, else after it
    assert (saved["model.layers.0.mlp.up_proj:weight.amax_history"][0] > 0) == bool(saved["recorded"]) == pending


def test_a_checkpoint_without_fp8_begins_with_empty_histories(tmp_path, caplog):
    trainer(tmp_path / "plain", max_steps=2, save_steps=1).train()
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        resumed = trainer(tmp_path / "fp8", callback(), max_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))
    assert "trained without Fp8Callback" in caplog.text
    assert (state(resumed.model).amax_history("model.layers.0.mlp.up_proj:weight") > 0).sum() == 1


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


def test_by_the_backends_name_alone(tmp_path, caplog):
    register_backend()
    named_backend._say_that_the_state_is_not_saved.cache_clear()
    model = llama()
    named_backend.prepare(model, recipe=RECIPE, backend="aot_eager")  # TrainingArguments has no place for options
    named = trainer(tmp_path, model=model, torch_compile_backend="fp8pass", max_steps=3, save_steps=3)
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        named.train()
    assert caplog.text.count("outside of model.state_dict()") == 1
    assert len({g.module for g in inspect(named.model_wrapped).gemms if g.quantized}) == 7
    (store,) = named_backend.named_session(named.model_wrapped).stores
    assert store.version == 2
    assert list(load_file(tmp_path / "checkpoint-3" / "model.safetensors")) == sorted(llama().state_dict())


def test_generation_after_training(tmp_path):
    trained = trainer(tmp_path, callback(), max_steps=2)
    trained.train()
    model, before = trained.model.eval(), state(trained.model).state_dict()
    prompt = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    model.config.use_cache = True
    plain = LlamaForCausalLM.from_pretrained(save(model, tmp_path / "saved"))
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 16}
    for cache, most in (({}, 3), ({"cache_implementation": "static"}, 2)):  # the prompt, and a token or two
        graphs = len(inspect(model).graphs)
        tokens = model.generate(prompt, **options, **cache)
        assert 1 <= len(inspect(model).graphs) - graphs <= most
        assert tokens.shape == (2, 21)
        with torch.no_grad():
            expected = plain(tokens[:, :-1]).logits[:, 4:]
            chosen = expected.gather(-1, tokens[:, 5:, None]).squeeze(-1)
        assert (chosen >= expected.amax(-1) - 0.1).all()
    assert_same_tensors(state(model).state_dict(), before)


def save(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_lora_trains(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=32, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    tuned = trainer(tmp_path, callback(), model=peft.get_peft_model(llama(), config), max_steps=4, save_steps=2)
    tuned.train()
    first = "base_model.model.model.layers.0.mlp.up_proj"
    quantized = {(g.module, g.role) for g in inspect(tuned.model).gemms if g.quantized}
    assert (f"{first}.base_layer", "output") in quantized
    assert (f"{first}.base_layer", "grad_weight") not in quantized
    assert (f"{first}.lora_A.default", "grad_weight") in quantized
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    resumed = trainer(tmp_path / "rest", callback(), model=peft.get_peft_model(llama(), config), max_steps=4, save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_tensors(resumed.model.state_dict(), tuned.model.state_dict())
    assert_same_tensors(state(resumed.model).state_dict(), state(tuned.model).state_dict())


def test_the_monitors_numbers_go_to_the_reporters(tmp_path):
    class Kept(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "fp8/step" in logs:
                kept.append((state.global_step, logs))

    kept, watched = [], callback(monitor=2, print_table=False)
    run = trainer(tmp_path, watched, max_steps=5)
    run.add_callback(Kept())
    run.train()
    assert [numbers["fp8/step"] for _, numbers in kept] == [0, 2, 4]
    assert kept[-1][1] == watched.monitor.latest.to_dict()
    assert "fp8/model.layers.0.mlp.up_proj/weight/underflow" in kept[0][1]
    assert not any("fp8/step" in entry for entry in run.state.log_history)


# -- one training after another


def test_a_callback_takes_over_what_is_compiled_alike(tmp_path):
    """And what no Trainer has run."""
    model = llama()
    trainer(tmp_path, callback("current"), model=model)
    tensors = []
    for turn in range(2):
        trainer(tmp_path, callback(print_table=False), model=model, max_steps=2).train()
        assert num_updates(model) == 2 * (turn + 1)
        tensors.append(state(model).tensors)
    assert tensors[0] == tensors[1]
    assert {g.recipe for g in inspect(model).gemms if g.quantized} == {"delayed"}
    by_hand = fp8_compile(llama(), RECIPE, backend="aot_eager", in_place=True)
    trainer(tmp_path, callback(print_table=False), model=by_hand, max_steps=2).train()
    assert num_updates(by_hand) == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: callback("current"), r"by default: DelayedScaling\(.* so far, Float8CurrentScaling\(.* in this callback"),
        (lambda: callback(weight_copies="cache"), "weight_copies: 'auto' so far, 'cache' in this callback"),
        (lambda: callback(strict=True), "schedule or strict"),
    ],
    ids=["recipe", "option", "strict"],
)
def test_a_callback_with_other_arguments_names_them_and_the_way_out(tmp_path, other, message):
    model = llama()
    trainer(tmp_path, callback(print_table=False), model=model, max_steps=1).train()
    with pytest.raises(OptionError, match=rf"{message}.*fp8_uncompile"):
        trainer(tmp_path, other(), model=model, max_steps=1).train()
    fp8_uncompile(model)
    trainer(tmp_path, other(), model=model, max_steps=1).train()


def test_a_callback_serves_several_models_in_turn(tmp_path):
    shared, models = callback(print_table=False, monitor=1), [llama(), llama()]
    for turn in range(2):
        for model in models:
            trainer(tmp_path, shared, model=model, max_steps=2).train()
            assert num_updates(model) == 2 * (turn + 1)
    assert_same_tensors(*(state(model).state_dict() for model in models))
    tokens = torch.stack([row["input_ids"] for row in token_data(4)])
    for _ in range(3):  # steps end by themselves after training; the third has not ended
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert num_updates(model) == 4 + 2


def test_an_evaluation_in_a_fresh_process_runs_in_fp8_with_the_state_of_its_checkpoint(run, tmp_path):
    folder, whole, options = run
    model = LlamaForCausalLM.from_pretrained(folder / "checkpoint-3")
    fresh = trainer(tmp_path, callback(print_table=False), model=model, bf16=options["bf16"])
    assert fresh.evaluate()["eval_loss"] == losses_of_evaluations(whole)[3]
    assert any(g.quantized for g in inspect(model).gemms)
    fresh.predict(token_data(4))
    fresh.train()
    assert len(state(model).tensors) == len(state(whole.model).tensors)


def test_a_model_that_is_uncompiled_before_it_trains_is_compiled_again(tmp_path):
    made = trainer(tmp_path, callback(print_table=False), max_steps=1)
    fp8_uncompile(made.model)
    made.train()
    assert num_updates(made.model) == 1


def test_a_training_that_an_error_ended_is_followed_by_another(tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise RuntimeError("of the user")

    model, own = llama(), callback(print_table=False, monitor=1)
    failing = trainer(tmp_path, own, model=model, max_steps=2)
    failing.add_callback(Failing())
    with pytest.raises(RuntimeError, match="of the user"):
        failing.train()
    trainer(tmp_path, own, model=model, max_steps=2).train()
    assert own.monitor.latest.step == 2
    tokens = torch.stack([row["input_ids"] for row in token_data(4)])
    with pytest.raises(RuntimeError, match="of the user"):
        failing.train()

    def go_on():
        for _ in range(6):
            model(input_ids=tokens, labels=tokens).loss.backward()
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(0.99)

    with pytest.warns(Fp8Warning, match="4 updates of the weights without"):
        go_on()


def test_an_evaluation_in_high_precision_says_so(tmp_path, caplog):
    late = trainer(tmp_path)
    late.add_callback(callback(print_table=False))
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        late.evaluate()
        late.evaluate()
    assert caplog.text.count("is evaluated in high precision") == 1


def test_the_best_model_without_its_state_is_said(tmp_path, caplog):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        done = trainer(tmp_path, callback(print_table=False), max_steps=4, **options, **best)
        done.train()
    assert "has the best weights and no fp8_state.safetensors" in caplog.text
    found = state(done.model)
    assert not found.amax_history("model.layers.0.mlp.up_proj:weight").any()
    assert found.amax_history("model.layers.0.mlp.up_proj:input").any()
