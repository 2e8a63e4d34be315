"""A compiled module within a compiled module: each GEMM in FP8 once, in every container, by every way, in either order."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from fp8pass import inspect, state
from fp8pass.errors import Fp8Warning, NotCompiledError
from tests.support import training
from tests.support.cases import rest
from tests.support.models import Stack, mlp
from tests.support.numerics import sqnr
from tests.support.training import fp8

OPTIONS = {"backend": "aot_eager", "select": "all"}
NAMED = {"backend": "fp8pass", "options": {"recipe": "delayed", **OPTIONS}}


class Attributes(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.first, self.middle, self.last = parts

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Named(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleDict(zip("abc", parts, strict=True))

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


class Nested(nn.Module):
    """The loop is not in the frame that is compiled."""

    def __init__(self, *parts):
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return self.body(x) * 2


def listed(*parts):
    return Stack(parts)


CONTAINERS = {"sequential": nn.Sequential, "attributes": Attributes, "list": listed, "dict": Named, "nested": Nested}


def in_place(module, recipe="delayed"):
    return fp8(module, recipe, in_place=True)


def own_compile(module):
    module.compile(**NAMED)
    return module


WAYS = {
    "in place": in_place,
    "wrapper": lambda module: fp8(module, "delayed"),
    "by name": lambda module: torch.compile(module, **NAMED),
    "module.compile": own_compile,
}
CASES = [
    case
    for case in itertools.product(CONTAINERS, ["Sequential", "custom"], WAYS, WAYS, [True, False])
    # torch.compile does nothing for nn.Sequential(...).compile(), and what wraps a module cannot come after its container.
    if not (case[0] == "sequential" and case[3] == "module.compile")
    and not (case[1] == "Sequential" and case[2] == "module.compile")
    and not (not case[4] and case[2] in ("wrapper", "by name"))
]
#: Each container, way and order at least once, and three times as many cases where time is no matter.
FAST = CASES[5::31]
REST = CASES[::7]


def train(compiled):
    """Two steps without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        training.train(compiled, torch.randn(32, 64), torch.randn(32, 64))


def linear():
    return nn.Linear(64, 64)


@pytest.mark.parametrize(("container", "kind", "way", "outer_way", "is_inner_first"), [*FAST, *rest(REST)])
def test_each_gemm_is_in_fp8_once(container, kind, way, outer_way, is_inner_first):
    middle = mlp(64, 96, 64) if kind == "Sequential" else Attributes(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    parts = [linear(), middle, linear()]
    plain = CONTAINERS[container](*copy.deepcopy(parts))
    if is_inner_first:
        parts[1] = WAYS[way](middle)
    compiled = WAYS[outer_way](CONTAINERS[container](*parts))
    if not is_inner_first:
        parts[1] = WAYS[way](middle)
    train(compiled)
    x = torch.randn(32, 64)
    with torch.no_grad():
        assert sqnr(plain(x), compiled(x)) > 20
    gemms = [*inspect(compiled).gemms, *inspect(parts[1]).gemms]
    assert [g.reason for g in gemms if not g.quantized] == []
    assert len(gemms) == 5 + 6  # the input of the model has no gradient
    assert all(m.__dict__.get("_compiled_call_impl") is None for m in (parts[0], parts[2]))


def test_every_container_way_and_order_is_in_the_fast_suite():
    for i in range(5):
        assert {case[i] for case in FAST} == {case[i] for case in CASES}


def test_one_graph_break_is_all_that_it_costs():
    torch._dynamo.utils.counters.clear()
    compiled = in_place(Attributes(linear(), in_place(mlp(64, 96, 64), "current"), linear()))
    train(compiled)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) <= 2  # torch 2.13 counts it in two frames, 2.11 in none
    report = inspect(compiled)
    assert len(report.graphs) == 2
    assert {g.recipe for g in report.gemms} == {"delayed"}
    assert {g.recipe for g in inspect(compiled.middle).gemms} == {"current"}


def test_three_levels_have_their_own_states():
    middle = in_place(nn.Sequential(linear(), in_place(mlp(64, 96, 64)), linear()))
    outer = in_place(nn.Sequential(linear(), middle, linear()))
    train(outer)
    for module in (outer, middle, middle[1]):
        assert {name.split(":")[0] for name in state(module).tensors} == {"0", "2"}
        assert state(module).scale("0:weight") == torch.tensor(448.0) / module[0].weight.abs().max()


def test_a_module_compiled_after_the_first_step_of_its_container():
    outer = in_place(nn.Sequential(linear(), mlp(64, 96, 64), linear()))
    train(outer)
    in_place(outer[1])
    train(outer)
    assert len(inspect(outer[1]).gemms) == 6
    assert all(g.quantized for m in (outer, outer[1]) for g in inspect(m).gemms)


def test_modules_that_look_alike_share_a_graph():
    parts = [linear() for _ in range(12)]  # more than Dynamo's recompile limit
    outer = in_place(nn.Sequential(*parts, in_place(mlp(64, 96, 64)), linear(), linear()))
    train(outer)
    report = inspect(outer)
    assert len(report.gemms) == 3 * 14 - 1
    assert all(g.quantized for g in report.gemms)
    assert len(report.graphs) <= 2


@pytest.mark.parametrize(
    "module", [mlp(64, 96, 64), linear(), nn.TransformerEncoderLayer(64, 2, 64)], ids=lambda m: type(m).__name__
)
def test_what_torch_does_not_compile_is_said(module):
    own_compile(module)
    module(torch.randn(4, 32, 64))
    for ask in (inspect, state):
        with pytest.raises(NotCompiledError, match=f"compiles nothing in nn.{type(module).__name__}"):
            ask(module)
