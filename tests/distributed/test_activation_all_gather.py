"""The quantized all-gather: FP8 bytes travel, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import DelayedScaling, Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, fp8_compile, inspect
from tests.distributed.gathers import GATHER, REDUCE, collectives, count, equal, with_and_without
from tests.distributed.models import BATCH, TOKENS, WIDTH, loss_of, seeded, tensor_parallel
from tests.distributed.support import everyone, on_ranks
from tests.tolerances import REORDERED_LOSS

pytestmark = pytest.mark.dist
SHARD = BATCH * TOKENS * WIDTH // 2
BF16, F32 = torch.bfloat16, torch.float32


def sequence_parallel(recipe, backend="aot_eager", bias=False, steps=3, **options):
    """The loss and the gradients of the last step, and the compiled model."""
    model = seeded(bias=bias)
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence=True)
    compiled = fp8_compile(model, recipe, backend=backend, select="all", **options)  # a rank's part of the head is thin
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(compiled, step)
        loss.backward()
    return [loss, *(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters())], compiled


@on_ranks(2)
def test_fp8_travels_and_results_stay_bit_for_bit(rank):
    """Of the inputs of gate/up in 2 layers and of the head, and of the gradients of 2 down projections."""
    modules = {f"layers.{i}.{name}" for i in (0, 1) for name in ("gate", "down")} | {"head"}
    for recipe, backend in (("delayed", "aot_eager"), ("current", "aot_eager"), ("current", "inductor")):
        moved, kept, ours, _ = with_and_without(lambda recipe=recipe, backend=backend: sequence_parallel(recipe, backend))
        if backend == "aot_eager":
            assert equal(moved, kept), recipe
        else:  # Inductor fuses the two programs differently and so rounds norms differently: only the loss, and nearly
            assert torch.allclose(moved[0], kept[0], rtol=REORDERED_LOSS, atol=0)
        (graph,) = ours.graphs
        # Before, gate and up gather the same input, in forward only; the last two gather the logits and the gradient of the
        # embedding.
        counts = [count(graph.before, GATHER, F32), count(graph.after, GATHER, F32), count(graph.after, GATHER, torch.uint8)]
        assert counts == [5 + 2 + 2, 2, 5], recipe
        assert count(graph.after, REDUCE, torch.int32) == (0 if recipe == "delayed" else 5)
        assert ([g.quantized for g in graph.gathers], {g.module for g in graph.gathers}) == ([True] * 5, modules)
        assert all((g.bytes_before, g.bytes_after) == (4 * SHARD, SHARD) for g in graph.gathers)
        text = f"5 all-gathers send FP8: {5 * SHARD:,} bytes per rank instead of {20 * SHARD:,}, each time."
        assert text in str(ours)


@on_ranks(2)
def test_what_is_not_moved_says_why(rank):
    def reasons(recipe, **options):
        torch._dynamo.reset()
        (graph,) = inspect(sequence_parallel(recipe, steps=1, **options)[1]).graphs
        assert all(g.bytes_before == g.bytes_after for g in graph.gathers if not g.quantized)
        return [(g.module, g.is_backward, g.reason) for g in graph.gathers]

    def kinds(*args, **options):
        return {(is_backward, why and why.partition(":")[0]) for _, is_backward, why in reasons(*args, **options)}

    bias = kinds(DelayedScaling(), bias=True)
    assert bias == {(False, None), (True, "readers")}, "the gradient of the bias sums what is gathered"
    ruled = {(module, why) for module, _, why in reasons(DelayedScaling(), rules={"layers.*.up": None}) if why}
    assert ruled == {(f"layers.{i}.gate", "readers: mm reads the gathered tensor in high precision") for i in (0, 1)}
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for recipe, options in ((DelayedScaling(reduce_amax=False), {}), (DelayedScaling(), {"amax_reduction_group": alone})):
        assert kinds(recipe, **options) == {(False, "scales"), (True, "scales")}
    assert kinds("blockwise") == {(False, "shape"), (True, "shape")}, "8 tokens per rank, and blocks of 128"


# -- products of a tensor that is gathered, whose scales travel with their values

BLOCKS = [(0, (128, 144)), (1, (3, 128, 144)), (0, (256, 96))]
LINES = [(0, (33, 72)), (1, (3, 8, 50)), (0, (16, 96))]
MX = [(0, (32, 80)), (1, (3, 64, 48))]
#: Recipe, dtype, whether there is a backward, the dimension that is gathered and sizes of a shard; the gathers of bytes and of
#: float32, and of the bytes in high precision the largest part that travels; or the reason why none does. Copies for forward
#: and backward travel each where their scales differ. Two of three shapes of blocks each, by turns.
PRODUCTS = [
    (Float8BlockScaling(), F32, True, BLOCKS[:2], (2, 2, 0.53)),
    (Float8BlockScaling(use_f32_scales=True), F32, True, BLOCKS[1:], (2, 2, 0.53)),
    (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), BF16, True, BLOCKS[::2], (1, 1, 0.53)),
    (Float8BlockScaling(), BF16, False, BLOCKS[:2], (1, 1, 0.53)),
    (Float8BlockScaling(), BF16, False, [(0, (96, 144))], (1, 1, 0.53)),  # blocks of 1x128 cross no shard
    (Float8RowwiseScaling(), BF16, False, LINES, (1, 1, None)),  # a byte for each element, four for each line
    (Float8RowwiseScaling(high_precision_grad_weight=True), F32, False, LINES, (1, 1, None)),
    (MXFP8BlockScaling(), F32, True, MX, (4, 0, 2 * 33 / 32 / 4 + 0.02)),
    (MXFP8BlockScaling(), BF16, False, MX, (2, 0, 33 / 32 / 2 + 0.02)),
    (Float8BlockScaling(), F32, True, [(0, (96, 144))], "shape: a block of scales crosses"),
    (MXFP8BlockScaling(), F32, True, [(0, (48, 144))], "shape: a block of scales crosses"),
    (Float8RowwiseScaling(), F32, True, [(0, (32, 96))], "scales: columns are spread over several ranks"),
]


def gathered(model, recipe, trains, x, weight):
    """The gathers of bytes and of float32 and bfloat16, and the record, of a moved gather, which changes no bit."""

    def run():
        compiled = fp8_compile(model, recipe, backend="aot_eager")
        x.grad = weight.grad = None
        with torch.set_grad_enabled(trains):
            out = compiled(x)
        if trains:
            out.square().mean().backward()
        return [out, x.grad, weight.grad], compiled

    moved, kept, ours, _ = with_and_without(run)
    assert equal(moved, kept), recipe
    (graph,) = ours.graphs
    (record,) = graph.gathers
    return [count(graph.after, GATHER, dtype) for dtype in (torch.uint8, F32, BF16)], record


def normal(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@on_ranks(2)
def test_scales_travel_with_their_values_or_the_reason_is_said(rank):
    for recipe, dtype, trains, shapes, expected in PRODUCTS:
        for dim, shape in shapes:

            class Gathering(nn.Linear):
                def forward(self, x, dim=dim):
                    return super().forward(all_gather_tensor_autograd(x, dim, dist.group.WORLD))

            case = recipe, dtype, shape
            torch.manual_seed(0)
            model = Gathering(shape[-1], 48, dtype=dtype)
            counts, record = gathered(model, recipe, trains, normal(shape, dtype, rank).requires_grad_(), model.weight)
            if isinstance(expected, str):
                assert record.reason.startswith(expected), case
                continue
            assert record.quantized, (case, record.reason)
            assert counts == [*expected[:2], 0], case
            part = record.bytes_after / record.bytes_before
            if expected[2] is None:
                assert part == pytest.approx((1 + 4 / shape[-1]) / dtype.itemsize, rel=0.01), case
            else:
                assert part < expected[2], case


@on_ranks(2)
def test_a_gathered_weight_in_tiles_travels_once(rank):
    """x @ w.T for a weight whose rows the ranks share, as FSDP gathers it. With a scale per 32x32 one copy serves both
    orientations, in one buffer; with 1x32 each travels, and its scales, and bfloat16 would be smaller."""
    found = []
    for recipe in (MXFP8BlockScaling(enable_2d_quantization=True), MXFP8BlockScaling()):
        shard = nn.Parameter(normal((32, 64), BF16, rank))

        def product(x, shard=shard):
            return x @ all_gather_tensor_autograd(shard, 0, dist.group.WORLD).t()

        found.append(gathered(product, recipe, True, normal((48, 64), BF16, 9).requires_grad_(), shard))
    ((num_bytes, *_), tiles), (_, lines) = found
    assert tiles.quantized, tiles.reason
    assert (num_bytes, tiles.bytes_after) == (1, 32 * 64 + 2)
    assert lines.reason.startswith("bytes")
    assert lines.bytes_before <= 2 * (32 * 64 + 64)


@on_ranks(2)
def test_without_sharded_tensors_nothing_is_communicated(rank):
    model = seeded()
    tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence=False)
    compiled = fp8_compile(model, "current", backend="aot_eager")
    loss_of(compiled, 0).backward()
    (graph,) = inspect(compiled).graphs
    assert collectives(graph.before) == collectives(graph.after)
    assert len(graph.gathers) == 0


@on_ranks(2)
def test_non_finite_values_reach_every_rank_and_scale_alike(rank):
    def function(x, w):
        return all_gather_tensor(x, 0, dist.group.WORLD) @ w

    torch.manual_seed(rank)
    x = torch.randn(16, 32)
    x[0, 0] = [float("nan"), float("inf")][rank]
    compiled = fp8_compile(function, "current", backend="aot_eager")
    first, second = everyone(compiled(x, torch.eye(32)))
    assert inspect(compiled).graphs[0].gathers[0].quantized
    assert first.isnan().equal(second.isnan())
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert first[0].isnan().any()
    assert first[16].isnan().any()
    assert first[1:16].isfinite().all()
