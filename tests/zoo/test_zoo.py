"""Other people's models, unchanged: right numbers, every GEMM accounted for, losses that fall.

How many GEMMs must run in FP8 does not come from our own records: a dispatch mode counts what the eager model multiplies, and
a profiler what the compiled one does.
"""

import collections
import fnmatch
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass import fp8_compile, inspect
from fp8pass.errors import ReasonKind
from tests.support.training import Step, assert_close
from tests.tolerances import NEGLIGIBLE_GRADIENT
from tests.zoo.models import TORCH, TRANSFORMERS, Case

aten = torch.ops.aten

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
FP8_GEMMS = {f"lowering::scaled_{name}" for name in ("mm", "mm_blockwise", "mm_rowwise", "mm_mxfp8", "grouped_mm")}
REASONS = tuple(f"{kind.value}: " for kind in ReasonKind)

pytestmark = [
    pytest.mark.zoo,
    # transformers and torch's own deprecations, met while tracing code that is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers)"),
]


def make_case(name: str) -> Case:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    return {**TRANSFORMERS, **TORCH}[name]()


class CountProducts(TorchDispatchMode):
    """Counts the products of matrices that run, grouped ones and batches of one among them: those are what FP8 can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_batch_of_one = func is aten.bmm.default and args[0].shape[0] == 1
        self.count += func in (aten.mm.default, aten.addmm.default, aten._grouped_mm.default) or is_batch_of_one
        return func(*args, **(kwargs or {}))


def executed(run: Callable[[], Any]) -> collections.Counter[str]:
    """The number of runs of each kind of product: `fp8`, and `high precision` outside of the emulation of FP8."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    counts: collections.Counter[str] = collections.Counter()
    for event in profiled.events():
        if event.name in FP8_GEMMS:
            counts["fp8"] += 1
        elif event.name in ("aten::mm", "aten::addmm") and not is_below_an_opaque_op(event):
            counts["high precision"] += 1
    return counts


def is_below_an_opaque_op(event: Any) -> bool:
    """True if a product runs inside of an operation that is one node to the compiler."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(("lowering::", "transformers::")):
            return True
        parent = parent.cpu_parent
    return False


def run_step(case: Case, call: Callable[..., Any], target: torch.Tensor) -> Step:
    """Output and gradients of one forward and backward, but those that jump."""
    parameters = case.parameters()
    for parameter in parameters.values():
        parameter.grad = None
    out = case.select(call(**case.inputs))
    (out - target).square().mean().backward()
    jumps = case.discontinuous or ""
    found = {n: p.grad for n, p in parameters.items() if p.grad is not None and not fnmatch.fnmatchcase(n, jumps)}
    return Step(out.detach(), [], found)


def make_target(case: Case) -> torch.Tensor:
    with torch.no_grad():
        return torch.randn_like(case.select(case.model(**case.inputs)))


check_close = functools.partial(assert_close, negligible=NEGLIGIBLE_GRADIENT)


def check_model(name: str, recipe: str, backend: str = "aot_eager") -> None:
    case = make_case(name)
    target = make_target(case)
    with CountProducts() as eager:
        reference = run_step(case, case.model, target)
    compiled = fp8_compile(case.model, recipe, backend=backend, select="all")
    for _ in range(2):  # delayed scaling runs its compiled backward from the second step on
        check_close(run_step(case, compiled, target), reference)

    counts = executed(lambda: run_step(case, compiled, target))
    assert counts["fp8"] == eager.count
    if backend == "aot_eager":
        assert counts["high precision"] == 0

    gemms = inspect(compiled).gemms
    assert sum(g.quantized for g in gemms) == eager.count
    assert all((g.reason is None) == g.quantized for g in gemms)
    assert all(g.quantized or g.reason.startswith(REASONS) for g in gemms)
    assert {g.op for g in gemms if not g.quantized} <= {"bmm", "baddbmm", "transformers.grouped_mm_fallback"} | {
        "transformers.grouped_mm_fallback_backward"
    }

    optimizer = torch.optim.AdamW(case.parameters().values(), lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (case.select(compiled(**case.inputs)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


#: Every model with one recipe, by turns: what a model brings is found before a recipe is asked.
ZOO = [(name, RECIPES[i % len(RECIPES)]) for i, name in enumerate([*TORCH, *TRANSFORMERS])]


@pytest.mark.parametrize(("name", "recipe"), ZOO)
def test_model(name, recipe):
    check_model(name, recipe)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "recipe"), [(name, None if i % 2 else recipe) for i, (name, recipe) in enumerate(ZOO[::3])])
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")  # of recipe=None
def test_saved_activations(name, recipe):
    """Nothing is refused, outputs have the same bits, and gradients are those of FP8."""
    case = make_case(name)
    target = make_target(case)
    eager, options = run_step(case, case.model, target), {"backend": "aot_eager", "saved_activations": "fp8"}
    without = fp8_compile(case.model, recipe or "current", backend="aot_eager", rules=None if recipe else {"*": None})
    expected = run_step(case, without, target)
    torch._dynamo.reset()
    found = run_step(case, fp8_compile(case.model, recipe, **options), target)
    assert found.out.equal(expected.out)
    assert all(gradient.isfinite().all() for gradient in found.gradients)
    check_close(found, eager)


@pytest.mark.slow
def test_a_model_with_inductor():
    check_model("gpt2", "current", backend="inductor")
