"""Eager code within a compiled forward under `fsdp_gather="fp8"` reads a Parameter's own values, or is refused."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8pass import fp8_compile, inspect
from fp8pass.weights.released import CAN_REFUSE
from tests.distributed.fsdp2 import WIDTH, Block, Run, batch, differing, sgd, wide
from tests.distributed.support import run_on_ranks

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


def training(make, gather):
    return Run("current", gather, sharded(make), optimizer=sgd, select="all")


# -- what is known before anything travels in FP8


def with_eager_code(rank, makes):
    found = []
    for make in makes:
        ours, theirs = (training(globals()[make], gather).steps(0, 1, 2, 3) for gather in ("fp8", None))
        reasons = {g.tensor: str(g.reason) for graph in inspect(ours.compiled).graphs for g in graph.gathers}
        found.append((differing(ours.results, theirs.results), reasons, sum(ours.sent[-1]) < sum(theirs.sent[-1])))
    return found


PART = "readers: a graph is not all of the forward of {}, and eager code there may read it while it is gathered"


def test_what_eager_code_may_read_travels_as_it_is():
    for broken, with_hook, in_module in run_on_ranks(with_eager_code, 2, ["penalized", "hooked", "nested"]):
        assert [found[0] for found in (broken, with_hook, in_module)] == [[]] * 3
        assert [found[2] for found in (broken, with_hook, in_module)] == [True] * 3, "the other block's travel in FP8"
        assert broken[1]["0.up:weight"] == PART.format("Penalized")
        assert with_hook[1]["0.up:weight"] == "readers: a hook of Block runs while it is gathered, and may read it"
        assert in_module[1]["0.last:weight"] == PART.format("Nested")
        assert broken[1]["1.up:weight"] == with_hook[1]["1.up:weight"] == in_module[1]["0.inner.up:weight"] == "None"


# -- what shows itself later


def with_later_code(rank):
    """An evaluation that takes another path, after FP8 has travelled: what it computes before and after ranks agree again."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fp8pass.weights.gathered").addHandler(handler)
    runs = []
    for gather in ("fp8", None):
        Penalized.breaks = False
        run = training(penalized, gather).steps(0, 1, 2)
        Penalized.breaks = True
        run.forward(run.compiled, 20)
        Penalized.breaks = False
        run.steps(3, 4, 5, 6, 7)  # ranks compare before forwards 5 and 9
        Penalized.breaks = True
        run.forward(run.compiled, 21)
        runs.append(run)
    ours, theirs = (run.results for run in runs)
    return differing(ours, theirs), len(ours), [*map(sum, runs[0].sent)], records


def test_eager_code_that_comes_later_reads_its_own_values_once_ranks_have_agreed():
    for differs, total, sent, records in run_on_ranks(with_later_code, 2):
        assert set(differs) <= {total - 1 - 5 * 11 - 1}, "the one evaluation alone"
        assert sent[1] < sent[4] == sent[7] < sent[0]
        assert any("0.up.weight was gathered in FP8, and it is also used" in text for text in records)


def with_late_hook(rank):
    """What a hook finds that was registered when FP8 travels already."""
    found = []
    for recipe in ("current", "blockwise", "rowwise"):
        width = 256
        model = sharded(functools.partial(wide, width))
        compiled = fp8_compile(model, recipe, backend="aot_eager", select="all", fsdp_gather="fp8")
        for step in (0, 1, 2):
            compiled(batch(step, width)).square().mean().backward()
        weight = model[0].up.weight

        @torch.compiler.disable
        def look(module, args):
            weight = module.up.weight
            memory = weight.untyped_storage().nbytes()
            try:
                found.append((memory, bool(weight.detach().isnan().all())))
            except RuntimeError as error:
                found.append((memory, str(error)))

        handle = model[0].register_forward_pre_hook(look)  # behind FSDP2's, which gathers
        with torch.no_grad():
            compiled(batch(3, width))
        handle.remove()
        with torch.no_grad():
            model(batch(3, width))  # its own values again, eagerly
        found.append(weight is model[0].up.weight)
    return found


def test_a_late_reader_finds_no_values_and_is_told():
    expected = (0, "this Parameter has no values now") if CAN_REFUSE else (None, True)
    for found in run_on_ranks(with_late_hook, 2):
        looks = [f for f in found if isinstance(f, tuple)]
        assert len(looks) == 3
        for memory, what in looks:
            if CAN_REFUSE:
                assert memory == expected[0]
                assert what.startswith(expected[1])
            else:
                assert what is True


# -- a graph that reads a Parameter itself


class Small(Block):
    """Reads a weight in another dtype where it is told to: a graph of its own."""

    is_exact = False

    def forward(self, x):
        h = self.norm(x)
        h = (h.double() @ self.up.weight.double().t()).float() + self.up.bias if self.is_exact else self.up(h)
        return x + self.down(h.relu())


def small():
    return nn.Sequential(Small())


def with_another_graph(rank):
    runs = []
    for gather in ("fp8", None):
        Small.is_exact = False
        run = training(small, gather).steps(0, 1, 2)
        Small.is_exact = True
        run.steps(3, 4, 5, 6)
        runs.append(run)
    ours, theirs = (run.results for run in runs)
    close = [torch.allclose(a, b, rtol=0.1, atol=0.05) for a, b in zip(ours, theirs, strict=True)]
    return differing(ours, theirs), all(close), [*map(sum, runs[0].sent)]


def test_another_graph_that_reads_the_values_gets_them():
    """Those of the copies, until ranks agree before forward 5; afterwards its own."""
    for differs, is_close, sent in run_on_ranks(with_another_graph, 2):
        assert is_close
        assert sent[4] > sent[2]
        assert set(differs) <= {i for i in range(100) if i >= 3 * 6}
