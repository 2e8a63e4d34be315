"""The search on several ranks: the effects of the mean loss, and the same rules on each rank."""

import pytest
import torch
from torch import nn

from fp8pass import suggest_rules
from tests.distributed.support import outcomes_on_ranks, run_on_ranks

pytestmark = pytest.mark.dist
ROWS = 64


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def whole_batch():
    """The second rank's rows have an outlier that the first one's have not."""
    x = torch.randn(2 * ROWS, 32, generator=torch.Generator().manual_seed(0))
    x[ROWS:, 3] *= 1000
    return x


def search(model, x):
    target = torch.randn(2 * ROWS, 32, generator=torch.Generator().manual_seed(1))[: len(x)]
    return suggest_rules(model, lambda m: (m(x) - target).square().mean(), "rowwise", keep=0.7, checks=3, progress=False)


def on_rank(rank):
    model = make_model()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    found = search(model, whole_batch()[rank * ROWS : (rank + 1) * ROWS])
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(model[0].weight.grad, torch.ones_like(before[0]))
    assert torch.equal(random, torch.get_rng_state())
    return dict(found), found.loss, found.gemms


def test_ranks_find_the_same_and_what_one_process_finds_with_both_batches():
    first, second = run_on_ranks(on_rank, 2)
    assert first == second, "to the last bit"
    rules, loss, gemms = first

    def mean_loss(m):
        target = torch.randn(2 * ROWS, 32, generator=torch.Generator().manual_seed(1))[:ROWS]
        return sum((m(x) - target).square().mean() for x in whole_batch().split(ROWS)) / 2

    alone = suggest_rules(make_model(), mean_loss, "rowwise", keep=0.7, checks=3, progress=False)
    assert loss == pytest.approx(alone.loss, rel=1e-6)
    assert [(g.module, g.role, g.kept) for g in gemms] == [(g.module, g.role, g.kept) for g in alone.gemms]
    assert rules == dict(alone)
    assert rules
    for ours, theirs in zip(gemms, alone.gemms, strict=True):
        assert ours.expected == pytest.approx(theirs.expected, rel=1e-2, abs=1e-3 * theirs.spread)
        assert ours.spread == pytest.approx(theirs.spread, rel=1e-2)
        assert ours.flops == theirs.flops
    assert [g.measured is not None for g in gemms[:4]] == [True] * 3 + [False]


def wrong(rank, what):
    model = make_model(rank if what == "parameters" else 0)
    has_nan = what == "NaN on one rank" and rank == 0
    x = torch.full((ROWS, 32), torch.nan) if has_nan else whole_batch()[:ROWS]
    search(nn.parallel.DistributedDataParallel(model) if what == "wrapped" else model, x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parameters", "parameters differ between ranks"),
        ("wrapped", "model is a DistributedDataParallel; pass its module"),
        ("NaN on one rank", "the loss of step is nan"),
    ],
)
def test_every_rank_says_what_is_wrong(what, message):
    for outcome in outcomes_on_ranks(wrong, 2, what):
        assert f"OptionError: {message}" in outcome.error
