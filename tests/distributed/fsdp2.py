"""FSDP2 with gathers in FP8 and without: models, counted collectives, and runs that keep all that they compute."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from fp8pass import fp8_compile, inspect, state

WIDTH = 64


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
    sent, reductions = [], []
    gather, reduce = collectives.DefaultAllGather.__call__, dist.all_reduce

    def count(self, output_tensor, input_tensor, *args, **kwargs):
        sent.append(input_tensor.nbytes)
        return gather(self, output_tensor, input_tensor, *args, **kwargs)

    def count_reduction(tensor, *args, **kwargs):
        reductions.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    collectives.DefaultAllGather.__call__, dist.all_reduce = count, count_reduction
    try:
        yield sent, reductions
    finally:
        collectives.DefaultAllGather.__call__, dist.all_reduce = gather, reduce


def wide(width=256):
    """Each of two ranks has whole 128x128 blocks of its weights; each of four, if it is twice as wide."""
    torch.manual_seed(0)
    return nn.Sequential(Block(width))


def batch(step, width=WIDTH, shard=None):
    shard = dist.get_rank() if shard is None else shard
    return torch.randn(32, width, generator=torch.Generator().manual_seed(100 * step + shard))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Run:
    """A model that trains, with all that it computes and sends."""

    def __init__(self, recipe, gather, model, shard=None, optimizer=adamw, **options):
        """shard: of the batch; the rank's own by default."""
        torch._dynamo.reset()
        self.model, self.shard = model, dist.get_rank() if shard is None else shard
        self.compiled = fp8_compile(model, recipe, backend="aot_eager", fsdp_gather=gather, **options)
        self.results, self.sent, self.reductions = [], [], []
        self.make_optimizer = optimizer
        self.renew()

    def renew(self):
        self.optimizer = self.make_optimizer(self.model.parameters())

    def steps(self, *steps, width=WIDTH):
        for step in steps:
            with counted() as (sent, reductions):
                loss = self.compiled(batch(step, width, self.shard)).float().square().mean()
                loss.backward()
            self.sent.append(sent)
            self.reductions.append(reductions)
            self.results += [loss.detach(), *(p.grad.to_local().clone() for p in self.model.parameters())]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def forward(self, model, step):
        with counted() as (sent, _):
            self.results.append(self.forward_of(model, step))
        return sent

    def forward_of(self, model, step, width=WIDTH):
        with torch.no_grad():
            return model(batch(step, width)).clone()


def both(recipe, make, **options):
    """A run with gathers in FP8, and one without, each of a model of its own."""
    return [Run(recipe, gather, make(), **options) for gather in ("fp8", None)]


def reasons(run):
    """Module -> why its weight travels as it is."""
    return {g.module: g.reason for graph in inspect(run.compiled).graphs for g in graph.gathers}


def load(run, folder):
    """Weights and scales of a checkpoint."""
    weights = run.model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    run.model.load_state_dict(weights)
    state(run.compiled).load_checkpoint(folder)


def differing(ours, theirs):
    """The numbers of the results that are not bit for bit the same."""
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not a.equal(b)]


def equal(ours, theirs):
    return differing(ours.results, theirs.results) == []


def casts_of_weights(graphs):
    nodes = [n for g in graphs for n in g.after.graph.nodes if str(n.target).startswith("lowering.cast")]
    return sum(read.op == "placeholder" and read.meta["val"].shape[0] != 32 for node in nodes for read in node.args[0])
