"""Graph breaks and regional compilation: one graph serves many layers, each layer has its own histories and names."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.func import functional_call

from fp8pass import DelayedScaling, inspect, monitor, state
from fp8pass.errors import RuleError
from tests.support.cases import each
from tests.support.joint import one_rank
from tests.support.models import BrokenLayers, Net, ResidualMlp, Stack
from tests.support.training import fp8, same, train

RECIPE = DelayedScaling(amax_history_len=4)
KINDS = ("input", "weight", "grad_output")


def test_layers_that_share_a_graph_have_their_own_histories():
    model = BrokenLayers(4, 32, 64)
    compiled, x = fp8(model, RECIPE), torch.randn(16, 32)
    train(compiled, *[x.clone().requires_grad_()] * 3)
    view = state(compiled)
    assert set(view.tensors) == {f"layers.{i}.{linear}:{kind}" for i in range(4) for linear in ("up", "down") for kind in KINDS}
    view.step()
    for i, layer in enumerate(model.layers):
        assert view.scale(f"layers.{i}.up:weight") == torch.tensor(448.0) / layer.up.weight.abs().max()
    report = inspect(compiled)
    assert len({(g.module, g.role) for g in report.gemms if g.quantized}) == len(report.gemms) == 24
    assert len(report.graphs) == 2, "the halves of a block, for all layers"


# -- graphs without Parameters among their inputs: the modules in the variables of their frames tell layers apart


class Bare(nn.Module):
    """Parameters of its own, in front of a break."""

    def __init__(self, factor):
        super().__init__()
        self.ups = nn.ParameterList([nn.Parameter(torch.randn(64, 96) * factor / 8)])
        self.down = nn.Parameter(torch.randn(96, 64) / factor / 8)

    def forward(self, x):
        x = x + torch.relu(x @ self.ups[0]) @ self.down
        torch._dynamo.graph_break()
        return x


class Rotated(nn.Module):
    """What it shares with other layers, a table and a norm, and linears of its own, in front of a break."""

    def __init__(self, factor, rotary, norm):
        super().__init__()
        self.rotary, self.norm, self.up, self.down = rotary, norm, nn.Linear(64, 96), nn.Linear(96, 64)
        with torch.no_grad():
            self.up.weight.mul_(factor), self.down.weight.div_(factor)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(self.norm(x) * self.rotary.table)))
        torch._dynamo.graph_break()
        return x


def rotated():
    rotary, norm = Net(None), nn.LayerNorm(64)
    rotary.register_buffer("table", torch.rand(64))
    return Stack(Rotated(4.0**i, rotary, norm) for i in range(3))


class Products(nn.Module):
    """Products of activations behind breaks, in a module without Parameters and in the block's own code, which reads a norm of
    all blocks."""

    def __init__(self, norm):
        super().__init__()
        self.up, self.core, self.norm = nn.Linear(64, 64), Attention(), norm

    def forward(self, x):
        h = self.up(x)
        torch._dynamo.graph_break()
        h = self.core(h)
        torch._dynamo.graph_break()
        return (h @ x.t()).softmax(-1) @ self.norm(h)


class Attention(nn.Module):
    """Its products are behind a break, where `self` is no variable any more."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return (x @ x.t()).softmax(-1) @ x


def values_of(model):
    """The values of the Parameters, in tensors that are none."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def call_with_tensors(compiled, x):
    return functional_call(compiled, values_of(compiled), x)


def outputs_and_scales(model, with_tensors=False, **options):
    """What three steps return, and the scales after them."""
    compiled = fp8(model, RECIPE, **options)
    return three_steps((lambda x: call_with_tensors(compiled, x)) if with_tensors else compiled, {"": compiled})


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


@each("make, in_place", [(lambda: Stack(Bare(4.0**i) for i in range(3)), False), (rotated, True)])
def test_layers_that_run_with_other_tensors_than_their_parameters_are_told_apart(make, in_place):
    model = make()
    expected = outputs_and_scales(copy.deepcopy(model))
    assert_told_apart(outputs_and_scales(model, True, in_place=in_place), expected)


def test_products_of_activations_behind_breaks_belong_to_their_layers():
    norm = nn.LayerNorm(64)
    model = Stack(Products(norm) for _ in range(2))
    alone = copy.deepcopy(model)
    layers = {f"layers.{i}.": fp8(layer, RECIPE, select="all", in_place=True) for i, layer in enumerate(alone.layers)}
    expected = three_steps(alone, layers)
    found = outputs_and_scales(model)
    assert_told_apart(found, (expected[0], {name.replace(".matmul", ""): scale for name, scale in expected[1].items()}))
    assert {name.partition(":")[0] for name in found[1]} == {f"layers.{i}{of}" for i in range(2) for of in ("", ".up", ".core")}
    with pytest.raises(RuleError, match=r"layers\.0\.core and layers\.1\.core share one compiled graph"):
        outputs_and_scales(model, rules={"layers.0.core": None})


def test_layers_that_a_compiled_function_calls_have_their_own_histories():
    """They have the outputs and scales of a compiled model, by names of the function's variables."""
    model = rotated()
    expected, values = outputs_and_scales(copy.deepcopy(model)), values_of(model)
    compiled = fp8(lambda x: functional_call(model, values, x), RECIPE)
    found = three_steps(compiled, {"": compiled})
    assert all(map(torch.equal, found[0], expected[0]))
    assert sorted(found[1].values()) == sorted(expected[1].values())
    assert {name.rpartition(".")[0] for name in found[1]} == {"", "self#1", "self#2"}


def fsdp1(model):
    """A stack whose layers are wrapped, and itself."""
    how = {"use_orig_params": True, "device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    model.layers = nn.ModuleList(FullyShardedDataParallel(layer, **how) for layer in model.layers)
    return FullyShardedDataParallel(model, **how)


def test_layers_under_fsdp1_have_names_and_histories_as_without_it():
    model = rotated()
    expected = outputs_and_scales(copy.deepcopy(model))
    with one_rank():
        assert_told_apart(outputs_and_scales(fsdp1(model)), expected)


def test_reading_frames_keeps_no_tensor_of_the_training_loop():
    """Before Python 3.13 the locals of a frame that are read live as long as it."""
    compiled = fp8(Stack(Attention() for _ in range(2)))
    for _ in range(2):
        x = torch.randn(16, 64, requires_grad=True)
        loss = compiled(x).sum()
        loss.backward()
        seen = weakref.ref(x), weakref.ref(loss)
        del x, loss
        assert [reference() for reference in seen] == [None, None]


def in_parts(m, x):
    h = m.one(x)
    if m.parts == 2:
        torch._dynamo.graph_break()
    return m.two(h)


@pytest.mark.parametrize(("scale", "frozen_from", "copies"), [("one", 0, "auto"), ("current", 2, "cache")])
def test_a_frozen_layer_with_a_graph_of_its_own_goes_on_recording_and_is_measured(scale, frozen_from, copies):
    """Its graph has no backward, and belongs to a model that trains: as one graph the model records the same."""
    found = []
    for parts in (1, 2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(in_parts, parts=parts, one=ResidualMlp(32), two=ResidualMlp(32))
        compiled = fp8(model, DelayedScaling(amax_history_len=4, initial_scale=scale), weight_copies=copies)
        watching = monitor(compiled, 1)
        for i in range(5):
            if i == frozen_from:
                model.one.requires_grad_(False)
            compiled(torch.full((16, 32), 1.0 + 15 * (i > 2))).sum().backward()
        state(compiled).step()
        names = [name for name in state(compiled).tensors if name.startswith("one.") and "grad" not in name]
        histories = {name: state(compiled).amax_history(name).tolist() for name in names}
        found.append((histories, sorted({t.name for t in watching.latest.tensors} & histories.keys())))
        before = state(compiled).state_dict()
        model.requires_grad_(False)
        with torch.no_grad():
            compiled(torch.full((16, 32), 99.0))
        assert same(before, state(compiled).state_dict()), "an evaluation records nothing"
    assert found[0] == found[1]
    assert found[0][1] == sorted(n for n in found[0][0] if copies == "auto" or "weight" not in n)  # that are cast in the graph
