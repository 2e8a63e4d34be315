"""Casts, compared with the reference when a variant of their kernels is launched for the first time.

NOTE [second line] The analysis of the machine code (tests/machine_code) holds for the assemblers that it was run with, and a
user may choose another one. So what it makes is tried: the cast of a small matrix, for which Triton takes the same variant, has
to have the bytes of the reference. GEMMs of other libraries are tried likewise (lowering/trials.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lowering.formats import FP8_MAX
from lowering.triton import ahead
from lowering.triton.ahead import Described
from lowering.triton.assembler import choose

#: Hashes of variants that were launched in a trial.
_TRIED: set[str] = set()


class MiscompiledKernel(RuntimeError):
    """A kernel writes other bytes than the reference. The message names the kernel, Triton, ptxas, and what to do."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def tried(
    function: Callable[..., Any], reference: Callable[..., Any], adjust: Callable[..., Arguments] | None = None
) -> Callable[..., Any]:
    """A function that launches casts, as it is, but that the first launch of each variant on a GPU is followed by a trial.
    adjust: makes arguments of small random tensors consistent, where their sizes and values are not independent. Raises
    MiscompiledKernel if the trial's FP8 results differ from those of `reference`. Nothing is tried while a CUDA graph is
    captured, which allows no waiting; the variant's next launch is its first then."""

    @functools.wraps(function)
    def launch(*args: Any, **options: Any) -> Any:
        if ahead.compiles_only():
            return function(*args, **options)
        result, launched = ahead.with_launches(function, args, options)
        for kernel in launched:
            if kernel is not None and kernel.hash not in _TRIED and not torch.cuda.is_current_stream_capturing():
                _try(function, reference, adjust, args, options)
                _TRIED.update(kernel.hash for kernel in launched if kernel is not None)
        return result

    return launch


def _try(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    adjust: Callable[..., Arguments] | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    args, options = small_arguments(args, options)
    if adjust is not None:
        args, options = adjust(*args, **options)
    found, launched = ahead.with_launches(function, args, options)
    expected = reference(*args, **options)
    for position, (ours, theirs) in enumerate(zip(tree_leaves(found), tree_leaves(expected), strict=True)):
        if ours.dtype in FP8_MAX and not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise MiscompiledKernel(_message(function.__name__, position, ours, theirs, launched))
    _TRIED.update(kernel.hash for kernel in launched)


def small_arguments(args: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
    """The arguments of a call with small random tensors instead of its own. Of a list, two matrices of each kind are kept, and
    two of a batch: as many as tell several from one."""
    tensors = [x for x in tree_leaves((args, options)) if isinstance(x, torch.Tensor)]
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    lists = [x for x in (*args, *options.values()) if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
    layouts = [[small_layout(x, is_in_list=True) for x in each] for each in lists]
    kinds = list(zip(*layouts, strict=True))  # a matrix, and its scale
    kept = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2]

    def small(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return filled(small_layout(x), generator)
        position = next((i for i, each in enumerate(lists) if each is x), None)
        return x if position is None else [filled(layouts[position][i], generator) for i in kept]

    return tuple(map(small, args)), {name: small(x) for name, x in options.items()}


def small_size(size: int) -> int:
    """At most 2175, and equal to `size` in whatever kernels are compiled for: whether it is 1, whether 16 divides it, its
    blocks of 128 or 32, or the former rounded up to 4, and whether tiles are whole."""
    blocks, rest = divmod(size, 128)
    if blocks % 16 == 0:
        return min(blocks, 16) * 128 + rest
    if blocks % 16 > 12:
        return (15 if blocks % 16 == 15 else 13) * 128 + rest  # with a rest, 15 are 16 tiles
    return min(blocks, 4 if blocks % 4 == 0 else 2) * 128 + rest


def small_layout(x: torch.Tensor, is_in_list: bool = False) -> Described:
    """A small one for which Triton compiles what it compiles for x. It is of `small_size`, its strides keep their order and
    what they exceed a multiple of 16 by, at an address that keeps what it exceeds one of 16 bytes by. is_in_list: x is a
    matrix, a batch, or the scale of one. The matrices of a batch are a dimension of the grid: nothing is compiled for their
    number. Another tensor of three or more dimensions is cast as a matrix whose sizes are products of its own, of which nothing
    matters but what they exceed a multiple of 16 by."""
    if is_in_list and x.dim() in (1, 3):
        x = x[:2]
    is_flattened = not is_in_list and x.dim() > 2
    sizes = [min(size, 16 + size % 16) if is_flattened else small_size(size) for size in x.shape]
    strides, extent = [0] * x.dim(), 0
    for d in sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d])):
        stride = x.stride(d)
        strides[d] = stride if stride < 2 else max(extent, 1) + (stride - max(extent, 1)) % 16
        extent = max(extent, 1 + sum(s * max(size - 1, 0) for s, size in zip(strides, sizes, strict=True)))
    return Described(tuple(sizes), tuple(strides), x.dtype, x.data_ptr() % 16 // x.element_size())


def filled(layout: Described, generator: torch.Generator) -> torch.Tensor:
    """A tensor of random elements, where the generator is."""
    sizes, strides, dtype, offset = layout.size, layout.stride, layout.dtype, layout.misalignment
    extent = 1 + sum(stride * max(size - 1, 0) for stride, size in zip(strides, sizes, strict=True))
    values = torch.randn(extent + offset + 1, generator=generator, device=generator.device)
    if len(sizes) < 2:
        values = values.abs() + 0.5  # scales
    if dtype in FP8_MAX:
        values = values.clamp(-FP8_MAX[dtype], FP8_MAX[dtype])
    return values.to(dtype).as_strided(sizes, strides, offset)


def _message(name: str, position: int, ours: torch.Tensor, theirs: torch.Tensor, launched: list[Any]) -> str:
    import triton

    wrong = int((ours.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    kernels = ", ".join(dict.fromkeys(kernel.name for kernel in launched))
    arch = launched[-1].metadata.target.arch
    return (
        f"lowering::{name} wrote {wrong} of {ours.numel()} bytes of its result {position} wrongly in a trial: {kernels},"
        f" compiled by Triton {triton.__version__} and {choose(arch)}. Take ptxas 13.0 or newer: pip install nvidia-cuda-nvcc,"
        " and TRITON_PTXAS_PATH=<its bin/ptxas> in the environment. `python -m lowering.triton.check` shows details"
    )
