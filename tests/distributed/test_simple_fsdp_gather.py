"""All-gathers of sharded Parameters in the graph, as SimpleFSDP makes them: FP8 bytes travel, and nothing else changes."""

import types
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.fx_passes import bucketing
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, fp8_compile, inspect, rewrite_graph
from tests.distributed.gathers import GATHER, REDUCE, collectives, equal, with_and_without
from tests.distributed.models import Gathered, GatheredAgain, simple_fsdp
from tests.distributed.support import on_ranks
from tests.support.cases import rest
from tests.support.models import Net

pytestmark = pytest.mark.dist
#: Both operands of a GEMM cannot have 128x128 blocks: weights have, and a copy of one serves both orientations.
BLOCKS, SQUARES = Float8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)


def mlp(hidden=256):
    return nn.Sequential(OrderedDict(up=nn.Linear(256, hidden), act=nn.GELU(), down=nn.Linear(hidden, 256, bias=False)))


def all_gathers(graph):
    return graph.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)


def batch(rank, dtype=torch.bfloat16):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sharded(make, dtype=torch.bfloat16, kind=Gathered):
    torch.manual_seed(0)
    return simple_fsdp(make(), init_device_mesh("cpu", (dist.get_world_size(),)), dtype, kind)


def trained(rank, recipe, hidden=256, steps=1):
    """The graphs without and with the gathers moved, which changes no bit of losses and gradients, and the latter's table."""

    def run():
        model, results = sharded(lambda: mlp(hidden)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
        for _ in range(steps):
            loss = compiled(batch(rank)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return results, compiled

    moved, kept, ours, theirs = with_and_without(run)
    assert equal(moved, kept), recipe
    (graph,), (plain,) = ours.graphs, theirs.graphs
    return plain, graph, str(ours)


def sent(graph):
    """Sizes and dtypes of what a rank gives the gathers of a graph."""
    return [(size, dtype) for name, dtype, size in collectives(graph) if name == GATHER]


def buckets(graph, is_wanted=lambda gather: True):
    """In which torch's passes put gathers."""
    module = types.SimpleNamespace(graph=graph)
    return bucketing.bucket_all_gather_by_mb(module, lambda index: 1000.0, lambda wait: is_wanted(wait.args[0]))


class Ancestors(dict):
    """Of each node, as torch 2.11 wants them."""

    def __missing__(self, node):
        return set().union(*({n, *self[n]} for n in node.all_input_nodes))


def is_fsdps(gather):
    """What torch takes for a gather of FSDP's."""
    given = () if torch.__version__ >= "2.12" else (Ancestors(),)
    return bucketing.is_fsdp_all_gather(gather, *given)


@pytest.mark.parametrize(
    ("recipe", "scales", "known"), [("delayed", 0, []), ("current", 0, []), (BLOCKS, 8, [3]), (SQUARES, 32, [3])], ids=str
)
@on_ranks(2)
def test_gathered_parameters_travel_as_fp8_and_results_stay_bit_for_bit(rank, recipe, scales, known):
    """scales: bytes that travel with a shard. known: the buckets of passes that look for FSDP's gathers. They want one input
    behind each; a scale from the state, or of all Parameters, is another one."""
    weight = 128 * 256  # elements of a rank's shard
    plain, graph, text = trained(rank, recipe, steps=2)
    assert [size for size, _ in sent(plain.after)] == [2 * weight, 2 * 128, 2 * weight], "two weights and a bias"
    sizes = (2 * 128, weight + scales, weight + scales)
    assert sorted(sent(graph.after), key=lambda one: one[0]) == [(size, torch.uint8) for size in sizes], "the bias as bytes"
    assert [(g.tensor, g.quantized, g.bytes_before, g.bytes_after) for g in graph.gathers] == [
        (f"{name}:weight", True, 2 * weight, weight + scales) for name in ("up", "down")
    ]
    assert "2 all-gathers send FP8" in text
    found = [[[*map(len, buckets(g.after.graph, *of))] for of in ((), (is_fsdps,))] for g in (plain, graph)]
    assert found == [[[3], [3]], [[3], known]], "one bucket of three, as before"
    reductions = [(dtype, size) for name, dtype, size in collectives(graph.after) if name == REDUCE]
    assert reductions == ([(torch.int32, 8)] if recipe == "current" else []), "the amaxes of both weights in one"


@pytest.mark.parametrize("recipe", ["rowwise", *rest(["current"])])
@on_ranks(2)
def test_merged_reductions_compile(rank, recipe):
    found = []
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        model = sharded(mlp, torch.float32)
        compiled = fp8_compile(model, recipe, backend=backend, select="all")
        loss = compiled(batch(rank, torch.float32)).square().mean()
        loss.backward()
        names = [name for name, *_ in collectives(inspect(compiled).graphs[0].after)]
        assert names.count(REDUCE) == 1, "the amaxes of both weights in one"
        found.append([loss.detach(), *(p.grad.to_local() for p in model.parameters())])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 orders what it puts into a bucket in another way, and fails")
@on_ranks(2)
def test_torchs_bucketing_after_the_rewrite_changes_no_bit(rank):
    """A trace of a step on shards, rewritten, and its gathers in buckets by torch's own pass."""

    def step(up, bias, down, x):
        parameters = [all_gather_tensor_autograd(shard, 0, dist.group.WORLD) for shard in (up, bias, down)]
        loss = F.linear(F.linear(x, *parameters[:2]).relu(), parameters[2]).square().mean()
        return [loss, *torch.autograd.grad(loss, [up, bias, down])]

    torch.manual_seed(rank)
    shards = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((128, 256), (128,), (128, 256))]
    inputs = *shards, torch.randn(64, 256, dtype=torch.bfloat16)
    traced = make_fx(step, tracing_mode="fake")(*inputs)
    for recipe in (BLOCKS, SQUARES):
        rewritten = rewrite_graph(traced, recipe, inputs=["up.weight", "up.bias", "down.weight"])
        assert "2 all-gathers send FP8" in str(rewritten)
        graph = rewritten.graph
        expected = graph(*inputs)
        assert len(all_gathers(graph)) == 3
        bucketing.merge_all_gather(graph, buckets(graph.graph, is_fsdps), "default")
        graph.recompile()
        assert all(a.equal(b) for a, b in zip(graph(*inputs), expected, strict=True))
        assert (buckets(graph.graph), all_gathers(graph)) == ([], []), "all three went into one, which writes into a buffer"


@on_ranks(2)
def test_shards_of_different_sizes(rank):
    """255 rows on two ranks: DTensor pads the last shard, gathers, and takes the padding off."""
    _, graph, _ = trained(rank, "current", 255)
    assert [g.quantized for g in graph.gathers] == [True, True]
    assert [dtype for _, dtype in sent(graph.after)].count(torch.uint8) == 3


@on_ranks(2)
def test_what_cannot_travel_says_why(rank):
    """Layer 0 needs no gradient of its input, so one copy of its weight serves."""
    for recipe, hidden, layer, reason in (
        (BLOCKS, 192, 0, "shape: a block of scales crosses the border"),
        ("rowwise", 256, 1, "bytes: FP8 copies with 2 different scales"),
        ("mxfp8", 256, 1, "bytes: FP8 copies with 2 different scales"),
        (DelayedScaling(reduce_amax=False), 256, 0, "scales: reduce_amax=False"),
    ):
        _, graph, _ = trained(rank, recipe, hidden)
        gather = graph.gathers[layer]
        assert gather.reason.startswith(reason)
        assert gather.bytes_after == gather.bytes_before == hidden * 256
        assert hidden * 256 in [size for size, _ in sent(graph.after)]


def from_inputs(inputs, outputs):
    """A linear whose weight is [inputs, outputs]: forward reads the columnwise copy."""
    return Net(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(inputs, outputs) / 16))


def linears():
    first, last = (nn.Linear(256, 256, bias=False) for _ in range(2))
    return nn.Sequential(first, nn.GELU(), from_inputs(256, 256), nn.GELU(), last)


def gathered_twice(rank, recipe):
    """What forward and backward send, what they reduce, and what they send without moved gathers; the record of gathers."""

    def run():
        model, x = sharded(linears, kind=GatheredAgain), batch(rank).requires_grad_()
        compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
        compiled(x).square().mean().backward()
        return [x.grad, *(p.grad.to_local() for p in model.parameters())], compiled

    def sides(inspection, kind):
        (graph,) = inspection.graphs
        every = [collectives(side) for side in (graph.forward, graph.backward)]
        return [sorted(((size, dtype) for name, dtype, size in side if name == kind), key=lambda one: one[0]) for side in every]

    moved, kept, ours, theirs = with_and_without(run)
    assert equal(moved, kept), recipe
    gathers = [(g.bytes_before, g.bytes_after) for g in ours.graphs[0].gathers]
    return sides(ours, GATHER), sides(ours, REDUCE), sides(theirs, GATHER), gathers


#: Recipe, bytes of scales beside a shard of 128 x 256 elements.
TWICE = [("current", 0), (BLOCKS, 8), ("mxfp8", 1024), (Float8BlockScaling(w_block_scaling_dim=1), 1024)]


@on_ranks(2)
def test_what_backward_gathers_again_is_the_copy_that_it_reads(rank):
    """With blocks along K the gathers of forward and backward bring different copies, each once."""
    shard = 128 * 256
    for recipe, scales in TWICE:
        moved, _, plain, gathers = gathered_twice(rank, recipe)
        assert plain == [[(2 * shard, torch.bfloat16)] * 3] * 2
        assert moved == [[(shard + scales, torch.uint8)] * 3] * 2, recipe
        assert gathers == [(2 * shard, shard + scales)] * 3
    moved, reduced, _, gathers = gathered_twice(rank, "rowwise")
    scales, values = (128 * 4, torch.uint8), (shard, torch.uint8)  # the scales of columns are known on all ranks
    assert moved == [[scales] * 2 + [values] * 3, [scales] + [values] * 3]
    assert reduced == [[(3 * 256 * 4, torch.int32)], []], "the amaxes of all columns in one"
    assert gathers == [(2 * shard, shard + 128 * 4)] * 3
