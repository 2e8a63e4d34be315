"""The monitor on several ranks: the numbers are those of the ranks' tensors together."""

import math

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, monitor, state
from lowering.formats import E4M3
from tests.distributed.support import everyone, on_ranks

pytestmark = pytest.mark.dist
ROWS = 48


def whole_batch():
    """The ranks' rows behind each other: those of the second are much larger, and hold what is not finite."""
    x = torch.randn(2 * ROWS, 64, generator=torch.Generator().manual_seed(0))
    x[ROWS:] *= 1000
    x[0, :4] = torch.tensor([-0.0, -1e-30, 1e-12, 1e-30])
    x[-1, :2] = torch.tensor([torch.nan, -torch.inf])
    return x


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@on_ranks(2)
def test_numbers_are_those_of_the_tensors_of_all_ranks(rank, recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    chosen = DelayedScaling(initial_scale="one") if recipe == "delayed" else recipe
    compiled = fp8_compile(model, chosen, backend="aot_eager", step="manual")
    logged = []
    watching = monitor(compiled, every=1, log=logged.append)
    nn.parallel.DistributedDataParallel(compiled)(whole_batch()[rank * ROWS : (rank + 1) * ROWS]).sum().backward()
    state(compiled).step()
    found = next(t for t in watching.latest.tensors if t.name == "0:input" and t.copy != "columnwise")
    numbers = str((found, logged, watching.latest.first_non_finite))
    assert everyone(numbers) == [numbers] * 2, "every rank has the same numbers"
    assert ":input, for the GEMM output, in the forward (2 elements)" in watching.latest.first_non_finite
    x = whole_batch()
    finite = x.isfinite()
    parts = {"delayed": [x], "current": list(x.split(ROWS)), "rowwise": list(x)}[recipe]
    rounded, ratios, saturated = [], [], 0
    for part in parts:
        amax = part.abs().amax()
        scale = torch.tensor(448.0) / amax if recipe != "delayed" and amax.isfinite() else torch.tensor(1.0)
        scale = 2 ** scale.log2().floor() if recipe == "rowwise" else scale
        saturated += int(((part * scale).abs().gt(464) & part.isfinite()).sum())
        rounded.append((part * scale).clamp(-448, 448).to(E4M3).double() * scale.reciprocal().double())
        keep = part.isfinite()
        ratios.append((part.double()[keep].square().sum() / (part.double() - rounded[-1])[keep].square().sum()).item())
    q, x = torch.cat([r.reshape(-1) for r in rounded]).reshape(x.shape)[finite], x[finite].double()
    error = (x - q).square().sum()
    assert found.num_elements == 2 * ROWS * 64
    assert found.num_non_finite == 2
    assert found.num_underflow == int(((q == 0) & (x != 0)).sum()) >= 3
    assert found.num_saturated == saturated
    assert found.amax == x.abs().max().item()
    assert found.sqnr == pytest.approx(10 * math.log10(x.square().sum() / error), rel=1e-6)
    assert found.mse == pytest.approx((error / len(x)).item(), rel=1e-6)
    if recipe == "rowwise":  # the extremes are those of all blocks, the quantiles between them means of the ranks' own
        assert found.block_sqnr[0] == pytest.approx(10 * math.log10(min(ratios)), rel=1e-6)
        assert found.block_sqnr[-1] == pytest.approx(10 * math.log10(max(ratios)), rel=1e-6)
        medians = [sorted(part)[(ROWS - 1) // 2] for part in (ratios[:ROWS], ratios[ROWS:])]
        assert found.block_sqnr[2] == pytest.approx(10 * math.log10(sum(medians) / 2), rel=1e-6)
