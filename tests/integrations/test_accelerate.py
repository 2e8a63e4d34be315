"""accelerate takes the backend by its name, with options or without."""

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import NotCompiledError
from fp8pass.integrations.accelerate import keep_state
from tests.support.models import mlp
from tests.support.training import same

pytestmark = pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning")


@pytest.fixture(autouse=True)
def fresh_accelerator():
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


def test_checkpoints_hold_the_state(tmp_path):
    def prepared():
        torch.manual_seed(0)
        model = fp8_compile(mlp(), DelayedScaling(amax_history_len=4), backend="aot_eager", in_place=True)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        keep_state(accelerator, model)
        return accelerator, model, optimizer

    def train(accelerator, model, optimizer, *seeds):
        for seed in seeds:
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {**model.state_dict(), **state(model).state_dict()}

    first = prepared()
    train(*first, 0, 1)
    first[0].save_state(str(tmp_path))
    resumed, fresh = prepared(), prepared()
    resumed[0].load_state(str(tmp_path))
    ours, theirs, others = (train(*run, 2) for run in (first, resumed, fresh))
    assert same(ours, theirs)
    assert not same(ours, others)
    with pytest.raises(NotCompiledError):
        keep_state(Accelerator(cpu=True), mlp())
