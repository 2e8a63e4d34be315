"""FP8 copies that backward makes itself: what is saved instead, that no bit changes, and where copies are still saved."""

import copy
import functools

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass import inspect
from fp8pass.rewrite import runner
from fp8pass.rewrite.launches import MANY_ROWS
from lowering.formats import FP8_MAX
from tests.support.cases import each
from tests.support.joint import trace
from tests.support.models import LlamaBlock, Net
from tests.support.training import assert_equal, compiled_step

train = functools.partial(compiled_step, count=3)


def saved_fp8(compiled) -> list[tuple[int, ...]]:
    """Shapes of the FP8 tensors that forward saves for backward."""
    (graph,) = inspect(compiled).graphs
    (results,) = graph.forward.graph.find_nodes(op="output")[0].args
    values = [n.meta["val"] for n in results if isinstance(n, fx.Node)]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dtype in FP8_MAX]


def test_recomputed_copies_change_no_bit():
    x = torch.randn(2, 32, 128)
    block = LlamaBlock()
    _, recomputed = train(copy.deepcopy(block), "delayed", x)
    with runner.without("plan recomputation"):
        plain, saved = train(block, "delayed", x)
    assert {(64, 128), (128, 64)} & set(saved_fp8(plain))
    assert_equal(recomputed, saved)


def two_linears(between) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), between, nn.Linear(96, 64))


RECOMPUTE = {"weight_copies": "recompute"}
WHOLE = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
OWN = two_linears(nn.GELU())
COMPUTED = Net(lambda m, x: x @ (m.w * 2), w=nn.Parameter(torch.randn(64, 64)))
PLANS = {
    # Casts of whole blocks join the code before them; others are kernels of their own, for which the value would be written.
    "casts of whole blocks": (WHOLE, (128, 128), {"recipe": "blockwise"}, {"2:input"}),
    "casts of parts of blocks": (two_linears(nn.GELU()), (48, 64), {"recipe": "blockwise"}, set()),
    "casts to MXFP8": (WHOLE, (128, 128), {"recipe": "mxfp8"}, set()),
    "inference": (two_linears(nn.GELU()), (48, 64), RECOMPUTE | {"trains": False}, set()),
    "a computed weight": (COMPUTED, (48, 64), RECOMPUTE, set()),
    "the user's": (
        lambda x: checkpoint(OWN, x, use_reentrant=False),
        (48, 64),
        RECOMPUTE,
        {"OWN.0:weight", "OWN.2:weight"},
    ),
    "few rows": (nn.Linear(16, 16), (MANY_ROWS - 16, 16), {}, set()),
    "many rows": (nn.Linear(16, 16), (MANY_ROWS, 16), {}, {"self:weight"}),
}


@each("case", PLANS)
def test_what_backward_makes_itself(case):
    """Names of the tensors whose backward-only copies it makes."""
    model, shape, options, expected = PLANS[case]
    plan = trace(model, torch.randn(shape), **{"recipe": "current"} | options).run("plan recomputation").plan
    values = {str(t.name) for t in plan.copies if t.name.kind != "weight" and t.value.root in plan.recomputed}
    assert values | {str(t.name) for t in plan.recomputed_weights} == expected
