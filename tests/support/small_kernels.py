"""Kernels around a device function of all kernels, so that it can be called: they quantize, and count tiles. Imports Triton."""

import torch
import triton
import triton.language as tl

from benchmarks.variants import Launch, compile_launch
from lowering.formats import E5M2
from lowering.triton.tile import as_float32, fp8_bits, tiles_of


@triton.jit
def quantize_kernel(x, scale, out, IS_E5M2: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, fp8_bits(as_float32(tl.load(x + i)), tl.load(scale), IS_E5M2))


def compiled_conversion(x: torch.Tensor, dtype: torch.dtype, arch: int, block: int, threads: int) -> str:
    """PTX that quantizes x without branches, `block` elements a program."""
    out, scale = torch.empty(x.shape, dtype=torch.uint8), torch.ones(())
    arguments = {"x": x, "scale": scale, "out": out, "IS_E5M2": dtype == E5M2, "BLOCK": block}
    launch = Launch(quantize_kernel, arguments, {"num_warps": threads // 32}, x.numel() // block)
    return compile_launch(launch, arch).asm["ptx"]


@triton.jit
def count(out, size, BLOCK: tl.constexpr):
    """out = the number of tiles."""
    tl.store(out, tiles_of(size, BLOCK))
