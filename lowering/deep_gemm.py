"""The package `deep_gemm`, which is used where it is installed, and what it asks of every GEMM (SM90)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
from typing import Any

import torch

from lowering import hardware
from lowering.formats import BLOCK, E4M3, GEMM_ALIGNMENT

log = logging.getLogger(__name__)

#: The compute capability that it is used on.
CAPABILITY = (9, 0)

#: Its words for scales: rows of a, rows of b, and K that share one. 1x128 by 128x128, and 1x128 by 1x128.
BY_SQUARES, BY_LINES = (1, BLOCK, BLOCK), (1, 1, BLOCK)


@functools.cache
def library() -> Any:
    """The package, or None where it is not installed or cannot be loaded, which is logged."""
    if not is_installed():
        return None
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:  # built for another torch or CUDA, asserts CUDA_HOME, ...: others compute these GEMMs, too
        log.warning("deep_gemm is installed but cannot be loaded, and is not used: %s", str(error) or type(error).__name__)
        return None


def is_installed() -> bool:
    """True if there is a package of that name, which may not load."""
    return importlib.util.find_spec("deep_gemm") is not None


def call(function: str, device: torch.device, *args: Any, **options: Any) -> None:
    """Call a function of the package, which launches on the current device, with that of its tensors as the current one."""
    compute = getattr(library(), function)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        compute(*args, **options)
        return
    with torch.cuda.device(device):
        compute(*args, **options)


def refusal(a: torch.Tensor, b: torch.Tensor, function: str) -> str | None:
    """Why no `function` of DeepGEMM multiplies a [.., M, K] by b [.., K, N], whatever their scales; None where it may."""
    n, k = b.shape[-1], a.shape[-1]
    if hardware.cuda_capability(a.device) != CAPABILITY:
        return f"it is used on compute capability 9.0, which {a.device} does not have"
    if (a.dtype, b.dtype) != (E4M3, E4M3):
        return f"it takes only float8_e4m3fn, not {a.dtype} by {b.dtype}"
    if 0 in (*a.shape, n) or n % GEMM_ALIGNMENT or k % GEMM_ALIGNMENT:
        return f"N {n} and K {k} are not multiples of {GEMM_ALIGNMENT} above 0, or M is 0"
    if not (_is_dense(a) and _is_dense(b.mT)):
        return f"strides of a {a.stride()} and b {b.stride()} are not row-major and column-major"
    found = library()
    if found is None:
        return f"the package deep_gemm {'cannot be loaded' if is_installed() else 'is not installed'}"
    return None if hasattr(found, function) else f"this release of deep_gemm has no {function}"


def _is_dense(x: torch.Tensor) -> bool:
    """True if strides are those of contiguous memory, in dimensions of one element, too: TMA is told of them."""
    return x.stride() == tuple(math.prod(x.shape[i + 1 :]) for i in range(x.dim()))
