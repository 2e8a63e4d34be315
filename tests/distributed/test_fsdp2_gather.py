"""FSDP2 gathers weights in FP8: what travels, counted at the collective, and the same bits as by gathering first."""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fp8pass import (
    DelayedScaling,
    Float8BlockScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    fp8_compile,
    inspect,
    monitor,
    state,
    use_rules,
)
from fp8pass.errors import OptionError
from fp8pass.options import CompileOptions
from fp8pass.runtime.session import Session
from tests.distributed.fsdp2 import (
    WIDTH,
    Run,
    batch,
    blocks,
    both,
    casts_of_weights,
    counted,
    equal,
    load,
    reasons,
    sharded,
    wide,
)
from tests.distributed.support import on_ranks, run_on_ranks

pytestmark = pytest.mark.dist
# -- the same bits, half the bytes

BF16, F32 = torch.bfloat16, torch.float32


def busy(run):
    """Also an evaluation, an eager call, writes to the shards and new Parameters. What the first two sent."""
    run.steps(0, 1)
    evaluated = run.forward(run.model, 20), run.forward(run.compiled, 21)
    run.steps(2)
    for parameter in run.model.parameters():
        parameter.to_local().data.mul_(1.5)  # leaves no trace
    run.steps(3)
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    run.renew()
    run.steps(4)
    return evaluated


def travels(rank, num_ranks, cases):
    rows, small = -(-128 // num_ranks), -(-64 // num_ranks)
    weights, rest = rows * 64 + small * 128, rows + 2 * small  # elements of a block's two weights, of a bias and a norm
    for recipe, dtype in cases:
        ours, plain = both(recipe, lambda dtype=dtype: sharded(dtype))
        (eager, evaluated), (usual_eager, _) = busy(ours), busy(plain)
        assert equal(ours, plain)
        size = dtype.itemsize
        usual, expected = (weights + rest) * size, weights + rest * size
        assert [set(step) for step in plain.sent] == [{usual}] * 5
        assert [set(step) for step in ours.sent] == [{usual}] + [{expected}] * 4, "the first forward's scales are its own"
        assert (evaluated, eager) == ([expected] * 2, usual_eager), "an eager call gets the Parameters as they are"
        assert all(len(r) == 1 for r in ours.reductions[1:]), "one all-reduce per step for all scales"
        assert ours.reductions[1] == ([4096] if recipe == "delayed" else [4])
        report = inspect(ours.compiled)
        assert casts_of_weights(report.graphs) == 0 < casts_of_weights(inspect(plain.compiled).graphs)
        one, gathers = (num_ranks - 1) * rows * 64, [g for graph in report.graphs for g in graph.gathers]
        first = gathers[0]
        assert (first.tensor, first.bytes_before, first.bytes_after, first.reason) == ("0.up:weight", one * size, one, None)
        assert {g.tensor for g in gathers} == {f"{i}.{name}:weight" for i in (0, 1) for name in ("up", "down")}
        assert "4 all-gathers send FP8" in str(report)


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, [("delayed", BF16), ("current", F32)]), (3, [("current", BF16)])], ids=["even", "uneven"]
)
def test_fp8_travels_and_no_bit_changes(num_ranks, cases):
    """Three ranks have shards of different sizes."""
    run_on_ranks(travels, num_ranks, num_ranks, cases)


#: Recipe -> bytes of scales that travel with a rank's part of a weight [rows, columns], before the forward and the backward.
WITH_SCALES = {
    Float8BlockScaling(): lambda rows, columns: [rows * columns // 128**2 * 4] * 2,
    MXFP8BlockScaling(enable_2d_quantization=True): lambda rows, columns: [rows * columns // 32**2] * 2,
    Float8BlockScaling(w_block_scaling_dim=1): lambda rows, columns: [rows * columns // 128 * 4] * 2,
    MXFP8BlockScaling(): lambda rows, columns: [rows * columns // 32] * 2,
    Float8RowwiseScaling(use_power_2_scales=False): lambda rows, columns: [rows * 4, 0],
}


def scales_travel(rank, num_ranks, width, numbers):
    for recipe in (list(WITH_SCALES)[number] for number in numbers):
        ours, plain = both(recipe, lambda: sharded(make=lambda: wide(width)))
        for run in (ours, plain):
            run.steps(0, 1, width=width)
            run.results.append(run.forward_of(run.compiled, 20, width))
            run.steps(2, width=width)
        graphs = inspect(ours.compiled).graphs
        assert equal(ours, plain), recipe
        assert casts_of_weights(graphs) == 0 < casts_of_weights(inspect(plain.compiled).graphs)
        shard = 2 * width * width // num_ranks  # elements of either weight
        rest = 2 * (2 * width + 2 * width) // num_ranks  # bytes of a bias and a norm
        usual = [4 * shard + rest] * 2
        assert plain.sent == [usual] * 3
        sizes = ((2 * width, width), (width, 2 * width))
        scales = [WITH_SCALES[recipe](rows // num_ranks, columns) for rows, columns in sizes]
        moved = [2 * shard + rest + sum(of_gather) for of_gather in zip(*scales, strict=True)]
        assert ours.sent == [usual, moved, moved], recipe
        others = num_ranks - 1
        expected = [(2 * others * shard, others * (shard + of_weight[0]), None) for of_weight in scales]
        gathers = {g.tensor: (g.bytes_before, g.bytes_after, g.reason) for g in graphs[0].gathers}
        assert gathers == dict(zip(("0.up:weight", "0.down:weight"), expected, strict=True))
        amaxes = [3 * width] if isinstance(recipe, Float8RowwiseScaling) else []
        assert ours.reductions[1:] == [amaxes] * 2, "amaxes of all columns in one"


@pytest.mark.parametrize(
    ("num_ranks", "width", "numbers"), [(2, 256, (0, 2, 3)), (4, 512, (1, 4))], ids=["two ranks", "four ranks"]
)
def test_scales_travel_with_their_values(num_ranks, width, numbers):
    """Where forward and backward need copies with different scales, each has its own gather. Only the scales of columns are
    on all ranks before it: one all-reduce makes them."""
    run_on_ranks(scales_travel, num_ranks, num_ranks, width, numbers)


# -- forwards and backwards in other orders

STAYS = (
    "readers: reshard_after_forward=False leaves it gathered after the forward, where other code may read it; so does FSDP2"
    " with the root's own Parameters"
)
#: Recipe, order, options of fully_shard; which gathers of a step are smaller, and the reason of the others.
UNUSUAL = [
    ("delayed", "two forwards", {}, [True, False, False], None),
    ("delayed", "two forwards", {"reshard_after_forward": False}, [False], STAYS),
    ("delayed", "a step between", {}, [True, True], None),
    ("rowwise", "two forwards", {}, [True, True, True], None),
    ("current", "gathered by others", {}, [True, False], None),
    ("rowwise", "gathered by others", {}, [True, False], None),
    ("mxfp8", "forward again", {}, [False, False], None),
    ("mxfp8", "", {"reshard_after_forward": False}, [False], STAYS),
]


def unusual_step(run, what, step):
    with counted() as (sent, _):
        x = batch(step, 256)
        if what == "forward again":
            y = checkpoint(run.compiled, x.bfloat16().requires_grad_(), use_reentrant=False)
        else:
            y = run.compiled(x)
        if what == "gathered by others":
            run.model[0].unshard()
        if what == "a step between":
            state(run.compiled).step()
        if what == "two forwards":
            y = y + run.compiled(batch(step + 50, 256))
        y.float().square().mean().backward()
    run.results += [y.detach(), *(p.grad.to_local().clone() for p in run.model.parameters())]
    run.optimizer.step()
    run.optimizer.zero_grad()
    return sent


@on_ranks(2)
def test_other_orders_of_forwards_and_backwards(rank):
    for recipe, what, options, smaller, reason in UNUSUAL:
        runs, sent = both(recipe, lambda options=options: sharded(make=wide, **options)), []
        for run in runs:
            run.steps(*(() if what == "forward again" else (0, 1)), width=256)
            sent.append([unusual_step(run, what, step) for step in (2, 3, 4)])
        assert equal(*runs), (recipe, what)
        assert [n < 2 * 2**17 for n in sent[0][-1]] == smaller, (recipe, what)
        assert set(reasons(runs[0]).values()) == {reason}, (recipe, what)


# -- what travels as it is, and why


class Odd(nn.Module):
    """Two linears that share a weight, one whose rows are no multiple of 16, one that is sharded along its columns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.ragged, self.wide = nn.Linear(WIDTH, 40, bias=False), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x):
        return self.wide(self.ragged(self.second(self.first(x).relu()).relu()).relu())


def odd():
    torch.manual_seed(0)
    return nn.Sequential(Odd())


RULES = {"0.up": None, "0.down:grad_input": None, "1.up": "blockwise"}
COLUMNS = {"shard_placement_fn": lambda p: Shard(1) if p.shape == (WIDTH, 40) else None}


def share_and_reasons(recipe, make, how=None, **options):
    """The part of the usual bytes that a later step sends, and why what travels as it is does."""
    ours, plain = (run.steps(0, 1, 2) for run in both(recipe, lambda: sharded(make=make, **(how or {})), **options))
    assert equal(ours, plain)
    return sum(ours.sent[2]) / sum(plain.sent[2]), reasons(ours)


@on_ranks(2)
def test_what_travels_as_it_is_says_why(rank):
    share, why = share_and_reasons("delayed", blocks, rules=RULES)
    assert 0.75 < share < 1
    assert why == {
        "0.down": "readers: mm reads the gathered tensor in high precision",
        "1.up": "shape: a block of scales crosses the border between two ranks' shards of 64 rows",
        "1.down": None,
    }
    share, why = share_and_reasons(DelayedScaling(reduce_amax=False), blocks)
    assert (share, set(why.values())) == (1, {"scales: reduce_amax=False, so ranks scale the tensor differently"})
    share, why = share_and_reasons("current", odd, COLUMNS)
    assert share == 1
    assert (
        why.items()
        >= {
            "0.first": "readers: tied: it is a Parameter of another module too, Linear",
            "0.ragged": "shape: its 40 rows are not a multiple of 16",
            "0.wide": "shape: it is sharded along dimension 1, not along its rows",
        }.items()
    )
    runs = both("current", sharded)
    for run in runs:
        monitor(run.compiled, every=2)
        run.steps(0, 1, 2)
        use_rules(run.compiled, {"1.*": None})
        run.steps(3, 4)
        use_rules(run.compiled, None)
        run.steps(5, 6)
    assert equal(*runs)
    sent = [sum(s) for s in runs[0].sent]
    assert sent[0] == sent[3] == sent[5] > sent[4] > sent[2] == sent[6], "as it is in the first forward under other rules"


# -- refusals


def in_fp8(model, recipe="current"):
    return fp8_compile(model, recipe, backend="aot_eager", fsdp_gather="fp8")


@on_ranks(4)
def test_refusals_name_the_cause_and_the_fix(rank):
    inside, run = blocks(), Run("current", "fp8", sharded()).steps(0, 1)
    inside[0] = in_fp8(inside[0])
    fully_shard(inside[0])
    other = in_fp8(run.model, "delayed")
    other(batch(0))
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for model, *texts in (
        (lambda x: in_fp8(blocks())(x), "no Parameter of Sequential is under FSDP2; call fully_shard(model)"),
        (
            lambda x: in_fp8(sharded(reshard_after_forward=2))(x),
            "reshard_after_forward=2), and", "Use reshard_after_forward=True or False",
        ),
        (lambda x: in_fp8(sharded(**offload))(x), "0.norm.weight is under CPUOffloadPolicy"),
        (inside, "gathers norm.weight before the forward of the compiled Block begins", "in_place=True"),
        (other, "0.up.weight is gathered in FP8 for another compiled model"),
    ):  # fmt: skip
        with pytest.raises(OptionError) as caught:
            model(batch(1))
        assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_what_is_no_module_and_what_is_compiled_by_name_are_refused():
    with pytest.raises(OptionError, match=r"needs an nn.Module .*, not a function"):
        fp8_compile(lambda x: x, "current", fsdp_gather="fp8")
    with pytest.raises(OptionError, match=r"compiles, not torch.compile\(backend='fp8pass'\)"):
        Session(blocks(), CompileOptions.named(None, {"fsdp_gather": "fp8"}, None), steps_at_graphs=True)


# -- checkpoints


def saved(rank, folder):
    run = Run("delayed", "fp8", sharded()).steps(0, 1, 2)
    weights = run.model.state_dict()
    assert {type(w).__name__ for w in weights.values()} == {"DTensor"}
    assert not any(vars(w.to_local()) for w in weights.values()), "nothing of ours goes to a checkpoint"
    dcp.save({"model": weights, "fp8": state(run.compiled)}, checkpoint_id=folder)
    return {name: w.full_tensor() for name, w in weights.items()}


def resumed(rank, folder):
    runs = both("delayed", sharded)
    for run in runs:
        load(run, folder)
        run.steps(3, 4, 5)
    assert equal(*runs)
    assert sum(runs[0].sent[2]) < 0.52 * sum(runs[1].sent[2])


def test_a_checkpoint_is_a_plain_model_and_resumes_on_other_ranks(tmp_path):
    weights = run_on_ranks(saved, 2, str(tmp_path))[0]
    plain = {name: torch.zeros_like(w) for name, w in blocks().state_dict().items()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path))
    assert all(w.dtype is torch.float32 and w.equal(weights[name]) for name, w in plain.items())
    run_on_ranks(resumed, 4, str(tmp_path))
