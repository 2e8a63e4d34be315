"""Kernels compiled ahead: the variants that a graph launches, in threads, while Inductor generates the rest of its code.

NOTE [a call on paper] Which variant a launch needs follows from dtypes, sizes, strides and alignments alone. So the launch
wrapper runs on tensors of the meta device, in a thread in which kernels compile instead of being launched (`Kernel`). The
first launch of any kernel waits for all that are under way. What was foreseen wrongly, such as an address that is no
multiple of 16 bytes, compiles at its launch, as it would without.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from lowering.triton.assembler import assemble_anew

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Compilations at a time. Each holds Python's lock for a part of its time, so that more threads gain nothing.
THREADS = 8


@dataclasses.dataclass(frozen=True)
class Described:
    """The properties of a tensor without its elements, which are all that a launch wrapper may know."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    misalignment: int = 0  # Elements between the last multiple of 16 bytes and its first element.

    def on_paper(self) -> torch.Tensor:
        last = sum(stride * (size - 1) for size, stride in zip(self.size, self.stride, strict=True)) if all(self.size) else -1
        memory = torch.empty(self.misalignment + last + 1, dtype=self.dtype, device="meta")
        return memory.as_strided(self.size, self.stride, self.misalignment)


def described(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int) -> Described:
    """Describe a tensor that begins so many elements behind an aligned address."""
    return Described(tuple(map(int, size)), tuple(map(int, stride)), dtype, int(offset) % (16 // dtype.itemsize))


_THREAD = threading.local()  # `compiles`: True while it compiles ahead. `launched`: the kernels that `with_launches` collects.
_LOCK = threading.Lock()
_SUBMITTED: set[str] = set()
_UNDER_WAY: list[concurrent.futures.Future[None]] = []
_POOL: list[concurrent.futures.ThreadPoolExecutor] = []


class Kernel:
    """A kernel of Triton's that compiles and launches nothing in a thread that compiles ahead: kernel[grid](...). jit: Triton's
    function. What it compiles is assembled by the ptxas that `assembler` chooses."""

    def __init__(self, jit: Any) -> None:
        assemble_anew(jit)
        self.jit = jit
        self.__name__ = jit.fn.__name__
        self.__doc__ = jit.fn.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if compiles_only():
            return lambda *args, **options: self.jit.warmup(*args, grid=grid, **options)
        if _UNDER_WAY:
            wait()
        run, launched = self.jit.run, getattr(_THREAD, "launched", None)
        if launched is None:
            return lambda *args, **options: run(*args, grid=grid, warmup=False, **options)
        # What `self.jit[grid]` calls is called here, because another function around it would pass on all arguments again.
        return lambda *args, **options: launched.append(run(*args, grid=grid, warmup=False, **options))


def with_launches(function: Callable[..., T], args: Iterable[Any], options: Mapping[str, Any]) -> tuple[T, list[Any]]:
    """The results of a call, and Triton's compiled kernels that it launches in this thread, in order."""
    found: list[Any] = []
    before = getattr(_THREAD, "launched", None)
    _THREAD.launched = found
    try:
        return function(*args, **options), found
    finally:
        _THREAD.launched = before


def compiles_only() -> bool:
    """True if this thread compiles ahead."""
    return getattr(_THREAD, "compiles", False)


def compile_ahead(launch: Callable[..., Any], name: str, device: torch.device, args: Iterable[Any], options: Any) -> None:
    """Compile what `launch` launches on a CUDA device for these arguments, which have `Described` instead of tensors.
    Once for equal arguments; returns at once."""
    arguments, options = tuple(args), dict(options)
    key = repr((name, device, arguments, options))
    with _LOCK:
        if key in _SUBMITTED:
            return
        _SUBMITTED.add(key)
        if not _POOL:
            _POOL.append(concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "fp8-compile-ahead"))
        _UNDER_WAY.append(_POOL[0].submit(_compile, launch, name, device, arguments, options))


def _compile(launch: Callable[..., Any], name: str, device: torch.device, args: Any, options: Any) -> None:
    try:
        with torch.cuda.device(device):
            on_paper(launch, args, options)
    except Exception as error:  # at its first launch the kernel compiles again, and raises what is wrong
        log.warning("the kernels of %s could not be compiled ahead: %s: %s", name, type(error).__name__, error)


def on_paper(launch: Callable[..., Any], args: Any, options: Any) -> None:
    """Call a launch wrapper on tensors without memory; its kernels compile and do not run."""
    tensors = torch.utils._pytree.tree_map(lambda x: x.on_paper() if isinstance(x, Described) else x, (args, options))
    _THREAD.compiles = True
    try:
        launch(*tensors[0], **tensors[1])
    finally:
        _THREAD.compiles = False


def wait() -> None:
    """Return when nothing is under way."""
    with _LOCK:
        futures = list(_UNDER_WAY)
    concurrent.futures.wait(futures)
    with _LOCK:
        _UNDER_WAY[:] = [future for future in _UNDER_WAY if not future.done()]


def _forget_threads() -> None:
    """A forked process has none of them, and no thread to release the lock if one held it."""
    global _LOCK
    _LOCK = threading.Lock()
    _SUBMITTED.clear()
    _UNDER_WAY.clear()
    _POOL.clear()


os.register_at_fork(after_in_child=_forget_threads)
