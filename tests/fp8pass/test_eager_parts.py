"""Parts of a compiled model that Dynamo leaves eager are known by module and reason, and nothing else is taken for one."""

import contextlib
import copy
import inspect as python
import itertools
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8pass import diff, fp8_compile, fp8_uncompile, inspect
from fp8pass.errors import Fp8FallbackWarning, Fp8Warning, StrictError
from fp8pass.runtime.eager import function_name
from fp8pass.runtime.wrap import session_of
from tests.support.backend import register_backend
from tests.support.cases import rest
from tests.support.models import mlp
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
    """A block, a head and modules of `others`, which takes their place."""

    others = staticmethod(dict)

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(64, 64)
        for name, module in self.others().items():
            setattr(self, name, module)

    def forward(self, x):
        return self.head(self.block(x))


class InLoop(Model):
    def forward(self, x):
        for _ in range(2):
            x = self.block(x)
            torch._dynamo.graph_break()
        return self.head(x)


class InTry(Model):
    def forward(self, x):
        x = self.block(x)
        try:
            torch._dynamo.graph_break()
            raise ValueError
        except ValueError:
            pass
        return self.head(x)


class Caught(Model):
    def check(self):
        torch._dynamo.graph_break()
        raise RuntimeError("no")

    def forward(self, x):
        x = self.block(x)
        with contextlib.suppress(RuntimeError):
            self.check()
        return self.head(x)


class InWith(Model, contextlib.AbstractContextManager):
    def __exit__(self, *_):
        return None

    def forward(self, x):
        x = self.block(x)
        with self:
            torch._dynamo.graph_break()
            return self.head(x)


class Behind(Model):
    """`turn` is a constant to Dynamo: each value compiles the part behind the break again."""

    turn = 0

    def forward(self, x):
        x = self.block(x)
        torch._dynamo.graph_break()
        return self.head(x) * self.turn


class Recurrent(Model):
    others = staticmethod(lambda: {"lstm": nn.LSTM(64, 64)})

    def forward(self, x):
        return self.head(self.lstm(self.block(x))[0])


class RecurrentBehindUnpacking(Recurrent):
    """Dynamo cannot resume behind the LSTM: its own word for it does not say what it met."""

    def forward(self, x):
        x = self.block(x)
        rows, _ = x.shape
        return self.head(self.lstm(x.reshape(rows, -1))[0])


class Disabled(Model):
    @torch.compiler.disable
    def tail(self, x):
        return self.head(x)

    def forward(self, x):
        return self.tail(self.block(x))


class DisabledBeforeLoop(Model):
    """The loop is left eager behind a module that is disabled on its own, beside which modules get frames: `Siblings`."""

    others = staticmethod(
        lambda: {"head": torch.compiler.disable(nn.Linear(64, 64)), "loop": nn.ModuleList([nn.Linear(64, 64)])}
    )

    def forward(self, x):
        x = self.head(self.block(x))
        for layer in self.loop:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Calling(Model):
    def check(self):
        torch._dynamo.graph_break()

    def forward(self, x):
        x = self.block(x)
        for _ in range(1):
            self.check()
        return self.head(x)


class Attending(InLoop):
    """The attention's output projection has no call of its own."""

    others = staticmethod(lambda: {"head": nn.MultiheadAttention(64, 2)})

    def forward(self, x):
        for _ in range(2):
            x = self.block(x)
            torch._dynamo.graph_break()
        return self.head(x, x, x)[0]


def without(part):
    """The model, with one of its modules disabled."""
    model = Model()
    setattr(model, part, torch.compiler.disable(getattr(model, part)))
    return model


class Branches(nn.Module):
    """A graph break, and heads of which a call takes some."""

    def __init__(self):
        super().__init__()
        self.block, self.heads, self.never = Block(), nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]), nn.Linear(64, 8)
        self.taken = [0]

    def forward(self, x):
        x = self.block(x)
        torch._dynamo.graph_break()
        return sum(self.heads[i](x) for i in self.taken)


def make(model, way="beside", **options):
    if way == "name":
        register_backend()
        return torch.compile(model, backend="fp8pass", options={"recipe": "current", "backend": "aot_eager", **options})
    return fp8_compile(model, "current", backend="aot_eager", in_place=way == "in place", **options)


def said_in(compiled, num_steps=3):
    """The warnings of some steps of training."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            compiled(x()).sum().backward()
    return [str(w.message) for w in said if issubclass(w.category, Fp8FallbackWarning)]


# -- what ran eagerly

RNN = "nn.LSTM is not traced: torch._dynamo.config.allow_rnn"
#: The module that runs eagerly, words of its reason, and how many lines below `class` the break or the call that has it is.
EAGER = {
    InLoop: ("head", "forward", 4),
    InTry: ("head", "try", 3),
    Caught: ("head", "graph break", None),
    InWith: ("head", "graph break", None),
    Recurrent: ("head", "allow_rnn", None),
    RecurrentBehindUnpacking: ("head", "allow_rnn", None),
    DisabledBeforeLoop: ("loop.0", "graph break", 11),
    Calling: ("head", "graph break", 7),
    Attending: ("head.out_proj", "graph break", None),
}


@pytest.mark.parametrize("model", EAGER)
def test_a_module_in_a_frame_that_dynamo_drops_is_said_once_in_the_first_step(model):
    path, reason, line = EAGER[model]
    compiled = make(model())
    with pytest.warns(Fp8FallbackWarning, match="2 modules run" if model is Attending else "1 module runs eagerly") as said:
        compiled(x()).sum().backward()
    assert len(said) == 1
    assert said[0].filename == __file__
    found, text = inspect(compiled), str(said[0].message)
    assert f"{path} (" in text
    assert said_in(compiled) == []
    assert reason in found.ran_eagerly[path]
    assert found.ran_eagerly.get("lstm", RNN).startswith(RNN)
    assert found.to_dict()["ran_eagerly"] == dict(found.ran_eagerly)
    (row,) = (g for g in found.gemms if g.module == path)
    assert not row.quantized
    assert row.reason == f"ran eagerly: {found.ran_eagerly[path]}"
    assert (row.m, row.n, row.k) == (16, 64, 64)
    assert row.source.startswith(__file__)
    assert {g.module for g in found.gemms if g.quantized} == {"block", "block.up"}
    assert path in found.outside
    assert "No GEMM belongs to" not in str(found)
    assert path in str(found).rpartition("left out of the compiled graphs")[2]
    if line is not None:
        first = python.getsourcelines(model)[1]
        place = f" forward (test_eager_parts.py:{first + line})"
        place += f", in check (test_eager_parts.py:{first + 2})" * (model is Calling)
        assert place in text
        assert place in found.ran_eagerly[path]


class InTurn(nn.ModuleList):
    def forward(self, given):
        for layer in self:
            given = layer(given)
        return given


class Rest(nn.Module):
    """Products by a Parameter and by a linear, before a break and behind it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner = way, nn.Linear(64, 64)
        self.weight, self.last = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))

    def forward(self, given):
        h = self.inner(given) @ self.weight
        if self.way == "with":
            with contextlib.ExitStack():
                torch._dynamo.graph_break()
                h = self.inner(h) @ self.last
        elif self.way == "lock":  # resumed behind the first break, and dropped there
            with threading.Lock():
                torch._dynamo.graph_break()
                h = self.inner(h) @ self.last
        elif self.way == "pointwise":
            try:
                torch._dynamo.graph_break()
                h = h.tanh()
            finally:
                h = h + 1
        elif self.way == "loop":
            for _ in range(2):
                torch._dynamo.graph_break()
                h = self.inner(h)
        return h


@pytest.mark.parametrize(
    ("parts", "eager"),
    [
        (["with"], {"0", "0.inner"}),
        (["lock"], {"0", "0.inner"}),
        (["pointwise"], set()),
        (["", "loop"], {"1", "1.inner"}),
        (["", "shared"], {"0.inner", "1"}),
    ],
    ids=["with", "lock", "pointwise", "loop", "shared"],
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_products_behind_a_break_are_said_beside_those_before_it_and_those_of_other_instances(parts, eager):
    layers = [Rest(part.replace("shared", "loop")) for part in parts]
    if "shared" in parts:
        layers[1].inner = layers[0].inner
    compiled = make(InTurn(layers))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        compiled(x()).sum().backward()
    assert {"0", "0.inner"} <= {g.module for g in inspect(compiled).gemms if g.quantized}
    assert set(inspect(compiled).ran_eagerly) == eager


def test_a_recurrent_module_runs_in_fp8_with_the_setting_that_compiles_it():
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = make(Recurrent(), strict=True)
        compiled(x())
        assert all(g.quantized for g in inspect(compiled).gemms if g.role == "output")


@pytest.mark.parametrize("way", ["beside", "in place", "name"])
def test_it_is_found_however_the_model_is_compiled_and_strict_makes_one_error_of_it(way):
    compiled = make(InTry(), way)
    (text,) = said_in(compiled)
    assert text.startswith("InTry: 1 module runs eagerly")
    assert list(inspect(compiled).ran_eagerly) == ["head"]
    assert "5 of 6 GEMMs run in FP8" in str(inspect(compiled))
    torch._dynamo.reset()
    compiled = make(InTry(), way)
    with torch.no_grad(), pytest.warns(Fp8FallbackWarning, match="head"):
        compiled(x()), compiled(x())
    torch._dynamo.reset()
    compiled = make({"beside": InTry, "in place": InLoop, "name": DisabledBeforeLoop}[way](), way, strict=True)
    if way == "name":  # the session of a name begins within the first call
        compiled(x())
    with pytest.raises(StrictError, match=r"(head|loop\.0) \(graph break"):
        compiled(x())
    compiled(x()).sum().backward()


def test_a_part_at_the_recompile_limit_is_said_in_the_call_that_reaches_it():
    model = Behind()
    compiled = make(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        for model.turn in range(2):
            assert said_in(compiled, 1) == []
        model.turn = 2
        (text,) = said_in(compiled, 1)
        assert "head (recompile limit: torch.compile compiled forward" in text
        assert said_in(compiled) == []
    rows = [g for g in inspect(compiled).gemms if g.module == "head" and g.role == "output"]
    assert [g.quantized for g in rows] == [True, False]
    assert rows[1].reason.startswith("ran eagerly: recompile limit")
    assert rows[1].m == 16


class Around(Model):
    """`inner` is left eager in the first call alone; in others it is in the graph of `forward`, until that is at its limit."""

    others, turn = staticmethod(lambda: {"before": nn.Linear(64, 64), "head": Block()}), 0

    def inner(self, x):
        for _ in range(1 if self.turn == 0 else 0):
            x = x + 1
            torch._dynamo.graph_break()
        return self.block(self.head(x)[self.turn :])

    def forward(self, x):
        return self.inner(self.before(x) * (1 + self.turn))


def test_the_rest_of_a_function_has_its_name():
    rests = ("forward", "torch_dynamo_resume_in_forward_at_7", "torch_dynamo_resume_in_look_at_me_at_12")
    assert [*map(function_name, rests)] == ["forward", "forward", "look_at_me"]


def test_the_limit_of_a_frame_is_the_cause_of_what_it_calls():
    compiled = make(model := Around())
    with torch._dynamo.config.patch(recompile_limit=3):
        for model.turn in range(3):
            assert said_in(compiled, 1) == []
        model.turn = 3
        said = [text for _ in range(2) for text in said_in(compiled, 1)]
    assert all("recompile limit" in text and "graph break" not in text for text in said)
    reasons = inspect(compiled).ran_eagerly
    assert reasons.keys() == {"before", "block.up"}
    assert {reason.partition(":")[0] for reason in reasons.values()} == {"recompile limit"}


class TwoWays(Model):
    """Training and evaluation reach the head in frames of their own, behind breaks of their own."""

    def forward(self, x, times=""):
        h = self.block(x)
        if self.training:
            torch._dynamo.graph_break()
            return self.head(h)
        torch._dynamo.graph_break()
        return self.head(h) * len(times)


def test_what_is_eager_in_each_second_call_alone_is_said():
    """In the other ones the module runs in FP8, and its frame there is not at the limit."""
    compiled, lengths = make(model := TwoWays()), itertools.count(1)

    def train_and_evaluate(given):
        out = compiled(given)
        with torch.no_grad():
            model.eval()
            compiled(given, "x" * next(lengths))
        model.train()
        return out

    with torch._dynamo.config.patch(recompile_limit=2):
        (text,) = said_in(train_and_evaluate, 6)
    assert list(inspect(compiled).ran_eagerly) == ["head"]
    assert "1 module runs eagerly" in text


def with_a_reason():
    model = Model()
    model.head.forward = torch.compiler.disable(model.head.forward, reason="it is exact")
    return model


@pytest.mark.parametrize(
    ("make_model", "reason", "paths"),
    [
        (Disabled, "torch.compiler.disable on ", ["head"]),
        (lambda: without("head"), "torch.compiler.disable on ", ["head"]),
        (lambda: without("block"), "torch.compiler.disable on a Block", ["block", "block.up"]),
        (with_a_reason, "it is exact", ["head"]),
    ],
)
def test_what_torch_compiler_disable_keeps_is_in_the_table_and_no_warning(make_model, reason, paths):
    """Also a product of the module's own, whose sizes are not known; a comparison has the rows."""
    compiled = make(make_model(), strict=True)
    assert said_in(compiled) == []
    found = inspect(compiled)
    assert list(found.ran_eagerly) == paths
    assert reason in found.ran_eagerly[paths[0]]
    assert paths != ["head"] or "5 of 6 GEMMs run in FP8" in str(found)
    if paths != ["head"]:
        assert [g.flops for g in found.gemms if g.module == "block"] == [None]
        said_in(other := make(Model()), 1)
        assert ("block.up", "output") in {(c.module, c.role) for c in diff(found, inspect(other)).changes}


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_a_rule_for_a_module_that_runs_eagerly_has_no_effect(recipe):
    """That is a warning of its own where the rule asks for FP8."""
    compiled = make(InLoop(), rules={"block.up": "rowwise", "head": recipe})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(x()).sum().backward()
    remark = "The rule 'head' has no effect: head runs in high precision under any rule (ran eagerly)."
    assert [w.category for w in said] == [Fp8FallbackWarning] + [Fp8Warning] * (recipe is not None)
    assert recipe is None or remark in str(said[1].message)
    found = inspect(compiled)
    assert found.unmatched_rules == ["head"]
    assert found.to_dict()["rule_remarks"] == {"head": remark}
    assert remark in str(found)
    # Of one that is meant to run eagerly that is an error with `strict`.
    compiled = make(Disabled(), strict=True, rules={"head": recipe})
    with contextlib.nullcontext() if recipe is None else pytest.raises(StrictError, match="The rule 'head' has no effect"):
        compiled(x()).sum().backward()


# -- what did not


def test_modules_within_one_that_is_compiled_in_place_are_not_watched():
    """They are its own, so nothing is left to watch in the outer model."""
    model = Model()
    make(model.block, "in place")
    compiled = make(model)
    assert said_in(compiled, 4) == []
    runs = session_of(compiled).eager
    assert runs.is_settled
    assert [path for path, _ in runs.candidates(model, False)] == ["head"]


def test_modules_with_hooks_of_both_kinds_that_calls_take_in_turns_are_compiled_once():
    model = Branches()
    for head in model.heads:
        head.register_forward_pre_hook(lambda *_: None)
        head.register_forward_hook(lambda *_: None)
    compiled = make(model)
    for taken in ([0], [1], [0], [1]):
        model.taken = taken
        assert said_in(compiled, 1) == []
        counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for taken in ([0], [1]):
        model.taken = taken
        assert said_in(compiled, 1) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head.weight = self.block.up.weight

    def forward(self, x):
        x = self.block(x)
        torch._dynamo.graph_break()
        return nn.functional.linear(x, self.head.weight, self.head.bias)


class Checkpointed(Model):
    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False)
        torch._dynamo.graph_break()
        return self.head(x)


class Frozen(Model):
    def forward(self, x):
        with torch.no_grad():
            x = self.block(x)
        torch._dynamo.graph_break()
        return self.head(x)


MODELS = [Model, Tied, Checkpointed, Frozen, Branches]


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *((model, ("beside", "in place")[i % 2]) for i, model in enumerate(MODELS)),
        *rest((model, ("in place", "beside")[i % 2]) for i, model in enumerate(MODELS)),
    ],
)
def test_nothing_is_said_of_what_runs_compiled_or_not_at_all(model, way):
    compiled = make(model(), way, strict=True)
    assert said_in(compiled) == []
    with torch.no_grad():
        compiled(x())
    assert not inspect(compiled).ran_eagerly
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_heads_that_take_turns_an_evaluation_beside_training_and_a_penalty_on_all_weights_are_no_runs():
    model = Branches()
    compiled = make(model, strict=True)
    for taken in ([0], [1], [0, 1], [0], [1]):
        model.taken = taken
        (compiled(x()).sum() + sum(p.square().sum() for p in model.parameters())).backward()
        with torch.no_grad():
            model.taken = [0]
            compiled(x())
    model.never(x())  # the user's own eager call
    assert not inspect(compiled).ran_eagerly


def test_modules_with_hooks_of_the_users_run_as_they_did():
    model, calls = Branches(), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
    compiled = make(model, strict=True)
    said_in(compiled)
    assert not inspect(compiled).ran_eagerly
    assert model.never not in calls


# -- watching leaves no trace


def test_watching_leaves_the_model_as_it_was_and_compiles_nothing_anew():
    model = Branches()
    keys, compiled = list(model.state_dict()), make(model)
    said_in(compiled, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        said_in(compiled, 12)
    model.taken = [9]
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(x())
    assert list(model.state_dict()) == keys
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    pickle.dumps(model)
    copy.deepcopy(model)


def test_modules_that_come_and_go():
    model = InLoop()
    compiled = make(model, "in place")
    assert len(said_in(compiled)) == 1
    model.block = Block()
    model.head = nn.Sequential(nn.Linear(64, 64))
    (text,) = said_in(compiled)
    assert "head.0 (" in text
    fp8_uncompile(model)
    assert said_in(model) == []


# -- calls that run no graph


def test_the_whole_model_is_in_ran_eagerly_as_itself():
    compiled = make(mlp())
    compiled(x())
    assert not inspect(compiled).ran_eagerly
    with torch.compiler.set_stance("force_eager"), pytest.warns(Fp8FallbackWarning, match=r"The cause: .*force_eager"):
        compiled(x())
    assert "force_eager" in inspect(compiled).ran_eagerly["self"]


def norms():
    """The momentum that `update_bn` sets: torch asks a counter for its number, a graph break in the loop of nn.Sequential."""
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=None))


LEFT = "The cause: graph break: Dynamo left the forward of Sequential eager: "
LIMIT = "The cause: recompile limit: torch.compile compiled the forward of Sequential 1 times"


@pytest.mark.parametrize("way", ["", "in place"])
@pytest.mark.parametrize(
    ("model", "call", "cause"),
    [
        (mlp, lambda c: torch.func.grad(lambda v: c(v).sum())(x()), r"The cause: a transform of torch\.func"),
        (lambda: nn.Sequential(nn.LSTM(64, 64)), lambda c: c(x()), r"nn\.LSTM.*allow_rnn = True"),
        (norms, lambda c: train(c, x(16), x(32)), rf"{LEFT}.*Tensor\.item"),
        (mlp, lambda c: train(c, x(16), x(32)), LIMIT),
    ],
)
def test_the_cause_of_an_eager_call_is_named(model, call, cause, way):
    compiled, has_limit = make(model(), way, dynamic=False), cause is LIMIT
    with (
        torch._dynamo.config.patch(recompile_limit=1 if has_limit else 8),
        pytest.warns(Fp8FallbackWarning, match=cause) as said,
    ):
        call(compiled)
    assert has_limit or "limit" not in str(said[0].message)


def test_the_cause_is_named_where_torch_counted_it_by_another_kind_before():
    """As of a break that raised an error in another model of the process."""
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.warns(Fp8FallbackWarning, match=r"The cause: graph break: .*Tensor\.item"):
            make(norms())(x(16))
        counted = torch._dynamo.utils.counters
        counted["unimplemented"].update(dict.fromkeys(counted["graph_break"], 9))


def test_a_dispatch_mode_is_the_cause():
    compiled = make(mlp(), "in place")
    said = pytest.warns(Fp8FallbackWarning, match="dispatch mode FlopCounterMode.* in later calls, too.*_dynamo.reset")
    with FlopCounterMode(display=False), said:
        compiled(x())
    compiled(x())
    assert not any(gemm.quantized for gemm in inspect(compiled).gemms)
    torch._dynamo.reset()
    compiled(x()).sum().backward()
    with FlopCounterMode(display=False):
        compiled(x())
    assert any(gemm.quantized for gemm in inspect(compiled).gemms)


class Looped(Model):
    """The graph breaks in the loop by the block's hooks alone."""

    def forward(self, x):
        for block in (self.block,):
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("sharded", ["block", "head"])
def test_the_hooks_of_fsdp2_are_named_as_the_cause(sharded):
    """Of a linear that is wrapped itself, too: it has hooks of both kinds, of which guards count those of a kind."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Looped()
        fully_shard(model.get_submodule(sharded))
        compiled = fp8_compile(fully_shard(model), "current", backend="aot_eager")
        with pytest.warns(Fp8FallbackWarning, match="head .* eagerly.*fully_shard breaks the graph around every module"):
            compiled(x()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
