"""Carrying out a plan: the nodes that replace a GEMM in every form it can have, and what the graph computes then."""

import dataclasses

import pytest
import torch
from torch import fx, nn

from fp8pass import fp8_compile, inspect
from fp8pass.graph.cursor import is_pinned
from fp8pass.graph.traces import Snapshot
from tests.support.joint import calls, trace
from tests.support.models import LlamaBlock, Net
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_MODEL_OUTPUT

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.lowering


def inference(model, *inputs, recipe="current", **options):
    return trace(model, *inputs, recipe=recipe, trains=False, **options)


def computed(graph: fx.Graph, values):
    return fx.Interpreter(fx.GraphModule({}, Snapshot.take(graph).restore())).run(*values)


def values_of(joint):
    metas = [n.meta["val"] for n in joint.graph.find_nodes(op="placeholder")]
    return [torch.randn(tuple(map(int, m.shape))).mul(0.2).to(m.dtype) for m in metas]


ADDMM = torch.addmm
FORMS = {
    # function, shapes of the inputs -> operations of the rewritten graph besides casts and scales
    "mm": (torch.mm, [(16, 32), (32, 48)], {"slice.Tensor": 0, "add.Tensor": 0, "unsqueeze.default": 0}),
    "addmm with a vector": (ADDMM, [(48,), (16, 32), (32, 48)], {"add.Tensor": 0, "constant_pad_nd.default": 0}),
    "addmm with a vector, padded N": (
        ADDMM, [(20,), (16, 32), (32, 20)],
        {"add.Tensor": 0, "constant_pad_nd.default": 1, "slice.Tensor": 1, "clone.default": 1},
    ),
    "addmm with a matrix": (ADDMM, [(16, 48), (16, 32), (32, 48)], {"add.Tensor": 1, "constant_pad_nd.default": 0}),
    "addmm with a matrix, padded N": (
        ADDMM, [(16, 20), (16, 32), (32, 20)], {"add.Tensor": 1, "constant_pad_nd.default": 0, "slice.Tensor": 1},
    ),
    "addmm with one number": (ADDMM, [(1,), (16, 32), (32, 48)], {"add.Tensor": 1}),
    "addmm with a column": (ADDMM, [(16, 1), (16, 32), (32, 48)], {"add.Tensor": 1}),
    "odd M, N and K": (torch.mm, [(7, 50), (50, 37)], {"slice.Tensor": 1, "clone.default": 1}),
    "a vector as a matrix": (torch.mm, [(1, 32), (32, 48)], {"slice.Tensor": 0}),
    "both operands transposed": (lambda a, b: torch.mm(a.t(), b.t()), [(32, 16), (48, 32)], {"slice.Tensor": 0}),
    "a product of products": (lambda a, b, c: a @ b @ c, [(16, 32), (32, 20), (20, 48)], {"slice.Tensor": 1}),
    "a product read in another shape": (
        lambda a, b, c: (a @ b).view(32, 24) @ c, [(16, 32), (32, 48), (24, 16)], {"slice.Tensor": 0, "reshape.default": 1},
    ),
    "an operand read in two shapes": (
        lambda a, b, c: (a.view(32, 24) @ b, a @ c), [(16, 48), (24, 16), (48, 16)], {"reshape.default": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_a_gemm(case):
    function, shapes, expected = FORMS[case]
    joint = inference(function, *(torch.randn(s) for s in shapes))
    values = values_of(joint)
    wanted = computed(joint.graph, values)
    num_gemms = sum(n.target in (aten.mm.default, aten.addmm.default) for n in joint.graph.nodes)
    work = joint.run()
    found = {name: len([n for n in work.graph.nodes if str(n.target) == f"aten.{name}"]) for name in expected}
    assert found == expected
    assert len(calls(work.graph, ops.scaled_mm.default)) == num_gemms
    for ours, theirs in zip(computed(work.graph, values), wanted, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert sqnr(theirs, ours) >= (SQNR_LINEAR_E4M3 if num_gemms == 1 else SQNR_MODEL_OUTPUT)


def test_results_are_copied_where_they_are_returned_or_the_backend_takes_strides_for_granted():
    def product(a, b):
        return torch.mm(a, b).relu()

    def transposed(a, b):
        return torch.mm(a, b).T.unsqueeze(0)

    rows = ((product, True, 1), (product, False, 0), (torch.mm, False, 1), (transposed, False, 1))
    for function, contiguous, num_clones in rows:
        joint = inference(function, torch.randn(16, 32), torch.randn(32, 20))
        options = dataclasses.replace(joint.options, contiguous_outputs=contiguous)
        work = dataclasses.replace(joint, options=options).run()
        assert len(calls(work.graph, aten.clone.default)) == num_clones


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_cut_rows_of_a_batch_leave_no_gaps(recipe):
    """A batch on the left of one GEMM and on the right of another, whose N, 40, is padded: so are the rows of the first."""
    right, left = (nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((64, 48), (48, 64)))
    model, x = (
        Net(lambda m, x: (torch.bmm(x, m.right), torch.bmm(m.left, x.mT)), right=right, left=left),
        torch.randn(4, 40, 64),
    )
    compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
    for found, wanted in zip(compiled(x), model(x), strict=True):
        assert found.stride() == wanted.stride()
        assert sqnr(wanted, found) >= SQNR_LINEAR_E4M3
    assert all(g.quantized for g in inspect(compiled).gemms)


@pytest.mark.parametrize(("recipe", "dims"), [("current", {0: "a", 1: "result"}), ("blockwise", {0: "result", 1: "result"})])
def test_spare_rows_of_an_operand(recipe, dims):
    """x @ x.T with x [20, 32]: one copy serves both sides, padded to 32 rows because of N. A scale per tensor fits any rows, so
    the operand is cut; scales per block do not, so the result is."""
    joint = inference(lambda x: x @ x.t(), torch.randn(20, 32), recipe=recipe)
    values = values_of(joint)
    (wanted,) = computed(joint.graph, values)
    work = joint.run()
    cuts = {
        n.args[1]: "a" if n.users and next(iter(n.users)).target is ops.scaled_mm.default else "result"
        for n in calls(work.graph, aten.slice.Tensor)
    }
    assert cuts == dims
    (found,) = computed(work.graph, values)
    assert found.shape == wanted.shape == (20, 20)
    assert sqnr(wanted, found) >= SQNR_LINEAR_E4M3


def test_every_node_has_a_value_and_a_side():
    work = trace(LlamaBlock(64, 128, 2), torch.randn(2, 16, 64)).run()
    new = [n for n in work.graph.nodes if n not in work.known]
    assert {n.target for n in new if "val" not in n.meta} == {ops.record_amax.default}, "which returns nothing"
    assert {n.meta["partitioner_tag"].rpartition("_")[2] for n in new} == {"forward", "backward"}
    pinned = [n for n in new if is_pinned(n)]
    assert {n.target for n in pinned} == {ops.record_amax.default, ops.cast.default}
    order = {n: i for i, n in enumerate(work.graph.nodes)}
    assert all(order[read] < order[n] for n in work.graph.nodes for read in n.all_input_nodes)
