"""Module names with brackets and colons: in every table and message as they are, and in rules by the suggested pattern."""

import html
import re
import warnings

import pytest
import torch
from torch import nn

from fp8pass import diff, estimate, fp8_compile, inspect, monitor, state, suggest_rules
from fp8pass.errors import RuleError

rich_console = pytest.importorskip("rich.console")

NAMES = ("a[/b]", "c[red]d", "[qk]_proj", "x:y")


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in NAMES:
            self.add_module(name, nn.Linear(64, 64))

    def forward(self, x):
        for module in self.children():
            x = module(x).relu()
        return x


def train(rules=None, recipe="delayed"):
    torch._dynamo.reset()
    compiled = fp8_compile(Chain(), recipe, rules=rules, backend="aot_eager", select="all")
    watching = monitor(compiled, 1)
    for _ in range(2):
        compiled(torch.randn(32, 64)).sum().backward()
    return compiled, watching


def assert_named(text):
    whole = re.sub(r"\s", "", text)
    assert [name for name in NAMES if name not in whole] == []


def test_tables_and_pages_name_them(monkeypatch, tmp_path):
    compiled, watching = train()
    for columns in ("160", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert_named(str(inspect(compiled)))
        assert_named(repr(inspect(compiled)))
    monkeypatch.delenv("COLUMNS")
    assert_named(str(watching))
    console = rich_console.Console(record=True, width=160)  # a user's, with markup
    console.print(watching.latest)
    assert_named(console.export_text())
    inspect(compiled).to_html(tmp_path / "page.html")
    assert_named(html.unescape((tmp_path / "page.html").read_text()))
    assert set(state(compiled).tensors) == {f"{name}:{kind}" for name in NAMES for kind in ("input", "weight", "grad_output")}


def test_comparisons_suggestions_and_estimates_name_them():
    assert_named(str(diff(inspect(train(recipe="current")[0]), inspect(train(recipe="blockwise")[0]))))
    assert_named(str(suggest_rules(Chain(), lambda m: m(torch.randn(32, 64)).square().mean(), "current", 0.5)))
    assert_named(str(estimate(Chain(), torch.randn(32, 64))))


@pytest.mark.parametrize(("name", "pattern"), list(zip(NAMES, ("a[[]/b]", "c[[]red]d", "[[]qk]_proj", "x?y"), strict=True)))
def test_rules_name_them_as_is_suggested(name, pattern):
    if ":" in name:
        with pytest.raises(RuleError, match=re.escape(f"write '?' for it: {pattern!r}")):
            train({name: None})
    else:
        with pytest.warns(match=re.escape(f"In a pattern [...] is a set of characters; did you mean {pattern!r}?")):
            train({name: None})
    misspelt = pattern.replace("d", "f").replace("y", "z").replace("proj", "porj").replace("/b", "/c")
    with pytest.warns(match=re.escape(f"Did you mean {pattern!r}?")):
        train({misspelt: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute")
        compiled, _ = train({pattern: None})
    assert {g.module for g in inspect(compiled).gemms if not g.quantized} == {name}
