"""The quantized all-gather: FP8 bytes travel, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fp8pass import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    fp8_compile,
    inspect,
)
from fp8pass.rewrite import runner
from tests.distributed.models import BATCH, TOKENS, WIDTH, loss_of, seeded, tensor_parallel
from tests.distributed.support import run_on_ranks
from tests.tolerances import REORDERED_LOSS

pytestmark = pytest.mark.dist
SHARD = BATCH * TOKENS * WIDTH // 2
GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"


def sequence_parallel(recipe, backend="aot_eager", bias=False, steps=3, **options):
    """A trained model: (loss and gradients of the last step, its inspection)."""
    model = seeded(bias=bias)
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence=True)
    compiled = fp8_compile(model, recipe, backend=backend, select="all", **options)  # a rank's part of the head is thin
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(compiled, step)
        loss.backward()
    results = [
        loss.detach(),
        *(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()),
    ]
    return results, inspect(compiled)


def collectives(graph) -> list[tuple[str, torch.dtype]]:
    """Name and dtype of every collective of a graph."""
    nodes = [n for n in graph.graph.nodes if str(n.target).startswith("_c10d_functional")]
    found = [(str(n.target).split(".")[1], n.meta["val"].dtype) for n in nodes]
    return [c for c in found if c[0] != "wait_tensor"]


def with_and_without(rank, cases):
    return [compared(*case) for case in cases]


def compared(recipe, backend):
    torch._dynamo.reset()
    moved, inspection = sequence_parallel(recipe, backend)
    (graph,) = inspection.graphs
    torch._dynamo.reset()
    with runner.without("plan gathers"):
        kept, _ = sequence_parallel(recipe, backend)
    # Inductor fuses the two programs differently and so rounds norms differently: there only the loss is compared, nearly
    equal = [a.equal(b) for a, b in zip(moved, kept, strict=True)]
    if backend == "inductor":
        equal = [torch.allclose(moved[0], kept[0], rtol=REORDERED_LOSS, atol=0)]
    return equal, collectives(graph.before), collectives(graph.after), graph.gathers, str(inspection)


def test_fp8_travels_and_results_stay_bit_for_bit():
    # the inputs of gate/up in 2 layers and of the head, and the gradients of 2 down projections: 5 gathers
    cases = [(DelayedScaling(), "aot_eager"), (Float8CurrentScaling(), "aot_eager"), (Float8CurrentScaling(), "inductor")]
    for results in run_on_ranks(with_and_without, 2, cases):
        for (recipe, backend), (equal, before, after, gathers, text) in zip(cases, results, strict=True):
            case = (recipe.name, backend)
            assert all(equal), case
            # before, gate and up gather the same input, in forward only;
            # the last two gather the logits and the gradient of the embedding
            assert before.count((GATHER, torch.float32)) == 5 + 2 + 2, case
            assert after.count((GATHER, torch.float32)) == 2, case
            assert after.count((GATHER, torch.uint8)) == 5, case
            num_reductions = after.count((REDUCE, torch.int32))
            assert num_reductions == (0 if isinstance(recipe, DelayedScaling) else 5), case
            assert [g.quantized for g in gathers] == [True] * 5, case
            assert {g.module for g in gathers} == {
                "layers.0.gate",
                "layers.1.gate",
                "head",
                "layers.0.down",
                "layers.1.down",
            }, case
            assert all((g.bytes_before, g.bytes_after) == (4 * SHARD, SHARD) for g in gathers), case
            assert f"5 all-gathers send FP8: {5 * SHARD:,} bytes per rank instead of {20 * SHARD:,}, each time." in text, case


def refusals(rank):
    found = {}
    for name, recipe, options in (
        ("bias", DelayedScaling(), {"bias": True}),
        ("rule", DelayedScaling(), {"rules": {"layers.*.up": None}}),
        ("local scales", DelayedScaling(reduce_amax=False), {}),
        ("blockwise", "blockwise", {}),
        ("group", DelayedScaling(), {"amax_reduction_group": [dist.new_group([0]), dist.new_group([1])][rank]}),
    ):
        torch._dynamo.reset()
        _, inspection = sequence_parallel(recipe, steps=1, **options)
        (graph,) = inspection.graphs
        found[name] = [(g.module, g.is_backward, g.reason) for g in graph.gathers]
        assert all(g.bytes_before == g.bytes_after for g in graph.gathers if not g.quantized)
    return found


def test_what_is_not_moved_says_why():
    for found in run_on_ranks(refusals, 2):
        reasons = {name: {(b, r.split(":")[0] if r else None) for _, b, r in records} for name, records in found.items()}
        assert reasons["bias"] == {(False, None), (True, "readers")}  # the gradient of the bias sums what is gathered
        assert {(m, r) for m, _, r in found["rule"] if r} == {
            (f"layers.{i}.gate", "readers: mm reads the gathered tensor in high precision") for i in (0, 1)
        }
        assert reasons["local scales"] == {(False, "scales"), (True, "scales")}
        assert reasons["blockwise"] == {(False, "shape"), (True, "shape")}, "8 tokens per rank, and blocks of 128"
        assert reasons["group"] == {(False, "scales"), (True, "scales")}


WITH_SCALES = {
    "1D": (Float8BlockScaling(), torch.float32),
    "1D, float32 scales": (Float8BlockScaling(use_f32_scales=True), torch.float32),
    "2D": (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), torch.bfloat16),
    "inference": (Float8BlockScaling(), torch.bfloat16),
    "rows, inference": (Float8RowwiseScaling(), torch.bfloat16),
    "rows": (Float8RowwiseScaling(), torch.float32),
    "rows, hp, inference": (Float8RowwiseScaling(high_precision_grad_weight=True), torch.float32),
}
MX = {
    "1D": (MXFP8BlockScaling(), torch.float32),
    "inference": (MXFP8BlockScaling(), torch.bfloat16),
    "2D": (MXFP8BlockScaling(enable_2d_quantization=True), torch.bfloat16),
}


def gathered_products(rank, cases, recipes=WITH_SCALES):
    return [gathered_product(rank, *case, recipes) for case in cases]


def gathered_product(rank, case, dim, shape, recipes):
    """A linear on a tensor gathered along `dim`, with the gather moved and without: (equal?, collectives, records)."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    class Gathering(nn.Linear):
        def forward(self, x):
            return super().forward(all_gather_tensor_autograd(x, dim, dist.group.WORLD))

    recipe, dtype = recipes[case]
    torch.manual_seed(0)
    model = Gathering(shape[-1], 48, dtype=dtype)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    found = []
    for left_out in ((), ("plan gathers",)):
        torch._dynamo.reset()
        with runner.without(*left_out):
            compiled = fp8_compile(model, recipe, backend="aot_eager")
            x.grad = None
            model.zero_grad()
            with torch.set_grad_enabled("inference" not in case):
                out = compiled(x)
            if "inference" not in case:
                out.square().mean().backward()
        (graph,) = inspect(compiled).graphs
        found.append(([out.detach(), x.grad, model.weight.grad], collectives(graph.after), graph.gathers))
    (moved, ours, gathers), (kept, _, _) = found
    return [a is b or a.equal(b) for a, b in zip(moved, kept, strict=True)], ours, gathers


def products_on_ranks(cases, recipes=WITH_SCALES):
    """Each of (case, dim, shape) with its dtype and what two ranks, in one launch, found."""
    for results in run_on_ranks(gathered_products, 2, cases, recipes):
        for case, result in zip(cases, results, strict=True):
            yield case, recipes[case[0]][1], *result


def test_blockwise_copies_travel_with_their_scales():
    """Two of three shapes each, by turns."""
    shapes = [(0, (128, 144)), (1, (3, 128, 144)), (0, (256, 96))]
    names = [name for name in WITH_SCALES if "rows" not in name]
    cases = [(name, *shapes[(i + more) % 3]) for i, name in enumerate(names) for more in (0, 1)]
    for case, dtype, equal, sent, gathers in products_on_ranks(cases):
        assert all(equal), case
        num_copies = 2 if case[0].startswith("1D") else 1
        assert gathers[0].quantized, (case, gathers[0].reason)
        assert [s for s in sent if s[0] == GATHER].count((GATHER, torch.uint8)) == num_copies, case
        assert sent.count((GATHER, torch.float32)) == num_copies, (case, "the scales")
        assert (GATHER, dtype) not in sent or dtype == torch.float32, case
        record = gathers[0]
        assert record.quantized, (case, record.reason)
        assert record.bytes_after < 0.53 * record.bytes_before, case


def test_rowwise_copies_travel_with_their_scales():
    shapes = [(0, (33, 72)), (1, (3, 8, 50)), (0, (16, 96))]
    cases = [(name, *shape) for name in ("rows, inference", "rows, hp, inference") for shape in shapes]
    for case, dtype, equal, sent, (record,) in products_on_ranks(cases):
        assert all(equal), case
        assert record.quantized, (case, record.reason)
        gathers = [s for s in sent if s[0] == GATHER]
        assert sorted(gathers, key=str) == sorted([(GATHER, torch.uint8), (GATHER, torch.float32)], key=str), case
        expected = (1 + 4 / case[2][-1]) / dtype.itemsize
        assert record.bytes_after == pytest.approx(expected * record.bytes_before, rel=0.01), case


def test_mxfp8_copies_travel_with_their_scales():
    """Bytes of data and bytes of scales: 33/32 of a byte per element and copy."""
    cases = [(name, *shape) for name in ("1D", "inference") for shape in ((0, (32, 80)), (1, (3, 64, 48)))]
    for case, dtype, equal, sent, (record,) in products_on_ranks(cases, MX):
        num_copies = 2 if case[0] == "1D" else 1
        assert all(equal), case
        assert record.quantized, (case, record.reason)
        assert [s for s in sent if s[0] == GATHER].count((GATHER, torch.uint8)) == 2 * num_copies, case
        assert (GATHER, dtype) not in sent, case
        assert record.bytes_after < (num_copies * 33 / 32 / dtype.itemsize + 0.02) * record.bytes_before, case


def gathered_weights(rank, cases):
    return [gathered_weight(rank, case) for case in cases]


def gathered_weight(rank, case):
    """x @ w.T for a weight whose rows the ranks share, as FSDP gathers it."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    recipe, dtype = MX[case]
    generator = torch.Generator().manual_seed(rank)
    shard = nn.Parameter(torch.randn(32, 64, generator=generator).to(dtype))
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()

    def product(x, shard):
        return x @ all_gather_tensor_autograd(shard, 0, dist.group.WORLD).t()

    found = []
    for left_out in ((), ("plan gathers",)):
        torch._dynamo.reset()
        with runner.without(*left_out):
            compiled = fp8_compile(product, recipe, backend="aot_eager")
            x.grad = shard.grad = None
            out = compiled(x, shard)
            out.square().mean().backward()
        (graph,) = inspect(compiled).graphs
        found.append(([out.detach(), x.grad, shard.grad], collectives(graph.after), graph.gathers))
    (moved, ours, gathers), (kept, _, _) = found
    return [a.equal(b) for a, b in zip(moved, kept, strict=True)], ours, gathers


def test_a_gathered_weight_in_tiles_travels_once():
    """With a scale per 32x32 one copy serves both orientations, in one buffer; with 1x32 each travels, and its scales, and
    bfloat16 would be smaller."""
    cases = {"2D": (1, 32 * 64 + 2), "inference": (4, 2 * (32 * 64 + 64))}
    for results in run_on_ranks(gathered_weights, 2, list(cases)):
        for (case, (num_gathers, num_bytes)), (equal, sent, (record,)) in zip(cases.items(), results, strict=True):
            assert all(equal), case
            if num_bytes < record.bytes_before:
                assert record.quantized, (case, record.reason)
                assert record.bytes_after == num_bytes, case
                assert sent.count((GATHER, torch.uint8)) == num_gathers, case
            else:
                assert record.reason.startswith("bytes"), case


def test_blocks_and_columns_must_not_cross_shards():
    for (name, *_), _, equal, _, (record,) in products_on_ranks(
        [("1D", 0, (96, 144)), ("inference", 0, (96, 144)), ("rows", 0, (32, 96))]
    ):
        assert all(equal), name
        if name == "inference":
            assert record.quantized, "blocks of 1x128 cross no shard"
        else:
            why = {"1D": "shape: a block of scales crosses", "rows": "scales: columns are spread over several ranks"}[name]
            assert record.reason.startswith(why)
    for _, _, _, _, (record,) in products_on_ranks([("1D", 0, (48, 144))], MX):
        assert record.reason.startswith("shape: a block of scales crosses")


def no_sharded_tensor(rank):
    model = seeded()
    tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence=False)
    compiled = fp8_compile(model, "current", backend="aot_eager")
    loss_of(compiled, 0).backward()
    (graph,) = inspect(compiled).graphs
    return collectives(graph.before) == collectives(graph.after), len(graph.gathers)


def test_without_sharded_tensors_nothing_is_communicated():
    assert run_on_ranks(no_sharded_tensor, 2) == [(True, 0)] * 2


def non_finite_shard(rank):
    from torch.distributed._functional_collectives import all_gather_tensor

    def function(x, w):
        return all_gather_tensor(x, 0, dist.group.WORLD) @ w

    torch.manual_seed(rank)
    x = torch.randn(16, 32)
    x[0, 0] = [float("nan"), float("inf")][rank]
    compiled = fp8_compile(function, "current", backend="aot_eager")
    return compiled(x, torch.eye(32)), inspect(compiled).graphs[0].gathers[0].quantized


def test_non_finite_values_reach_every_rank_and_scale_alike():
    (first, moved), (second, _) = run_on_ranks(non_finite_shard, 2)
    assert moved
    assert first.isnan().equal(second.isnan())
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert first[0].isnan().any()
    assert first[16].isnan().any()
    assert first[1:16].isfinite().all()
