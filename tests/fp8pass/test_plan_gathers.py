"""All-gathers in a plan: which send FP8, which do not and why. Two ranks in one process: nothing moves."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass import DelayedScaling, Float8BlockScaling, inspect
from fp8pass.graph import gathers
from fp8pass.rewrite.report import gather_records
from fp8pass.schemes.emitter import FIRST_STEP
from tests.support.joint import calls, trace, two_ranks
from tests.support.models import Net
from tests.support.training import fp8, train

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
    """A linear of a gathered tensor. read: what else the model returns of it."""

    def __init__(self, inputs=32, outputs=48, dim=0, read=None, **options):
        super().__init__(inputs, outputs, **options)
        self.dim, self.read = dim, read

    def forward(self, x):
        x = gather(x, self.dim)
        out = super().forward(x)
        return out if self.read is None else (out, self.read(x))


def weighted(forward, *shape):
    return Net(forward, w=nn.Parameter(torch.randn(shape or (32, 32))))


def addmm(m, x, of_addend=lambda x: x):
    x = gather(x)
    return torch.addmm(of_addend(x), x, m.w)


PART = "scales: a part of the gathered tensor has amaxes of its own, which its shards do not have"
ENGINE = "scales: match=... quantizes as an inference engine does: whole tensors, not shards"
GROUPED = "readers: a grouped GEMM reads it, whose operands are gathered in high precision"
PARTS = "shape: ranks hold parts of rows, or sizes are dynamic"
BLOCKS, ROWS, TILE = {"recipe": "blockwise"}, {"recipe": "rowwise"}, 1 + 4 / 128**2
HIGH = "readers: {} reads the gathered tensor in high precision"
TWO_RECIPES, BF16 = {"rules": {"*:grad_weight": "delayed"}}, {"dtype": torch.bfloat16}
OWN = "scales: reduce_amax=False, so ranks scale the tensor differently"
RESULT = "readers: the shard is the result of an FP8 GEMM, with nothing in between"
PADDING = "shape: dynamic sizes may need padding to multiples of 16"
BORDER = "shape: a block of scales crosses the border between two ranks' shards, or sizes are dynamic"
#: A model, the shape of its input, options -> why not in FP8, bytes per element.
CASES = {
    "current": (Gathering(), (16, 32), {}, None, 1.0),
    "dynamic rows, aligned columns": (Gathering(), (16, 32), {"dynamic": True}, PADDING, 1.0),
    "scales of its own on each rank": (Gathering(), (16, 32), {"recipe": DelayedScaling(reduce_amax=False)}, OWN, 1.0),
    "two recipes, two scales, bfloat16": (Gathering(), (16, 32), TWO_RECIPES | BF16, TWO_SCALES, 2.0),
    "blocks end within a shard": (Gathering(256), (64, 256), BLOCKS, BORDER, 2.0625),
    # 128x128 tiles: one copy serves both orientations, with 4 / 128**2 of a scale.
    "tiles, bfloat16": (Gathering(256), (128, 256), {"recipe": TILES} | BF16, None, TILE),
    "the model returns it": (Gathering(read=lambda x: x), (16, 32), {}, HIGH.format("the model's output"), 1.0),
    "along the second dimension": (Gathering(dim=1), (2, 16, 32), {}, None, 1.0),
    "blocks along the second dimension": (Gathering(256, dim=1), (2, 128, 256), BLOCKS, None, 2.0625),
    "blocks of part": (weighted(lambda m, x: gather(x).split(128)[1] @ m.w, 256, 48), (128, 256), BLOCKS, None, 2.0625),
    "tiles of a batch": (weighted(lambda m, x: x @ gather(m.w).flatten(0, 1).t(), 1, 128, 256), (16, 256), BLOCKS, None, TILE),
    "rows of a batch": (Gathering().requires_grad_(False), (2, 16, 32), ROWS, None, 1.125),
    "dynamic rows": (Gathering().requires_grad_(False), (16, 32), {"dynamic": True} | ROWS, PARTS, 1.125),
    "a part": (weighted(lambda m, x: gather(x)[:16] @ m.w), (16, 32), {}, PART, 1.0),
    "a part, with scales of columns": (weighted(lambda m, x: x @ gather(m.w)[:16].t()), (16, 32), ROWS, PART, 2.125),
    "an engine's numbers": (Gathering(), (16, 32), {"match": "vllm"}, ENGINE, 2.125),
    "a batch": (weighted(lambda m, x: torch.bmm(gather(x), m.w), 2, 32, 48), (1, 16, 32), {}, GROUPED, 1.0),
    "what a GEMM returns": (weighted(lambda m, x: gather(x @ m.w) @ m.w), (16, 32), {}, RESULT, 1.0),
    "an addend": (weighted(addmm), (16, 32), {}, HIGH.format("addmm"), 1.0),
    "of an addend": (weighted(lambda m, x: addmm(m, x, lambda x: x * 2)), (16, 32), {}, HIGH.format("mul"), 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_travels(case):
    model, shape, options, reason, bytes_per_element = CASES[case]
    dtype, options = options.get("dtype", torch.float32), {key: value for key, value in options.items() if key != "dtype"}
    x = torch.randn(shape).to(dtype).requires_grad_()
    plan = trace(model.to(dtype), x, **{"recipe": "current"} | options).run().plan
    (found,), (record,) = plan.gathers, gather_records(plan)
    assert (found.reason and str(found.reason), found.bytes_per_element) == (reason, bytes_per_element)
    assert (record.bytes_after < record.bytes_before, record.quantized) == (reason is None, reason is None)


def two_weights(x, v, w):
    """Two products with gathered weights, the second of which is gathered where it is needed."""
    return (x @ gather(v).t()).relu() @ gather(w.to(torch.bfloat16).float()).t()


def gathering(recipe, **options):
    v, w = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(24, 32))
    return trace(two_weights, torch.randn(16, 32, requires_grad=True), v, w, recipe=recipe, **options)


def test_reductions_of_amaxes_are_merged_and_come_before_what_they_scale():
    joint = gathering("delayed")
    joint = dataclasses.replace(joint, options=dataclasses.replace(joint.options, variants=frozenset({FIRST_STEP})))
    for case in (joint, gathering("current")):
        graph = case.run().graph
        (reduction,) = calls(graph, c10d.all_reduce.default)
        assert (tuple(reduction.args[0].meta["val"].shape), reduction.args[1]) == ((2,), "max")
        assert reduction.args[0].meta["val"].dtype is torch.int32, "as floats, MAX may lose NaN"
        sent = calls(graph, c10d.all_gather_into_tensor.default)
        assert [n.meta["val"].dtype for n in sent] == [torch.uint8] * 2
        order = {node: i for i, node in enumerate(graph.nodes)}
        assert all(order[reduction] < order[n] for n in sent)
    (reduction,) = calls(gathering("rowwise").run().graph, c10d.all_reduce.default)
    assert tuple(reduction.args[0].meta["val"].shape) == (32 + 32,), "of the columns of both"


def test_what_is_gathered_again_in_backward_is_gathered_in_fp8():
    joint = gathering("current")
    for wait in gathers.waits(joint.graph):
        for node in (wait, wait.args[0]):
            node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    sent = calls(joint.run().graph, c10d.all_gather_into_tensor.default)
    assert [n.meta["val"].dtype for n in sent] == [torch.uint8] * 2
    again = [n.meta["recompute"] for gathered in sent for n in (gathered, *gathered.users)]
    assert again == [CheckpointPolicy.MUST_RECOMPUTE] * 4


def test_equal_gathers_are_merged_and_those_that_differ_are_not():
    layers = {name: Gathering(bias=False) for name in "qk"}  # two linears that gather the same rows, as DTensor does
    joint = trace(Net(lambda m, x: (m.q(x), m.k(x)), **layers), torch.randn(16, 32), recipe="current")
    first, second = gathers.waits(joint.graph)
    same = gathers.equal_gathers(joint.graph)
    assert (same[second], same[second.args[0]]) == (first, first.args[0])
    second.args[0].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert gathers.equal_gathers(joint.graph) == {}


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        (96, ROWS, None),
        (256, BLOCKS, None),
        (96, {"recipe": "current"}, None),
        (96, {"recipe": "delayed"}, None),
        (97, ROWS, "shape: not all ranks have 49 rows, and row scales are sent by all ranks or by none"),
        (96, {"match": "vllm"} | ROWS, ENGINE),
        (96, {"recipe": "rowwise_with_gw_hp"}, "bytes: forward and backward need copies with different scales"),
        (96, BLOCKS, "shape: a block of scales crosses the border between two ranks' shards of 48 rows"),
        (40, {"recipe": "current"}, "shape: its 40 rows are not a multiple of 16"),
        (96, {"rules": {"*:grad_input": "delayed"}}, "bytes: GEMMs read it with 2 different scales"),
    ],
)
def test_what_fsdp_gathers_in_fp8(rows, options, reason):
    mesh, block = init_device_mesh("cpu", (2,)), Net(lambda m, x: m.inner(x), inner=nn.Linear(64, rows))
    compiled = fp8(fully_shard(nn.Sequential(fully_shard(block, mesh=mesh)), mesh=mesh), fsdp_gather="fp8", **options)
    for _ in range(2 if reason is None else 1):
        train(compiled, torch.randn(16, 64, requires_grad=True))
        torch.optim.SGD(block.parameters(), lr=0.1).step()
    assert (reason is None, reason) in {(g.quantized, g.reason) for graph in inspect(compiled).graphs for g in graph.gathers}
    assert block.inner.weight.grad.to_local().shape == ((rows + 1) // 2, 64)
