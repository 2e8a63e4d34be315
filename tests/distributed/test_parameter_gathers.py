"""All-gathers of sharded Parameters in the graph, as SimpleFSDP makes them: FP8 bytes travel, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.fx_passes.fsdp import is_fsdp_all_gather
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_compile, inspect
from fp8pass.rewrite import runner
from tests.distributed.models import loss_of, seeded, simple_fsdp, train
from tests.distributed.support import run_on_ranks

pytestmark = pytest.mark.dist
GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"
#: Both operands of a GEMM cannot have 128x128 blocks: weights have, and a copy of one serves both orientations.
BLOCKS = Float8BlockScaling()


class MLP(nn.Module):
    def __init__(self, hidden=256, width=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def collectives(graph):
    """Name, dtype and number of bytes that a rank gives each collective of a graph."""
    nodes = [n for n in graph.graph.nodes if str(n.target).startswith("_c10d_functional")]
    nodes = [n for n in nodes if "wait_tensor" not in str(n.target)]
    given = [n.args[0].meta["val"] for n in nodes]
    return [(str(n.target).split(".")[1], x.dtype, x.numel() * x.element_size()) for n, x in zip(nodes, given, strict=True)]


def all_gathers(graph):
    return graph.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)


def with_and_without(rank, recipe, hidden, dtype, steps=2):
    """Losses and gradients with the gathers moved and without; what travels; how many gathers torch takes for FSDP's."""
    found = []
    for left_out in ((), ("plan gathers",)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = simple_fsdp(MLP(hidden), mesh, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results = []
        with runner.without(*left_out):
            compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
            for _ in range(steps):
                loss = compiled(x).square().mean()
                loss.backward()
                results += [loss.detach(), *(p.grad.to_local() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
        found.append((results, inspect(compiled)))
    (moved, ours), (kept, theirs) = found
    (graph,), (plain,) = ours.graphs, theirs.graphs
    recognized = [sum(map(is_fsdp_all_gather, all_gathers(g))) for g in (plain.after, graph.after)]
    equal = [a.equal(b) for a, b in zip(moved, kept, strict=True)]
    return equal, collectives(plain.after), collectives(graph.after), graph.gathers, str(ours), recognized


@pytest.mark.parametrize(("recipe", "scales", "known"), [("delayed", 0, 1), ("current", 0, 1), (BLOCKS, 8, 5)], ids=str)
def test_gathered_parameters_travel_as_fp8_and_results_stay_bit_for_bit(recipe, scales, known):
    """known: gathers that torch's FSDP passes recognize. They want one input behind a gather; a scale from the state, or of all
    Parameters, is another one."""
    weight = 128 * 256  # elements of a rank's shard
    for equal, before, after, gathers, text, recognized in run_on_ranks(with_and_without, 2, recipe, 256, torch.bfloat16):
        assert all(equal)
        sizes = [size for name, _, size in before if name == GATHER]
        assert sizes == [2 * weight, 2 * 128, 2 * weight], "two weights and a bias"
        sent = [(dtype, size) for name, dtype, size in after if name == GATHER]
        assert sent.count((torch.uint8, weight)) == 2
        assert sent.count((torch.bfloat16, 2 * 128)) == 1, "the bias"
        assert sum(size for _, size in sent) == 2 * (weight + scales) + 2 * 128
        assert [(g.tensor, g.quantized, g.bytes_before, g.bytes_after) for g in gathers] == [
            (f"{name}:weight", True, 2 * weight, weight + scales) for name in ("up", "down")
        ]
        assert "2 all-gathers send FP8" in text
        assert recognized == [3, known]
        reductions = [(dtype, size) for name, dtype, size in after if name == REDUCE]
        assert reductions == ([(torch.int32, 8)] if recipe == "current" else []), "the amaxes of both weights in one"


def test_shards_of_different_sizes():
    """255 rows on two ranks: DTensor pads the last shard, gathers, and takes the padding off."""
    for equal, _, after, gathers, *_ in run_on_ranks(with_and_without, 2, "current", 255, torch.bfloat16, 1):
        assert all(equal)
        assert [g.quantized for g in gathers] == [True, True]
        assert [dtype for name, dtype, _ in after if name == GATHER].count(torch.uint8) == 2


#: Recipe, hidden size, layer: layer 0 needs no gradient of its input, so one copy of its weight serves. The reason.
REFUSED = [
    (BLOCKS, 192, 0, "shape: a block of scales crosses the border"),
    ("rowwise", 256, 1, "bytes: FP8 copies with 2 different scales"),
    ("mxfp8", 256, 1, "bytes: FP8 copies with 2 different scales"),
    (DelayedScaling(reduce_amax=False), 256, 0, "scales: reduce_amax=False"),
]


def refused(rank):
    return [with_and_without(rank, recipe, hidden, torch.bfloat16, 1) for recipe, hidden, _, _ in REFUSED]


def test_what_cannot_travel_says_why():
    for results in run_on_ranks(refused, 2):
        for (_, hidden, layer, reason), (equal, _, after, gathers, *_) in zip(REFUSED, results, strict=True):
            assert all(equal)
            assert gathers[layer].reason.startswith(reason)
            assert gathers[layer].bytes_after == gathers[layer].bytes_before == hidden * 256
            assert (GATHER, torch.bfloat16, hidden * 256) in after


def curves(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rules = {"emb": None, "head": None}
    sharded = simple_fsdp(seeded(layers=1), mesh)
    compiled = fp8_compile(sharded, "current", rules=rules, backend="aot_eager")
    sharing = train(compiled, sharded.parameters(), range(30), rank, 2)
    assert all(g.quantized for g in inspect(compiled).graphs[0].gathers)
    torch._dynamo.reset()
    alone = seeded(layers=1)
    single = fp8_compile(alone, "current", rules=rules, backend="aot_eager")
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-3)
    losses = []
    for step in range(30):
        loss = loss_of(single, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sharing, losses


def test_thirty_steps_follow_one_rank():
    for sharing, alone in run_on_ranks(curves, 2):
        assert sum(sharing[-3:]) == pytest.approx(sum(alone[-3:]), rel=0.01)
