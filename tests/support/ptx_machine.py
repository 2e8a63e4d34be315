"""Executes PTX on numpy arrays, a lane for each thread: the few instructions that conversions to FP8 are made of.

Written after the PTX ISA (8.7) alone, apart from torch and from Triton. Anything else than these instructions raises.
"""

import re
from collections.abc import Callable
from typing import Any

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


def run_kernel(ptx: str, programs: int, threads: int, parameters: list[np.ndarray]) -> None:
    """A kernel without branches. parameters: contiguous uint8 arrays, the memory that its pointers point at."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.index("ret;")]
    body = re.sub(r"//[^\n]*|^\s*\.(loc|file|reg)\b[^\n]*|^\$\w+:", "", body, flags=re.MULTILINE)
    lanes = np.arange(programs * threads, dtype=np.uint64)
    registers = {"%tid.x": lanes % np.uint64(threads), "%ctaid.x": lanes // np.uint64(threads)}
    sizes = [memory.size for memory in parameters]
    starts = np.cumsum([_PAGE, *(size + _PAGE for size in sizes)])[:-1]
    memory = np.zeros(int(starts[-1]) + sizes[-1], np.uint8)
    for start, given in zip(starts, parameters, strict=True):
        memory[start : start + given.size] = given
    name = re.search(r"\.entry (\w+)", ptx)
    assert name is not None
    for i, start in enumerate(starts):
        registers[f"{name[1]}_param_{i}"] = np.full(lanes.shape, start, np.uint64)
    execute(body, registers, memory)
    for start, given in zip(starts, parameters, strict=True):
        given[:] = memory[start : start + given.size]


_PAGE = 4096


def execute(ptx: str, registers: Registers, memory: np.ndarray | None = None) -> None:
    """Instructions one after the other; what a scope in braces declares is seen outside, too."""
    for statement in re.sub(r"\{\s*(?=\.reg)|\}\s*(?=$|\n)", "", ptx).split(";"):
        text = " ".join(statement.split())
        if not text or text == "}" or text.startswith(".reg"):
            continue
        opcode, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if re.fullmatch(r"(ld|st)\.global(\.v[24])?\.b(8|16|32)", opcode):
            assert memory is not None
            _access(opcode, operands, registers, memory)
        elif opcode == "ld.param.b64":
            registers[operands[0]] = registers[operands[1].strip("[] ")]
        elif opcode == "mov.b32" and operands[1].startswith("{"):
            low, high = (registers[name] for name in _names(operands[1]))
            registers[operands[0]] = low | high << np.uint64(16)
        else:
            if opcode not in _INSTRUCTIONS:
                raise NotImplementedError(f"PTX instruction {text!r}")
            registers[operands[0]] = _INSTRUCTIONS[opcode](*(_value(x, registers) for x in operands[1:]))


def _names(group: str) -> list[str]:
    return [name.strip() for name in group.strip("{} ").split(",")]


def _value(text: str, registers: Registers) -> Any:
    if text in registers:
        return registers[text]
    if text.startswith("0f"):
        return np.array([int(text[2:], 16)], np.uint64)
    return np.array([int(text, 0) % 2**64], np.uint64)


def _access(opcode: str, operands: list[str], registers: Registers, memory: np.ndarray) -> None:
    width = int(opcode.rsplit("b", 1)[1]) // 8
    address, group = (operands[1], operands[0]) if opcode.startswith("ld") else (operands[0], operands[1])
    base, _, offset = address.strip("[] ").partition("+")
    places = (registers[base.strip()] + np.uint64(int(offset or 0))).astype(np.int64)
    for i, name in enumerate(_names(group)):
        at = places[:, None] + i * width + np.arange(width)
        if opcode.startswith("ld"):
            lanes = np.zeros((len(places), 8), np.uint8)
            lanes[:, :width] = memory[at]
            registers[name] = lanes.view(np.uint64)[:, 0]
        else:
            value = np.ascontiguousarray(np.broadcast_to(registers[name], places.shape))
            memory[at] = value.view(np.uint8).reshape(-1, 8)[:, :width]


# -- instructions: operands and results are bits


def _float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)


def _word(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A value of 32 bits."""
    return lambda *operands: function(*operands) & np.uint64(0xFFFFFFFF)


def _signed(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.int32).astype(np.int64)


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _bits(_float(a) * _float(b))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Exact where c is a zero or NaN: float64 holds the product, and the sum is rounded once."""
    addend = _float(c)
    if not ((addend == 0) | np.isnan(addend)).all():
        raise NotImplementedError("fma with an addend other than zero and NaN")
    with np.errstate(all="ignore"):
        return _bits(_float(a).astype(np.float64) * _float(b) + addend)


def _mad_wide(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (_signed(a) * _signed(b) + c.astype(np.int64)).astype(np.uint64)


def _to_fp8(name: str, bits: np.ndarray) -> np.ndarray:
    """.rn.satfinite of float32: ties to the even code; beyond the largest finite value, that value; NaN is 0x7F."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        value = _float(bits).astype(np.float64)
    return np.where(np.isnan(value), 0x7F, codes_of(value, {"e4m3": E4M3, "e5m2": E5M2}[name])).astype(np.uint64)


def _pair(name: str) -> Callable[..., np.ndarray]:
    return lambda upper, lower: _to_fp8(name, upper) << np.uint64(8) | _to_fp8(name, lower)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.u32": lambda a: a,
    "and.b32": _word(np.bitwise_and),
    "or.b32": _word(np.bitwise_or),
    "shl.b32": _word(np.left_shift),
    "cvt.s64.s32": lambda a: _signed(a).astype(np.uint64),
    "add.s64": np.add,
    "mad.wide.s32": _mad_wide,
    "mul.f32": _multiply,
    "fma.rn.f32": _fma,
    "cvt.rn.satfinite.e4m3x2.f32": _pair("e4m3"),
    "cvt.rn.satfinite.e5m2x2.f32": _pair("e5m2"),
}
