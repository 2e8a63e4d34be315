"""The speed of this machine: copies, GEMMs and attention. Each result is compared with high precision before it is timed.

The only cases that are timed, so their group runs alone.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.correctness import FAST_ERROR, GEMM_ERROR, relative_error
from benchmarks.gemm_layer import ends_of_groups
from benchmarks.part0.cases import Case, Found, skip_if, within
from benchmarks.timing import mean_seconds
from lowering import hardware
from lowering.blockwise import gemm as blockwise_gemm
from lowering.blockwise import reference as blockwise
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import gemm as grouped_gemm
from lowering.grouped.reference import GroupedGemm
from lowering.operation import NAMESPACE
from lowering.products import Product
from lowering.scaling import scale_shape
from lowering.triton import assembler

#: Seconds of one measurement on a GPU, and how many there are.
_SECONDS, _WINDOWS = 0.15, 3
#: Largest relative error of bfloat16 GEMMs, and of attention beside that in float32.
_BF16_ERROR, _ATTENTION_ERROR = 1e-2, 2e-2


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of everything that is measured."""

    copied_bytes: int = 2 << 30
    gemm: int = 8192
    heads: tuple[int, int, int, int] = (2, 32, 8192, 128)
    experts: tuple[int, int, int, int] = (128, 131072, 2048, 1536)
    """Experts, rows of all, inputs, outputs: `benchmarks.gemm_layer`."""


_SMALL = _Sizes(1 << 16, 128, (1, 2, 64, 32), (4, 128, 64, 32))


def cases(on: torch.device) -> Iterator[Case]:
    """In the order of their importance."""
    sizes = _Sizes() if on.type == "cuda" else _SMALL
    yield Case("versions", functools.partial(_versions, on))
    yield Case("attention that torch chooses", functools.partial(_attention_choice, sizes, on))
    yield Case("copy", functools.partial(_copy, sizes, on))
    yield Case("bf16", functools.partial(_bf16, sizes, on))
    for name, fp8 in (("E4M3", E4M3), ("E5M2 by E4M3", E5M2)):
        for how in ("fast", "accurate"):
            yield Case(f"FP8 per tensor, {name}, {how}", functools.partial(_scaled_mm, sizes, on, fp8, how == "fast", False))
            yield Case(f"FP8 rowwise, {name}, {how}", functools.partial(_scaled_mm, sizes, on, fp8, how == "fast", True))
    one, two = Granularity.BLOCK_1X128, Granularity.BLOCK_128X128
    for of_b in (two, one):
        for how in (*blockwise_gemm.LIBRARIES, "triton") if on.type == "cuda" else ("reference",):
            yield Case(f"FP8 blockwise, 1x128 by {of_b.label}, {how}", functools.partial(_blockwise, sizes, on, of_b, how))
    yield Case("bf16 grouped", functools.partial(_grouped_bf16, sizes, on))
    for kind, of_a, fast, libraries in (
        (Granularity.TENSOR_WISE, E4M3, True, ["cutlass"]), (Granularity.TENSOR_WISE, E5M2, False, []),
        (Granularity.ROW_WISE, E4M3, True, ["cutlass"]), (Granularity.ROW_WISE, E4M3, False, []),
        (one, E4M3, False, ["deep_gemm"]),
    ):  # fmt: skip
        label = f"FP8 grouped, {kind.label}, {'E4M3' if of_a == E4M3 else 'E5M2 by E4M3'}, {'fast' if fast else 'accurate'}"
        for how in (*libraries, "triton") if on.type == "cuda" else ("reference",):
            yield Case(f"{label}, {how}", functools.partial(_grouped, sizes, on, kind, of_a, fast, how))
    for direction in ("forward", "forward and backward"):
        yield Case(f"attention, causal, {direction}", functools.partial(_attention, sizes, on, direction == "forward"))


def _seconds(call: Callable[[], Any], on: torch.device) -> float:
    """The time of one of many calls that follow each other; median of the windows."""
    call()
    calls = max(2, round(_SECONDS / mean_seconds(call, on, 2))) if on.type == "cuda" else 2
    return statistics.median(mean_seconds(call, on, calls) for _ in range(_WINDOWS))


def _rate(call: Callable[[], Any], flops: float, on: torch.device) -> Found:
    seconds = _seconds(call, on)
    return {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12}


def _versions(on: torch.device) -> Found:
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if on.type == "cuda":
        found |= {"cudnn": torch.backends.cudnn.version(), "device": torch.cuda.get_device_name()}
        major, minor = torch.cuda.get_device_capability()
        found |= {"capability": f"{major}.{minor}", "assembler": str(assembler.choose(10 * major + minor))}
    return found


def _heads(sizes: _Sizes, on: torch.device, requires_grad: bool) -> list[torch.Tensor]:
    return [torch.randn(sizes.heads, device=on, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


def _attention_choice(sizes: _Sizes, on: torch.device) -> Found:
    """The backend for a training step, and for inference."""
    found = {}
    for what, requires_grad in (("training", True), ("inference", False)):
        choice = torch._fused_sdp_choice(*_heads(sizes, on, requires_grad), is_causal=True)
        found[what] = SDPBackend(choice).name
    return found


def _attention(sizes: _Sizes, on: torch.device, is_forward: bool) -> Found:
    q, k, v = _heads(sizes, on, not is_forward)
    batch, heads, tokens, width = sizes.heads
    attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    dy = torch.randn(sizes.heads, device=on, dtype=torch.bfloat16)
    flops = 2.0 * batch * heads * tokens * tokens * width
    few = slice(0, 1)  # of the heads: attention in float32 keeps all scores
    exact = [x.detach()[few, few].float().requires_grad_() for x in (q, k, v)]
    after = torch.ones(tokens, tokens, device=on, dtype=torch.bool).triu(1)
    expected = (exact[0] @ exact[1].mT * width**-0.5).masked_fill(after, -torch.inf).softmax(-1) @ exact[2]
    out = attend()
    error = relative_error(out.detach()[few, few], expected.detach())
    if is_forward:
        gate = within(error, _ATTENTION_ERROR)
        return _rate(attend, flops, on) | gate
    wanted = torch.autograd.grad(expected, exact, dy[few, few].float())
    found = torch.autograd.grad(out, (q, k, v), dy)
    errors = [relative_error(f[few, few], w) for f, w in zip(found, wanted, strict=True)]
    gate = within(max(error, *errors), _ATTENTION_ERROR)
    del expected, wanted, found, out
    return _rate(lambda: torch.autograd.grad(attend(), (q, k, v), dy), 3.5 * flops, on) | gate


def _copy(sizes: _Sizes, on: torch.device) -> Found:
    source = torch.randint(0, 255, (sizes.copied_bytes,), device=on, dtype=torch.uint8)
    target = torch.empty_like(source)
    if not torch.equal(source, target.copy_(source)):
        raise AssertionError("the copy differs")
    seconds = _seconds(lambda: target.copy_(source), on)
    return {"ms": 1e3 * seconds, "TB/s": 2 * sizes.copied_bytes / seconds / 1e12}


def _operands(sizes: _Sizes, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b, [n, n], of a @ b.t()."""
    n = sizes.gemm
    return torch.randn(n, n, device=on, dtype=torch.bfloat16), torch.randn(n, n, device=on, dtype=torch.bfloat16)


def _bf16(sizes: _Sizes, on: torch.device) -> Found:
    a, b = _operands(sizes, on)
    gate = within(relative_error(a @ b.t(), a.float() @ b.t().float()), _BF16_ERROR)
    return _rate(lambda: a @ b.t(), 2.0 * sizes.gemm**3, on) | gate


def _scaled_mm(sizes: _Sizes, on: torch.device, of_a: torch.dtype, fast: bool, per_row: bool) -> Found:
    """torch's GEMM itself, with scales of 1: per tensor or per row."""
    a, b = _operands(sizes, on)
    a8, b8 = a.to(of_a), b.to(E4M3).t()
    scales = [torch.ones((sizes.gemm, 1) if per_row else (), device=on) for _ in range(2)]
    skip_if(_row_refusal(of_a, on) if per_row else None)
    call = functools.partial(
        torch._scaled_mm, a8, b8, scales[0], scales[1].t() if per_row else scales[1], None, None, torch.bfloat16, fast
    )
    gate = within(relative_error(call(), a8.float() @ b8.float()), FAST_ERROR if fast else GEMM_ERROR)
    return _rate(call, 2.0 * sizes.gemm**3, on) | gate


def _row_refusal(of_a: torch.dtype, on: torch.device) -> str | None:
    """Why torch has no GEMM with scales per row here, or None."""
    if on.type == "cpu" and torch.__version__ < (2, 13):
        return "torch's CPU GEMM has scales per row since 2.13"
    rows = Granularity.ROW_WISE
    return hardware.refusal(hardware.Gemm(of_a, E4M3, rows, rows), on)


def _blockwise(sizes: _Sizes, on: torch.device, of_b: Granularity, how: str) -> Found:
    one = Granularity.BLOCK_1X128
    a, b = _operands(sizes, on)
    cast = NAMESPACE.operations["cast_with_scales"]
    (qa, sa), (qb, sb) = (cast([x], E4M3, granularity=kind) for x, kind in ((a, one), (b, of_b)))
    kinds = {"granularity_a": one.value, "granularity_b": of_b.value}
    library = blockwise_gemm.LIBRARIES.get(how)
    skip_if(None if library is None else library.refusal(Product(qa, qb.t(), sa, sb, **kinds)))
    call = functools.partial(NAMESPACE.operations["scaled_mm"], qa, qb.t(), sa, sb, **kinds, implementation=how)
    expected = blockwise.dequantize(qa, sa, one) @ blockwise.dequantize(qb, sb, of_b).t()
    gate = within(relative_error(call(), expected), GEMM_ERROR)
    return _rate(call, 2.0 * sizes.gemm**3, on) | gate


def _experts(sizes: _Sizes, on: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights [experts, inputs, outputs], and where groups end, which differ by up to a third."""
    experts, rows, inputs, outputs = sizes.experts
    a = torch.randn(rows, inputs, device=on, dtype=torch.bfloat16)
    return a, torch.randn(experts, outputs, inputs, device=on, dtype=torch.bfloat16).mT, ends_of_groups(experts, rows).to(on)


def _expert_flops(sizes: _Sizes) -> float:
    _, rows, inputs, outputs = sizes.experts
    return 2.0 * rows * inputs * outputs


def _expert_error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> float:
    """The error of the first and the last expert: all of them in float32 would take as long as everything else."""
    ends = [0, *offs.tolist()]
    rows = [slice(ends[e], ends[e + 1]) for e in (0, len(ends) - 2)]
    return max(relative_error(out[r], a[r].float() @ b[e].float()) for r, e in zip(rows, (0, -1), strict=True))


def _grouped_bf16(sizes: _Sizes, on: torch.device) -> Found:
    a, b, offs = _experts(sizes, on)
    call = functools.partial(torch._grouped_mm, a, b, offs=offs)
    gate = within(_expert_error(call(), a, b, offs), _BF16_ERROR)
    return _rate(call, _expert_flops(sizes), on) | gate


def _expert_scales(sizes: _Sizes, on: torch.device, kind: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of 1, of rows and of weights, at the strides that casts give them (NOTE [scales of grouped operands])."""
    experts, rows, inputs, outputs = sizes.experts
    if kind is Granularity.TENSOR_WISE:
        return torch.ones((), device=on), torch.ones(experts, device=on)
    lines, num = scale_shape(rows, inputs, kind)
    of_rows = torch.ones(num, lines, device=on).t() if kind.block else torch.ones(lines, num, device=on)
    of_b = Granularity.BLOCK_128X128 if kind.block else kind
    return of_rows, torch.ones(experts, *scale_shape(outputs, inputs, of_b), device=on)


def _grouped(sizes: _Sizes, on: torch.device, kind: Granularity, of_a: torch.dtype, fast: bool, how: str) -> Found:
    a, b, offs = _experts(sizes, on)
    a8, b8 = a.to(of_a), b.mT.to(E4M3).mT
    of_b = Granularity.BLOCK_128X128 if kind.block else kind
    scales = _expert_scales(sizes, on, kind)
    given = GroupedGemm(a8, b8, *scales, offs, granularity_a=kind.value, granularity_b=of_b.value, fast_accum=fast)
    library = grouped_gemm.LIBRARIES.get(how)
    skip_if(None if library is None else library.refusal(given))
    if how == "reference":
        call = functools.partial(NAMESPACE.operations["scaled_grouped_mm"], **vars(given))
    else:
        call = functools.partial(grouped_gemm.prepared(how, given), a8, b8, *scales, offs, None)
    gate = within(_expert_error(call(), a8, b8, offs), FAST_ERROR if fast else GEMM_ERROR)
    return _rate(call, _expert_flops(sizes), on) | gate
