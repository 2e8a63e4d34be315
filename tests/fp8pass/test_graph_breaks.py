"""Graph breaks and regional compilation: one graph serves many layers, each layer has its own histories and names."""

import contextlib
import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.func import functional_call

from fp8pass import DelayedScaling, fp8_compile, inspect, monitor, state
from fp8pass.errors import RuleError
from tests.support.models import BrokenBlock, BrokenLayers, Net, ResidualMlp, Stack, mlp
from tests.support.numerics import sqnr
from tests.support.training import fp8, same, train
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
        self.rotary, self.norm = rotary, norm
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        with torch.no_grad():
            self.up.weight.mul_(factor), self.down.weight.div_(factor)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(self.norm(x) * self.rotary.table)))
        torch._dynamo.graph_break()
        return x


def bare():
    return Stack(Bare(4.0**i) for i in range(3))


def rotated():
    rotary, norm = nn.Module(), nn.LayerNorm(64)
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
    def forward(self, x):
        return (x @ x.t()).softmax(-1) @ x


def call(compiled, x):
    return compiled(x)


def values_of(model):
    """The values of the Parameters, in tensors that are none."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def call_with_tensors(compiled, x):
    return functional_call(compiled, values_of(compiled), x)


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
    "make", [lambda: Stack(BrokenBlock(64, 96) for _ in range(3)), mlp, lambda: Run(False), lambda: Run(True), bare, rotated]
)
def test_layers_that_run_with_other_tensors_than_their_parameters_are_told_apart(make, in_place):
    model = make()
    expected = outputs_and_scales(copy.deepcopy(model))
    assert_told_apart(outputs_and_scales(model, call_with_tensors, in_place=in_place), expected)


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


@pytest.mark.parametrize("with_tensors", [False, True])
def test_layers_that_a_compiled_function_calls_have_their_own_histories(with_tensors):
    """They have the outputs and scales of a compiled model, by names of the function's variables."""
    model = rotated()
    expected, values = outputs_and_scales(copy.deepcopy(model)), values_of(model)
    compiled = fp8((lambda x: functional_call(model, values, x)) if with_tensors else (lambda x: model(x)), RECIPE)
    found = three_steps(compiled, {"": compiled})
    assert all(map(torch.equal, found[0], expected[0]))
    assert sorted(found[1].values()) == sorted(expected[1].values())
    assert {name.rpartition(".")[0] for name in found[1]} == {"", "self#1", "self#2"}


@contextlib.contextmanager
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def fsdp1(model):
    """A stack whose layers are wrapped, and itself."""
    how = {"use_orig_params": True, "device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    model.layers = nn.ModuleList(FullyShardedDataParallel(layer, **how) for layer in model.layers)
    return FullyShardedDataParallel(model, **how)


@pytest.mark.parametrize("make", [lambda: Stack(ResidualMlp(64) for _ in range(2)), bare, rotated])
def test_layers_under_fsdp1_have_names_and_histories_as_without_it(make):
    model = make()
    expected = outputs_and_scales(copy.deepcopy(model))
    with one_rank():
        assert_told_apart(outputs_and_scales(fsdp1(model)), expected)


@pytest.mark.parametrize(("make", "parts"), [(bare, ("", ".ups")), (rotated, (".up", ".down"))])
def test_rules_reach_a_layer_that_shares_a_parameter_or_has_bare_ones(make, parts):
    """The first layer, whose input needs no gradient, has a graph of its own."""
    with one_rank():
        for wrap, run in ((lambda model: model, call_with_tensors), (fsdp1, call)):
            compiled = fp8(wrap(make()), rules={"layers.0*": None})
            run(compiled, torch.randn(16, 64)).sum().backward()
            found = {(gemm.module, gemm.quantized) for gemm in inspect(compiled).gemms}
            assert found == {(f"layers.{i}{part}", i > 0) for i in range(3) for part in parts}


def test_a_tied_head_has_one_name():
    model = Net(lambda m, x: m.head(m.embedding(x)), embedding=nn.Embedding(96, 64), head=mlp(hidden=64, outputs=96))
    model.head[2].weight, names = model.embedding.weight, []
    for run in (call, call_with_tensors):
        compiled = fp8(copy.deepcopy(model), RECIPE)
        run(compiled, torch.arange(16)).sum().backward()
        names.append((set(state(compiled).tensors), {g.module for g in inspect(compiled).gemms}))
    assert names[0] == names[1]
    assert "head.2:weight" in names[0][0]


def test_parameters_that_a_function_behind_a_break_takes_have_their_own_histories():
    def product(x, w):
        torch._dynamo.graph_break()
        return x @ w

    def forward(model, x):
        for layer in model.layers:
            x = x + product(torch.relu(product(x, layer.ups[0])), layer.down)
        return x

    compiled = fp8(Net(forward, layers=nn.ModuleList(Bare(4.0**i) for i in range(2))), RECIPE)
    compiled(torch.randn(16, 64, requires_grad=True)).sum().backward()
    paths = {f"layers.{i}.{name}" for i in range(2) for name in ("ups.0", "down")}
    assert set(state(compiled).tensors) == {f"{path}:{kind}" for path in paths for kind in KINDS}


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


def in_one(m, x):
    return m.two(m.one(x))


def in_two(m, x):
    h = m.one(x)
    torch._dynamo.graph_break()
    return m.two(h)


@pytest.mark.parametrize(
    ("scale", "frozen_from", "copies"), [("one", 0, "auto"), ("current", 2, "auto"), ("current", 2, "cache")]
)
def test_a_frozen_layer_with_a_graph_of_its_own_goes_on_recording_and_is_measured(scale, frozen_from, copies):
    """Its graph has no backward, and belongs to a model that trains: as one graph the model records the same."""
    found = []
    for form in (in_one, in_two):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(form, one=ResidualMlp(32), two=ResidualMlp(32))
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
