"""Situations of several ranks beyond the plain kinds of parallelism, each against the same program on one rank alone.

The losses of several ranks differ from those of one: gradients are added in another order, the first step of delayed scaling
and every one of current scaling scales by a rank's own amax, and some values then fall on the other side of an FP8 rounding.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, monitor, state
from fp8pass.graph.gathers import equal_gathers
from fp8pass.rewrite.simplify import merge_equal_gathers
from fp8pass.runtime import ranks
from tests.distributed import models
from tests.distributed.models import seeded, spread, train
from tests.distributed.support import everyone, on_ranks
from tests.support.models import mlp
from tests.support.moe import Experts
from tests.tolerances import RESHARDED_LOSS

pytestmark = pytest.mark.dist
STEPS = 4
DELAYED = DelayedScaling(amax_history_len=3)
RECIPES = (DELAYED, Float8CurrentScaling())
#: Relative difference of an amax: that of one value of the largest, which each rounding of a step moves a little.
AMAX = 0.03
#: The same of gradients: one operand in E5M2, and an amax is that of a single value.
AMAX_OF_GRADIENT = 0.2
NO_HEAD = {"head": None}


def compiler(recipe, **options):
    return functools.partial(fp8_compile, recipe=recipe, backend="aot_eager", select="all", **options)


def serial(recipe, **options):
    """The model on this rank alone: its amaxes stay its own."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch._dynamo.reset()
    model = seeded()
    return model, compiler(recipe, amax_reduction_group=alone, **options)(model)


def gemms(compiled, prefix=""):
    return {(prefix + g.module, g.role) for g in inspect(compiled).gemms if g.quantized}


def histories(compiled, prefix=""):
    """Amaxes of the finished steps, by tensor."""
    return {prefix + name: state(compiled).amax_history(name)[1:].tolist() for name in state(compiled).tensors}


def assert_same_amaxes(found, expected, num_shards):
    """`num_shards`: of the batch; the mean over a shard has gradients that are larger by that factor. Where DDP's buckets
    divide the graph between linears that share an input, each has its own amaxes of it."""
    again = found.keys() - expected.keys()
    assert all(name.endswith(".up:input") for name in again)
    assert expected.keys() <= found.keys()
    for name, amaxes in found.items():
        is_gradient = name.endswith(":grad_output")
        scaled = [a / num_shards for a in amaxes] if is_gradient else amaxes
        twin = name.replace(".up:", ".gate:") if name in again else name
        assert scaled == pytest.approx(expected[twin], rel=AMAX_OF_GRADIENT if is_gradient else AMAX), name


def assert_same(found, expected, num_shards):
    """Losses, what is quantized, and amaxes."""
    assert found[0] == pytest.approx(expected[0], rel=RESHARDED_LOSS)
    assert found[1] == expected[1]
    assert_same_amaxes(found[2], expected[2], num_shards)


# -- TP with FSDP2


@pytest.mark.exhaustive
@on_ranks(4)
def test_tensor_parallel_with_fsdp(rank):
    for recipe in RECIPES:
        model, compiled = serial(recipe, rules=NO_HEAD)
        alone = train(compiled, model.parameters(), range(STEPS), 0, 1), gemms(compiled), histories(compiled)
        torch._dynamo.reset()
        model = seeded()
        _, shard, num_shards = spread(model, "fsdp+tp per block", compiler(recipe))
        losses = train(model, model.parameters(), range(STEPS), shard, num_shards)
        parts = [(layer, f"layers.{i}.") for i, layer in enumerate(model.layers)]
        quantized = set().union(*(gemms(*part) for part in parts))
        found = losses, quantized, {k: v for part in parts for k, v in histories(*part).items()}
        assert everyone(found) == [found] * 4
        assert_same(found, alone, 2)


# -- a schedule, and a monitor


def watched(model, compiled, shard, num_shards):
    """Losses, what is quantized by which recipe after each step, amaxes, and what the monitor says of steps."""
    logged, quantized, losses = [], [], []
    watching = monitor(compiled, every=2, log=lambda values, *rest: logged.append(values))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(6):
        losses += train(compiled, None, range(step, step + 1), shard, num_shards, optimizer)
        quantized.append(sorted((g.module, g.role, repr(g.recipe)) for g in inspect(compiled).gemms if g.quantized))
    amaxes = histories(compiled)
    names = sorted({t.name for t in watching.latest.tensors})
    return losses, quantized, amaxes, logged, names


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_schedule_and_a_monitor_act_in_the_same_step_on_all_ranks(rank):
    schedule = {2: {"layers.0.*": "rowwise", "*:grad_weight": None}, 4: {"layers.1.*": Float8CurrentScaling()}}
    model, compiled = serial(DELAYED, schedule=schedule)
    alone = watched(model, compiled, 0, 1)
    torch._dynamo.reset()
    model = seeded()
    compiled, shard, num_shards = spread(model, "ddp", compiler(DELAYED, schedule=schedule))
    found = watched(model, compiled, shard, num_shards)
    assert everyone(str(found)) == [str(found)] * 2
    assert_same(found, alone, 2)
    assert len({str(each) for each in found[1]}) == 3
    assert len(found[3]) == len(alone[3]) > 0
    assert set(alone[4]) <= set(found[4])


@on_ranks(2)
def test_a_boundary_without_training_is_no_step(rank):
    """Ranks agree at boundaries behind which none of them has trained: each step runs in FP8 until two have passed."""
    model = mlp()
    compiled = fp8_compile(model, DELAYED, backend="aot_eager", step="manual", schedule={2: {"*": None}})
    view, x = state(compiled), torch.randn(16, 64)
    for is_in_fp8 in (True, True, False):
        out = compiled(x)
        assert torch.equal(out, model(x)) != is_in_fp8
        out.sum().backward()
        for _ in range(3):
            view.step()


# -- groups made again


def make_again(rank, store):
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.exhaustive
@on_ranks(2, fresh=True)
def test_training_goes_on_in_groups_made_again(rank):
    model, compiled = serial(DELAYED)
    alone = train(compiled, None, range(STEPS), 0, 1, sgd(model)), gemms(compiled), histories(compiled)
    torch._dynamo.reset()
    store, losses = dist.distributed_c10d._get_default_store(), []
    model = seeded()
    compiled, optimizer = compiler(DELAYED)(model), sgd(model)
    for step in range(STEPS):  # the compiled model goes on, without DDP, which keeps the group that it was made in
        make_again(rank, dist.PrefixStore(f"{step}", store))
        losses += train(compiled, None, range(step, step + 1), 0, 1, optimizer)
    assert (losses, gemms(compiled), histories(compiled)) == alone, "every rank has the whole batch"
    torch._dynamo.reset()
    new = seeded()
    compiled, *shards = spread(new, "ddp", compiler(DELAYED))
    found = train(compiled, None, range(STEPS), *shards, sgd(new)), gemms(compiled), histories(compiled)
    assert everyone(found) == [found] * 2
    assert_same(found, alone, 2)


@on_ranks(2, fresh=True)
def test_a_group_made_again_is_never_taken_for_an_earlier_one(rank):
    """Python gives the `id` of a destroyed group to a later one, on one rank and not on another."""
    store, numbers = dist.distributed_c10d._get_default_store(), []
    for again in range(30):
        make_again(rank, dist.PrefixStore(f"{again}", store))
        numbers.append(ranks._default_group())
        assert ranks._default_group() == numbers[-1]
    assert len(set(numbers)) == 30


# -- sequences that the ranks do not divide


@pytest.mark.exhaustive
@on_ranks(2, group_timeout=20, fresh=True)
def test_uneven_sequences_of_sequence_parallelism(rank):
    """15 tokens on two ranks; between modules activations stay DTensors, as torch needs them there."""
    models.TOKENS = 15
    for recipe in (*RECIPES, "rowwise"):
        model, compiled = serial(recipe)
        alone = train(compiled, model.parameters(), range(STEPS), 0, 1), gemms(compiled), histories(compiled)
        torch._dynamo.reset()
        model, stays = seeded(), {"use_local_output": False}
        into, out = ColwiseParallel(input_layouts=Shard(1), **stays), RowwiseParallel(output_layouts=Shard(1), **stays)
        plan = {
            "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **stays),
            "layers.*.norm": SequenceParallel(**stays),
            "layers.*.gate": into,
            "layers.*.up": into,
            "layers.*.down": out,
            "norm": SequenceParallel(**stays),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        compiled = compiler(recipe)(model)
        found = train(compiled, model.parameters(), range(STEPS), 0, 1), gemms(compiled), histories(compiled)
        moves = [(g.tensor, g.quantized) for graph in inspect(compiled).graphs for g in graph.gathers]
        assert everyone((found, moves)) == [(found, moves)] * 2, "ranks that pad their shard gather as often as the others"
        assert_same(found, alone, 1)
        assert [name for name, _ in moves].count("layers.0.gate:input") == 1


def test_ranks_merge_equal_gathers_whether_or_not_they_pad():
    """Each linear's gather of one shard; a rank with a smaller shard pads it before each of them."""
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    for pads in (False, True):
        graph = fx.Graph()
        shard = graph.placeholder("shard")
        for _ in range(3):
            rows = graph.call_function(aten.view.default, (shard, [7, 32])) if pads else shard
            sent = graph.call_function(aten.constant_pad_nd.default, (rows, [0, 0, 0, 1], 0.0)) if pads else shard
            gathered = graph.call_function(c10d.all_gather_into_tensor.default, (sent, 2, "0"))
            graph.call_function(c10d.wait_tensor.default, (gathered,))
        merge_equal_gathers(equal_gathers(graph))
        assert [n.target for n in graph.nodes].count(c10d.all_gather_into_tensor.default) == 1


# -- experts, with an all-to-all around them

WIDTH, HIDDEN, NUM_EXPERTS, TOKENS = 64, 48, 4, 64
RANKS = 2
LOCAL = NUM_EXPERTS // RANKS


class ExpertParallel(nn.Module):
    """A projection on every rank, then experts; a rank has those of `owned`, and tokens travel to their expert and back."""

    def __init__(self, kind: str, owned: range, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.group = kind, group
        self.proj = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        weights = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16)[owned.start : owned.stop] / WIDTH**0.5
        if kind == "grouped":
            self.experts = Experts(len(owned), WIDTH, HIDDEN)
            self.experts.weight.data.copy_(weights)
        else:
            self.experts = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.bfloat16) for _ in owned)
            for expert, weight in zip(self.experts, weights, strict=True):
                expert.weight.data.copy_(weight)

    def forward(self, x, order, back, sizes, sent, received):
        """`x` is sorted by expert, `order` sorts what arrives by expert and `back` undoes it; `sizes`: of experts."""
        h = self.proj(x)
        if self.group is not None:
            h = self.travel(h, received, sent)
        h = h[order]
        if self.kind == "grouped":
            h = self.experts(h, torch.tensor(sizes).cumsum(0).to(torch.int32))
        else:
            h = torch.cat([expert(part) for expert, part in zip(self.experts, h.split(sizes), strict=True)])
        h = h[back]
        return h if self.group is None else self.travel(h, sent, received)

    def travel(self, rows, into, out_of):
        if self.kind == "broken graph":
            return eagerly(rows, into, out_of, self.group)
        return wait_tensor(all_to_all_single_autograd(rows, into, out_of, self.group))


@torch.compiler.disable
def eagerly(rows, into, out_of, group):
    return differentiable.all_to_all_single(rows.new_empty(sum(into), rows.shape[1]), rows, into, out_of, group)


#: Rows of each expert on each rank: expert 1 has some on one rank alone, expert 2 none at all in the second.
ROUTING = (((8, 0, 40, 16), (24, 16, 8, 16)), ((32, 16, 0, 16), (40, 8, 0, 16)))


def rows_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()


def by_expert(blocks, num_sources, num_experts):
    """`blocks[source][expert]` rows lie source after source: their order expert after expert, and back."""
    ends = torch.tensor([n for source in blocks for n in source]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    at = [(s * num_experts + e) for e in range(num_experts) for s in range(num_sources)]
    order = torch.cat([torch.arange(starts[i], ends[i]) for i in at])
    return order, order.argsort()


def experts_of(rank, kind, recipe, size):
    """The gradients of weights, outputs, amaxes and what is quantized, of this rank of `size`; one rank has all rows."""
    torch._dynamo.reset()
    ranks_here = range(RANKS) if size == 1 else [rank]
    owned = range(NUM_EXPERTS) if size == 1 else range(LOCAL * rank, LOCAL * (rank + 1))
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    model = ExpertParallel(kind, owned, None if size == 1 else dist.group.WORLD)
    compiled = compiler(recipe, amax_reduction_group=alone, rules={"proj": "rowwise"}, dynamic=None)(model)
    outputs, gradients = [], []
    for step in range(STEPS):
        routing = ROUTING[step % 2]
        x = torch.cat([rows_of(r, step) for r in ranks_here]).requires_grad_()
        blocks = [routing[r][owned.start : owned.stop] for r in range(RANKS)]
        order, back = by_expert(blocks, RANKS, len(owned))
        sizes = [sum(source[e] for source in blocks) for e in range(len(owned))]
        sent = [sum(routing[rank][LOCAL * r : LOCAL * (r + 1)]) for r in range(RANKS)]
        received = [sum(source) for source in blocks]
        y = compiled(x, order, back, sizes, sent, received)
        y.square().sum().backward()
        outputs.append(y.detach())
        gradients.append([p.grad.clone() for p in model.experts.parameters()] + [x.grad])
        with torch.no_grad():
            for parameter in model.experts.parameters():
                parameter -= 0.001 * parameter.grad
        model.zero_grad()
    return outputs, gradients, histories(compiled), gemms(compiled)


@pytest.mark.exhaustive
@on_ranks(RANKS)
def test_an_all_to_all_of_experts(rank):
    """Experts that are linears equal those of one rank bit for bit. Grouped ones share their input's scale over a rank."""
    rows, experts = slice(TOKENS * rank, TOKENS * (rank + 1)), range(LOCAL * rank, LOCAL * (rank + 1))
    names = {f"experts.{e}:": f"experts.{e - experts.start}:" for e in experts}
    for kind, recipe in itertools.product(("grouped", "linears", "broken graph"), (DELAYED, "rowwise")):
        (outputs, gradients, amaxes, quantized), found = (experts_of(rank, kind, recipe, size) for size in (1, RANKS))
        is_close = is_near if (kind, recipe) == ("grouped", DELAYED) else torch.equal
        assert all(is_close(whole[rows], part) for whole, part in zip(outputs, found[0], strict=True))
        for (*whole, x), (*part, own_x) in zip(gradients, found[1], strict=True):
            whole = [whole[0][experts.start : experts.stop]] if kind == "grouped" else whole[experts.start : experts.stop]
            assert all(is_close(w, p) for w, p in zip([*whole, x[rows]], [*part, own_x], strict=True))
        assert {role for _, role in found[3]} == {"output", "grad_input", "grad_weight"}
        assert found[3] <= quantized
        if kind != "grouped" and recipe is DELAYED:
            own = {new + n.removeprefix(old): v for n, v in amaxes.items() for old, new in names.items() if n.startswith(old)}
            assert found[2] == own
            assert len(own) == 3 * LOCAL


def is_near(a, b):
    """Whether the relative error in the Frobenius norm is that of two roundings to E5M2 with different scales."""
    return (a.double() - b.double()).norm() <= 0.1 * a.double().norm()
