"""torchtitan's protocol, as its sources have it in August 2026: a converter transforms a tree of configs, the model is built
from it, and each transformer block is compiled in place by the name of a backend."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8pass import DelayedScaling, inspect, state
from fp8pass.errors import OptionError
from fp8pass.integrations.torchtitan import Fp8Converter
from fp8pass.runtime.wrap import session_of

RECIPE = DelayedScaling(amax_history_len=4)


class Module(nn.Module):
    """As torchtitan's: a class knows its config, and a slotted config builds its class."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **arguments):
            return self._owner(config=dataclasses.replace(self), **arguments)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        cls.Config._owner = cls


class Block(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        width: int

    def __init__(self, config):
        super().__init__()
        self.w1, self.w2 = nn.Linear(config.width, 64), nn.Linear(64, config.width)

    def forward(self, x):
        return x + self.w2(self.w1(x).relu())


class Transformer(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        block: Block.Config
        num_layers: int = 2

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): config.block.build() for i in range(config.num_layers)})
        self.output = nn.Linear(config.block.width, 32)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def registry(converters):
    config = Transformer.Config(block=Block.Config(width=32))
    for converter in converters:
        config = converter.build().convert(config)
    return config


def apply_compile(model, backend="fp8pass", checkpoints=False):
    for name, block in list(model.layers.named_children()):
        block = checkpoint_wrapper(block) if checkpoints else block
        block.compile(backend=backend, fullgraph=True)
        model.layers[name] = block


def train(model, num_steps):
    for _ in range(num_steps):
        model(torch.randn(16, 32)).square().mean().backward()


def converter(**options):
    return Fp8Converter.Config(recipe=RECIPE, options={"backend": "aot_eager"}, **options)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_blocks_train_with_one_session_and_the_models_paths(checkpoints):
    config = registry([converter(rules={"layers.*.w2:grad_weight": None})])
    assert isinstance(config, Transformer.Config)
    assert {field.name for field in dataclasses.fields(config)} == {"block", "num_layers"}
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    keys = list(model.state_dict())
    apply_compile(model, checkpoints=checkpoints)
    train(model, 3)
    assert {g.module for g in inspect(model).gemms} == {f"layers.{i}.w{j}" for i in (0, 1) for j in (1, 2)}
    kept = {(g.module, g.role) for g in inspect(model).gemms if not g.quantized}
    assert kept == {(f"layers.{i}.w2", "grad_weight") for i in (0, 1)}
    (store,) = session_of(model).stores
    assert store.version == 2
    state(model).step()
    for i in (0, 1):
        assert state(model).amax_history(f"layers.{i}.w1:weight")[-1] == model.layers[str(i)].w1.weight.abs().max()
    if not checkpoints:
        assert list(model.state_dict()) == keys
        assert session_of(model.layers["0"]) is session_of(model)


def test_blocks_that_were_compiled_by_inductor_run_in_fp8_and_others_are_an_error(capsys):
    """torchtitan refuses other names of backends where a model has FlexAttention."""
    model = registry([converter()]).build()
    with pytest.raises(OptionError, match=r"pass --compile\.enable"):
        train(model, 1)
    model = registry([converter()]).build()
    apply_compile(model, backend="inductor", checkpoints=True)
    train(model, 1)
    assert capsys.readouterr().out == ""
    train(model, 2)
    assert capsys.readouterr().out.count("GEMMs run in FP8") == 1
    assert {g.module for g in inspect(model).gemms if g.quantized} == {f"layers.{i}.w{j}" for i in (0, 1) for j in (1, 2)}
