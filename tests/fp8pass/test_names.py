"""Names of quantized tensors: what `str` writes, `parse` reads, and nothing else."""

import types

import pytest
import torch
from torch import nn

from fp8pass import inspect, state
from fp8pass.errors import RuleError
from fp8pass.graph.origin import KINDS, TensorName
from tests.support.models import Stack, mlp
from tests.support.training import fp8, train

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

MODULES = st.text(min_size=1) | st.sampled_from(["layers.0.attn.wq", "layer#1", "a:input", "w@1", "b.scale@1", "recorded"])
FORMATS = st.none() | st.sampled_from(["float8_e5m2", "float8_e4m3fn"])
NAMES = st.builds(TensorName, MODULES, st.sampled_from(KINDS), st.integers(1, 99), FORMATS, st.none() | st.integers(0, 9))


@given(NAMES)
def test_parse_reads_what_str_writes(name):
    assert TensorName.parse(str(name)) == name


@given(NAMES, NAMES)
def test_different_names_have_different_texts(first, second):
    assert (str(first) == str(second)) == (first == second)


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


def call_each(rules, widths):
    """A function called with several modules, whose graphs are shared where the widths are equal."""
    layers = [nn.Linear(32, width) for width in widths]
    run = fp8(lambda layer, x: layer(x), "delayed", rules=rules)
    for layer in layers:
        run(layer, torch.randn(16, 32, requires_grad=True)).sum().backward()
    return run


@pytest.mark.parametrize("pattern", ["layer#1", "layer#*"])
def test_a_rule_matches_a_further_instance_of_a_variable(pattern):
    run = call_each({pattern: None}, (32, 64))
    report = inspect(run)
    assert {g.module for g in report.gemms if not g.quantized} == {"layer#1"}
    assert {g.module for g in report.gemms if g.quantized} == {"layer"}
    assert report.unmatched_rules == []
    assert {TensorName.parse(n).module for n in state(run).tensors} == {"layer"}


def test_a_rule_that_parts_instances_of_one_graph_is_refused():
    with pytest.raises(RuleError, match="layer and layer#1 share one compiled graph"):
        call_each({"layer#1": None}, (32, 32))


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
