"""Carrying out a plan: the nodes that replace a GEMM in every form it can have, and what the graph computes then."""

import dataclasses

import pytest
import torch
from torch import fx, nn

from fp8pass import Float8BlockScaling, fp8_compile, inspect
from fp8pass.graph.cursor import Cursor, is_pinned
from fp8pass.graph.traces import Snapshot
from fp8pass.rewrite.apply import Applied
from fp8pass.rewrite.runner import PASSES
from fp8pass.schemes.copies import FromInput
from lowering.formats import E4M3
from tests.support.copies import CastNode, casts_by, one_copy
from tests.support.joint import calls, trace
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT

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


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_a_joint_graph_computes_what_it_did(recipe):
    """Outputs and gradients, against the graph before. With blocks M is a multiple of 4 for the hardware: 50 is not."""
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 50, bias=False))
    joint = trace(model, torch.randn(50, 40, requires_grad=True), recipe=recipe)
    values = values_of(joint)
    placeholders = joint.graph.find_nodes(op="placeholder")
    for nodes in joint.state.values():  # scale 64, staging row 0, a slot for each tensor
        for node, value in ((nodes.scale, 64.0), (nodes.amax, 0.0), (nodes.grad_amax, 0.0)):
            values[placeholders.index(node)] = torch.full(node.meta["val"].shape, value)
        values[placeholders.index(nodes.slots)] = torch.arange(nodes.slots.meta["val"].shape[0])
    wanted = [x for x in computed(joint.graph, values) if x is not None]
    work = joint.run()
    found = [x for x in computed(work.graph, values) if x is not None]
    assert len(found) == len(wanted) == 1 + 4
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert sqnr(theirs, ours) >= SQNR_MODEL_GRADIENT
    for nodes in joint.state.values():
        x = values[next(i for i, n in enumerate(placeholders) if n.meta["val"].shape == (50, 40))]
        assert values[placeholders.index(nodes.amax)][0] == x.abs().max(), "slot 0 is that of the input"


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


class BothSides(nn.Module):
    """A batch on the left of one GEMM and on the right of another, whose N, 40, is padded: so are the rows of the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.right, self.left = (nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((64, 48), (48, 64)))

    def forward(self, x):
        return torch.bmm(x, self.right), torch.bmm(self.left, x.mT)


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_cut_rows_of_a_batch_leave_no_gaps(recipe):
    model, x = BothSides(), torch.randn(4, 40, 64)
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


def test_hand_written_casts_read_the_dtype_of_the_gemm():
    """Blockwise casts are kernels: under autocast float32 would be written and read at twice the bytes; a Parameter is there
    anyway, and fused casts read registers."""
    model = nn.Sequential(nn.GELU(), nn.Linear(32, 48, bias=False))

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for recipe, expected in (("blockwise", {torch.bfloat16, torch.float32}), ("current", {torch.float32})):
        work = inference(function, torch.randn(128, 32), recipe=recipe).run()
        casts = [cast for n in work.graph.nodes if (cast := CastNode.read(n)) is not None]
        assert {matrix.meta["val"].dtype for cast in casts for matrix in cast.matrices} == expected


def test_nothing_to_rewrite():
    joint = trace(mlp(), torch.randn(16, 64), rules={"*": None})
    before = [(n.name, n.target, n.args) for n in joint.graph.nodes]
    work = joint.run()
    assert work.applied == Applied()
    assert [(n.name, n.target, n.args) for n in joint.graph.nodes] == before


def test_every_node_has_a_value_and_a_side():
    work = trace(LlamaBlock(64, 128, 2), torch.randn(2, 16, 64)).run()
    new = [n for n in work.graph.nodes if n not in work.known]
    assert {n.target for n in new if "val" not in n.meta} == {ops.record_amax.default}, "which returns nothing"
    assert {n.meta["partitioner_tag"].rpartition("_")[2] for n in new} == {"forward", "backward"}
    pinned = [n for n in new if is_pinned(n)]
    assert {n.target for n in pinned} == {ops.record_amax.default, ops.cast.default}
    order = {n: i for i, n in enumerate(work.graph.nodes)}
    assert all(order[read] < order[n] for n in work.graph.nodes for read in n.all_input_nodes)


def test_two_recipes_and_tiles_of_two_orientations():
    work = trace(mlp(), torch.randn(16, 64), rules={"2": "blockwise", "0:grad_weight": "current"}).run()
    assert len(calls(work.graph, ops.scaled_mm_blockwise.default)) == 3
    assert len(calls(work.graph, ops.scaled_mm.default)) == 2
    recipes = {type(c.recipe).__name__: c.recipe for c in work.applied.copies}
    assert list(recipes) == ["DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling"]
    assert list(work.applied.state) == [recipes["DelayedScaling"]], "the others record nothing"
    records = calls(work.graph, ops.record_amax.default)
    assert sum(len(n.args[3]) for n in records) == len(work.plan.tensors_in_state(recipes["DelayedScaling"]))
    recipe = Float8BlockScaling()
    work = trace(nn.Linear(128, 128), torch.randn(16, 128, requires_grad=True), recipe=recipe).run()
    granularities = [n.kwargs["granularity"] for n in casts_by(ops.cast_blockwise.default, work.graph.nodes, both=True)]
    assert sorted(granularities) == ["block_128x128", "block_1x128", "block_1x128"]


def test_copies_that_come_from_inputs_are_not_cast():
    """The weight's copy and its scales as inputs of the graph: the same result, and one cast fewer."""
    model, x = nn.Linear(64, 48), torch.randn(32, 64)
    usual = trace(model, x, recipe="rowwise", trains=False).run()
    work = trace(model, x, recipe="rowwise", trains=False).run("plan launches")
    (launch,) = (n for n in work.plan.launches if n[0].tensor.name.kind == "weight")
    made, scale_inv = ops.cast_rowwise(
        [model.weight.detach()], E4M3, **one_copy(columnwise=False, pad_outer=True, power_of_2=True)
    )
    graph, nodes = work.graph, []
    for name, value in (("weight_data", made), ("weight_scales", scale_inv)):
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = Cursor.start(graph).fake_mode.from_tensor(value, static_shapes=True)
    (cast,) = launch
    given = (dataclasses.replace(cast, source=FromInput(*nodes)),)
    launches = tuple(given if n is launch else n for n in work.plan.launches)
    work = dataclasses.replace(work, plan=dataclasses.replace(work.plan, launches=launches))
    for name in ("apply", "verify"):
        work = dict(PASSES)[name](work)
    assert len(calls(usual.graph, ops.cast_rowwise.default)) == 2
    (left,) = calls(work.graph, ops.cast_rowwise.default)
    assert left.args[0][0].meta["val"].shape == x.shape
    known = {(48, 64): model.weight.detach(), (48,): model.bias.detach(), (32, 64): x}
    by_name = {"weight_data": made, "weight_scales": scale_inv}
    results = []
    for found in (usual.graph, work.graph):
        inputs = [by_name.get(n.name, known.get(tuple(n.meta["val"].shape))) for n in found.find_nodes(op="placeholder")]
        results.append(computed(found, inputs)[0])
    assert results[0].equal(results[1])
