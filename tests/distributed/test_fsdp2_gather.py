"""FSDP2 gathers weights in FP8: what travels, counted at the collective, the same bits as by gathering first, and what others
read of a Parameter meanwhile: its own value."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fp8pass import inspect, state
from fp8pass.errors import OptionError
from tests.distributed.support import on_ranks, run_on_ranks
from tests.support.models import Net
from tests.support.training import fp8

pytestmark = pytest.mark.dist
BF16, F32 = torch.bfloat16, torch.float32
WIDTH, WIDE = 64, 256


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def sharded(dtype=torch.bfloat16, make=blocks, **options):
    model = make()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


@contextlib.contextmanager
def counted():
    """Bytes that this rank gives each all-gather of FSDP2's, and its calls of dist.all_reduce."""
    sent, reductions, gatherer = [], [], collectives.DefaultAllGather
    gather, reduce = gatherer.__call__, dist.all_reduce

    def count(self, output_tensor, input_tensor, *args, **kwargs):
        sent.append(input_tensor.nbytes)
        return gather(self, output_tensor, input_tensor, *args, **kwargs)

    def count_reduction(tensor, *args, **kwargs):
        reductions.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(gatherer, "__call__", count), mock.patch.object(dist, "all_reduce", count_reduction):
        yield sent, reductions


def wide():
    """Each of two ranks has whole 128x128 blocks of its weights."""
    torch.manual_seed(0)
    return nn.Sequential(Block(WIDE))


def batch(step, width=WIDTH):
    """The rank's own."""
    return torch.randn(32, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


class Run:
    """A model that trains, with all that it computes and sends."""

    def __init__(self, recipe, gather, model, **options):
        torch._dynamo.reset()
        self.model, self.width = model, next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
        self.compiled = fp8(model, recipe, fsdp_gather=gather, **options)
        self.results, self.sent, self.reductions = [], [], []
        self.renew()

    def renew(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def learn(self, y):
        """A step by an output of the model."""
        loss = y.float().square().mean()
        loss.backward()
        self.results += [loss.detach(), *(p.grad.to_local().clone() for p in self.model.parameters())]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *steps):
        for step in steps:
            with counted() as (sent, reductions):
                self.learn(self.compiled(batch(step, self.width)))
            self.sent.append(sent)
            self.reductions.append(reductions)
        return self

    def forward(self, model, step):
        with counted() as (sent, _), torch.no_grad():
            self.results.append(model(batch(step, self.width)).clone())
        return sent


def both(recipe, make, **options):
    """A run with gathers in FP8, and one without, each of a model of its own."""
    return [Run(recipe, gather, make(), **options) for gather in ("fp8", None)]


def reasons(run):
    """Module -> why its weight travels as it is."""
    return {g.module: g.reason for graph in inspect(run.compiled).graphs for g in graph.gathers}


def differing(ours, theirs):
    """The numbers of the results that are not bit for bit the same."""
    return [i for i, (a, b) in enumerate(zip(ours.results, theirs.results, strict=True)) if not a.equal(b)]


def equal(ours, theirs):
    return differing(ours, theirs) == []


# -- the same bits, half the bytes


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
        usual, expected = (weights + rest) * dtype.itemsize, weights + rest * dtype.itemsize
        assert [set(step) for step in plain.sent] == [{usual}] * 5
        assert [set(step) for step in ours.sent] == [{usual}] + [{expected}] * 4, "the first forward's scales are its own"
        assert (evaluated, eager) == ([expected] * 2, usual_eager), "an eager call gets the Parameters as they are"
        assert all(len(r) == 1 for r in ours.reductions[1:]), "one all-reduce per step for all scales"
        assert ours.reductions[1] == ([4096] if recipe == "delayed" else [4])
        assert reasons(ours) == {f"{i}.{name}": None for i in (0, 1) for name in ("up", "down")}
        assert "4 all-gathers send FP8" in str(inspect(ours.compiled))


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, [("delayed", BF16), ("current", F32)]), (3, [("current", BF16)])], ids=["even", "uneven"]
)
def test_fp8_travels_and_no_bit_changes(num_ranks, cases):
    """Three ranks have shards of different sizes."""
    run_on_ranks(travels, num_ranks, num_ranks, cases)


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
]


def unusual_step(run, what, step):
    with counted() as (sent, _):
        if what == "forward again":
            y = checkpoint(run.compiled, batch(step, WIDE).bfloat16().requires_grad_(), use_reentrant=False)
        else:
            y = run.compiled(batch(step, WIDE))
        if what == "gathered by others":
            run.model[0].unshard()
        if what == "a step between":
            state(run.compiled).step()
        if what == "two forwards":
            y = y + run.compiled(batch(step + 50, WIDE))
        run.learn(y)
    return sent


@on_ranks(2)
def test_other_orders_of_forwards_and_backwards(rank):
    for recipe, what, options, smaller, reason in UNUSUAL:
        runs, sent = both(recipe, lambda options=options: sharded(make=wide, **options)), []
        for run in runs:
            run.steps(*(() if what == "forward again" else (0, 1)))
            sent.append([unusual_step(run, what, step) for step in (2, 3, 4)])
        assert equal(*runs), (recipe, what)
        assert [n < 2 * 2**17 for n in sent[0][-1]] == smaller, (recipe, what)
        assert set(reasons(runs[0]).values()) == {reason}, (recipe, what)


# -- what travels as it is, and why


def odd():
    """Two linears that share a weight, one whose rows are no multiple of 16, one that is sharded along its columns."""
    torch.manual_seed(0)
    first, second, ragged, wide = (nn.Linear(i, o, bias=False) for i, o in ((64, 64), (64, 64), (64, 40), (40, 64)))
    second.weight = first.weight
    layers = {"first": first, "second": second, "ragged": ragged, "wide": wide}
    return nn.Sequential(Net(lambda m, x: m.wide(m.ragged(m.second(m.first(x)))), **layers))


def share_and_reasons(recipe, rules=None, **how):
    """The part of the usual bytes that a later step sends, and why what travels as it is does."""
    ours, plain = (run.steps(0, 1, 2) for run in both(recipe, lambda: sharded(**how), rules=rules))
    assert equal(ours, plain)
    return sum(ours.sent[2]) / sum(plain.sent[2]), reasons(ours)


@on_ranks(2)
def test_what_travels_as_it_is_says_why(rank):
    share, why = share_and_reasons("delayed", {"0.up": None, "0.down:grad_input": None, "1.up": "blockwise"})
    assert 0.75 < share < 1
    assert why == {
        "0.down": "readers: mm reads the gathered tensor in high precision",
        "1.up": "shape: a block of scales crosses the border between two ranks' shards of 64 rows",
        "1.down": None,
    }
    columns = lambda p: Shard(1) if p.shape == (64, 40) else None  # noqa: E731
    share, why = share_and_reasons("current", make=odd, shard_placement_fn=columns)
    assert (share, why["0.first"]) == (1, "readers: tied: it is a Parameter of another module too, Linear")
    assert why["0.ragged"] == "shape: its 40 rows are not a multiple of 16"
    assert why["0.wide"] == "shape: it is sharded along dimension 1, not along its rows"


# -- refusals


def in_fp8(model, recipe="current"):
    return fp8(model, recipe, fsdp_gather="fp8")


@on_ranks(4)
def test_refusals_name_the_cause_and_the_fix(rank):
    inside, run = blocks(), Run("current", "fp8", sharded()).steps(0, 1)
    inside[0] = in_fp8(inside[0])
    fully_shard(inside[0])
    other = in_fp8(run.model, "delayed")
    other(batch(0))
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for call, *texts in (
        (lambda x: in_fp8(lambda x: x), "needs an nn.Module", "not a function"),
        (
            lambda x: torch.compile(blocks(), backend="fp8pass", options={"fsdp_gather": "fp8"})(x),
            "that fp8_compile compiles, not torch.compile(backend='fp8pass')",
        ),
        (lambda x: in_fp8(blocks())(x), "no Parameter of Sequential is under FSDP2; call fully_shard(model)"),
        (
            lambda x: in_fp8(sharded(reshard_after_forward=2))(x),
            "reshard_after_forward=2), and", "Use reshard_after_forward=True or False",
        ),
        (lambda x: in_fp8(sharded(**offload))(x), "0.norm.weight is under CPUOffloadPolicy"),
        (inside, "gathers norm.weight before the forward of the compiled Block begins", "in_place=True"),
        (other, "0.up.weight is gathered in FP8 for another compiled model"),
    ):  # fmt: skip
        with pytest.raises((OptionError, BackendCompilerFailed)) as caught:
            call(batch(1))
        assert all(text in str(caught.value) for text in texts), str(caught.value)


# -- eager code within a forward


@torch.compiler.disable
def norm_of(weight):
    return weight.detach().double().norm().float()


class Reading(Block):
    """Reads a weight of its FP8 GEMM in eager code at a graph break: from the first forward on, or once it is told to."""

    reads = True

    def forward(self, x):
        y = self.down(self.up(self.norm(x)).relu())
        if self.reads:
            torch._dynamo.graph_break()
            y = y * norm_of(self.up.weight)
        return x + y


def reading():
    return nn.Sequential(Reading(), Block())


def hooked():
    model = nn.Sequential(Block(), Block())
    model[0].register_forward_hook(lambda module, args, out: out * norm_of(module.up.weight))
    return model


def training(make, *steps):
    """A run with gathers in FP8 and one without, each after these steps."""
    for gather in ("fp8", None):
        torch.manual_seed(0)
        yield Run("current", gather, sharded(F32, make)).steps(*steps)


#: A model, and why a weight of its first block travels as it is.
READ = (
    (reading, "readers: a graph is not all of the forward of Reading, and eager code there may read it while it is gathered"),
    (hooked, "readers: a hook of Block runs while it is gathered, and may read it"),
)


@on_ranks(2)
def test_what_eager_code_may_read_travels_as_it_is(rank):
    for make, why in READ:
        ours, theirs = training(make, 0, 1, 2, 3)
        assert equal(ours, theirs)
        assert (reasons(ours)["0.up"], reasons(ours)["1.up"]) == (why, None)
        assert sum(ours.sent[-1]) < sum(theirs.sent[-1]), "the other block's travel in FP8"


@on_ranks(2)
def test_code_that_comes_later_reads_its_own_values_once_ranks_have_agreed(rank):
    """An evaluation that takes another path, after FP8 has travelled: what it computes before and after ranks agree again."""
    Reading.reads, runs = False, []
    for run in training(reading, 0, 1, 2):
        for number, steps in ((20, (3, 4, 5, 6, 7)), (21, ())):  # ranks compare before forwards 5 and 9
            Reading.reads = True
            run.forward(run.compiled, number)
            Reading.reads = False
            run.steps(*steps)
        runs.append(run)
    assert set(differing(*runs)) <= {len(runs[0].results) - 1 - 5 * 11 - 1}, "the one evaluation alone"
    sent = [*map(sum, runs[0].sent)]
    assert sent[1] < sent[4] == sent[7] < sent[0]
