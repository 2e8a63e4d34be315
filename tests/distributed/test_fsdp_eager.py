"""Eager code within a compiled forward under `fsdp_gather="fp8"` reads a Parameter's own values, or is refused."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8pass import fp8_compile
from fp8pass.weights.released import CAN_REFUSE
from tests.distributed.fsdp2 import WIDTH, Block, Run, batch, differing, reasons, sgd, wide
from tests.distributed.support import on_ranks

pytestmark = pytest.mark.dist


class Penalized(Block):
    """Adds the norm of a weight that its FP8 GEMM reads, which eager code computes at a graph break."""

    breaks = True

    def forward(self, x):
        y = self.down(self.up(self.norm(x)).relu())
        if self.breaks:
            torch._dynamo.graph_break()
            y = y * norm_of(self.up.weight)
        return x + y


@torch.compiler.disable
def norm_of(weight):
    return weight.detach().double().norm().float()


class Nested(nn.Module):
    """Its own weight is gathered while another module's forward runs, whose hooks are eager code."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Block(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.last(self.inner(x))


def penalized():
    return nn.Sequential(Penalized(), Block())


def hooked():
    model = nn.Sequential(Block(), Block())
    model[0].register_forward_hook(lambda module, args, out: out * norm_of(module.up.weight))
    return model


def nested():
    return nn.Sequential(Nested())


def sharded(make):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    for module in reversed([m for m in model.modules() if isinstance(m, (Block, Nested))]):  # inner ones first
        fully_shard(module)
    return fully_shard(model)


def training(make, *steps):
    """A run with gathers in FP8 and one without, each after these steps."""
    for gather in ("fp8", None):
        yield Run("current", gather, sharded(make), optimizer=sgd, select="all").steps(*steps)


# -- what is known before anything travels in FP8

PART = "readers: a graph is not all of the forward of {}, and eager code there may read it while it is gathered"
#: A model, the weight that travels as it is and why, and one that travels in FP8.
READ = (
    (penalized, "0.up", PART.format("Penalized"), "1.up"),
    (hooked, "0.up", "readers: a hook of Block runs while it is gathered, and may read it", "1.up"),
    (nested, "0.last", PART.format("Nested"), "0.inner.up"),
)


@on_ranks(2)
def test_what_eager_code_may_read_travels_as_it_is(rank):
    for make, module, why, other in READ:
        ours, theirs = training(make, 0, 1, 2, 3)
        assert differing(ours.results, theirs.results) == []
        assert (reasons(ours)[module], reasons(ours)[other]) == (why, None)
        assert sum(ours.sent[-1]) < sum(theirs.sent[-1]), "the other block's travel in FP8"


# -- what shows itself later


@on_ranks(2)
def test_eager_code_that_comes_later_reads_its_own_values_once_ranks_have_agreed(rank):
    """An evaluation that takes another path, after FP8 has travelled: what it computes before and after ranks agree again."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fp8pass.weights.gathered").addHandler(handler)
    Penalized.breaks, runs = False, []
    for run in training(penalized, 0, 1, 2):
        for number, steps in ((20, (3, 4, 5, 6, 7)), (21, ())):  # ranks compare before forwards 5 and 9
            Penalized.breaks = True
            run.forward(run.compiled, number)
            Penalized.breaks = False
            run.steps(*steps)
        runs.append(run)
    ours, theirs = (run.results for run in runs)
    assert set(differing(ours, theirs)) <= {len(ours) - 1 - 5 * 11 - 1}, "the one evaluation alone"
    sent = [*map(sum, runs[0].sent)]
    assert sent[1] < sent[4] == sent[7] < sent[0]
    assert any("0.up.weight was gathered in FP8, and it is also used" in text for text in records)


@on_ranks(2)
def test_a_late_reader_finds_no_values_and_is_told(rank):
    """What a hook finds that was registered when FP8 travels already."""
    looks = []

    @torch.compiler.disable
    def look(module, args):
        weight = module.up.weight
        memory = weight.untyped_storage().nbytes()
        try:
            looks.append((memory, bool(weight.detach().isnan().all())))
        except RuntimeError as error:
            looks.append((memory, str(error)))

    for recipe in ("current", "blockwise", "rowwise"):
        model = sharded(functools.partial(wide, 256))
        compiled = fp8_compile(model, recipe, backend="aot_eager", select="all", fsdp_gather="fp8")
        for step in (0, 1, 2):
            compiled(batch(step, 256)).square().mean().backward()
        handle = model[0].register_forward_pre_hook(look)  # behind FSDP2's, which gathers
        with torch.no_grad():
            compiled(batch(3, 256))
        handle.remove()
        with torch.no_grad():
            model(batch(3, 256))  # its own values again, eagerly
    assert len(looks) == 3
    for memory, what in looks:
        assert what is True or (memory == 0 and what.startswith("this Parameter has no values now"))
        assert (what is True) != CAN_REFUSE


# -- a graph that reads a Parameter itself


class Small(Block):
    """Reads a weight in another dtype where it is told to: a graph of its own."""

    is_exact = False

    def forward(self, x):
        h = self.norm(x)
        h = (h.double() @ self.up.weight.double().t()).float() + self.up.bias if self.is_exact else self.up(h)
        return x + self.down(h.relu())


@on_ranks(2)
def test_another_graph_that_reads_the_values_gets_them(rank):
    """Those of the copies, until ranks agree before forward 5; afterwards its own."""
    runs = []
    for run in training(lambda: nn.Sequential(Small()), 0, 1, 2):
        Small.is_exact = True
        runs.append(run.steps(3, 4, 5, 6))
        Small.is_exact = False
    ours, theirs = (run.results for run in runs)
    assert all(torch.allclose(a, b, rtol=0.1, atol=0.05) for a, b in zip(ours, theirs, strict=True))
    sent = [*map(sum, runs[0].sent)]
    assert sent[4] > sent[2]
    assert set(differing(ours, theirs)) <= {i for i in range(100) if i >= 3 * 6}
