"""The error that quantization adds to a product, with operands as a rewritten graph has them."""

from __future__ import annotations

import dataclasses

import torch

from fp8pass.graph.names import Kind
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.eager import rounded


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The quantization of an operand."""

    quantization: Quantization
    kind: Kind
    recipe: Recipe

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A matrix [outer, inner], or a batch of them, as FP8 holds it."""
        return rounded(x, self.recipe, self.quantization, self.kind)


def product_error(
    a: torch.Tensor, b: torch.Tensor, of_a: Rounding, of_b: Rounding, offs: torch.Tensor | None = None
) -> torch.Tensor:
    """The error that quantizing both operands adds to a [m, k] @ b [k, n], or to their batched product: float32, of its shape.

    offs: where the groups of a grouped product end, among the rows of a, or, of two matrices, along what is summed over. Rows
    behind the last group are zeros.
    """
    if offs is None:
        return of_a(a) @ of_b(b.mT).mT - a.float() @ b.float()
    ends = [int(end) for end in offs.tolist()]
    if b.dim() == 2:
        a, b = a[:, : ends[-1]], b[: ends[-1]]
        near_a, near_b = _in_groups(a, of_a, ends), _in_groups(b.mT, of_b, ends).mT
    else:
        a = a.clone()
        a[ends[-1] :] = 0  # they reach no amax that other rows share
        near_a, near_b = of_a(a), of_b(b.mT).mT
    return _grouped(near_a, near_b, ends) - _grouped(a.float(), b.float(), ends)


def _in_groups(x: torch.Tensor, rounding: Rounding, ends: list[int]) -> torch.Tensor:
    """[outer, slots]: one scale is that of all groups, and blocks along the slots begin with each group."""
    if rounding.quantization.has_one_scale:
        return rounding(x)
    return torch.cat([rounding(x[:, part]) for part in _parts(ends)], 1)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    if b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in _parts(ends)])
    product = a.new_zeros(len(a), b.shape[-1])
    for part, matrix in zip(_parts(ends), b, strict=True):
        product[part] = a[part] @ matrix
    return product


def _parts(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
