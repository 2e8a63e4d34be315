"""Parts of a compiled model that Dynamo leaves eager are known by module and reason, and nothing else is taken for one."""

import contextlib
import inspect as python
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8pass import fp8_compile, inspect
from fp8pass.errors import Fp8FallbackWarning, Fp8Warning, StrictError
from tests.support.models import Stack, mlp
from tests.support.training import train


def x(rows=16):
    return torch.randn(rows, 64)


class Block(nn.Module):
    """Two GEMMs, of which one is a product of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return self.up(x).relu() @ self.down


class Model(nn.Module):
    """A block and a head."""

    def __init__(self, **others):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(64, 64)
        for name, module in others.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.head(self.block(x))


class InTry(Model):
    def forward(self, x):
        x = self.block(x)
        try:
            torch._dynamo.graph_break()
            raise ValueError
        except ValueError:
            pass
        return self.head(x)


class Attending(Model):
    """The attention's output projection has no call of its own."""

    def __init__(self):
        super().__init__(head=nn.MultiheadAttention(64, 2))

    def forward(self, x):
        for _ in range(2):
            x = self.block(x)
            torch._dynamo.graph_break()
        return self.head(x, x, x)[0]


class Branches(nn.Module):
    """A frozen call and a checkpointed one, a graph break, and heads of which a call takes some; a function reads a weight."""

    def __init__(self):
        super().__init__()
        self.block, self.heads, self.never = Block(), nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), nn.Linear(64, 8)
        self.own, self.read, self.taken = nn.Identity(), nn.Linear(64, 64, bias=False), [0]
        self.read.weight = self.block.up.weight

    def forward(self, x):
        with torch.no_grad():
            frozen = self.block(x)
        x = checkpoint(self.block, x, use_reentrant=False)
        torch._dynamo.graph_break()
        x = nn.functional.linear(self.own(x) + frozen, self.read.weight)
        return sum(self.heads[i](x) for i in self.taken)


def make(model, way="beside", **options):
    torch._dynamo.reset()
    if way == "name":
        return torch.compile(model, backend="fp8pass", options={"recipe": "current", "backend": "aot_eager", **options})
    return fp8_compile(model, "current", backend="aot_eager", in_place=way == "in place", **options)


def said_in(compiled, num_steps=3, category=Fp8FallbackWarning):
    """The warnings of a category in some steps of training."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            compiled(x()).sum().backward()
    return [str(w.message) for w in said if issubclass(w.category, category)]


# -- what ran eagerly


@pytest.mark.parametrize(
    ("model", "way", "path", "reason"),
    [(InTry, "beside", "head", "try"), (Attending, "in place", "head.out_proj", "graph break")],
)
def test_what_dynamo_drops_is_said_once_and_an_error_with_strict(model, way, path, reason):
    """However the model is compiled, also by an evaluation."""
    compiled = make(model(), way)
    with pytest.warns(Fp8FallbackWarning, match="2 modules run" if model is Attending else "1 module runs eagerly") as said:
        compiled(x()).sum().backward()
    assert [w.filename for w in said] == [__file__]
    found, text = inspect(compiled), str(said[0].message)
    assert f"{path} (" in text
    assert said_in(compiled) == []
    assert reason in found.ran_eagerly[path]
    assert found.to_dict()["ran_eagerly"] == dict(found.ran_eagerly)
    (row,) = (g for g in found.gemms if g.module == path)
    assert not row.quantized
    assert row.reason == f"ran eagerly: {found.ran_eagerly[path]}"
    assert (row.m, row.n, row.k) == (16, 64, 64)
    assert row.source.startswith(__file__)
    assert {g.module for g in found.gemms if g.quantized} == {"block", "block.up"}
    assert path in str(found).rpartition("left out of the compiled graphs")[2]
    if model is InTry:
        assert f" forward (test_eager_parts.py:{python.getsourcelines(model)[1] + 3})" in text
    strict = make(model(), way, strict=True)
    with torch.no_grad(), pytest.raises(StrictError, match=rf"{path} \(.*{reason}"):
        strict(x())
    strict(x()).sum().backward()


class Rest(nn.Module):
    """Products by a Parameter and by a linear, before a break and behind it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.weight = way, nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, given):
        h = self.inner(given) @ self.weight
        if self.way == "with":
            with contextlib.ExitStack():
                torch._dynamo.graph_break()
                h = self.inner(h) @ self.weight
        elif self.way == "loop":
            for _ in range(2):
                torch._dynamo.graph_break()
                h = self.inner(h)
        return h


@pytest.mark.parametrize(("ways", "eager"), [(["with"], {"0", "0.inner"}), (["", "loop"], {"1", "1.inner"})])
def test_products_behind_a_break_are_said_beside_those_before_it_and_those_of_other_instances(ways, eager):
    compiled = make(Stack(Rest(way) for way in ways))
    said_in(compiled, 1)
    assert {"layers.0", "layers.0.inner"} <= {g.module for g in inspect(compiled).gemms if g.quantized}
    assert set(inspect(compiled).ran_eagerly) == {f"layers.{path}" for path in eager}


def test_what_torch_compiler_disable_keeps_is_in_the_table_and_no_warning():
    """Also a product of the module's own, whose sizes are not known, where another instance has a break."""
    for has_break in (False, True):
        model = Model(head=torch.compiler.disable(Block()))
        if has_break:
            model.block.up.forward = torch.compiler.disable(model.block.up.forward)
        compiled = make(model, strict=True)
        assert said_in(compiled) == []
        found = inspect(compiled)
        assert "torch.compiler.disable on a Block" in found.ran_eagerly["head.up"]
        flops = {g.module: g.flops for g in found.gemms if g.module.startswith("head")}
        assert flops == {"head": None, "head.up": 2 * 16 * 64 * 64}


def test_a_rule_for_a_module_that_runs_eagerly_has_no_effect():
    """That is a warning where the rule asks for FP8."""
    remark = "The rule 'head' has no effect: head runs in high precision under any rule (ran eagerly)."
    for recipe in (None, "rowwise"):
        compiled = make(InTry(), rules={"head": recipe})
        assert [remark in text for text in said_in(compiled, category=Fp8Warning)] == [False] + [True] * (recipe is not None)
        assert inspect(compiled).unmatched_rules == ["head"]


# -- what did not


def test_nothing_is_said_of_what_runs_compiled_or_not_at_all():
    """Heads take turns, with hooks of both kinds, an evaluation stands beside training, a penalty reads all weights, and a
    block is compiled on its own. Each is compiled once."""
    model = Branches()
    for head in model.heads:
        head.register_forward_pre_hook(lambda *_: None)
        head.register_forward_hook(lambda *_: None)
    model.own = Block()
    make(model.own, "in place")
    keys = list(model.state_dict())
    compiled, num_graphs = make(model, "in place", strict=True), []
    for taken in ([0], [1], [0, 1], [0], [1], [0, 1], [0], [1], [0, 1]):
        model.taken = taken
        (compiled(x()).sum() + sum(p.square().sum() for p in model.parameters())).backward()
        with torch.no_grad():
            model.taken = [0]
            compiled(x())
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    model.never(x())  # the user's own eager call
    assert not inspect(compiled).ran_eagerly
    assert all(g.quantized for g in inspect(compiled).gemms)
    assert num_graphs[5] == num_graphs[-1]
    assert list(model.state_dict()) == keys
    assert not model.block._forward_pre_hooks
    assert not model.block._forward_hooks


# -- calls that run no graph


def counted(compiled):
    with FlopCounterMode(display=False):
        compiled(x())


@pytest.mark.parametrize(
    ("model", "call", "cause", "way"),
    [
        (lambda: nn.Sequential(nn.LSTM(64, 64)), lambda c: c(x()), r"nn\.LSTM.*allow_rnn = True", "beside"),
        (mlp, lambda c: train(c, x(16), x(32)), "recompile limit: .* the forward of Sequential 1 times", "in place"),
        (mlp, counted, "dispatch mode FlopCounterMode.* in later calls, too.*_dynamo.reset", "in place"),
    ],
)
def test_the_cause_of_an_eager_call_is_named_and_the_whole_model_in_the_table_as_itself(model, call, cause, way):
    compiled, has_limit = make(model(), way, dynamic=False), "limit" in cause
    with (
        torch._dynamo.config.patch(recompile_limit=1 if has_limit else 8),
        pytest.warns(Fp8FallbackWarning, match=f"The cause: .*{cause}") as said,
    ):
        call(compiled)
    assert has_limit or "limit" not in str(said[0].message)
    assert re.search(cause, inspect(compiled).ran_eagerly["self"])


class Looped(Model):
    """The graph breaks in the loop by the block's hooks alone."""

    def forward(self, x):
        for block in (self.block,):
            x = block(x)
        return self.head(x)


def test_the_hooks_of_fsdp2_are_named_as_the_cause():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Looped()
        fully_shard(model.block)
        compiled = make(fully_shard(model))
        with pytest.warns(Fp8FallbackWarning, match="head .* eagerly.*fully_shard breaks the graph around every module"):
            compiled(x()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
