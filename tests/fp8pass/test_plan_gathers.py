"""All-gathers in a plan: which send FP8, which do not and why. Two ranks in one process: nothing moves."""

import cProfile
import dataclasses

import pytest
import torch
from torch import fx, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass import DelayedScaling, Float8BlockScaling
from fp8pass.errors import InvariantError
from fp8pass.graph import gathers
from fp8pass.graph.cursor import Cursor
from fp8pass.rewrite.gathers import plan_gathers
from fp8pass.rewrite.report import gather_records
from fp8pass.rewrite.verify import verify
from fp8pass.schemes.emitter import FIRST_STEP
from tests.support.joint import calls, trace, two_ranks
from tests.support.models import Net

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
TILES = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
TWO_SCALES = "bytes: FP8 copies with 2 different scales would be no smaller than the tensor itself"


@pytest.fixture(autouse=True)
def ranks():
    with two_ranks():
        yield


def gather(x, dim=0):
    return all_gather_tensor_autograd(x, dim, torch.distributed.group.WORLD)


class Gathering(nn.Linear):
    def __init__(self, inputs=32, outputs=48, dim=0, **options):
        super().__init__(inputs, outputs, **options)
        self.dim = dim

    def forward(self, x):
        return super().forward(gather(x, self.dim))


class Reading(Gathering):
    def __init__(self, read, **options):
        super().__init__(**options)
        self.read = read

    def forward(self, x):
        x = gather(x)
        return nn.Linear.forward(self, x), self.read(x)


def planned(model, *shape, recipe="current", dtype=torch.float32, **options):
    """(reason, bytes per element) of the one gather that feeds FP8 GEMMs."""
    x = torch.randn(shape).to(dtype).requires_grad_()
    work = trace(model.to(dtype), x, recipe=recipe, **options).run("plan gathers")
    (found,) = work.plan.gathers
    return None if found.reason is None else str(found.reason), found.bytes_per_element


class OfOneHalf(Gathering):
    def forward(self, x):
        return nn.Linear.forward(self, gather(x)[:16])


def addmm_of(addend):
    def forward(m, x):
        x = gather(x)
        return torch.addmm(addend(x), x, m.w)

    return forward


def square(forward):
    return Net(forward, w=nn.Parameter(torch.randn(32, 32)))


PART = "scales: a part of the gathered tensor has amaxes of its own, which its shards do not have"
HIGH = "readers: {} reads the gathered tensor in high precision"
CASES = {
    "current": (Gathering(), (16, 32), "current", {}, (None, 1.0)),
    "delayed": (Gathering(), (16, 32), "delayed", {}, (None, 1.0)),
    "bfloat16": (Gathering(), (16, 32), "current", {"dtype": torch.bfloat16}, (None, 1.0)),
    "along the second dimension": (Gathering(dim=1), (2, 16, 32), "current", {}, (None, 1.0)),
    "a batch": (Gathering(), (2, 16, 32), "delayed", {}, (None, 1.0)),
    "a part, current": (OfOneHalf(), (16, 32), "current", {}, (PART, 1.0)),
    "a part, delayed": (OfOneHalf(), (16, 32), "delayed", {}, (PART, 1.0)),
    "padded": (Gathering(40, 20), (16, 40), "current", {}, (None, 1.0)),
    "dynamic rows, aligned columns": (
        Gathering(), (16, 32), "current", {"dynamic": True},
        ("shape: dynamic sizes may need padding to multiples of 16", 1.0),
    ),
    "scales of its own on each rank": (
        Gathering(), (16, 32), DelayedScaling(reduce_amax=False), {},
        ("scales: reduce_amax=False, so ranks scale the tensor differently", 1.0),
    ),
    "grad_weight in high precision": (
        Gathering(), (16, 32), "current", {"rules": {"*:grad_weight": None}}, (HIGH.format("mm"), 1.0),
    ),
    "two recipes, two scales": (Gathering(), (16, 32), "current", {"rules": {"*:grad_weight": "delayed"}}, (None, 2.0)),
    "two recipes, two scales, bfloat16": (
        Gathering(), (16, 32), "current", {"rules": {"*:grad_weight": "delayed"}, "dtype": torch.bfloat16}, (TWO_SCALES, 2.0),
    ),
    # 1x128 blocks: a byte and 4 / 128 of a scale, for each orientation.
    "blocks": (Gathering(256), (128, 256), "blockwise", {}, (None, 2.0625)),
    "blocks end within a shard": (
        Gathering(256), (64, 256), "blockwise", {},
        ("shape: a block of scales crosses the border between two ranks' shards, or sizes are dynamic", 2.0625),
    ),
    "blocks, bfloat16": (Gathering(256), (128, 256), "blockwise", {"dtype": torch.bfloat16}, (TWO_SCALES, 2.0625)),
    # 128x128 tiles: one copy serves both orientations, with 4 / 128**2 of a scale.
    "tiles, bfloat16": (Gathering(256), (128, 256), TILES, {"dtype": torch.bfloat16}, (None, 1 + 4 / 128**2)),
    "the model returns it": (Reading(lambda x: x), (16, 32), "current", {}, (HIGH.format("the model's output"), 1.0)),
    "a part is returned": (Reading(lambda x: x[:4]), (16, 32), "current", {}, (HIGH.format("the model's output"), 1.0)),
    "its sum is returned": (Reading(lambda x: x.sum()), (16, 32), "current", {}, (HIGH.format("sum"), 1.0)),
    # An addend, and what only the addend of an FP8 GEMM is made of.
    "an addend": (square(addmm_of(lambda x: x)), (16, 32), "current", {}, (HIGH.format("addmm"), 1.0)),
    "of an addend": (square(addmm_of(lambda x: x * 2)), (16, 32), "current", {}, (HIGH.format("mul"), 1.0)),
    "what a GEMM returns": (
        square(lambda m, x: gather(x @ m.w) @ m.w), (16, 32), "current", {},
        ("readers: the shard is the result of an FP8 GEMM, with nothing in between", 1.0),
    ),
    "its size alone is read": (Reading(lambda x: torch.ones(x.shape[0])), (16, 32), "current", {}, (None, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_travels(case):
    model, shape, recipe, options, expected = CASES[case]
    assert planned(model, *shape, recipe=recipe, **options) == expected


def test_a_group_of_ranks_with_other_scales():
    joint = trace(Gathering(), torch.randn(16, 32), recipe="delayed")
    asked = []
    context = dataclasses.replace(joint.context, shares_scales=lambda group: asked.append(group) or False)
    (found,) = dataclasses.replace(joint, context=context).run("plan gathers").plan.gathers
    assert str(found.reason) == "scales: amax_reduction_group does not contain all ranks of the gather"
    assert asked == [found.gather.group]


def test_a_gather_that_feeds_no_fp8_gemm_is_not_planned():
    assert trace(Gathering(), torch.randn(16, 32), rules={"*": None}).run("plan gathers").plan.gathers == ()
    assert trace(lambda x: gather(x) * 2, torch.randn(16, 32)).run("plan gathers").plan.gathers == ()
    assert trace(nn.Linear(32, 32), torch.randn(16, 32)).run("plan gathers").plan.gathers == ()


def test_records_of_gathers():
    for model, sent in ((Gathering(), 16 * 32), (Reading(lambda x: x), 16 * 32 * 4)):
        work = trace(model, torch.randn(16, 32), recipe="current").run("plan gathers")
        (record,) = gather_records(work.plan)
        assert (record.num_ranks, record.is_backward, record.quantized) == (2, False, sent == 16 * 32)
        assert (record.bytes_before, record.bytes_after) == (16 * 32 * 4, sent), "what the other rank sends"
    work = gathering("current").run("plan gathers")
    assert [r.tensor for r in gather_records(work.plan)] == ["v:weight", "w:weight"]


def test_a_gathered_weight_is_not_recomputed_in_backward():
    work = gathering("current", weight_copies="recompute").run("plan recomputation")
    assert [g.reason for g in work.plan.gathers] == [None] * 2
    assert work.plan.recomputed_weights == frozenset()


# -- Parameters


def two_weights(x, v, w):
    """Two products with gathered weights, the second of which is gathered where it is needed."""
    return (x @ gather(v).t()).relu() @ gather(w.to(torch.bfloat16).float()).t()


def gathering(recipe, **options):
    v, w = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(24, 32))
    return trace(two_weights, torch.randn(16, 32, requires_grad=True), v, w, recipe=recipe, **options)


def test_reductions_of_amaxes():
    work = gathering("current").run()
    (reduction,) = calls(work.graph, c10d.all_reduce.default)
    assert tuple(reduction.args[0].meta["val"].shape) == (2,)
    order = {node: i for i, node in enumerate(work.graph.nodes)}
    sent = calls(work.graph, c10d.all_gather_into_tensor.default)
    assert [n.meta["val"].dtype for n in sent] == [torch.uint8] * 2
    assert all(order[reduction] < order[n] for n in sent)
    apart = gathering("current").run(without=("fold elements", "merge reductions"))
    assert len(calls(apart.graph, c10d.all_reduce.default)) == 2

    def function(x, w):
        h = x @ w
        return gather(h.relu()) @ w + gather(h.tanh()) @ w

    work = trace(function, torch.randn(16, 32), torch.randn(32, 32), recipe="current").run()
    assert [tuple(n.args[0].meta["val"].shape) for n in calls(work.graph, c10d.all_reduce.default)] == [()] * 2
    joint = gathering("delayed")
    joint = dataclasses.replace(joint, options=dataclasses.replace(joint.options, variants=frozenset({FIRST_STEP})))
    (reduction,) = calls(joint.run().graph, c10d.all_reduce.default)
    assert tuple(reduction.args[0].meta["val"].shape) == (2,)


def test_a_reduction_of_another_tensor_is_found():
    work = gathering("current").run(until="merge reductions")
    (together,) = calls(work.graph, aten.cat.default)
    together.args = (together.args[0][::-1],)
    with pytest.raises(InvariantError, match=r"b has .*, the plan says primals_1"):
        verify(work.graph, work.plan, work.applied, work.known, work.permuted)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_what_is_gathered_again_in_backward_is_gathered_in_fp8(recipe):
    joint = gathering(recipe)
    for wait in gathers.waits(joint.graph):
        for node in (wait, wait.args[0]):
            node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    sent = calls(joint.run().graph, c10d.all_gather_into_tensor.default)
    assert [n.meta["val"].dtype for n in sent] == [torch.uint8] * 2
    again = [n.meta["recompute"] for gathered in sent for n in (gathered, *gathered.users)]
    assert again == [CheckpointPolicy.MUST_RECOMPUTE] * 4


# -- the graph


def shared(*dims):
    """Two linears that gather the same rows, as DTensor does."""
    q, k = (Gathering(dim=dim, bias=False) for dim in dims or (0, 0))
    return Net(lambda m, x: (m.q(x), m.k(x)), q=q, k=k)


def test_equal_gathers_are_merged_and_those_that_differ_are_not():
    joint = trace(shared(), torch.randn(16, 32), recipe="current")
    first, second = gathers.waits(joint.graph)
    same = gathers.equal_gathers(joint.graph)
    assert (same[second], same[second.args[0]]) == (first, first.args[0])
    second.args[0].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert gathers.equal_gathers(joint.graph) == {}
    work = trace(shared(), torch.randn(16, 32), recipe="current").run()
    (sent,) = calls(work.graph, c10d.all_gather_into_tensor.default)
    assert sent.meta["val"].dtype is torch.uint8
    joint = trace(shared(0, 1), torch.randn(2, 16, 32), recipe="current")
    waits = set(gathers.waits(joint.graph))
    assert len(waits) == 2
    assert not any(n in waits and n.args[0].args != same.args[0].args for n, same in gathers.equal_gathers(joint.graph).items())


def test_the_largest_of_all_ranks():
    graph = trace(Gathering(), torch.randn(16, 32), recipe="current").graph
    (wait,) = gathers.waits(graph)
    found = gathers.Gather.read(wait, lambda group: True)
    cursor = Cursor.start(graph).at(wait, backward=False)
    largest = found.largest_of_ranks(cursor, cursor.call(torch.ops.lowering.amaxes.default, [found.source]))
    reduced = largest.args[0].args[0]
    assert (reduced.target, reduced.args[1:]) == (c10d.all_reduce.default, ("max", found.group))
    assert reduced.args[0].meta["val"].dtype is torch.int32, "as floats, MAX may lose NaN"
    assert (largest.meta["val"].dtype, largest.meta["val"].dim()) == (torch.float32, 0)
    assert found.shard_as_matrix(Cursor.start(graph)) is found.source, "a matrix is taken as it is"
    assert isinstance(found.source, fx.Node)


def test_time_grows_with_the_number_of_gathers_and_not_with_its_square():
    counts = []
    for num_gathers in (8, 64):
        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_gathers))
        many = Net(lambda m, x: sum(f(gather(x * i)).tanh() for i, f in enumerate(m.layers)), layers=layers)
        joint = trace(many, torch.randn(16, 32), recipe="current", trains=False)
        work = joint.run("share sigmoids")
        profiler = cProfile.Profile()
        profiler.runcall(plan_gathers, work.graph, work.plan, work.context)
        counts.append(sum(entry.callcount for entry in profiler.getstats()))
        assert len(plan_gathers(work.graph, work.plan, work.context).gathers) == num_gathers
    assert counts[1] <= 9 * counts[0]
