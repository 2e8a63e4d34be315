"""Verification: edits that `test_mutations.py`, which changes arguments of nodes, does not make, and what the messages name."""

import dataclasses
import re

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import Cursor, pin
from fp8pass.graph.values import value_of
from fp8pass.rewrite.verify import verify
from fp8pass.rewrite.verify_partitioned import prepare_checked
from lowering.formats import E4M3, E5M2
from tests.support.copies import scaled_gemms
from tests.support.joint import calls, trace

aten, ops = torch.ops.aten, torch.ops.lowering


def fresh(**options):
    """A graph of three linears that everything is done to but what folds elements."""
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48))
    work = trace(model, torch.randn(16, 32), recipe="delayed", **options).run("apply")
    check(work)
    return work


def check(work):
    verify(work.graph, work.plan, work.applied, work.known)


def refused(work, message):
    with pytest.raises(InvariantError, match=re.escape(message)):
        check(work)


def cursor(work, before):
    return Cursor.start(work.graph).at(before, backward=False)


def erase(work, node, instead):
    node.replace_all_uses_with(instead)
    work.graph.erase_node(node)


def test_gemms_that_are_too_many_or_gone():
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    erase(work, node, node.args[4])
    refused(work, "addmm was planned for FP8, no scaled GEMM took its place")
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    with work.graph.inserting_before(node):
        extra = work.graph.node_copy(node)
    refused(work, f"{extra.name} multiplies in FP8, the plan has no such GEMM")
    check(dataclasses.replace(work, known=work.known | {extra}))
    work = fresh()
    x = work.graph.find_nodes(op="placeholder")[0]
    extra = cursor(work, work.graph.output_node()).call(aten.mm.default, x, cursor(work, x.next).call(aten.t.default, x))
    refused(work, f"{extra.name} multiplies in high precision, the plan does not keep it")
    work = fresh(rules={"2": None})
    (node,) = calls(work.graph, aten.addmm.default)
    erase(work, node, node.args[0])
    refused(work, f"{node.name} is gone, the plan keeps it: rule: '2' keeps high precision")


def test_operands_of_another_value_format_or_size():
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    node.update_arg(1, cursor(work, node).call(aten.clone.default, node.args[1]))  # which is no view
    refused(work, f"{node.name}: b is {node.args[1].name}")
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    data = node.args[0]
    data.meta["val"] = value_of(data).view(torch.uint8).view(E5M2)
    refused(work, f"{node.name}: a is {E5M2}, the plan says {E4M3}")
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    node.update_arg(1, cursor(work, node).call(aten.slice.Tensor, node.args[1], 1, 0, 20))
    refused(work, f"{node.name}: N is 20, not a multiple of 16")


def test_another_use_of_the_state_and_casts_and_records_that_the_partitioner_might_move():
    work = fresh()
    (state,) = work.state.values()
    extra = cursor(work, work.graph.output_node()).call(aten.clone.default, state.scale)
    refused(work, f"{extra.name} reads the live scales, which a boundary may change before backward runs")
    work = fresh()
    (state,) = work.state.values()
    uses = "uses the staging row, but does not record amaxes in the backward"
    extra = cursor(work, work.graph.output_node()).call(aten.clone.default, state.grad_amax)
    refused(work, f"{extra.name} {uses}")
    work = fresh()
    node = calls(work.graph, ops.record_amax.default)[1]
    node.meta["partitioner_tag"] = "is_backward"
    refused(work, f"{node.name} {uses}")
    for edit, message in (
        (lambda work, cast: pin(cast, backward=False), "is tagged must_be_in_forward, the plan says not pinned"),
        (lambda work, cast: cast.meta.update(partitioner_tag="is_backward"), "the plan quantizes 0:input before addmm"),
        (lambda work, cast: calls(work.graph, aten.gelu.default)[1].meta.pop("recompute"), "is saved, the plan recomputes it"),
        (lambda work, cast: calls(work.graph, ops.record_amax.default)[0].update_arg(1, cast), "are not slots of the state"),
    ):
        work = fresh()
        edit(work, next(n for n in calls(work.graph, ops.cast.default) if len(n.args[0]) > 1))
        refused(work, message)


# -- what is done to partitioned graphs


def partitioned(device="cuda"):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sigmoid.default, (x,))
    graph.output((graph.call_function(aten.mul.Tensor, (x, y)),))
    for node in graph.nodes:
        if node.op != "output":
            with FakeTensorMode():
                node.meta["val"] = torch.empty(4, device=device)
    return graph, y


def test_a_cheaper_operation_is_let_pass_and_another_edit_refused():
    graph, y = partitioned()
    prepare_checked(graph, lambda graph: setattr(y, "target", ops.sigmoid.default))
    assert y.target is ops.sigmoid.default
    for device, edit, text in (
        ("cpu", lambda y: setattr(y, "target", ops.sigmoid.default), "on torch.float32 on cpu"),
        ("cuda", lambda y: setattr(y, "target", aten.tanh.default), "instead of aten.sigmoid.default"),
        ("cuda", lambda y: y.replace_input_with(y.args[0], y.graph.call_function(aten.neg.default, (y.args[0],))), "added"),
        ("cuda", lambda y: next(iter(y.users)).update_arg(1, y.args[0]), "before it was prepared"),
    ):
        graph, y = partitioned(device)
        with pytest.raises(InvariantError, match=re.escape(text)):
            prepare_checked(graph, lambda graph, edit=edit, y=y: edit(y))
