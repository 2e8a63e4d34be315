"""accelerate takes the backend by its name, with options or without."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import NotCompiledError
from fp8pass.integrations.accelerate import keep_state
from tests.support.backend import register_backend
from tests.support.models import mlp

pytestmark = pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    register_backend()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_prepare_compiles_and_accumulates_gradients():
    options = {"recipe": DelayedScaling(amax_history_len=4), "backend": "aot_eager"}
    plugin = TorchDynamoPlugin(backend="fp8pass", options=options)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, gradient_accumulation_steps=2)
    model = mlp()
    plain = model[0].weight.detach().clone()
    compiled, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accelerator.accumulate(compiled):
            accelerator.backward(compiled(torch.randn(16, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert not model[0].weight.equal(plain)
    assert {g.module for g in inspect(compiled).gemms if g.quantized} == {"0", "2"}
    assert "0:weight" in state(compiled).tensors
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


@pytest.mark.parametrize("first", ["fp8pass.integrations.accelerate", "accelerate"])
def test_the_name_is_known_in_either_order_of_imports(first):
    code = (
        f"import {first}, fp8pass.integrations.accelerate; from accelerate.utils import DynamoBackend, TorchDynamoPlugin\n"
        "plugin = TorchDynamoPlugin(backend='fp8pass', mode='default')\n"
        "assert plugin.to_kwargs()['backend'] == 'fp8pass', plugin.to_kwargs()\n"
        "assert 'FP8PASS' in DynamoBackend.list() and 'FP8PASS' in DynamoBackend and 'fp8' not in DynamoBackend"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_accelerate_is_left_alone_until_it_is_asked_for():
    code = "import accelerate, fp8pass; assert 'FP8PASS' not in accelerate.utils.DynamoBackend.list()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_other_names_are_what_they_were():
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="fp9pass")
    assert isinstance(DynamoBackend("FP8PASS"), DynamoBackend)


def test_checkpoints_hold_the_state(tmp_path):
    def prepared():
        torch.manual_seed(0)
        model = fp8_compile(mlp(), DelayedScaling(amax_history_len=4), backend="aot_eager", in_place=True)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        keep_state(accelerator, model)
        return accelerator, model, optimizer

    def train(accelerator, model, optimizer, seed):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    first = prepared()
    for seed in range(2):
        train(*first, seed)
    first[0].save_state(str(tmp_path))
    resumed = prepared()
    resumed[0].load_state(str(tmp_path))
    for run in (first, resumed):
        train(*run, 2)
    ours, theirs = state(first[1]).state_dict(), state(resumed[1]).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert first[1][0].weight.equal(resumed[1][0].weight)
    fresh = prepared()
    train(*fresh, 2)
    assert not all(ours[name].equal(value) for name, value in state(fresh[1]).state_dict().items())


def test_a_model_that_is_not_compiled_has_no_state():
    with pytest.raises(NotCompiledError):
        keep_state(Accelerator(cpu=True), mlp())
