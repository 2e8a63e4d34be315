"""Graph breaks and regional compilation: one graph serves many layers, each layer has its own histories and names."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.func import functional_call

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import RuleError
from tests.support.models import BrokenBlock, BrokenLayers, ResidualMlp, Stack, mlp
from tests.support.numerics import sqnr
from tests.support.training import fp8, train
from tests.tolerances import SQNR_MODEL_OUTPUT

RECIPE = DelayedScaling(amax_history_len=4)
KINDS = ("input", "weight", "grad_output")


def test_layers_that_share_a_graph_have_their_own_histories():
    model = BrokenLayers(4, 32, 64)
    plain = copy.deepcopy(model)
    compiled, x = fp8(model, RECIPE), torch.randn(16, 32)
    *_, out = train(compiled, *[x.clone().requires_grad_()] * 3)
    view = state(compiled)
    assert set(view.tensors) == {f"layers.{i}.{linear}:{kind}" for i in range(4) for linear in ("up", "down") for kind in KINDS}
    view.step()
    for i, layer in enumerate(model.layers):
        assert view.scale(f"layers.{i}.up:weight") == torch.tensor(448.0) / layer.up.weight.abs().max()
    assert sqnr(plain(x), out) >= SQNR_MODEL_OUTPUT
    report = inspect(compiled)
    assert {g.module for g in report.gemms} == {f"layers.{i}.{linear}" for i in range(4) for linear in ("up", "down")}
    assert len(report.gemms) == 24
    assert all(g.quantized for g in report.gemms)
    assert len(report.graphs) == 2, "the halves of a block, for all layers"


class PutBack(nn.Module):
    """The effect of `self.up = self.up.to(dtype)` on Dynamo's names where it breaks the graph."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        up = self.up
        torch._dynamo.graph_break()
        self.up = up
        return self.up(x).relu()


PARAMS = {"w1": nn.Parameter(torch.randn(32, 64)), "w2": nn.Parameter(torch.randn(64, 32))}


@pytest.mark.parametrize(
    ("call", "args", "names"),
    [
        (nn.Sequential(PutBack(), PutBack()), (), {f"{i}.up:{kind}" for i in range(2) for kind in KINDS}),
        (
            lambda x, params: torch.relu(x @ params["w1"]) @ params["w2"],
            (PARAMS,),
            {f"params.{w}:{kind}" for w in PARAMS for kind in KINDS},
        ),
    ],
)
def test_modules_put_back_into_their_attributes_and_weights_of_a_function_have_their_own_histories(call, args, names):
    compiled = fp8(call, RECIPE)
    compiled(torch.randn(16, 32, requires_grad=True), *args).sum().backward()
    assert set(state(compiled).tensors) == names


def test_rules_that_part_layers_of_one_graph_are_refused():
    compiled = fp8_compile(BrokenLayers(4, 32, 64), RECIPE, rules={"layers.0.*": None}, backend="aot_eager")
    with pytest.raises(RuleError, match=r"layers\.0\.up and layers\.1\.up share one compiled graph"):
        compiled(torch.randn(16, 32, requires_grad=True))


# -- graphs without Parameters among their inputs: the modules in the variables of their frames tell layers apart


class Products(nn.Module):
    """Products of activations behind breaks, in a module without Parameters and in the block's own code."""

    def __init__(self):
        super().__init__()
        self.up, self.core = nn.Linear(64, 64), Attention()

    def forward(self, x):
        h = self.up(x)
        torch._dynamo.graph_break()
        h = self.core(h)
        torch._dynamo.graph_break()
        return (h @ x.t()).softmax(-1) @ h


class Attention(nn.Module):
    def forward(self, x):
        return (x @ x.t()).softmax(-1) @ x


def call(compiled, x):
    return compiled(x)


def call_with_tensors(compiled, x):
    """A call with the values of the Parameters, in tensors that are none."""
    return functional_call(compiled, {name: p.detach().clone().requires_grad_() for name, p in compiled.named_parameters()}, x)


def outputs_and_scales(model, run=call, **options):
    """What three steps return, and the scales after them."""
    compiled = fp8_compile(model, RECIPE, backend="aot_eager", select="all", **options)
    return three_steps(lambda x: run(compiled, x), {"": compiled})


def three_steps(run, compiled):
    """What three steps return, and the scales after them; compiled: models by what begins their tensors' names."""
    found = []
    for seed in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        found.append(run(x * 2**seed))
        found[-1].square().sum().backward()
        for model in compiled.values():
            state(model).step()
    return found, {prefix + name: float(state(m).scale(name)) for prefix, m in compiled.items() for name in state(m).tensors}


def assert_told_apart(found, expected):
    assert found[1] == expected[1]
    assert len(set(found[1].values())) > 4
    for out, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(out, other)


class Runner:
    """Calls a layer that it holds in a slot."""

    __slots__ = ("layer",)

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x.relu()


class Run(nn.Module):
    """Layers that objects call; with broken, in frames of their own."""

    def __init__(self, broken):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.runners = {3 * i: Runner(layer) for i, layer in enumerate(self.layers)}
        self.broken = broken

    def forward(self, x):
        for runner in self.runners.values():
            x = runner(x) if self.broken else runner.layer(x)
        return x


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: Stack(BrokenBlock(64, 96) for _ in range(3)), mlp, lambda: Run(False), lambda: Run(True)]
)
def test_layers_that_run_with_other_tensors_than_their_parameters_are_told_apart(make, in_place):
    model = make()
    expected = outputs_and_scales(copy.deepcopy(model))
    assert_told_apart(outputs_and_scales(model, call_with_tensors, in_place=in_place), expected)


def test_products_of_activations_behind_breaks_belong_to_their_layers():
    model = Stack(Products() for _ in range(2))
    alone = copy.deepcopy(model)
    layers = {f"layers.{i}.": fp8(layer, RECIPE, select="all", in_place=True) for i, layer in enumerate(alone.layers)}
    expected = three_steps(alone, layers)
    found = outputs_and_scales(model)
    assert_told_apart(found, (expected[0], {name.replace(".matmul", ""): scale for name, scale in expected[1].items()}))
    assert {name.partition(":")[0] for name in found[1]} == {f"layers.{i}{of}" for i in range(2) for of in ("", ".up", ".core")}
    with pytest.raises(RuleError, match=r"layers\.0\.core and layers\.1\.core share one compiled graph"):
        outputs_and_scales(model, rules={"layers.0.core": None})


def test_layers_under_fsdp1_have_names_and_histories_as_without_it():
    model = Stack(ResidualMlp(64) for _ in range(2))
    expected = outputs_and_scales(copy.deepcopy(model))
    how = {"use_orig_params": True, "device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model.layers = nn.ModuleList(FullyShardedDataParallel(layer, **how) for layer in model.layers)
        assert_told_apart(outputs_and_scales(FullyShardedDataParallel(model, **how)), expected)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model", [lambda x: (x @ x.t()).relu(), Stack(Attention() for _ in range(2))])
def test_reading_frames_keeps_no_tensor_of_the_training_loop(model):
    """Before Python 3.13 the locals of a frame that are read live as long as it."""
    compiled, seen = fp8(model, select="all"), []
    for _ in range(2):
        x = torch.randn(16, 64, requires_grad=True)
        loss = compiled(x).sum()
        loss.backward()
        seen += [weakref.ref(x), weakref.ref(loss)]
        del x, loss
        assert [reference() for reference in seen] == [None] * len(seen)
