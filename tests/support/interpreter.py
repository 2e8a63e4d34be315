"""Triton's interpreter, made to compute what a GPU computes. Only for processes started with TRITON_INTERPRET=1.

NOTE [interpreter's faults] It truncates where it converts to FP8 or bfloat16, loses the carry into the exponent, makes
a number of NaN and widens subnormal bfloat16 wrongly; it knows no libdevice; reductions combine numbers one by one, in
Python; and that of Triton 3.6 makes loop bounds of one-element arrays, which NumPy 2.4 refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


@contextlib.contextmanager
def exact_interpreter() -> Iterator[None]:
    """Inside, none of the interpreter's faults. Conversions round to nearest even, those to FP8 saturate as on a GPU."""
    from torch._inductor.runtime import triton_helpers

    patch_tensor = interpreter._patch_lang_tensor

    def with_scalar_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with (
        mock.patch.multiple(interpreter, _convert_float=convert, _patch_lang_tensor=with_scalar_index),
        mock.patch.object(interpreter.ReduceOps, "generic_reduce", _reduce),
        mock.patch.object(triton_helpers, "libdevice", _Libdevice()),
    ):
        yield


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """What `cvt.rn` and `cvt.rn.satfinite` do, computed by torch. Floating types are unsigned integers in `data`."""
    values = torch.from_numpy(np.array(data).reshape(-1).view(np.uint8)).view(_TORCH_DTYPES[source])
    dtype = _TORCH_DTYPES[target]
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.float().clamp(-limit, limit)
    return values.to(dtype).view(torch.uint8).numpy().view(f"uint{8 * dtype.itemsize}").reshape(data.shape)


def convert_like_sm89(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """`convert`, with float32 to FP8 by way of float16, the first step of it towards zero."""
    if source == tl.float32 and target in (tl.float8e4nv, tl.float8e5):
        values = np.ascontiguousarray(data).view(np.float32)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        too_far = np.abs(half.astype(np.float32)) > np.abs(values)
        data, source = np.where(too_far, np.nextafter(half, np.float16(0)), half), tl.float16
    return convert(data, source, target, rounding_mode)


def _reduce(self: Any, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Combines halves, as a GPU does; sizes are powers of two."""
    arrays = [x.handle.data.reshape(-1) if self.axis is None else x.handle.data for x in inputs]
    axis = self.axis or 0
    while arrays[0].shape[axis] > 1:
        halves = zip(*(np.split(a, 2, axis) for a in arrays), strict=True)
        operands = [self.to_tensor(a, x.dtype) for half in halves for a, x in zip(half, inputs, strict=True)]
        result = self.combine_fn.fn(*operands)
        arrays = [r.handle.data for r in (result if isinstance(result, tuple) else [result])]
    if not self.keep_dims:
        arrays = [a.squeeze(axis) for a in arrays]
    elif self.axis is None:
        arrays = [a.reshape((1,) * inputs[0].handle.data.ndim) for a in arrays]
    return [self.to_tensor(a, x.dtype) for a, x in zip(arrays, inputs, strict=True)]


class _Libdevice:
    """Functions of libdevice: torch's of the same names."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        function = getattr(torch, name)

        def call(*args: tl.tensor) -> tl.tensor:
            operands = [torch.from_numpy(np.array(a.handle.data)) for a in args]
            handle = interpreter.TensorHandle(function(*operands).numpy(), args[0].handle.dtype)
            return tl.core.tensor(handle, args[0].type)

        return call
