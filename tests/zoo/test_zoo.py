"""Other people's models, unchanged: right numbers, every GEMM accounted for, losses that fall.

How many GEMMs must run in FP8 does not come from our own records: a dispatch mode counts what the eager model multiplies, and
a profiler what the compiled one does.
"""

import collections
import copy
import fnmatch
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass import fp8_compile, inspect
from fp8pass.errors import ReasonKind
from tests.support.cases import rest
from tests.support.training import Step, assert_close
from tests.tolerances import NEGLIGIBLE_GRADIENT, sqnr
from tests.zoo.models import MIXTURES, TORCH, TRANSFORMERS

aten = torch.ops.aten

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
FP8_GEMMS = {f"lowering::scaled_{name}" for name in ("mm", "mm_blockwise", "mm_rowwise", "mm_mxfp8", "grouped_mm")}
REASONS = tuple(f"{kind.value}: " for kind in ReasonKind)

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.zoo,
    # transformers and torch's own deprecations, met while tracing code that is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers)"),
]


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
    return parent is not None and (parent.name.startswith(("lowering::", "transformers::")) or is_below_an_opaque_op(parent))


#: Every model with one recipe, by turns: what a model brings is found before a recipe is asked.
ZOO = [(name, RECIPES[i % len(RECIPES)]) for i, name in enumerate([*TORCH, *TRANSFORMERS])]


@pytest.mark.parametrize(("name", "recipe"), ZOO)
def test_model(name, recipe):
    case = {**TRANSFORMERS, **TORCH}[name]()
    parameters = dict(case.model.named_parameters())
    with torch.no_grad():
        target = torch.randn_like(case.select(case.model(**case.inputs)))

    def run_step(call: Callable[..., Any]) -> Step:
        """Output and gradients of one forward and backward, but those that jump."""
        case.model.zero_grad()
        out = case.select(call(**case.inputs))
        (out - target).square().mean().backward()
        jumps = case.discontinuous or ""
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None and not fnmatch.fnmatchcase(n, jumps)}
        return Step(out.detach(), [], found)

    with CountProducts() as eager:
        reference = run_step(case.model)
    compiled = fp8_compile(case.model, recipe, backend="aot_eager", select="all")
    for _ in range(2):  # delayed scaling runs its compiled backward from the second step on
        assert_close(run_step(compiled), reference, negligible=NEGLIGIBLE_GRADIENT)

    counts = executed(lambda: run_step(compiled))
    assert counts["fp8"] == eager.count
    assert counts["high precision"] == 0

    gemms = inspect(compiled).gemms
    assert sum(g.quantized for g in gemms) == eager.count
    assert all((g.reason is None) == g.quantized for g in gemms)
    assert all(g.quantized or g.reason.startswith(REASONS) for g in gemms)
    fallback = "transformers.grouped_mm_fallback"
    assert {g.op for g in gemms if not g.quantized} <= {"bmm", "baddbmm", fallback, f"{fallback}_backward"}

    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        losses.append((run_step(compiled).out - target).square().mean().item())
        optimizer.step()
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


# -- mixtures of experts: every GEMM of the experts in FP8 with its role, routers in high precision

DTYPES = ("bfloat16", "float32", "autocast")
OUTPUT, GRADIENT = 18, 12  # dB


def outcome(run, model, case, dtype):
    """Output, and the gradients of the experts' weights."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        out = case.select(run(**case.inputs))
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * seed).sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if ".experts." in name}


#: Each mixture with another recipe in the next dtype, by turns: what differs between mixtures is found before a dtype or a
#: recipe is asked.
BY_TURNS = [
    (name, DTYPES[i % len(DTYPES)], recipe)
    for i, (name, recipe) in enumerate(zip(MIXTURES, ("current", "rowwise", "blockwise", "delayed", "mxfp8"), strict=True))
]


@pytest.mark.parametrize(("name", "dtype", "recipe"), BY_TURNS)
def test_experts_run_in_fp8(name, dtype, recipe):
    torch.manual_seed(0)
    case = MIXTURES[name]()
    model = case.model.to(torch.bfloat16) if dtype == "bfloat16" else case.model
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    want, want_gradients = outcome(plain, plain, case, dtype)
    got, gradients = outcome(compiled, model, case, dtype)
    records = inspect(compiled)
    assert len(records.graphs) == 1
    grouped = [g for g in records.gemms if g.groups != 1]
    assert [g for g in grouped if not g.quantized] == []
    experts = {"deepseek_v3": 8}.get(name, 4)
    roles = collections.Counter((g.module.rpartition(".")[2], g.role, g.groups) for g in grouped)
    assert roles == collections.Counter(
        (weight, role, experts) for weight in ("gate_up_proj", "down_proj") for role in ("output", "grad_input", "grad_weight")
    )
    assert all(".mlp.experts." in g.module for g in grouped)
    routers = [g for g in records.gemms if g.module.endswith((".mlp.gate", ".mlp.router"))]
    assert {(g.role, g.quantized) for g in routers} == {(r, False) for r in ("output", "grad_input", "grad_weight")}
    assert sqnr(want, got) >= OUTPUT
    assert min(sqnr(want_gradients[n], gradients[n]) for n in want_gradients) >= GRADIENT


# -- what select="auto" finds: heads, and nothing else, by structure; here by the names that the authors gave


def selected(model: Any, **inputs: Any) -> dict[str, set[str]]:
    """Reason's kind -> modules, of what "auto" leaves in high precision; what is thin is none of its finds."""
    compiled = fp8_compile(model, "current", backend="aot_eager")
    with torch.no_grad():  # what is selected depends on forward alone
        compiled(**inputs)
    found: dict[str, set[str]] = {"fp8": set()}
    for g in inspect(compiled).gemms:
        kind = "fp8" if g.reason is None else g.reason.partition(":")[0]
        if kind not in ("unsupported op", "thin"):
            found.setdefault(kind, set()).add(g.module)
    assert found.pop("fp8")
    return found


#: Heads that are not called lm_head: of a tied decoder, and a projection.
HEADS = {"bert": "cls.predictions.decoder", "whisper": "proj_out"}
#: Tied and not, with the loss in the graph, with biases, of images.
FAST = ("gpt2", "llama", "phi", "vit", "nn_transformer")
DENSE = [name for name in (*TRANSFORMERS, *TORCH) if name != "mixtral"]


@pytest.mark.parametrize("name", [*FAST, *rest(name for name in DENSE if name not in FAST)])
def test_heads(name):
    """Of dense models, in which nothing is a router; of torch's own modules and a classifier of images, nothing is a head."""
    case = {**TRANSFORMERS, **TORCH}[name]()
    labels = {"labels": case.inputs["input_ids"]} if name == "llama" else {}
    expected = {} if name in (*TORCH, "vit") else {"head": {HEADS.get(name, "lm_head")}}
    assert selected(case.model, **case.inputs, **labels) == expected
