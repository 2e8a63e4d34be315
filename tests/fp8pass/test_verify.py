"""Verification: edits that `test_mutations.py`, which changes arguments of nodes, does not make, and what the messages name."""

import dataclasses
import operator
import re

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from fp8pass.errors import InvariantError, Reason, ReasonKind
from fp8pass.graph.cursor import Cursor, is_pinned, pin
from fp8pass.graph.values import value_of
from fp8pass.rewrite.meaning import CASTS
from fp8pass.rewrite.verify import verify
from fp8pass.rewrite.verify_partitioned import prepare_checked
from lowering.formats import E4M3, E5M2
from lowering.inductor import prepare
from tests.support.copies import casts, casts_by, scaled_gemms
from tests.support.joint import Joint, calls, trace, two_ranks
from tests.support.mutations import rewritten

aten, ops = torch.ops.aten, torch.ops.lowering


def traced(recipe="delayed", **options) -> Joint:
    """Three linears of different shapes. Their weights share a launch under delayed and current scaling."""
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48))
    return trace(model, torch.randn(16, 32), recipe=recipe, **options)


def fresh(**options):
    """A graph that everything is done to but what folds elements."""
    work = traced(**options).run("apply")
    check(work)
    return work


def check(work):
    verify(work.graph, work.plan, work.applied, work.known)


def refused(work, message):
    with pytest.raises(InvariantError, match=re.escape(message)):
        check(work)


def cursor(work, before):
    return Cursor.start(work.graph).at(before, backward=False)


def copy_of(work, node):
    with work.graph.inserting_before(node):
        return work.graph.node_copy(node)


def erase(work, node, instead):
    node.replace_all_uses_with(instead)
    work.graph.erase_node(node)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_what_the_passes_make_is_right(recipe, trains):
    work = fresh(recipe=recipe, trains=trains)
    assert len(scaled_gemms(work.graph)) == (8 if trains else 3)
    # In training the other inputs are cast once per side of the partition; blockwise, they are not recomputed.
    found = [len(cast.matrices) for cast in casts(work.graph)]
    assert sum(found) == ((9 if recipe == "blockwise" else 3 + 1 + 2 * 2 + 3) if trains else 6)
    # What stands ready shares a launch: two weights, in inference three, and the first input, if it is scaled as weights are.
    assert max(found) == (2 if recipe == "blockwise" and trains else 3)


def test_every_operation_that_quantizes_is_known():
    every = {name for name in dir(ops) if "cast" in name or name == "quantize"}
    assert every == {target._schema.name.partition("::")[2] for target in CASTS}


def test_gemms_that_are_out_of_order_too_many_or_gone():
    work = fresh()
    work.graph.output_node().prepend(scaled_gemms(work.graph)[0])
    with pytest.raises(RuntimeError, match="scaled_mm"):
        check(work)
    refused(traced().run("plan launches"), "addmm is in high precision, the plan rewrites it")
    work = fresh()
    node = scaled_gemms(work.graph)[0]
    erase(work, node, node.args[4])
    refused(work, "addmm was planned for FP8, no scaled GEMM took its place")
    work = fresh()
    extra = copy_of(work, scaled_gemms(work.graph)[0])
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


def test_casts_that_became_two_or_none_or_are_too_many():
    work = fresh()
    (node,) = casts_by(ops.cast.default, work.graph.nodes, many=True)
    extra = copy_of(work, node)
    data = next(u for u in node.users if u.args[1] == 1)
    data.update_arg(0, extra)
    refused(work, f"{extra.name} quantizes, the plan has no such cast")
    work.applied.copies.update(
        {c: dataclasses.replace(q, maker=extra) for c, q in work.applied.copies.items() if q.data is data}
    )
    refused(work, f"a launch of 3 casts became 2 operations, {', '.join(sorted((node.name, extra.name)))}")
    work = fresh()
    node = casts_by(ops.cast.default, work.graph.nodes, many=False, both=False)[0]
    node.target = ops.quantize.default
    node.args, node.kwargs = (node.args[0][0], node.args[1][0], node.args[2]), {}
    refused(work, "b has item(copy(")
    work = fresh()
    extra = copy_of(work, casts_by(ops.cast.default, work.graph.nodes, many=False)[0])
    extra.update_arg(1, [calls(work.graph, aten.select.int)[0]])
    refused(work, f"{extra.name} quantizes, the plan has no such cast")
    check(dataclasses.replace(work, known=work.known | {extra}))
    work = fresh()
    first = work.plan.launches[0]
    plan = dataclasses.replace(work.plan, launches=(*work.plan.launches, first))
    refused(dataclasses.replace(work, plan=plan), f"the plan makes rowwise {first[0].tensor.name} twice")


def test_casts_on_the_wrong_side_of_the_partition():
    work = fresh()
    (node,) = casts_by(ops.cast.default, work.graph.nodes, many=True)
    pin(node, backward=False)
    refused(work, f"{node.name} is tagged must_be_in_forward, the plan says not pinned")
    node.meta["partitioner_tag"] = "is_backward"
    refused(work, f"{node.name} is tagged is_backward, the plan quantizes 0:input before addmm")
    work = fresh(weight_copies="recompute")
    node = next(cast.node for cast in casts(work.graph) if is_pinned(cast.node))
    node.meta["partitioner_tag"] = "is_backward"
    refused(work, f"{node.name} is tagged is_backward, the plan says pinned")


@pytest.mark.parametrize("wrong", ["not transposed", "other columns"])
def test_a_transposed_copy_of_other_bytes(wrong):
    """FSDP2's weights with one scale: backward reads the transpose of what was gathered. Square, so that no shape tells."""
    with rewritten("sharded", "current") as work:
        verify(work.graph, work.plan, work.applied, work.known, work.permuted, work.sent_as_bytes)
        stored = next(n for n in calls(work.graph, aten.clone.default) if n.args[0].target is aten.permute.default)
        rows = stored.args[0].args[0]
        if wrong == "not transposed":
            stored.update_arg(0, rows)
        else:
            part = cursor(work, stored.args[0]).call(aten.slice.Tensor, rows, 1, 16, 256)
            stored.args[0].update_arg(0, cursor(work, stored.args[0]).call(aten.constant_pad_nd.default, part, [0, 16]))
        refused(work, "b has stored" if wrong == "not transposed" else "b has slice 1 16 256 1 transpose stored")


def test_a_value_that_is_saved_instead_of_recomputed():
    work = fresh()
    node = calls(work.graph, aten.gelu.default)[1]
    del node.meta["recompute"]
    refused(work, f"{node.name} is saved, the plan recomputes it for {node.name}")


class Gathering(nn.Linear):
    def forward(self, x):
        return super().forward(all_gather_tensor_autograd(x, 0, torch.distributed.group.WORLD))


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_gather_that_sends_something_else_than_planned(is_planned):
    """40 columns are padded to 48, so the shard is quantized without a cast: the gather itself is what differs."""
    with two_ranks():
        joint = trace(Gathering(40, 48), torch.randn(16, 40, requires_grad=True))
        planned = joint.run("plan gathers").plan.gathers
        work = joint.run("apply", without=() if is_planned else ("plan gathers",))
        (gathered,) = planned
        check(work)
        reason = Reason(ReasonKind.BYTES, "as many") if is_planned else None
        plan = dataclasses.replace(work.plan, gathers=(dataclasses.replace(gathered, reason=reason),))
        expected = "in FP8, the plan says bytes: as many" if is_planned else "in high precision, the plan says FP8"
        refused(dataclasses.replace(work, plan=plan), f"{gathered.gather.collective.name} gathers {expected}")


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_another_use_of_the_state_and_records_that_the_partitioner_might_move(side):
    work = fresh()
    (state,) = work.state.values()
    extra = cursor(work, work.graph.output_node()).call(aten.clone.default, state.scale)
    refused(work, f"{extra.name} reads the live scales, which a boundary may change before backward runs")
    work = fresh()
    (state,) = work.state.values()
    row, uses = state.amax if side == "forward" else state.grad_amax, "uses the staging row, but does not record amaxes in the"
    extra = cursor(work, work.graph.output_node()).call(aten.clone.default, row)
    refused(work, f"{extra.name} {uses} {side}")
    work = fresh()
    node = calls(work.graph, ops.record_amax.default)[side == "backward"]
    node.meta["partitioner_tag"] = f"is_{side}"
    refused(work, f"{node.name} {uses} {side}")


def test_slots_that_are_recorded_twice_or_never_or_in_inference():
    work = fresh()
    forward, backward = calls(work.graph, ops.record_amax.default)
    assert (forward.args[3], backward.args[3]) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    backward.update_arg(3, [6, 7, 7])
    refused(work, "amaxes of slots [0, 1, 2, 3, 4, 5, 6, 7, 7] are recorded, the plan quantizes 9 tensors")
    work.graph.erase_node(backward)
    refused(work, "amaxes of slots [0, 1, 2, 3, 4, 5] are recorded, the plan quantizes 9 tensors")
    work = fresh(trains=False)
    (state,) = work.state.values()
    amax = cursor(work, work.graph.output_node()).call(ops.amaxes.default, [work.graph.find_nodes(op="placeholder")[0]])
    with work.graph.inserting_before(work.graph.output_node()):
        record = work.graph.call_function(ops.record_amax.default, (state.amax, state.slots, [amax], [0]))
    record.meta["partitioner_tag"] = "must_be_in_forward"
    refused(work, "amaxes of slots [0] are recorded, the plan quantizes 0 tensors")


def test_strides_that_an_operation_does_not_give_and_a_reader_of_another_result():
    work = fresh()
    node = casts_by(ops.cast.default, work.graph.nodes, many=False, both=False)[0]
    made, *others = node.meta["val"]
    node.meta["val"] = [made.t().contiguous().t(), *others]
    refused(work, f"{node.name} gives (torch.float8_e4m3fn")
    work = fresh()
    gemm = calls(work.graph, ops.scaled_mm.default)[0]
    (reader, *_) = gemm.users
    nodes = list(work.graph.nodes)
    earlier = (n for n in nodes[: nodes.index(reader)] if n is not gemm and isinstance(n.meta.get("val"), torch.Tensor))
    reader.replace_input_with(gemm, next(n for n in earlier if n.meta["val"].shape == value_of(gemm).shape))
    refused(work, f"{reader.name} does not read {gemm.name}")


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


def measured_cast():
    """A cast of two matrices, and the statistics of the second."""
    graph = fx.Graph()
    xs = [graph.placeholder(name) for name in ("x", "y")]
    scale = graph.placeholder("scale")
    cast = graph.call_function(ops.cast.default, (xs, [scale, scale], torch.float8_e4m3fn))
    copies = [graph.call_function(operator.getitem, (cast, i)) for i in range(2)]
    measured = graph.call_function(
        ops.quantization_statistics.default, (xs[1], torch.float8_e4m3fn, scale, scale), {"granularity": "tensor_wise"}
    )
    graph.output((*copies, measured))
    with FakeTensorMode():
        for node in (*xs, scale):
            node.meta["val"] = torch.empty((32, 32) if node in xs else (), device="cuda")
    return graph, copies, measured


def test_statistics_read_the_copy_of_their_matrix_and_of_no_other():
    graph, copies, measured = measured_cast()
    prepare_checked(graph, prepare)
    assert measured.args[0] is copies[1]
    for other in (lambda c: c[0], lambda c: c[0].args[0].args[0][0]):
        graph, copies, measured = measured_cast()
        with pytest.raises(InvariantError, match="before it was prepared"):
            prepare_checked(graph, lambda graph, m=measured, c=copies, other=other: m.update_arg(0, other(c)))
