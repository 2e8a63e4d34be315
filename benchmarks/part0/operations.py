"""Every registered operation against its reference, by the samples of `samples`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import lowering  # noqa: F401 (registers the operations)
from benchmarks.correctness import relative_error
from benchmarks.part0.cases import Case, Found, skip_if, within
from benchmarks.part0.samples import Sample, samples
from lowering import hardware
from lowering.operation import NAMESPACE, Operation


def cases(on: torch.device) -> Iterator[Case]:
    """The cases of all operations; of one without samples, one that says so."""
    for name, operation in NAMESPACE.operations.items():
        found = samples(name, on)
        if not found:
            yield Case(f"{name}: no sample", functools.partial(_missing, name))
        for sample in found:
            yield Case(f"{name}: {sample.name}", functools.partial(compare, operation, sample, on))


def _missing(name: str) -> Found:
    raise AssertionError(f"nothing is known of {name}: add a sample to benchmarks/part0/samples.py")


def compare(operation: Operation[..., Any], sample: Sample, on: torch.device) -> Found:
    """Call the operation as users' code does, and the reference; results and what is written to must agree."""
    skip_if(mx_obstacle(on) if sample.needs_mx else None)
    results = called(operation.overload, sample)
    given, options = operation.picked(sample.arguments, sample.options)
    if sample.bound is None:
        expected_results = called(operation.reference, Sample("", given, options))
        if sample.sums is not None:
            return within(max(map(largest_error, results, expected_results)), sample.sums)
        require_same(results, expected_results, sample.is_unordered)
        return {"compared": len(results)}
    exact = {**options, "out_dtype": torch.float32}
    exact.pop("implementation", None)
    (expected, *_), (found, *_) = called(operation.reference, Sample("", given, exact)), results
    return within(relative_error(found[: sample.valid], expected[: sample.valid]), sample.bound)


def mx_obstacle(on: torch.device) -> str | None:
    """Why 1x32 blocks have no GEMM on a device, or None."""
    needs_one = on.type == "cuda" and not hardware.has_mx_scaled_mm(on)
    return "1x32 blocks need compute capability 10.0" if needs_one else None


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of any element; equal infinities have none."""
    error = torch.where(found == expected, 0.0, ((found - expected) / expected).abs())
    return float(torch.where(error.isnan(), torch.inf, error).max())


def called(function: Any, sample: Sample) -> list[torch.Tensor]:
    """Its results; of an operation that has none, its arguments as it left them: copies of the sample's, with their strides."""
    arguments, options = tree_map(lambda x: _copy(x) if isinstance(x, torch.Tensor) else x, (sample.arguments, sample.options))
    results = function(*arguments, **options)
    return [x for x in tree_leaves((arguments, options) if results is None else results) if isinstance(x, torch.Tensor)]


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Copy the elements with their strides; a tensor that repeats elements is returned, for nothing writes to one."""
    if 0 in x.stride() and x.numel() > 1:
        return x
    copied = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copied.copy_(x) if x.element_size() > 1 else (copied.view(torch.uint8).copy_(x.view(torch.uint8)), copied)[1]


def require_same(results: list[torch.Tensor], expected: list[torch.Tensor], is_unordered: bool) -> None:
    """Dtypes, shapes, strides where they matter, and bits, whatever a NaN's sign and payload."""
    if len(results) != len(expected):
        raise AssertionError(f"{len(results)} tensors instead of {len(expected)}")
    for i, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            raise AssertionError(f"result {i} is {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}")
        strides = [[stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (found, wanted)]
        if wanted.numel() and strides[0] != strides[1]:
            raise AssertionError(f"result {i} has strides {found.stride()}, not {wanted.stride()}")
        pair = [found.reshape(-1), wanted.reshape(-1)]
        if is_unordered and found.dtype == torch.float32:
            pair = [x.sort().values for x in pair]
        if found.is_floating_point():
            nan = [x.float().isnan() for x in pair]
            if not torch.equal(*nan):
                raise AssertionError(f"result {i}: NaN in other places")
            pair = [_bits(x).masked_fill(where, 0) for x, where in zip(pair, nan, strict=True)]
        different = int((pair[0] != pair[1]).sum())
        if different:
            raise AssertionError(f"result {i}: {different} of {found.numel()} elements differ")


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
