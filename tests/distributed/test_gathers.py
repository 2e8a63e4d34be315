"""Quantized all-gathers in graphs: FP8 bytes travel, of activations and of Parameters, and nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import Float8BlockScaling, MXFP8BlockScaling, inspect
from fp8pass.rewrite import runner
from tests.distributed import models
from tests.distributed.support import on_ranks
from tests.support.models import Net
from tests.support.training import fp8

pytestmark = pytest.mark.dist
BF16, F32 = torch.bfloat16, torch.float32


def sent(graph, kind="all_gather"):
    """Sizes in bytes and dtypes of what a rank gives the collectives of a graph, in order of size."""
    nodes = [n for n in graph.graph.nodes if str(n.target).startswith(f"_c10d_functional.{kind}")]
    given = [n.args[0].meta["val"] for n in nodes]
    return sorted([(x.numel() * x.element_size(), x.dtype) for x in given], key=lambda one: one[0])


def count(graph, dtype):
    """All-gathers of a dtype."""
    return [dtype for _, dtype in sent(graph)].count(dtype)


def with_and_without(run):
    """The graph of a program with the gathers moved and without, which changes no bit of its results, and the first one's
    table. run: compiles it anew, and gives what is compiled and its results."""
    found = []
    for left_out in ((), ("plan gathers",)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with runner.without(*left_out):
            compiled, *results = run()
        found.append((inspect(compiled), [r.detach().clone() for r in results if r is not None]))
    (ours, moved), (theirs, kept) = found
    assert all(torch.equal(a, b) for a, b in zip(moved, kept, strict=True))
    (graph,), (plain,) = ours.graphs, theirs.graphs
    return graph, plain, str(ours)


def gradients(model):
    return [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]


# -- activations


@on_ranks(2)
def test_sequence_parallelism_sends_fp8_bytes(rank):
    """Of the inputs of gate/up in 2 layers and of the head, and of the gradients of 2 down projections."""
    shard = models.BATCH * models.TOKENS * models.WIDTH // 2
    modules = {f"layers.{i}.{name}" for i in (0, 1) for name in ("gate", "down")} | {"head"}
    for recipe in ("delayed", "current"):

        def run(recipe=recipe):
            model = models.seeded()
            models.tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence=True)
            compiled = fp8(model, recipe)  # a rank's part of the head is thin
            for step in range(3):
                model.zero_grad()
                loss = models.loss_of(compiled, step)
                loss.backward()
            return compiled, loss, *gradients(model)

        graph, _, text = with_and_without(run)
        # Before, gate and up gather the same input, in forward only; the last two gather the logits and the gradient of the
        # embedding.
        counts = [count(graph.before, F32), count(graph.after, F32), count(graph.after, torch.uint8)]
        assert counts == [5 + 2 + 2, 2, 5], recipe
        assert len(sent(graph.after, "all_reduce.")) == (0 if recipe == "delayed" else 5)
        assert ([g.quantized for g in graph.gathers], {g.module for g in graph.gathers}) == ([True] * 5, modules)
        assert all((g.bytes_before, g.bytes_after) == (4 * shard, shard) for g in graph.gathers)
        assert f"5 all-gathers send FP8: {5 * shard:,} bytes per rank instead of {20 * shard:,}, each time." in text


# -- Parameters, as SimpleFSDP gathers them

#: Both operands of a GEMM cannot have 128x128 blocks: weights have, and a copy of one serves both orientations.
BLOCKS, SQUARES = Float8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)
SHARD = 128 * 256


def batch(rank):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(BF16)


def trained(rank, recipe):
    """The graphs with the gathers moved and without, and the former's table."""

    def run():
        up, down = nn.Linear(256, 256), nn.Linear(256, 256, bias=False)
        model = Net(lambda m, x: m.down(F.gelu(m.up(x))), up=up, down=down)
        models.simple_fsdp(model, init_device_mesh("cpu", (2,)), BF16)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
        compiled = fp8(model, recipe)
        for _ in range(2):
            optimizer.zero_grad()
            loss = compiled(batch(rank)).square().mean()
            loss.backward()
            results += [loss, *gradients(model)]
            optimizer.step()
        return compiled, *results

    return with_and_without(run)


@pytest.mark.parametrize(("recipe", "scales"), [("delayed", 0), ("current", 0), (BLOCKS, 8), (SQUARES, 32)], ids=str)
@on_ranks(2)
def test_gathered_parameters_travel_as_fp8(rank, recipe, scales):
    """scales: bytes that travel with a shard."""
    graph, plain, text = trained(rank, recipe)
    assert [size for size, _ in sent(plain.after)] == [2 * 128, 2 * SHARD, 2 * SHARD], "a bias and two weights"
    sizes = (2 * 128, SHARD + scales, SHARD + scales)
    assert sent(graph.after) == [(size, torch.uint8) for size in sizes], "the bias as bytes"
    assert [(g.tensor, g.quantized, g.bytes_before, g.bytes_after) for g in graph.gathers] == [
        (f"{name}:weight", True, 2 * SHARD, SHARD + scales) for name in ("up", "down")
    ]
    assert "2 all-gathers send FP8" in text
    assert sent(graph.after, "all_reduce.") == [(8, torch.int32)] * (recipe == "current"), "the amaxes of both weights in one"
