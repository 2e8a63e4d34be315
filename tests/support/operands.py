"""The operands of FP8 GEMMs as they run: what a compiled model's GEMMs are given on the CPU, in order."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from lowering.operation import NAMESPACE


@dataclasses.dataclass(frozen=True)
class Gemm:
    """An FP8 GEMM's operands: a [M, K] and b [N, K], of groups with the batch first, and their scales as they are given."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Gemm]]:
    """Record every FP8 GEMM that runs on the CPU, with backend="aot_eager" those of the forward in the order of the graph."""
    gemms: list[Gemm] = []

    def recording(name: str, implementation: Any) -> Any:
        def of_device(device: torch.device) -> Any:
            run = implementation(device)

            def record(a: Any, b: Any, scale_a: Any, scale_b: Any, *args: Any, **options: Any) -> Any:
                offs = args[0] if "grouped" in name else None
                gemms.append(Gemm(name, a.clone(), b.mT.clone(), scale_a.clone(), scale_b.clone(), offs))
                return run(a, b, scale_a, scale_b, *args, **options)

            return record

        return of_device

    with contextlib.ExitStack() as stack:
        for name, operation in NAMESPACE.operations.items():
            if name.startswith("scaled_"):
                stack.enter_context(mock.patch.object(operation, "implementation", recording(name, operation.implementation)))
        yield gemms
