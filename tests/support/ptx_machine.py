"""Executes PTX on numpy arrays, a lane for each thread: the few instructions that conversions to FP8 are made of.

Written after the PTX ISA (8.7) alone, apart from torch and from Triton. Anything else than these instructions raises.
"""

import re
from collections.abc import Callable

import numpy as np

from lowering.formats import E4M3, E5M2
from tests.support.fp8 import codes_of

Registers = dict[str, np.ndarray]
"""Name -> bits of each lane, as uint64."""


def run_piece(ptx: str, operands: list[np.ndarray], pack: int) -> np.ndarray:
    """`tl.inline_asm_elementwise` with one word of `pack` bytes as its result: float32 operands [n] -> uint8 [n]."""
    (values,) = operands
    (count,) = values.shape
    padded = np.pad(values.astype(np.float32), (0, -count % pack)).reshape(-1, pack)
    registers = {f"${1 + i}": padded[:, i].copy().view(np.uint32).astype(np.uint64) for i in range(pack)}
    execute(ptx, registers)
    words = registers["$0"].astype(np.uint32)
    return words.view(np.uint8)[:count]


def execute(ptx: str, registers: Registers) -> None:
    """Instructions one after the other; what a scope in braces declares is seen outside, too."""
    for statement in re.sub(r"\{\s*(?=\.reg)|\}\s*(?=$|\n)", "", ptx).split(";"):
        text = " ".join(statement.split())
        if not text or text == "}" or text.startswith(".reg"):
            continue
        opcode, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if opcode == "mov.b32" and operands[1].startswith("{"):
            low, high = (registers[name] for name in _names(operands[1]))
            registers[operands[0]] = low | high << np.uint64(16)
        else:
            if opcode not in _INSTRUCTIONS:
                raise NotImplementedError(f"PTX instruction {text!r}")
            registers[operands[0]] = _INSTRUCTIONS[opcode](*(registers[name] for name in operands[1:]))


def _names(group: str) -> list[str]:
    return [name.strip() for name in group.strip("{} ").split(",")]


def _to_fp8(name: str, bits: np.ndarray) -> np.ndarray:
    """.rn.satfinite of float32: ties to the even code; beyond the largest finite value, that value; NaN is 0x7F."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        value = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isnan(value), 0x7F, codes_of(value, {"e4m3": E4M3, "e5m2": E5M2}[name])).astype(np.uint64)


def _pair(name: str) -> Callable[..., np.ndarray]:
    return lambda upper, lower: _to_fp8(name, upper) << np.uint64(8) | _to_fp8(name, lower)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "cvt.rn.satfinite.e4m3x2.f32": _pair("e4m3"),
    "cvt.rn.satfinite.e5m2x2.f32": _pair("e5m2"),
}
