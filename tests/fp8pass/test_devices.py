"""The plan and what the device then runs: for every recipe, form of GEMM and device the plan and the lowering agree.

A traced graph is moved to a make-believe GPU. A GEMM that the plan rewrites runs there: its operation is called with the fake
tensors of its arguments and reaches a kernel or a GEMM of torch's. One that the plan leaves alone because of the device is
refused by its operation too.
"""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8pass import Float8BlockScaling, MXFP8BlockScaling
from fp8pass.errors import ReasonKind
from fp8pass.recipes import PRESETS, as_recipe
from lowering import hardware
from lowering.blockwise import cublaslt
from lowering.grouped import cutlass
from lowering.operation import NAMESPACE
from lowering.triton.ahead import Kernel
from tests.support.cases import rest
from tests.support.joint import trace
from tests.support.models import Net
from tests.support.moe import Experts, offsets

CUDA = torch.device("cuda", 0)
#: (compute capability, CUDA); None: a CPU.
DEVICES = {
    "cpu": None,
    "sm_89": ((8, 9), (12, 9)),
    "sm_90": ((9, 0), (12, 9)),
    "sm_90, CUDA 12.8": ((9, 0), (12, 8)),
    "sm_100": ((10, 0), (13, 0)),
    "sm_120": ((12, 0), (13, 0)),
}
RECIPES = {name: as_recipe(name) for name in PRESETS} | {
    "blockwise, any scales": Float8BlockScaling(use_f32_scales=True),
    "blockwise, vectors": Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8, squares": MXFP8BlockScaling(enable_2d_quantization=True),
}


#: Of matrices, of rows in groups with a stack, a sum per group, of two stacks.
FORMS = (None, "rows", "sums", "batched")


class _Shapes(TorchFunctionMode):
    """Runs torch's functions of fake tensors of a GPU on meta tensors: torch's builds for the CPU lack what guards a GPU."""

    def __init__(self, fake_mode):
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ == "__get__":  # such as `device`, which is a GPU to all that ask
            return func(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            if kwargs.get("device") == CUDA:
                kwargs = {**kwargs, "device": "meta"}
            args, kwargs = tree_map_only(FakeTensor, _on_meta, (args, kwargs))
            made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: FakeTensor(self.fake_mode, x, CUDA), made)


def _on_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@contextlib.contextmanager
def machine(device):
    """The hardware answers as on this device; what would start on a GPU is counted instead."""
    started = []

    def starts(*args, **options):
        started.append(args)
        return torch.empty(1, 1, device=CUDA)  # broadcasts with whatever comes

    capability, cuda = DEVICES[device] or (None, ())
    with contextlib.ExitStack() as stack:
        replaced = {
            (hardware, "cuda_capability"): lambda d: capability if d.type == "cuda" else None,
            (hardware, "cuda_version"): lambda: cuda,
            (Kernel, "__getitem__"): lambda kernel, grid: starts,
            (torch, "_scaled_mm"): starts,
            (torch, "_scaled_grouped_mm"): starts,
            (torch.nn.functional, "scaled_mm"): starts,
            (torch.Tensor, "data_ptr"): lambda x: 0,
            (torch.cuda, "device"): lambda device: contextlib.nullcontext(),
            (cublaslt.trial, "is_passed"): lambda *form: True,
            (cutlass.trial, "is_passed"): lambda *form: True,
        }
        for (place, name), stub in replaced.items():
            stack.enter_context(mock.patch.object(place, name, stub))
        yield started


def moved(joint, device):
    """Its tensors are on the device."""
    if DEVICES[device] is not None:
        for node in joint.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if isinstance(value, FakeTensor):
                    value.fake_device = CUDA
    return joint


def refusal_of(node, started):
    """The error of a scaled GEMM for the arguments in its graph; None if it runs."""
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    operation = NAMESPACE.find(node.target)
    args, kwargs = operation.picked(args, kwargs)
    device = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor)).device
    if device.type == "cpu":
        return None  # every GEMM is emulated
    before = len(started)
    with _Shapes(node.meta["val"].fake_mode):
        try:
            operation.implementation(device)(*args, **kwargs)
        except NotImplementedError as error:
            return str(error)
    assert len(started) > before, f"{node.name} runs without a kernel"
    return None


def traced(recipe):
    torch.manual_seed(0)
    x = torch.randn(384, 128, dtype=torch.bfloat16, requires_grad=True)

    def every_form(m, x, offs):
        return torch.bmm(m.experts(m.linear(x).relu(), offs).relu().view(3, 128, 128), m.stack)

    layers = {"linear": nn.Linear(128, 128), "experts": Experts(2, 128, 128), "stack": nn.Parameter(torch.randn(3, 128, 128))}
    return trace(Net(every_form, **layers).bfloat16(), x, offsets((200, 184)), recipe=RECIPES[recipe])


@functools.cache
def on_the_cpu(recipe):
    """The graph with FP8 in it wherever the recipe has it: on the CPU every GEMM is emulated."""
    return traced(recipe).run("apply")


#: Declined although the operation would run, by a kernel that is slower than bfloat16 there.
STRICTER = {("blockwise, any scales", "sm_100"), ("blockwise, any scales", "sm_120")}


CASES = list(itertools.product(RECIPES, DEVICES))
FAST = [case for i, case in enumerate(CASES) if (i + i // len(DEVICES)) % 2]


@pytest.mark.parametrize(("recipe", "device"), [*FAST, *rest(case for case in CASES if case not in FAST)])
def test_the_plan_and_the_lowering_agree(recipe, device):
    emulated = on_the_cpu(recipe)
    joint = moved(traced(recipe), device)
    moved(emulated, device)
    found, expected = {}, {}
    with machine(device) as started:
        work = joint.run("apply")
        for decision, on_cpu in zip(work.plan.decisions, emulated.plan.decisions, strict=True):
            key = f"{decision.site.form} {decision.site.role}"
            if decision.reason is None:  # as it is made for the device
                found[key] = refusal_of(work.applied.gemms[decision.site.node], started)
                expected[key] = None
            elif on_cpu.reason is None and decision.reason.kind is ReasonKind.HARDWARE and (recipe, device) not in STRICTER:
                found[key] = refusal_of(emulated.applied.gemms[on_cpu.site.node], started) is not None
                expected[key] = True
            else:
                assert on_cpu.reason is not None or (recipe, device) in STRICTER, (key, decision.reason)
    assert found == expected
    assert {d.site.form for d in work.plan.decisions} == set(FORMS)


def test_the_reason_of_experts_under_mxfp8():
    with machine("sm_100"):
        plan = moved(traced("mxfp8"), "sm_100").run("plan GEMMs").plan
    expected = "hardware: grouped GEMMs with 1x32 blocks (MXFP8) have no kernel for GPUs; use the recipe 'blockwise' there"
    assert {str(d.reason) for d in plan.decisions if d.site.form is not None} == {expected}
    assert [d.reason for d in plan.decisions if d.site.form is None] == [None] * 3
