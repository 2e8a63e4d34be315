"""Lightning: the callback, and the backend by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from fp8pass import DelayedScaling, by_name, inspect, state  # noqa: E402
from fp8pass.errors import CheckpointMismatchError, OptionError  # noqa: E402
from fp8pass.integrations.lightning import Fp8Callback  # noqa: E402
from tests.integrations.support import VOCABULARY, assert_same_tensors, token_data  # noqa: E402
from tests.support.backend import register_backend  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
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
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_steps": 12, "logger": False, **options},
    )
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


def test_checkpoints_are_the_plain_models(run):
    folder, whole, _ = run
    assert list(whole.state_dict()) == list(Language().state_dict())
    plain = Language.load_from_checkpoint(folder / "step=12.ckpt")
    assert_same_tensors(plain.state_dict(), whole.state_dict())


def test_modules_share_a_state_with_the_lightning_modules_paths(run):
    _, whole, _ = run
    assert {g.module for g in inspect(whole).gemms if g.quantized} == {"model.up", "model.down"}  # not the head
    assert "model.up:weight" in state(whole).tensors
    (store,) = whole.model._compiled_call_impl.session.stores
    assert store.version == 12


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
    (store,) = by_name.named_session(compiled).stores
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
