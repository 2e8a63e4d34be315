"""GEMMs of other libraries, trusted after a trial, and the choice among them, made once for many calls.

NOTE [trusted after a trial] A wrong scale layout raises nothing in cuBLASLt and gives wrong numbers; torch 2.9 had one. So
each kind of GEMM is tried once per process and device on small matrices, and used only if it agrees with the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowering.formats import Granularity

#: The alignment of addresses that libraries read.
ALIGNMENT_BYTES = 16

#: Largest relative error, in the Frobenius norm, by the dtype of the output: what FP8 tensor cores and its rounding may lose
#: (docs/numerics.md), and far below what a scale in a wrong place does.
TOLERANCES = {torch.float32: 3e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}

_CAPTURED = "a CUDA graph was being captured, in which nothing can be tried"

Gemm = TypeVar("Gemm")


def is_aligned(x: torch.Tensor) -> bool:
    """True if x begins where libraries can read it. A tensor without memory, as in tracing, begins as its view of it does."""
    offset = x.storage_offset() * x.element_size()
    return (offset if isinstance(x, FakeTensor) else x.data_ptr()) % ALIGNMENT_BYTES == 0


@dataclasses.dataclass(frozen=True)
class ProductKind:
    """GEMMs that are right or wrong together."""

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    granularities: tuple[Granularity, Granularity]
    bias_dtype: torch.dtype | None
    out_dtype: torch.dtype
    is_ragged: bool = False  # Blocks of 128 do not fill M, N or K, of grouped ones N or K.
    form: str = ""  # Of grouped ones what is in groups.

    def __str__(self) -> str:
        if self.form:
            ragged = " of ragged blocks" if self.is_ragged else ""
            output = "" if self.out_dtype == torch.bfloat16 else f" to {self.out_dtype}"
            return f"{' by '.join(g.label for g in self.granularities)} scales{ragged} of {self.form}{output} on {self.device}"
        operands = (f"{g.label} {d}" for g, d in zip(self.granularities, self.dtypes, strict=True))
        return f"{' by '.join(operands)} to {self.out_dtype} on {self.device}"


class Trial(Generic[Gemm]):
    """The trial of one library's GEMMs, in this process. gemm: what they are called in the warning about a fault, and what runs
    `instead`. kind_of: what GEMMs have in common that are right or wrong together. fault_of: runs small GEMMs of a kind;
    returns what is wrong with their results, or None."""

    def __init__(
        self,
        log: logging.Logger,
        gemm: str,
        kind_of: Callable[[Gemm], ProductKind],
        fault_of: Callable[[ProductKind], str | None],
        instead: str = "Triton's",
    ) -> None:
        self._log, self._gemm, self._kind_of, self._fault_of, self._instead = log, gemm, kind_of, fault_of, instead
        self.tried: dict[ProductKind, bool] = {}  # Kind -> True if the library is used.
        self.reasons: dict[ProductKind, str] = {}  # Why it did not compute the last GEMM of a kind that it was asked for.

    def refuse(self, gemm: Gemm, reason: str) -> None:
        """Remember why the library does not compute a GEMM."""
        self.reasons[self._kind_of(gemm)] = reason

    def is_passed(self, gemm: Gemm) -> bool:
        """True if GEMMs like this one are right, as far as known or by a trial. A trial launches kernels and waits for them;
        while a CUDA graph is being captured, which allows no waiting, what has not been tried is not trusted."""
        kind = self._kind_of(gemm)
        if kind not in self.tried:
            if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self.reasons[kind] = _CAPTURED
                return False
            fault = self._fault_of(kind)
            self.tried[kind] = fault is None
            if fault is None and self.reasons.get(kind) == _CAPTURED:
                del self.reasons[kind]
            elif fault is not None:
                self.reasons[kind] = fault
                self._log.warning("%s is not used for %s, %s is: %s", self._gemm, kind, self._instead, fault)
        return self.tried[kind]


def trusted(libraries: Mapping[str, Any], gemm: Any) -> str | None:
    """The first of these modules that takes a GEMM and is right about it, by name; None where none does."""
    for name, library in libraries.items():
        reason = library.refusal(gemm)
        if reason is not None:
            if not isinstance(gemm.a, FakeTensor):  # in tracing nothing is computed
                library.trial.refuse(gemm, reason)
        elif library.trial.is_passed(gemm):
            return name
    return None


def libraries_of(
    libraries: Mapping[str, Any], scales: Collection[tuple[str | None, str | None]] | None = None
) -> dict[str, str]:
    """Kind of GEMM -> who computes it, one of these modules by name or "triton", of the kinds that were tried in this process
    and whose operands had such scales, by the labels of their granularities; None: any."""
    found: dict[str, str] = {}
    for name, library in libraries.items():
        for kind, is_right in library.trial.tried.items():
            labels = tuple(g.label for g in kind.granularities)
            if (scales is None or labels in scales) and found.get(str(kind), "triton") == "triton":
                found[str(kind)] = name if is_right else "triton"
    return found


def reasons_of(
    libraries: Mapping[str, Any], scales: Collection[tuple[str | None, str | None]] | None = None
) -> dict[str, dict[str, str]]:
    """Kind of GEMM -> library -> why it did not compute the last one of that kind; of operands as for `libraries_of`."""
    found: dict[str, dict[str, str]] = {}
    for name, library in libraries.items():
        for kind, reason in library.trial.reasons.items():
            if scales is None or tuple(g.label for g in kind.granularities) in scales:
                found.setdefault(str(kind), {})[name] = reason
    return found


def fault_of(
    compute: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    tolerance: float,
    device: torch.device,
    valid: slice = slice(None),
) -> str | None:
    """The fault of the `valid` rows of a GEMM's result on `device`, or None. tolerance: the largest relative error, in
    the Frobenius norm. Whatever a library raises is a fault, with its text, but for errors that spoil the CUDA context."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            out = compute()[valid].cpu().float()
    except torch.AcceleratorError:
        raise
    except Exception as raised:
        first = next(iter(str(raised).strip().splitlines()), "")
        # torch's and cuBLAS's for a GEMM that they do not have need no name.
        return f"it raises {first if type(raised) in (RuntimeError, ValueError) else f'{type(raised).__name__}: {first}'}"
    error = float((out - expected[valid]).norm() / expected[valid].norm())
    return None if error <= tolerance else f"its relative error is {error:.2g}"


def fault_of_sizes(
    kind: ProductKind,
    sizes: Iterable[tuple[int, int, int]],
    made: Callable[[int, int, int, torch.Tensor | None], tuple[Callable[[], torch.Tensor], torch.Tensor]],
) -> str | None:
    """The first fault among products of a kind, one per M, N, K, or None. made: of M, N, K and a bias on the host, or None,
    what computes the product on the kind's device, and the result in float32."""
    for m, n, k in sizes:
        bias = None if kind.bias_dtype is None else torch.linspace(-1, 1, n).to(kind.bias_dtype)
        fault = fault_of(*made(m, n, k, bias), TOLERANCES[kind.out_dtype], kind.device)
        if fault is not None:
            return f"{fault} for M, N, K = {m}, {n}, {k}"
    return None


Made = TypeVar("Made")

#: The most decisions that are cached for one operation: sizes of inputs may differ at each call.
_MOST = 4096


def keep(decisions: dict[Hashable, Made], key: Hashable, made: Made, x: torch.Tensor) -> None:
    """Keep a decision about x and other tensors among those of an operation. Not while a CUDA graph is captured: no library is
    tried then, and a later decision may differ; nor of tensors in tracing."""
    if isinstance(x, FakeTensor) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if len(decisions) >= _MOST:
        decisions.clear()
    decisions[key] = made


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """The properties that decide how a tensor can be read."""
    return x.shape, x.stride(), x.dtype, is_aligned(x)
