"""The resources that a GPU gives a program of a kernel, and the tiles of GEMMs that fit: the one place where a device decides
on a tile.

Sources: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications (shared memory); PTX
ISA, "Tensor Memory" (columns).
"""

from __future__ import annotations

import dataclasses

import torch

from lowering import hardware
from lowering.formats import BLOCK

#: Stages of the loop along K, beyond which loads only wait longer for their use.
MOST_STAGES = 4
#: Bytes beside the stages of operands: a factor for each of 128 columns (`one_per_thread`), and barriers.
BESIDE_STAGES = 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a program on one kind of device."""

    shared_memory: int  # Bytes of shared memory that it may ask for.
    has_operands_in_registers: bool = False
    """True if tensor cores read operands from registers (mma.sync). Triton then moves one stage there before its products, so
    that shared memory holds one less. Otherwise they read shared memory (wgmma, tcgen05)."""
    tensor_memory: int = 0  # Columns.
    warps_of_64_rows: int = 8
    """The warps of a GEMM's tile. One warp group multiplies it on SM90; elsewhere four warps would spill."""


#: The limits of the GPUs that kernels are compiled for without one.
BY_CAPABILITY = {
    (8, 9): Limits(99 * 1024, has_operands_in_registers=True),
    (9, 0): Limits(227 * 1024, warps_of_64_rows=4),
    (10, 0): Limits(227 * 1024, tensor_memory=512),
    (12, 0): Limits(99 * 1024, has_operands_in_registers=True),
}


def of_device(device: torch.device) -> Limits:
    """The limits of a CUDA device, whose driver tells its shared memory if it has no entry; of all others those of SM90."""
    capability = hardware.cuda_capability(device)
    if capability is None:
        return BY_CAPABILITY[9, 0]
    if capability in BY_CAPABILITY:
        return BY_CAPABILITY[capability]
    return Limits(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def tile_of_gemm(rows: int, limits: Limits, is_wide: bool = False, adds_to_lines: bool = False) -> dict[str, int]:
    """Tile and launch options of an FP8 GEMM whose output, or group of it, has so many rows. Eight warps share 128 rows: four
    would hold a product and a sum of 128 registers each, and spill. is_wide: 256 columns, if the device has room for all stages
    of them, and registers. Their sum takes 128 of a thread, which leaves none for operands, nor, where it comes from tensor
    memory, for factors of lines beside a bias (`adds_to_lines`)."""
    height = 64 if rows <= 64 else BLOCK
    has_registers = not (limits.has_operands_in_registers or (limits.tensor_memory and adds_to_lines))
    is_wide = is_wide and height == BLOCK and has_registers
    width = 2 * BLOCK if is_wide and stages(height, 2 * BLOCK, limits) == MOST_STAGES else BLOCK
    num_warps = limits.warps_of_64_rows if height == 64 else 8
    return {"BLOCK_M": height, "BLOCK_N": width, "num_warps": num_warps, "num_stages": stages(height, width, limits)}


def stages(height: int, width: int, limits: Limits) -> int:
    """The number of stages of a tile that fit, at most MOST_STAGES."""
    in_shared_memory = (limits.shared_memory - BESIDE_STAGES) // ((height + width) * BLOCK)
    return min(MOST_STAGES, in_shared_memory + limits.has_operands_in_registers)
