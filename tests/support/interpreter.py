"""Triton's interpreter, made to compute what a GPU computes. Only for processes started with TRITON_INTERPRET=1.

NOTE [interpreter's faults] It truncates where it converts to FP8 or bfloat16, loses the carry into the exponent, makes
a number of NaN and widens subnormal bfloat16 wrongly; it knows neither libdevice nor PTX; reductions combine numbers one by
one, in Python; and that of Triton 3.6 makes loop bounds of one-element arrays, which NumPy 2.4 refuses. Each call of a function
patches the whole language anew, and each sum of integers is computed twice for an assertion that is off: most of its time.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from lowering.formats import PACK, ptx_to_fp8
from lowering.triton.tile import larger

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
        mock.patch.multiple(
            interpreter,
            _convert_float=convert,
            _patch_lang_tensor=with_scalar_index,
            _patch_lang=_PatchOnce(interpreter._patch_lang),
        ),
        mock.patch.object(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
        mock.patch.object(interpreter.ReduceOps, "generic_reduce", _reduce),
        mock.patch.object(triton_helpers, "libdevice", _Libdevice()),
        mock.patch.object(tl, "inline_asm_elementwise", inline_asm_elementwise),
    ):
        yield


class _PatchOnce:
    """Patches the language for a kernel. A function that the kernel calls patches only what it sees beyond that."""

    def __init__(self, patch_lang: Callable[[Any], Any]) -> None:
        self.patch_lang = patch_lang
        self.scope: Any = None
        self.patched: frozenset[str] = frozenset()

    def __call__(self, fn: Any) -> Any:
        if self.scope is None:
            self.scope, self.patched = self.patch_lang(fn), _languages(fn)
            restore = self.scope.restore
            self.scope.restore = lambda: self.end(restore)
        elif not _languages(fn) <= self.patched:
            self.scope._changes += self.patch_lang(fn)._changes
            self.patched |= _languages(fn)
        return self.scope

    def end(self, restore: Callable[[], None]) -> None:
        self.scope = None
        restore()


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    return frozenset(x.__name__ for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core))


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """`cvt.rn` and `cvt.rn.satfinite`, computed by torch. Floating types are unsigned integers in `data`."""
    values = torch.from_numpy(np.array(data).reshape(-1).view(np.uint8)).view(_TORCH_DTYPES[source])
    dtype = _TORCH_DTYPES[target]
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.float().clamp(-limit, limit)
    return values.to(dtype).view(torch.uint8).numpy().view(f"uint{8 * dtype.itemsize}").reshape(data.shape)


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: list[Any], dtype: tl.dtype, is_pure: bool, pack: int
) -> tl.core.tensor:
    """`tl.inline_asm_elementwise` of the PTX that converts to FP8, as tests/lowering/test_reference.py proves it."""
    (x,) = args
    assert (x.dtype, dtype, _plain(pack)) == (tl.float32, tl.uint8, PACK)
    values = np.array(x.handle.data)
    found = convert(values, tl.float32, _FP8_OF_PTX[_plain(asm)], None)
    return tl.core.tensor(interpreter.TensorHandle(found, tl.uint8), _like(x))


_FP8_OF_PTX = {ptx_to_fp8(torch.float8_e4m3fn): tl.float8e4nv, ptx_to_fp8(torch.float8_e5m2): tl.float8e5}


def _like(x: tl.core.tensor) -> Any:
    return tl.block_type(tl.uint8, list(x.shape)) if x.shape else tl.uint8


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _reduce(self: Any, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Combines halves, as a GPU does; sizes are powers of two."""
    arrays = [x.handle.data.reshape(-1) if self.axis is None else x.handle.data for x in inputs]
    axis = self.axis or 0
    combine = _maximum(self.combine_fn) if inputs[0].dtype in (tl.float32, tl.int32) else None
    while arrays[0].shape[axis] > 1:
        halves = list(zip(*(np.split(a, 2, axis) for a in arrays), strict=True))
        if combine is not None:
            arrays = [combine(*(half[0] for half in halves))]
            continue
        operands = [self.to_tensor(a, x.dtype) for half in halves for a, x in zip(half, inputs, strict=True)]
        result = self.combine_fn.fn(*operands)
        arrays = [r.handle.data for r in (result if isinstance(result, tuple) else [result])]
    if not self.keep_dims:
        arrays = [a.squeeze(axis) for a in arrays]
    elif self.axis is None:
        arrays = [a.reshape((1,) * inputs[0].handle.data.ndim) for a in arrays]
    return [self.to_tensor(a, x.dtype) for a, x in zip(arrays, inputs, strict=True)]


def _maximum(combine_fn: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """Its result for numbers, in a tenth of the interpreter's time, if it is one of the two maxima that kernels use."""
    from torch._inductor.runtime import triton_helpers

    if combine_fn is triton_helpers.maximum:
        return lambda a, b: np.where((a > b) | (a != a), a, b)
    return np.maximum if combine_fn is larger else None


class _Libdevice:
    """Functions of libdevice: torch's of the same names."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        function = getattr(torch, name)

        def call(*args: tl.tensor) -> tl.tensor:
            operands = [torch.from_numpy(np.array(a.handle.data)) for a in args]
            handle = interpreter.TensorHandle(function(*operands).numpy(), args[0].handle.dtype)
            return tl.core.tensor(handle, args[0].type)

        return call
