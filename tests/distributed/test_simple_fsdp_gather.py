"""All-gathers of sharded Parameters in the graph, as SimpleFSDP makes them: FP8 bytes travel, and nothing else changes."""

import types

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
from tests.distributed.support import run_on_ranks
from tests.support.models import Net

pytestmark = pytest.mark.dist
#: Both operands of a GEMM cannot have 128x128 blocks: weights have, and a copy of one serves both orientations.
BLOCKS, SQUARES = Float8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)


class MLP(nn.Module):
    def __init__(self, hidden=256, width=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def all_gathers(graph):
    return graph.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)


def batch(rank, dtype):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sharded(make, dtype, kind=Gathered):
    torch.manual_seed(0)
    return simple_fsdp(make(), init_device_mesh("cpu", (dist.get_world_size(),)), dtype, kind)


def trained(rank, recipe, hidden, dtype, steps=2):
    """Losses and gradients with the gathers moved and without; what travels; how many gathers torch takes for FSDP's."""

    def run():
        model, results = sharded(lambda: MLP(hidden), dtype), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
        for _ in range(steps):
            loss = compiled(batch(rank, dtype)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return results, compiled

    moved, kept, ours, theirs = with_and_without(run)
    (graph,), (plain,) = ours.graphs, theirs.graphs
    found = [([*map(len, buckets(g.after.graph))], [*map(len, buckets(g.after.graph, is_fsdps))]) for g in (plain, graph)]
    return equal(moved, kept), collectives(plain.after), collectives(graph.after), graph.gathers, str(ours), found


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
def test_gathered_parameters_travel_as_fp8_and_results_stay_bit_for_bit(recipe, scales, known):
    """scales: bytes that travel with a shard. known: the buckets of passes that look for FSDP's gathers. They want one input
    behind each; a scale from the state, or of all Parameters, is another one."""
    weight = 128 * 256  # elements of a rank's shard
    for same, before, after, gathers, text, found in run_on_ranks(trained, 2, recipe, 256, torch.bfloat16):
        assert same
        sizes = [size for name, _, size in before if name == GATHER]
        assert sizes == [2 * weight, 2 * 128, 2 * weight], "two weights and a bias"
        sent = [(dtype, size) for name, dtype, size in after if name == GATHER]
        sizes = (2 * 128, weight + scales, weight + scales)
        assert sorted(sent, key=lambda one: one[1]) == [(torch.uint8, size) for size in sizes], "the bias as bytes"
        assert [(g.tensor, g.quantized, g.bytes_before, g.bytes_after) for g in gathers] == [
            (f"{name}:weight", True, 2 * weight, weight + scales) for name in ("up", "down")
        ]
        assert "2 all-gathers send FP8" in text
        assert found == [([3], [3]), ([3], known)], "one bucket of three, as before"
        reductions = [(dtype, size) for name, dtype, size in after if name == REDUCE]
        assert reductions == ([(torch.int32, 8)] if recipe == "current" else []), "the amaxes of both weights in one"


def by_backend(rank, recipe):
    """Losses and gradients through both backends; how many collectives reduce amaxes."""
    found = []
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        model = sharded(MLP, torch.float32)
        compiled = fp8_compile(model, recipe, backend=backend, select="all")
        loss = compiled(batch(rank, torch.float32)).square().mean()
        loss.backward()
        reductions = [name for name, *_ in collectives(inspect(compiled).graphs[0].after) if name == REDUCE]
        found.append(([loss.detach(), *(p.grad.to_local() for p in model.parameters())], len(reductions)))
    return found


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_merged_reductions_compile(recipe):
    for (eager, *_), (generated, count) in run_on_ranks(by_backend, 2, recipe):
        assert count == 1, "the amaxes of both weights in one"
        for ours, expected in zip(generated, eager, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


def bucketed(rank, recipes):
    """A trace of a step on shards, rewritten, and its gathers in buckets by torch's own pass."""

    def step(up, bias, down, x):
        parameters = [all_gather_tensor_autograd(shard, 0, dist.group.WORLD) for shard in (up, bias, down)]
        loss = F.linear(F.linear(x, *parameters[:2]).relu(), parameters[2]).square().mean()
        return [loss, *torch.autograd.grad(loss, [up, bias, down])]

    torch.manual_seed(rank)
    shards = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((128, 256), (128,), (128, 256))]
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    traced, found = make_fx(step, tracing_mode="fake")(*shards, x), []
    for recipe in recipes:
        rewritten = rewrite_graph(traced, recipe, inputs=["up.weight", "up.bias", "down.weight"])
        graph = rewritten.graph
        expected = graph(*shards, x)
        before = len(all_gathers(graph))
        bucketing.merge_all_gather(graph, buckets(graph.graph, is_fsdps), "default")
        graph.recompile()
        same = [a.equal(b) for a, b in zip(graph(*shards, x), expected, strict=True)]
        found.append((same, before, len(buckets(graph.graph)), len(all_gathers(graph)), str(rewritten)))
    return found


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 orders what it puts into a bucket in another way, and fails")
def test_torchs_bucketing_after_the_rewrite_changes_no_bit():
    for results in run_on_ranks(bucketed, 2, [BLOCKS, SQUARES]):
        for same, before, *after, text in results:
            assert all(same)
            assert "2 all-gathers send FP8" in text
            assert (before, after) == (3, [0, 0]), "all three went into one, which writes into a buffer"


def test_shards_of_different_sizes():
    """255 rows on two ranks: DTensor pads the last shard, gathers, and takes the padding off."""
    for same, _, after, gathers, *_ in run_on_ranks(trained, 2, "current", 255, torch.bfloat16, 1):
        assert same
        assert [g.quantized for g in gathers] == [True, True]
        assert [dtype for name, dtype, _ in after if name == GATHER].count(torch.uint8) == 3


#: Recipe, hidden size, layer: layer 0 needs no gradient of its input, so one copy of its weight serves. The reason.
REFUSED = [
    (BLOCKS, 192, 0, "shape: a block of scales crosses the border"),
    ("rowwise", 256, 1, "bytes: FP8 copies with 2 different scales"),
    ("mxfp8", 256, 1, "bytes: FP8 copies with 2 different scales"),
    (DelayedScaling(reduce_amax=False), 256, 0, "scales: reduce_amax=False"),
]


def refused(rank):
    return [trained(rank, recipe, hidden, torch.bfloat16, 1) for recipe, hidden, _, _ in REFUSED]


def test_what_cannot_travel_says_why():
    for results in run_on_ranks(refused, 2):
        for (_, hidden, layer, reason), (same, _, after, gathers, *_) in zip(REFUSED, results, strict=True):
            assert same
            assert gathers[layer].reason.startswith(reason)
            assert gathers[layer].bytes_after == gathers[layer].bytes_before == hidden * 256
            assert hidden * 256 in [size for name, _, size in after if name == GATHER]


def from_inputs(inputs, outputs):
    """A linear whose weight is [inputs, outputs]: forward reads the columnwise copy."""
    return Net(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(inputs, outputs) / 16))


def gathered_twice(rank, recipes):
    def linears():
        first, last = (nn.Linear(256, 256, bias=False) for _ in range(2))
        return nn.Sequential(first, nn.GELU(), from_inputs(256, 256), nn.GELU(), last)

    def sides(inspection):
        """What forward and backward send and reduce."""
        (graph,) = inspection.graphs
        every = [collectives(side) for side in (graph.forward, graph.backward)]
        return [[[c for c in side if c[0] == name] for side in every] for name in (GATHER, REDUCE)]

    found = []
    for recipe in recipes:

        def run(recipe=recipe):
            model, x = sharded(linears, torch.bfloat16, GatheredAgain), batch(rank, torch.bfloat16).requires_grad_()
            compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
            compiled(x).square().mean().backward()
            return [x.grad, *(p.grad.to_local() for p in model.parameters())], compiled

        moved, kept, ours, theirs = with_and_without(run)
        found.append((equal(moved, kept), *sides(ours), sides(theirs)[0], ours.graphs[0].gathers))
    return found


#: Recipe, bytes of scales beside a shard of 128 x 256 elements.
TWICE = [("current", 0), (BLOCKS, 8), ("mxfp8", 1024), (Float8BlockScaling(w_block_scaling_dim=1), 1024)]


def test_what_backward_gathers_again_is_the_copy_that_it_reads():
    """With blocks along K the gathers of forward and backward bring different copies, each once."""
    shard = 128 * 256
    for results in run_on_ranks(gathered_twice, 2, [recipe for recipe, _ in TWICE] + ["rowwise"]):
        for (recipe, scales), (same, sent, _, plain, gathers) in zip(TWICE, results[:-1], strict=True):
            assert same, recipe
            assert plain == [[(GATHER, torch.bfloat16, 2 * shard)] * 3] * 2
            assert sent == [[(GATHER, torch.uint8, shard + scales)] * 3] * 2, recipe
            assert [(g.bytes_before, g.bytes_after) for g in gathers] == [(2 * shard, shard + scales)] * 3
        same, sent, reduced, _, gathers = results[-1]
        assert same
        values, scales = (GATHER, torch.uint8, shard), (GATHER, torch.uint8, 128 * 4)
        rows, columns = [scales, values], [values]  # the scales of columns are known on all ranks
        sent = [sorted(side, key=lambda one: one[2]) for side in sent]
        assert sent == [sorted(of_side, key=lambda one: one[2]) for of_side in (2 * rows + columns, 2 * columns + rows)]
        assert reduced == [[(REDUCE, torch.int32, 3 * 256 * 4)], []], "the amaxes of all columns in one"
        assert [(g.bytes_before, g.bytes_after) for g in gathers] == [(2 * shard, shard + 128 * 4)] * 3
