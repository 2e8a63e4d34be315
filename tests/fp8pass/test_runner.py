"""The runner: its list of passes, what it records of them, and what it leaves in logs and traces."""

import logging
import pathlib
import re

import pytest
import torch
import torch._inductor.lowering
from torch._logging._internal import trace_log

import fp8pass
from fp8pass import fp8_compile, inspect
from fp8pass.rewrite import runner
from fp8pass.rewrite.runner import PASSES, rewrite
from tests.support.joint import Joint, trace
from tests.support.models import LlamaBlock, mlp

NAMES = [name for name, _ in PASSES]


def run(joint: Joint):
    return rewrite(joint.graph, joint.context, joint.rules, joint.inputs, joint.options)


def lines(graph):
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes]


def test_records_of_the_passes_and_copies_of_the_graphs():
    """5 GEMMs: the gradient of the input is not wanted. Two passes edit."""
    joint = trace(mlp(), torch.randn(16, 64))
    old = lines(joint.graph)
    result = run(joint)
    assert list(result.passes) == NAMES
    changes = dict(result.passes)
    applied, folded = changes.pop("apply"), changes.pop("fold elements")
    assert folded == {"aten.select.int": -applied["aten.select.int"]}, "all of what casts and GEMMs read"
    assert set(map(str, changes.values())) == {"{}"}
    expected = {"aten.addmm.default": -2, "aten.mm.default": -3, "lowering.scaled_mm.default": 5}
    expected |= {"lowering.load_scales.default": 1, "lowering.record_amax.default": 2}
    assert {op: applied[op] for op in expected} == expected
    assert "aten.gelu.default" not in applied, "what stays as it was is left out"
    assert lines(result.before.restore()) == old
    assert lines(result.after.restore()) == lines(joint.graph) != old


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_a_second_run_changes_nothing(recipe):
    joint = trace(LlamaBlock(64, 128, 2), torch.randn(2, 16, 64), recipe=recipe)
    first = run(joint)
    assert len(first.gemms) == 21
    once = lines(joint.graph)
    again = run(joint)
    assert again.gemms == []
    assert again.passes == {name: {} for name in NAMES}
    assert lines(joint.graph) == once


# -- logs and traces


def test_a_line_per_pass_and_per_gemm_at_debug_level_and_a_summary_above(caplog):
    caplog.set_level(logging.DEBUG, logger="fp8pass")
    result = run(trace(mlp(), torch.randn(16, 64), rules={"2:grad_weight": None}))
    messages = [r for r in caplog.records if r.name == runner.log.name]
    debug = [r for r in messages if r.levelno == logging.DEBUG]
    gemms = [r.args[0] for r in debug if r.args and r.args[0] in result.gemms]
    assert gemms == result.gemms
    names = [f"{g.module}:{g.role}" for g in gemms]
    assert names == ["0:output", "2:output", "2:grad_input", "2:grad_weight", "0:grad_weight"]
    assert [g.quantized for g in gemms] == [True, True, True, False, True]
    texts = [r.getMessage() for r in debug]
    assert sum("module='2', role='grad_weight'" in t and "'2:grad_weight' keeps high precision" in t for t in texts) == 1
    for name in NAMES:
        (text,) = (t for t in texts if t.startswith(f"{name}: "))
        assert text.endswith("reads only") == (name not in ("apply", "fold elements"))
    (summary,) = (r for r in messages if r.levelno > logging.DEBUG)
    assert (summary.levelno, summary.getMessage()[:24]) == (logging.INFO, "rewrote 4 of 5 GEMMs in ")


class _Artifacts(logging.Handler):
    def __init__(self):
        super().__init__()
        self.payloads: dict[str, str] = {}

    def emit(self, record):
        metadata = getattr(record, "metadata", {})
        name = metadata.get("artifact", {}).get("name", "")
        if name.startswith("fp8pass"):
            assert metadata["artifact"]["encoding"] == "string"
            assert name not in self.payloads
            self.payloads[name] = record.payload


@pytest.fixture
def artifacts():
    handler, level = _Artifacts(), trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    yield handler.payloads
    trace_log.removeHandler(handler)
    trace_log.setLevel(level)


def test_the_structured_trace_has_the_graph_before_and_after(artifacts):
    compiled = fp8_compile(mlp(), "current", backend="aot_eager")
    compiled(torch.randn(16, 64)).sum().backward()
    assert list(artifacts) == ["fp8pass_joint_graph_before", "fp8pass_joint_graph_after"]
    (graph,) = inspect(compiled).graphs
    before, after = artifacts.values()
    names = ("torch.ops.aten.mm.default", "torch.ops.lowering.scaled_mm.default")
    assert [[text.count(name) for name in names] for text in (before, after)] == [[3, 0], [0, 5]]
    assert after == str(graph.after.graph)


def test_inductor_has_a_lowering_of_every_operation_that_is_inserted():
    """Decompositions ran before the rewrite: an operation that has one alone would not compile."""
    folder = pathlib.Path(fp8pass.__path__[0])
    calls = [re.findall(r"\.call\(\s*(aten|prims)\.(\w+)\.(\w+)", file.read_text()) for file in sorted(folder.rglob("*.py"))]
    inserted = {
        getattr(getattr(getattr(torch.ops, space), name), overload) for found in calls for space, name, overload in found
    }
    assert torch.ops.aten.cat.default in inserted
    assert inserted <= set(torch._inductor.lowering.lowerings)
