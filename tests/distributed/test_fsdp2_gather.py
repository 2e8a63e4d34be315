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
from tests.distributed.fsdp2 import WIDTH, Run, batch, blocks, casts_of_weights, counted, equal, sharded, wide
from tests.distributed.support import run_on_ranks

pytestmark = pytest.mark.dist
# -- the same bits, half the bytes


def busy(recipe, dtype, gather):
    run = Run(recipe, gather, sharded(dtype))
    run.steps(0, 1)
    evaluated = run.forward(run.model, 20), run.forward(run.compiled, 21)
    run.steps(2)
    for parameter in run.model.parameters():
        parameter.to_local().data.mul_(1.5)  # leaves no trace
    run.steps(3)
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    run.renew()
    run.steps(4)
    return run, evaluated


def with_and_without(rank, cases):
    found = []
    for recipe, dtype in cases:
        (ours, evaluated), (plain, before) = (busy(recipe, dtype, gather) for gather in ("fp8", None))
        report = inspect(ours.compiled)
        casts = [casts_of_weights(inspect(run.compiled).graphs) for run in (ours, plain)]
        gathers = [(g.tensor, g.bytes_before, g.bytes_after, g.reason) for graph in report.graphs for g in graph.gathers]
        found.append(
            (equal(ours, plain), ours.sent, plain.sent, evaluated, before, ours.reductions, casts, gathers, str(report))
        )
    return found


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, [("delayed", BF16), ("current", F32)]), (3, [("current", BF16)])], ids=["even", "uneven"]
)
def test_fp8_travels_and_no_bit_changes(num_ranks, cases):
    """Three ranks have shards of different sizes. Also after an evaluation, an eager call, writes to the shards and new
    Parameters."""
    rows, small = -(-128 // num_ranks), -(-64 // num_ranks)
    weights, rest = rows * 64 + small * 128, rows + 2 * small  # elements of a block's two weights, of a bias and a norm
    for results in run_on_ranks(with_and_without, num_ranks, cases):
        for (recipe, dtype), result in zip(cases, results, strict=True):
            same, sent, before, (eager, evaluated), plain, reductions, casts, gathers, text = result
            assert same
            size = dtype.itemsize
            usual, expected = (weights + rest) * size, weights + rest * size
            assert [set(step) for step in before] == [{usual}] * 5
            assert [set(step) for step in sent] == [{usual}] + [{expected}] * 4, "the first forward's scales are its own"
            assert (evaluated, eager) == ([expected] * 2, plain[0]), "an eager call gets the Parameters as they are"
            assert all(len(r) == 1 for r in reductions[1:]), "one all-reduce per step for all scales"
            assert reductions[1] == ([4096] if recipe == "delayed" else [4])
            assert casts[0] == 0 < casts[1]
            one = (num_ranks - 1) * rows * 64
            assert gathers[0] == ("0.up:weight", one * size, one, None)
            assert {g[0] for g in gathers} == {f"{i}.{name}:weight" for i in (0, 1) for name in ("up", "down")}
            assert "4 all-gathers send FP8" in text


#: Recipe -> bytes of scales that travel with a rank's part of a weight [rows, columns], before the forward and the backward.
WITH_SCALES = {
    Float8BlockScaling(): lambda rows, columns: [rows * columns // 128**2 * 4] * 2,
    MXFP8BlockScaling(enable_2d_quantization=True): lambda rows, columns: [rows * columns // 32**2] * 2,
    Float8BlockScaling(w_block_scaling_dim=1): lambda rows, columns: [rows * columns // 128 * 4] * 2,
    MXFP8BlockScaling(): lambda rows, columns: [rows * columns // 32] * 2,
    Float8RowwiseScaling(use_power_2_scales=False): lambda rows, columns: [rows * 4, 0],
}


def with_scales(rank, width, recipes):
    found = []
    for recipe in recipes:
        ours, plain = (Run(recipe, gather, sharded(make=lambda: wide(width))) for gather in ("fp8", None))
        for run in (ours, plain):
            run.steps(0, 1, width=width)
            run.results.append(run.forward_of(run.compiled, 20, width))
            run.steps(2, width=width)
        gathers = {g.tensor: (g.bytes_before, g.bytes_after, g.reason) for g in inspect(ours.compiled).graphs[0].gathers}
        casts = [casts_of_weights(inspect(run.compiled).graphs) for run in (ours, plain)]
        found.append((equal(ours, plain), ours.sent, plain.sent, gathers, casts, ours.reductions))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "width", "numbers"), [(2, 256, (0, 2, 3)), (4, 512, (1, 4))], ids=["two ranks", "four ranks"]
)
def test_scales_travel_with_their_values(num_ranks, width, numbers):
    """Where forward and backward need copies with different scales, each has its own gather. Only the scales of columns are
    on all ranks before it: one all-reduce makes them."""
    recipes = [list(WITH_SCALES)[number] for number in numbers]
    for results in run_on_ranks(with_scales, num_ranks, width, recipes):
        for recipe, result in zip(recipes, results, strict=True):
            scales_of = WITH_SCALES[recipe]
            same, sent, before, gathers, casts, reductions = result
            assert same, recipe
            assert casts[0] == 0 < casts[1]
            shard = 2 * width * width // num_ranks  # elements of either weight
            rest = 2 * (2 * width + 2 * width) // num_ranks  # bytes of a bias and a norm
            assert before == [[4 * shard + rest] * 2] * 3
            scales = [scales_of(rows // num_ranks, columns) for rows, columns in ((2 * width, width), (width, 2 * width))]
            travels = [2 * shard + rest + sum(of_gather) for of_gather in zip(*scales, strict=True)]
            assert sent == [[4 * shard + rest] * 2] + [travels] * 2, recipe
            names = ("0.up:weight", "0.down:weight")
            one = num_ranks - 1
            expected = [(2 * one * shard, one * (shard + of_weight[0]), None) for of_weight in scales]
            assert gathers == dict(zip(names, expected, strict=True))
            is_rowwise = isinstance(recipe, Float8RowwiseScaling)
            assert reductions[1:] == [[3 * width] if is_rowwise else []] * 2, "amaxes of all columns in one"


# -- forwards and backwards in other orders


def unusual(rank, cases):
    """What travels in a step, with the same bits as by gathering first."""
    found = []
    for recipe, what, options in cases:
        runs = [Run(recipe, gather, sharded(make=wide, **options)) for gather in ("fp8", None)]
        for run in runs:
            run.steps(*(() if what == "forward again" else (0, 1)), width=256)
            for step in (2, 3, 4):
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
                run.sent.append(sent)
                run.results += [y.detach(), *(p.grad.to_local().clone() for p in run.model.parameters())]
                run.optimizer.step()
                run.optimizer.zero_grad()
        reasons = {g.reason for graph in inspect(runs[0].compiled).graphs for g in graph.gathers}
        found.append((equal(*runs), [n < 2 * 2**17 for n in runs[0].sent[-1]], reasons))
    return found


STAYS = (
    "readers: reshard_after_forward=False leaves it gathered after the forward, where other code may read it; so does FSDP2"
    " with the root's own Parameters"
)
#: Recipe, order, options of fully_shard; which gathers of a step are smaller, and the reason of the others.
UNUSUAL = [
    ("delayed", "two forwards", {}, [True, False, False], {None}),
    ("delayed", "two forwards", {"reshard_after_forward": False}, [False], {STAYS}),
    ("delayed", "a step between", {}, [True, True], {None}),
    ("rowwise", "two forwards", {}, [True, True, True], {None}),
    ("current", "gathered by others", {}, [True, False], {None}),
    ("rowwise", "gathered by others", {}, [True, False], {None}),
    ("mxfp8", "forward again", {}, [False, False], {None}),
    ("mxfp8", "", {"reshard_after_forward": False}, [False], {STAYS}),
]


def test_other_orders_of_forwards_and_backwards():
    for results in run_on_ranks(unusual, 2, [case[:3] for case in UNUSUAL]):
        for (*case, smaller, reasons), (same, found, why) in zip(UNUSUAL, results, strict=True):
            assert same, case
            assert (found, why) == (smaller, reasons), case


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


def declined(rank):
    found = []
    for recipe, make, how, options in (
        ("delayed", blocks, {}, {"rules": RULES}),
        (DelayedScaling(reduce_amax=False), blocks, {}, {}),
        ("current", odd, COLUMNS, {}),
    ):
        ours, plain = (Run(recipe, gather, sharded(make=make, **how), **options) for gather in ("fp8", None))
        for run in (ours, plain):
            run.steps(0, 1, 2)
        reasons = {g.module: g.reason for graph in inspect(ours.compiled).graphs for g in graph.gathers}
        found.append((equal(ours, plain), sum(ours.sent[2]) / sum(plain.sent[2]), reasons))
    rules = Run("current", "fp8", sharded()), Run("current", None, sharded())
    for run in rules:
        monitor(run.compiled, every=2)
        run.steps(0, 1, 2)
        use_rules(run.compiled, {"1.*": None})
        run.steps(3, 4)
        use_rules(run.compiled, None)
        run.steps(5, 6)
    return found, equal(*rules), [sum(s) for s in rules[0].sent]


def test_what_travels_as_it_is_says_why():
    for (ruled, unreduced, ragged), same, sent in run_on_ranks(declined, 2):
        assert [found[0] for found in (ruled, unreduced, ragged)] == [True] * 3
        assert ruled[2]["0.down"] == "readers: mm reads the gathered tensor in high precision"
        assert ruled[2]["1.up"] == "shape: a block of scales crosses the border between two ranks' shards of 64 rows"
        assert ruled[2]["1.down"] is None
        assert set(ruled[2]) == {"0.down", "1.up", "1.down"}
        assert 0.75 < ruled[1] < 1
        assert set(unreduced[2].values()) == {"scales: reduce_amax=False, so ranks scale the tensor differently"}
        assert unreduced[1] == ragged[1] == 1
        assert ragged[2]["0.first"] == "readers: tied: it is a Parameter of another module too, Linear"
        assert ragged[2]["0.ragged"] == "shape: its 40 rows are not a multiple of 16"
        assert ragged[2]["0.wide"] == "shape: it is sharded along dimension 1, not along its rows"
        assert same
        assert sent[0] == sent[3] == sent[5] > sent[4] > sent[2] == sent[6], "as it is in the first forward under other rules"


# -- refusals


def refused(rank):
    def message(model, **options):
        with pytest.raises(OptionError) as caught:
            fp8_compile(model, "current", backend="aot_eager", fsdp_gather="fp8", **options)(batch(0))
        return str(caught.value)

    found = [
        message(blocks()),
        message(sharded(reshard_after_forward=2)),
        message(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    ]
    model = blocks()
    model[0] = fp8_compile(model[0], "current", backend="aot_eager", fsdp_gather="fp8")
    fully_shard(model[0])
    with pytest.raises(OptionError) as caught:
        model(batch(0))
    found.append(str(caught.value))
    run = Run("current", "fp8", sharded())
    run.steps(0, 1)
    other = fp8_compile(run.model, "delayed", backend="aot_eager", fsdp_gather="fp8")
    other(batch(0))
    with pytest.raises(OptionError) as caught:
        other(batch(1))
    return [*found, str(caught.value)]


def test_refusals_name_the_cause_and_the_fix():
    for none, integer, offload, outside, other in run_on_ranks(refused, 4):
        assert "no Parameter of Sequential is under FSDP2; call fully_shard(model)" in none
        assert "reshard_after_forward=2), and" in integer
        assert "Use reshard_after_forward=True or False" in integer
        assert "0.norm.weight is under CPUOffloadPolicy" in offload
        assert "gathers norm.weight before the forward of the compiled Block begins" in outside
        assert "in_place=True" in outside
        assert "0.up.weight is gathered in FP8 for another compiled model" in other
    with pytest.raises(OptionError, match=r"needs an nn.Module .*, not a function"):
        fp8_compile(lambda x: x, "current", fsdp_gather="fp8")
    with pytest.raises(OptionError, match=r"compiles, not torch.compile\(backend='fp8pass'\)"):
        Session(blocks(), CompileOptions.named(None, {"fsdp_gather": "fp8"}, None), steps_at_graphs=True)


# -- checkpoints


def saved(rank, folder):
    run = Run("delayed", "fp8", sharded())
    run.steps(0, 1, 2)
    weights = run.model.state_dict()
    assert {type(w).__name__ for w in weights.values()} == {"DTensor"}
    assert not any(vars(w.to_local()) for w in weights.values()), "nothing of ours goes to a checkpoint"
    dcp.save({"model": weights, "fp8": state(run.compiled)}, checkpoint_id=folder)
    return {name: w.full_tensor() for name, w in weights.items()}


def resumed(rank, folder):
    runs = [Run("delayed", gather, sharded()) for gather in ("fp8", None)]
    for run in runs:
        weights = run.model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=folder)
        run.model.load_state_dict(weights)
        state(run.compiled).load_checkpoint(folder)
        run.steps(3, 4, 5)
    return equal(*runs), sum(runs[0].sent[2]) / sum(runs[1].sent[2])


def test_a_checkpoint_is_a_plain_model_and_resumes_on_other_ranks(tmp_path):
    weights = run_on_ranks(saved, 2, str(tmp_path))[0]
    plain = {name: torch.zeros_like(w) for name, w in blocks().state_dict().items()}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path))
    assert all(w.dtype is torch.float32 and w.equal(weights[name]) for name, w in plain.items())
    assert all(same and ratio < 0.52 for same, ratio in run_on_ranks(resumed, 4, str(tmp_path)))
