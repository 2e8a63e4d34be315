"""Lightning: the callback, and the backend by its name."""

import contextlib

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from fp8pass import DelayedScaling, fp8_compile, inspect, state  # noqa: E402
from fp8pass.errors import CheckpointMismatchError, OptionError  # noqa: E402
from fp8pass.integrations.lightning import Fp8Callback  # noqa: E402
from fp8pass.runtime import named_backend  # noqa: E402
from tests.integrations.support import VOCABULARY, assert_same_tensors, num_updates, token_data  # noqa: E402
from tests.support.backend import register_backend  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]

RECIPE = DelayedScaling(amax_history_len=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(x + self.down(self.up(x).relu()))


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, _):
        loss = self.loss(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("validation_loss", self.loss(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Own(LightningModule):
    """Calls itself, and its modules from there."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, x):
        return self.layers[0](self.up(x).relu())

    def training_step(self, batch, _):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(folder, module, *callbacks, data=None, checkpoint=None, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **{"max_steps": 12, **quiet, **options})
    data = token_data(48) if data is None else data
    validation = DataLoader(data[:4], batch_size=4) if isinstance(module, Language) else None
    trainer.fit(module, DataLoader(data, batch_size=2), validation, ckpt_path=checkpoint)
    return trainer


def callback(recipe=RECIPE, rules=None, **options):
    return Fp8Callback(recipe, rules, backend="aot_eager", **options)


def saver(folder):
    return lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")


@pytest.fixture(scope="module", params=["32-true", "bf16-mixed"])
def run(request, tmp_path_factory):
    """Twelve steps at once: (folder, LightningModule, arguments)."""
    folder = tmp_path_factory.mktemp("lightning")
    options = {"accumulate_grad_batches": 4, "precision": request.param, "max_epochs": 4}
    module = Language()
    fit(folder, module, callback(print_table=False), saver(folder), **options)
    return folder, module, options


def test_twelve_steps_equal_six_and_six(run, tmp_path):
    folder, whole, options = run
    rest = Language()
    fit(tmp_path, rest, callback(), saver(tmp_path), checkpoint=folder / "step=6.ckpt", **options)
    assert_same_tensors(rest.state_dict(), whole.state_dict())
    assert_same_tensors(state(rest).state_dict(), state(whole).state_dict())


def test_checkpoints_are_the_plain_models_and_modules_share_a_state_with_its_paths(run):
    folder, whole, _ = run
    assert list(whole.state_dict()) == list(Language().state_dict())
    plain = Language.load_from_checkpoint(folder / "step=12.ckpt")
    assert_same_tensors(plain.state_dict(), whole.state_dict())
    assert {g.module for g in inspect(whole).gemms if g.quantized} == {"model.up", "model.down"}, "not the head"
    assert "model.up:weight" in state(whole).tensors
    assert num_updates(whole.model) == 12


def test_another_recipe_is_refused_on_resume(run, tmp_path):
    folder, _, options = run
    with pytest.raises(CheckpointMismatchError, match=r"DelayedScaling\(.* in the checkpoint, Float8CurrentScaling\(.* now"):
        fit(tmp_path, Language(), callback("current"), saver(tmp_path), checkpoint=folder / "step=6.ckpt", **options)


def test_modules_that_the_lightning_module_calls(tmp_path, capsys):
    data = torch.randn(8, 64)
    for module, expected in ((None, {"up", "layers.0"}), ("", {"up", "layers.0"}), ("up", {"up"})):
        torch._dynamo.reset()
        own = Own()
        fit(tmp_path, own, callback(module=module), data=data, max_steps=2, enable_checkpointing=False)
        assert {g.module for g in inspect(own).gemms if g.quantized} == expected
        assert capsys.readouterr().out.count("GEMMs run in FP8") == 1


def test_what_cannot_be_compiled(tmp_path):
    options = {"data": torch.randn(8, 64), "max_steps": 2, "enable_checkpointing": False}
    with pytest.raises(OptionError, match=r"module is 'upp'.*Did you mean 'up'"):
        fit(tmp_path, Own(), callback(module="upp"), **options)
    with pytest.raises(OptionError, match="training_step called none of the modules"):
        fit(tmp_path, Language(), callback(module=""), max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    with pytest.raises(OptionError, match="the callback sets in_place itself"):
        Fp8Callback("delayed", in_place=True)


def test_by_the_backends_name(tmp_path):
    register_backend()
    own = Own()
    options = {"recipe": RECIPE, "backend": "aot_eager"}
    compiled = torch.compile(own, backend="fp8pass", options=options)
    fit(tmp_path, compiled, data=torch.randn(8, 64), max_steps=3, enable_checkpointing=False)
    assert {g.module for g in inspect(compiled).gemms if g.quantized} == {"up", "layers.0"}
    (store,) = named_backend.named_session(compiled).stores
    assert store.version == 2


def test_the_monitors_numbers_go_to_the_loggers(tmp_path):
    class Kept(lightning.pytorch.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            kept.append((step, metrics))

    kept, watched = [], callback(monitor=2, print_table=False)
    fit(tmp_path, Language(), watched, logger=Kept(tmp_path), max_steps=5, log_every_n_steps=100)
    measured = [(step, metrics) for step, metrics in kept if "fp8/step" in metrics]
    assert [(step, metrics["fp8/step"]) for step, metrics in measured] == [(0, 0), (2, 2), (4, 4)]
    assert measured[-1][1] == watched.monitor.latest.to_dict()
    assert "fp8/model.up/weight/underflow" in measured[0][1]


# -- one training after another


def test_a_callback_takes_over_what_is_compiled_alike(tmp_path):
    module, options = Language(), {"max_steps": 3, "enable_checkpointing": False}
    for turn in range(2):
        fit(tmp_path, module, callback(print_table=False), **options)
        assert num_updates(module.model) == 3 * (turn + 1)
    with pytest.raises(
        OptionError, match=r"DelayedScaling\(.* so far, Float8CurrentScaling\(.* in this callback.*fp8_uncompile"
    ):
        fit(tmp_path, module, callback("current"), **options)
    by_hand = Language()
    fp8_compile(by_hand.model, RECIPE, backend="aot_eager", in_place=True)
    fit(tmp_path, by_hand, callback(print_table=False), **options)
    assert num_updates(by_hand.model) == 3


def test_a_callback_serves_several_modules_in_turn(tmp_path):
    shared, modules = callback(print_table=False, monitor=2), [Language(), Language()]
    for module in modules:
        fit(tmp_path / "a", module, shared, saver(tmp_path / "a"), max_steps=6)
    assert_same_tensors(*(state(module).state_dict() for module in modules))
    fit(tmp_path / "b", modules[0], shared, saver(tmp_path / "b"), max_steps=12, checkpoint=tmp_path / "a" / "step=6.ckpt")
    assert modules[0].model._compiled_call_impl.session.num_steps == 6 + 6


@pytest.mark.parametrize("ends", ["in time", "by an error"])
def test_steps_end_by_themselves_after_training(tmp_path, ends):
    class Failing(Language):
        def on_train_batch_end(self, *_):
            if ends == "by an error" and self.global_step == 3:
                raise RuntimeError("of the user")

    module = Failing()
    with contextlib.nullcontext() if ends == "in time" else pytest.raises(RuntimeError, match="of the user"):
        fit(tmp_path, module, callback(print_table=False), max_steps=3, enable_checkpointing=False)
    tokens = torch.stack([row["input_ids"] for row in token_data(4)])
    for _ in range(3):
        module.train().model(tokens).sum().backward()
    assert num_updates(module.model) == 3 + 2


def evaluated(folder, module, *callbacks, checkpoint=None, what="validate"):
    """The loss of a Trainer that does nothing else."""
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)
    loader = DataLoader(token_data(48)[:4], batch_size=4)
    return getattr(trainer, what)(module, loader, ckpt_path=checkpoint)


@pytest.mark.parametrize("what", ["validate", "test"])
def test_a_fresh_process_evaluates_in_fp8_with_the_state_of_the_checkpoint(run, what, tmp_path):
    folder, whole, options = run
    if options["precision"] != "32-true":
        pytest.skip("the Trainers have different precisions")
    path = folder / "step=12.ckpt"
    fresh = Language()
    (found,) = evaluated(tmp_path, fresh, callback(), checkpoint=path, what=what)
    assert any(g.quantized for g in inspect(fresh).gemms)
    assert_same_tensors(state(fresh).state_dict(), state(whole).state_dict())
    assert found == evaluated(tmp_path, whole)[0]


def test_weights_of_another_checkpoint_come_with_its_state(tmp_path):
    module, own = Language(), callback(print_table=False)
    fit(tmp_path, module, own, saver(tmp_path), max_steps=12)
    after = state(module).state_dict()
    evaluated(tmp_path, module, own, checkpoint=tmp_path / "step=6.ckpt")
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=False)["callbacks"][own.state_key]["tensors"]
    assert_same_tensors(state(module).state_dict(), saved)
    assert not all(after[name].equal(value) for name, value in saved.items())


def test_a_checkpoint_without_fp8_state_is_said(tmp_path, caplog):
    fit(tmp_path, Language(), saver(tmp_path), max_steps=6)
    with caplog.at_level("WARNING", logger="fp8pass"):
        evaluated(tmp_path, Language(), callback(), checkpoint=tmp_path / "step=6.ckpt")
        evaluated(tmp_path, Language(), callback("current"), checkpoint=tmp_path / "step=6.ckpt")
        evaluated(tmp_path, Language(), callback())
    assert caplog.text.count("holds no FP8 state") == 1


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_averaged_weights_scale_themselves(tmp_path):
    average = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    module = Language()
    fit(tmp_path, module, callback(print_table=False), average, max_steps=-1, max_epochs=4, limit_train_batches=2)
    found = state(module)
    assert not found.amax_history("model.up:weight").any()
    assert found.amax_history("model.up:input").any()
