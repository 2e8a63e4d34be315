"""Names of quantized tensors and of modules: what is no name, what a call finds, and characters of rules and markup."""

import collections
import html
import re
from unittest import mock

import pytest
import torch
from torch import nn

from fp8pass import estimate, inspect, monitor, state
from fp8pass.errors import RuleError
from fp8pass.graph.origin import TensorName
from fp8pass.runtime import instances
from tests.support.cases import each
from tests.support.models import ResidualMlp, mlp
from tests.support.training import fp8, gradients, same, train


@each("text", ["", "wq", ":input", "wq:output", "wq:input#", "wq:input@", "wq:input.scale", "wq:input@1@2", "wq:input#1 "])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not the name of a quantized tensor"):
        TensorName.parse(text)


def test_wrappers_are_in_no_path():
    """As torch's activation checkpointing wraps blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, paths = mlp(), []
    for wrap in (lambda layer: layer, checkpoint_wrapper):
        torch._dynamo.reset()
        compiled = fp8(nn.Sequential(*map(wrap, plain.children())), "delayed")
        train(compiled, torch.randn(16, 64))
        paths.append(({g.module for g in inspect(compiled).gemms}, state(compiled).tensors))
    assert paths[0] == paths[1]


# -- what a call finds


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


def test_a_call_searches_the_model_once_for_all_layers_that_it_binds():
    """Binding thousands of experts would take minutes otherwise."""
    compiled = fp8(Loop(), "delayed")
    with mock.patch.object(instances.Search, "run", autospec=True, side_effect=instances.Search.run) as search:
        train(compiled, *torch.randn(3, 4, 16))
    assert search.call_count == 1
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


# -- brackets and colons

UNUSUAL = ("a[/b]", "c[red]d", "[qk]_proj", "x:y")
"""In every table and message they are as they are, and in rules by the suggested pattern."""


def unusual():
    return nn.Sequential(collections.OrderedDict((name, nn.Linear(64, 64)) for name in UNUSUAL))


def test_tables_and_pages_name_them(monkeypatch, tmp_path):
    model = unusual()
    compiled = fp8(model, "delayed")
    watching = monitor(compiled, 1)
    train(compiled, torch.randn(32, 64))
    found = inspect(compiled)
    found.to_html(tmp_path / "page.html")
    console = pytest.importorskip("rich.console").Console(record=True, width=160)  # a user's, with markup
    console.print(watching.latest)
    texts = [str(watching), console.export_text(), html.unescape((tmp_path / "page.html").read_text())]
    texts.append(str(estimate(model, torch.randn(32, 64))))
    monkeypatch.setenv("COLUMNS", "80")
    texts.append(str(found))
    for text in texts:
        whole = re.sub(r"\s", "", text)
        assert [name for name in UNUSUAL if name not in whole] == []
    assert {TensorName.parse(name).module for name in state(compiled).tensors} == set(UNUSUAL)


def test_rules_name_them_as_is_suggested():
    def run(pattern):
        train(fp8(unusual(), rules={pattern: None}), torch.randn(32, 64))

    with pytest.raises(RuleError, match=re.escape("write '?' for it: 'x?y'")):
        run("x:y")
    with pytest.warns(match=re.escape("In a pattern [...] is a set of characters; did you mean '[[]qk]_proj'?")):
        run("[qk]_proj")
    with pytest.warns(match=re.escape("Did you mean '[[]qk]_proj'?")):
        run("[[]qk]_porj")
