"""The runner: its list of passes, what it records of them, and what it leaves in logs and traces."""

import logging

import torch

from fp8pass.rewrite import runner
from fp8pass.rewrite.runner import PASSES, rewrite
from tests.support.joint import Joint, trace
from tests.support.models import mlp

NAMES = [name for name, _ in PASSES]


def run(joint: Joint):
    return rewrite(joint.graph, joint.context, joint.rules, joint.inputs, joint.options)


def lines(graph):
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes]


def test_records_of_the_passes_and_copies_of_the_graphs_also_in_the_structured_trace(monkeypatch):
    """5 GEMMs: the gradient of the input is not wanted. Two passes edit."""
    joint, traced = trace(mlp(), torch.randn(16, 64)), {}
    old, text = lines(joint.graph), str(joint.graph)
    monkeypatch.setattr(
        runner, "trace_structured", lambda _, metadata_fn, payload_fn: traced.update({metadata_fn()["name"]: payload_fn()})
    )
    result = run(joint)
    assert traced == {"fp8pass_joint_graph_before": text, "fp8pass_joint_graph_after": str(joint.graph)}
    assert list(result.passes) == NAMES
    changes = dict(result.passes)
    applied, folded = changes.pop("apply"), changes.pop("fold elements")
    assert folded == {"aten.select.int": -applied["aten.select.int"]}, "all of what casts and GEMMs read"
    assert set(map(str, changes.values())) == {"{}"}
    expected = {"aten.addmm.default": -2, "aten.mm.default": -3, "lowering.scaled_mm.default": 5}
    assert {op: applied[op] for op in expected} == expected
    assert lines(result.before.restore()) == old
    assert lines(result.after.restore()) == lines(joint.graph) != old


def test_a_line_per_pass_and_per_gemm_at_debug_level_and_a_summary_above(caplog):
    caplog.set_level(logging.DEBUG, logger="fp8pass")
    result = run(trace(mlp(), torch.randn(16, 64), rules={"2:grad_weight": None}))
    messages = [r for r in caplog.records if r.name == runner.log.name]
    debug = [r for r in messages if r.levelno == logging.DEBUG]
    gemms = [r.args[0] for r in debug if r.args and r.args[0] in result.gemms]
    assert gemms == result.gemms
    texts = [r.getMessage() for r in debug]
    assert sum("module='2', role='grad_weight'" in t and "'2:grad_weight' keeps high precision" in t for t in texts) == 1
    for name in NAMES:
        (text,) = (t for t in texts if t.startswith(f"{name}: "))
        assert text.endswith("reads only") == (name not in ("apply", "fold elements"))
    (summary,) = (r for r in messages if r.levelno > logging.DEBUG)
    assert (summary.levelno, summary.getMessage()[:24]) == (logging.INFO, "rewrote 4 of 5 GEMMs in ")
