"""GEMMs of other libraries, trusted after a trial.

NOTE [trusted after a trial] A wrong scale layout raises nothing in cuBLASLt and gives wrong numbers; torch 2.9 had one. So
each kind of GEMM is tried once per process and device on small matrices, and used only if it agrees with the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: Of what libraries read.
ALIGNMENT_BYTES = 16

Kind = TypeVar("Kind")


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins where libraries can read it. A tensor without memory, as in tracing, begins as its view of it does."""
    offset = x.storage_offset() * x.element_size()
    return (offset if isinstance(x, FakeTensor) else x.data_ptr()) % ALIGNMENT_BYTES == 0


def is_trusted(
    kind: Kind,
    device: torch.device,
    tried: dict[Kind, bool],
    fault_of: Callable[[Kind], str | None],
    log: logging.Logger,
    gemm: str,
    instead: str = "Triton's",
) -> bool:
    """Whether GEMMs of a kind are right, as far as known or by a trial, which `tried` keeps.

    fault_of: runs small GEMMs of the kind; returns what is wrong with their results, or None. A fault is logged as a warning
    about `gemm`, with what runs `instead`. A trial launches kernels and waits for them; while a CUDA graph is being captured,
    which allows no waiting, what has not been tried is not trusted.
    """
    if kind not in tried:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        fault = fault_of(kind)
        tried[kind] = fault is None
        if fault is not None:
            log.warning("%s is not used for %s, %s is: %s", gemm, kind, instead, fault)
    return tried[kind]


def fault_of(
    compute: Callable[[], torch.Tensor], expected: torch.Tensor, tolerance: float, valid: slice = slice(None)
) -> str | None:
    """What is wrong with the `valid` rows of a GEMM's result, or None. tolerance: the largest relative error, in the Frobenius
    norm."""
    try:
        out = compute()[valid].cpu().float()
    except (RuntimeError, ValueError) as raised:  # torch's and cuBLAS's for a GEMM that they do not have
        return f"it raises {str(raised).splitlines()[0]}"
    error = float((out - expected[valid]).norm() / expected[valid].norm())
    return None if error <= tolerance else f"its relative error is {error:.2g}"
