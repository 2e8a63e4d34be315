"""The arguments of an FP8 GEMM as one value, and GEMMs in plain torch: accumulated in float32, rounded once. These are what
kernels of every kind of scaling are held against."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch

from lowering import hardware
from lowering.formats import Granularity, round_up
from lowering.scaling import dequantize


@dataclasses.dataclass(frozen=True)
class Product:
    """a [M, K] @ b [K, N] of FP8 matrices with their scales, + bias [N]: the arguments of the operations, by their names."""

    a: torch.Tensor
    b: torch.Tensor
    scale_inv_a: torch.Tensor
    scale_inv_b: torch.Tensor
    bias: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    out_dtype: torch.dtype = torch.bfloat16
    granularity_a: str = "tensor_wise"
    granularity_b: str = "tensor_wise"
    fast_accum: bool = False

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        return Granularity(self.granularity_a), Granularity(self.granularity_b)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.a.shape[0], self.b.shape[1], self.a.shape[1]

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """None without a bias."""
        return None if self.bias is None else self.bias.dtype

    def on(self, device: torch.device) -> Self:
        """This product with its tensors on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **tensors)

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors: what a `Compute` takes."""
        return self.a, self.b, self.scale_inv_a, self.scale_inv_b, self.bias

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are no tensors."""
        return {name: getattr(self, name) for name in ("out_dtype", "granularity_a", "granularity_b", "fast_accum")}

    def gemm(self, granularity_a: Granularity, granularity_b: Granularity, multiple: int = 1) -> hardware.Gemm:
        """The hardware's GEMM, with M rounded up to a multiple."""
        m, n, k = self.sizes
        dtypes = self.out_dtype, self.bias_dtype
        return hardware.Gemm(self.a.dtype, self.b.dtype, granularity_a, granularity_b, *dtypes, round_up(m, multiple), n, k)


Compute = Callable[..., torch.Tensor]  # a, b, their scales and the bias or None -> the product.


def as_told(compute: Callable[[Product], torch.Tensor]) -> Callable[[Product], Compute]:
    """What computes products like a given one, by a function that decides nothing beforehand."""

    def prepare(like: Product) -> Compute:
        options = like.options
        return lambda *operands: compute(Product(*operands, **options))

    return prepare


def of_tensors(product: Product) -> torch.Tensor:
    """With a scalar scale each; [M, N]."""
    out = product.a.to(torch.float32) @ product.b.to(torch.float32)
    return finished(out * (product.scale_inv_a * product.scale_inv_b), product)


def of_lines(product: Product) -> torch.Tensor:
    """With a scale for each row of a [M, 1] and each column of b [N, 1]; either may be a scalar."""
    return scaled_lines(product.a.to(torch.float32) @ product.b.to(torch.float32), product)


def of_blocks(product: Product, granularities: tuple[str, str]) -> torch.Tensor:
    """With compact scales of blocks, of a and of the copy [N, K] whose transpose b is."""
    a = dequantize(product.a, product.scale_inv_a, granularities[0])
    b = dequantize(product.b.t(), product.scale_inv_b, granularities[1])
    return finished(a @ b.t(), product)


def scaled_lines(out: torch.Tensor, product: Product) -> torch.Tensor:
    """A float32 product of the operands, times the scales of its rows and columns."""
    return finished(out * product.scale_inv_a.reshape(-1, 1) * product.scale_inv_b.reshape(1, -1), product)


def finished(out: torch.Tensor, product: Product) -> torch.Tensor:
    """A float32 product of the scaled operands, with the bias added, of any float dtype, and rounded."""
    bias = product.bias
    return (out if bias is None else out + bias.to(torch.float32)).to(product.out_dtype)
