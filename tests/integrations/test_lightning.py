"""Lightning: the callback, and the backend by its name."""

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from fp8pass import DelayedScaling, inspect, state  # noqa: E402
from fp8pass.errors import CheckpointMismatchError, OptionError  # noqa: E402
from fp8pass.integrations.lightning import Fp8Callback  # noqa: E402
from tests.integrations.support import VOCABULARY, assert_same_tensors, num_updates, token_data  # noqa: E402
from tests.support.models import Decoder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]

RECIPE, UP = DelayedScaling(amax_history_len=4), "model.layers.0.up"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(layers=1, vocabulary=VOCABULARY)

    def step(self, name, batch):
        loss = nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log(name, loss)
        return loss

    def training_step(self, batch, _):
        return self.step("loss", batch)

    def validation_step(self, batch, _):
        return self.step("validation_loss", batch)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Own(Language):
    """Calls itself, and its modules from there."""

    def __init__(self):
        super().__init__()
        del self.model
        self.up, self.layers = nn.Linear(64, 64), nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, x):
        return self.layers[0](self.up(x).relu())

    def training_step(self, batch, _):
        return self(batch).square().mean()


def fit(folder, module, *callbacks, data=None, checkpoint=None, **options):
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **{"max_steps": 12, **QUIET, **options})
    data = token_data(48) if data is None else data
    validation = DataLoader(data[:4], batch_size=4) if isinstance(data, list) else None
    trainer.fit(module, DataLoader(data, batch_size=2), validation, ckpt_path=checkpoint)
    return trainer


def callback(recipe=RECIPE, rules=None, **options):
    return Fp8Callback(recipe, rules, backend="aot_eager", **options)


def saver(folder):
    return lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")


OPTIONS = {"accumulate_grad_batches": 4, "max_epochs": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve steps at once: (folder, LightningModule)."""
    folder = tmp_path_factory.mktemp("lightning")
    module = Language()
    fit(folder, module, callback(print_table=False), saver(folder), **OPTIONS)
    return folder, module


def test_twelve_steps_equal_six_and_six_and_checkpoints_are_the_plain_models(run, tmp_path):
    folder, whole = run
    rest = Language()
    fit(tmp_path, rest, callback(), saver(tmp_path), checkpoint=folder / "step=6.ckpt", **OPTIONS)
    assert_same_tensors(rest.state_dict(), whole.state_dict())
    assert_same_tensors(state(rest).state_dict(), state(whole).state_dict())
    plain = Language.load_from_checkpoint(folder / "step=12.ckpt")
    assert list(whole.state_dict()) == list(plain.state_dict())
    assert_same_tensors(plain.state_dict(), whole.state_dict())
    assert {g.module for g in inspect(whole).gemms if not g.quantized} == {"model.head"}
    assert f"{UP}:weight" in state(whole).tensors
    assert num_updates(whole.model) == 12
    with pytest.raises(CheckpointMismatchError, match=r"DelayedScaling\(.* in the checkpoint, Float8CurrentScaling\(.* now"):
        fit(tmp_path, Language(), callback("current"), saver(tmp_path), checkpoint=folder / "step=6.ckpt", **OPTIONS)


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


def test_the_monitors_numbers_go_to_the_loggers(tmp_path):
    class Kept(lightning.pytorch.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            kept.append((step, metrics))

    kept, watched = [], callback(monitor=2, print_table=False)
    fit(tmp_path, Language(), watched, logger=Kept(tmp_path), max_steps=5, log_every_n_steps=100)
    measured = [(step, metrics) for step, metrics in kept if "fp8/step" in metrics]
    assert [(step, metrics["fp8/step"]) for step, metrics in measured] == [(0, 0), (2, 2), (4, 4)]
    assert measured[-1][1] == watched.monitor.latest.to_dict()
    assert f"fp8/{UP}/weight/underflow" in measured[0][1]


# -- one training after another


def evaluated(folder, module, *callbacks, checkpoint=None, what="validate"):
    """The loss of a Trainer that does nothing else."""
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **QUIET)
    return getattr(trainer, what)(module, DataLoader(token_data(4), batch_size=4), ckpt_path=checkpoint)[0]


def test_evaluations_run_in_fp8_with_the_state_of_the_checkpoint(run, tmp_path):
    folder, whole = run
    for what in ("validate", "test"):
        fresh = Language()
        found = evaluated(tmp_path, fresh, callback(), checkpoint=folder / "step=12.ckpt", what=what)
        assert any(g.quantized for g in inspect(fresh).gemms)
        assert_same_tensors(state(fresh).state_dict(), state(whole).state_dict())
        assert found == evaluated(tmp_path, whole, what=what)
