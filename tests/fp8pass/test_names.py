"""Names of quantized tensors: what `str` writes, `parse` reads, and nothing else."""

import html
import re
import types
import warnings

import pytest
import torch
from torch import nn

from fp8pass import diff, estimate, inspect, monitor, state, suggest_rules
from fp8pass.errors import RuleError
from fp8pass.graph.origin import KINDS, TensorName
from fp8pass.runtime import instances
from tests.support.models import ResidualMlp, Stack, mlp
from tests.support.training import fp8, gradients, same, train

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

MODULES = st.text(min_size=1) | st.sampled_from(["layers.0.attn.wq", "layer#1", "a:input", "w@1", "b.scale@1", "recorded"])
FORMATS = st.none() | st.sampled_from(["float8_e5m2", "float8_e4m3fn"])
NAMES = st.builds(TensorName, MODULES, st.sampled_from(KINDS), st.integers(1, 99), FORMATS, st.none() | st.integers(0, 9))


@given(NAMES)
def test_parse_reads_what_str_writes(name):
    """So different names have different texts."""
    assert TensorName.parse(str(name)) == name


OTHER_TEXTS = [
    "",
    "wq",
    "wq:",
    ":input",
    "wq:output",
    "wq:input#",
    "wq:input@",
    "wq:input.scale",
    "wq:input@1@2",
    "wq:input#1 ",
]
OTHER_TEXTS += ["wq:input@recipe", "wq:input@recipe0@float8_e5m2"]


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not the name of a quantized tensor"):
        TensorName.parse(text)


@pytest.mark.parametrize("pattern", ["layer#1", "layer#*"])
def test_a_rule_matches_a_further_instance_of_a_variable(pattern):
    run = fp8(lambda layer, x: layer(x), "delayed", rules={pattern: None})
    for layer in (nn.Linear(32, 32), nn.Linear(32, 64)):
        run(layer, torch.randn(16, 32, requires_grad=True)).sum().backward()
    report = inspect(run)
    assert {(g.module, g.quantized) for g in report.gemms} == {("layer", True), ("layer#1", False)}
    assert report.unmatched_rules == []
    assert {TensorName.parse(n).module for n in state(run).tensors} == {"layer"}


def test_a_method_names_what_its_model_has():
    compiled = fp8(ResidualMlp().forward, "delayed")
    train(compiled, torch.randn(16, 64))
    assert {g.module for g in inspect(compiled).gemms} == {"up", "down"}


def test_a_wrapped_forward_names_what_the_forward_names():
    """As accelerate does for mixed precision: `self` comes to the compiled frame as `args[0]`."""

    def call(*args, **kwargs):
        return Stack.forward(*args, **kwargs)

    model = Stack(nn.Linear(32, 32) for _ in range(2))
    model.forward = types.MethodType(call, model)
    fp8(model, "delayed", in_place=True)
    train(model, torch.randn(16, 32))
    assert {g.module for g in inspect(model).gemms} == {"layers.0", "layers.1"}
    assert "layers.1:weight" in state(model).tensors


def test_wrappers_are_in_no_path():
    """As torch's activation checkpointing wraps blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, paths = mlp(), []
    for wrap in (lambda layer: layer, checkpoint_wrapper):
        torch._dynamo.reset()
        compiled = fp8(nn.Sequential(*map(wrap, plain.children())), "delayed")
        train(compiled, torch.randn(16, 64))
        paths.append((sorted({g.module for g in inspect(compiled).gemms}), sorted(state(compiled).tensors)))
    assert paths[0] == paths[1]
    assert not any("wrapped" in path for path in paths[1][0])


# -- brackets and colons

UNUSUAL = ("a[/b]", "c[red]d", "[qk]_proj", "x:y")
"""In every table and message they are as they are, and in rules by the suggested pattern."""


class Loop(nn.Module):
    """Experts in a loop that Dynamo leaves eager, each a call of one graph; the loop may change as it runs."""

    def __init__(self, count=8):
        super().__init__()
        self.experts = nn.ModuleList(ResidualMlp(16) for _ in range(count))
        self.change = self.extra = None

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        for i in range(len(self.experts)):
            if i == 3 and self.change is not None:
                self.change()
            if i == 3 and self.extra is not None:
                x = x + self.extra(x)
            x = x + self.experts[i](x) / 8
        return x


def test_a_call_searches_the_model_once_for_all_layers_that_it_binds(monkeypatch):
    """Binding thousands of experts would take minutes otherwise."""
    searched = []

    def run(search, root, run=instances.Search.run):
        searched.append(root)
        run(search, root)

    monkeypatch.setattr(instances.Search, "run", run)
    compiled = fp8(Loop(), "delayed")
    for _ in range(3):
        compiled(torch.randn(4, 16)).sum().backward()
    assert len(searched) == 1
    assert compiled._fp8pass_session.names.search is None, "between calls nothing keeps the model"
    assert {g.module for g in inspect(compiled).gemms} == {f"experts.{i}.{k}" for i in range(8) for k in ("up", "down")}


def test_a_call_finds_what_it_changes_itself():
    """Layers that a forward replaces, adds or exchanges have the names and scales that they have if that is done before it."""
    steps = []
    for is_within in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, new = Loop(), (ResidualMlp(16), ResidualMlp(16))

        def change(model=model, new=new):
            model.experts[4], model.extra = new
            model.experts[5], model.experts[6] = model.experts[6], model.experts[5]

        compiled = fp8(model, "delayed")
        train(compiled, *torch.randn(2, 4, 16))
        if is_within:
            model.change = change
        else:
            change()
        x = torch.ones(4, 16, requires_grad=True)
        out = train(compiled, x)
        model.change = None
        steps.append((out, x.grad, gradients(model), state(compiled).state_dict()))
    assert same(*steps)
    assert "extra.up:weight" in state(compiled).tensors


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in UNUSUAL:
            self.add_module(name, nn.Linear(64, 64))

    def forward(self, x):
        for module in self.children():
            x = module(x).relu()
        return x


def watched(rules=None, recipe="delayed"):
    torch._dynamo.reset()
    compiled = fp8(Chain(), recipe, rules=rules)
    watching = monitor(compiled, 1)
    for _ in range(2):
        compiled(torch.randn(32, 64)).sum().backward()
    return compiled, watching


def assert_named(text):
    whole = re.sub(r"\s", "", text)
    assert [name for name in UNUSUAL if name not in whole] == []


def test_tables_and_pages_name_them(monkeypatch, tmp_path):
    compiled, watching = watched()
    for columns in ("160", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert_named(str(inspect(compiled)))
        assert_named(repr(inspect(compiled)))
    monkeypatch.delenv("COLUMNS")
    assert_named(str(watching))
    console = pytest.importorskip("rich.console").Console(record=True, width=160)  # a user's, with markup
    console.print(watching.latest)
    assert_named(console.export_text())
    inspect(compiled).to_html(tmp_path / "page.html")
    assert_named(html.unescape((tmp_path / "page.html").read_text()))
    assert set(state(compiled).tensors) == {f"{name}:{kind}" for name in UNUSUAL for kind in ("input", "weight", "grad_output")}


def test_comparisons_suggestions_and_estimates_name_them():
    assert_named(str(diff(inspect(watched(recipe="current")[0]), inspect(watched(recipe="blockwise")[0]))))
    assert_named(str(suggest_rules(Chain(), lambda m: m(torch.randn(32, 64)).square().mean(), "current", 0.5)))
    assert_named(str(estimate(Chain(), torch.randn(32, 64))))


@pytest.mark.parametrize(("name", "pattern"), list(zip(UNUSUAL, ("a[[]/b]", "c[[]red]d", "[[]qk]_proj", "x?y"), strict=True)))
def test_rules_name_them_as_is_suggested(name, pattern):
    if ":" in name:
        with pytest.raises(RuleError, match=re.escape(f"write '?' for it: {pattern!r}")):
            watched({name: None})
    else:
        with pytest.warns(match=re.escape(f"In a pattern [...] is a set of characters; did you mean {pattern!r}?")):
            watched({name: None})
    misspelt = pattern.replace("d", "f").replace("y", "z").replace("proj", "porj").replace("/b", "/c")
    with pytest.warns(match=re.escape(f"Did you mean {pattern!r}?")):
        watched({misspelt: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute")
        compiled, _ = watched({pattern: None})
    assert {g.module for g in inspect(compiled).gemms if not g.quantized} == {name}
