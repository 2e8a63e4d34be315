"""The machine instructions of kernels for SM90: what each writes, how wide, and what else it does. Data; no analysis.

An opcode that is not in OPCODES is refused, never taken for harmless. Every entry was read off the disassembly of kernels that
use it; NVIDIA documents only what the opcodes are for.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Effect(enum.Enum):
    """An effect of an instruction besides writing its results."""

    NONE = "none"
    STORE = "store"
    """Registers among the operands are data, also those of an atomic operation."""
    BRANCH = "branch"
    """To a target; falls through if guarded, or if it has a predicate among its operands that is false."""
    CALL = "call"
    RETURN = "return"
    EXIT = "exit"
    JOIN = "join"
    """Threads wait for each other and go on where the barrier says."""


#: A number, or the function that computes it: of results from the operands' texts, of registers from the opcode's modifiers.
Number = int | Callable[[Sequence[str]], int]


def count(number: Number, texts: Sequence[str]) -> int:
    return number if isinstance(number, int) else number(texts)


def is_predicate(text: str) -> bool:
    return re.fullmatch(r"U?P[\dT]", text) is not None


def _and_carries(texts: Sequence[str]) -> int:
    """The first, and predicates right behind it."""
    return next(i for i, text in enumerate(texts) if i and not is_predicate(text))


def _maybe_predicate(texts: Sequence[str]) -> int:
    """The first; the second too if the first is a predicate."""
    return 2 if is_predicate(texts[0]) else 1


def _before_address(texts: Sequence[str]) -> int:
    return next(i for i, text in enumerate(texts) if "[" in text)


_MOVED = {"128": 4, "64": 2, "BF16x8": 4, "F16x8": 4, "BF16x4": 2, "F16x4": 2, "F64": 2}


def _moved(modifiers: Sequence[str]) -> int:
    return next((_MOVED[modifier] for modifier in modifiers if modifier in _MOVED), 1)


def _pair_if(*names: str) -> Number:
    return lambda modifiers: 2 if set(names) & set(modifiers) else 1


def _matrices(modifiers: Sequence[str]) -> int:
    return int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1


def _sums(modifiers: Sequence[str]) -> int:
    """Of 64 rows in four warps, a thread's registers of a shape such as "64x8x32"."""
    return int(modifiers[0].split("x")[1]) // (4 if modifiers[1] == "F16" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opcode:
    """One row of the table."""

    results: Number = 1
    """The operands that are results come first."""
    width: Number = 1
    """Registers of results that are no predicates."""
    reads: tuple[Number, ...] = (1,)
    """Registers of sources by position; the last holds for all that follow."""
    effect: Effect = Effect.NONE


_ROWS: list[tuple[str, Opcode]] = [
    # -- one register of registers
    ("FADD FMUL FFMA FMNMX FMNMX3 FSEL FRND MUFU", Opcode()),  # MUFU.RCP64H reads and writes the upper half of a double
    ("HADD2 HMUL2 HFMA2 HMNMX2 HSET2 VHMNMX", Opcode()),
    ("IABS IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX", Opcode()),
    ("MOV UMOV", Opcode(width=_pair_if("64"), reads=(_pair_if("64"),))),
    ("R2UR SEL USEL SHF USHF SGXT USGXT PRMT UPRMT BMSK BREV", Opcode()),
    ("POPC UPOPC FLO UFLO REDUX I2FP F2FP P2R FCHK", Opcode()),
    ("S2R S2UR", Opcode()),
    ("CS2R", Opcode(width=lambda modifiers: 1 if "32" in modifiers else 2)),
    # -- sums and products, whose third operand is as wide as the product; IMAD.HI adds 64 bits and keeps the upper half
    ("IADD3 UIADD3", Opcode(results=_and_carries, width=_pair_if("64"), reads=(_pair_if("64"),))),
    ("LEA ULEA", Opcode(results=_and_carries)),
    ("IMAD UIMAD", Opcode(results=_and_carries, width=_pair_if("WIDE"), reads=(1, 1, _pair_if("WIDE", "HI"), 1))),
    # -- float64
    ("DADD DMUL DFMA", Opcode(width=2, reads=(2,))),
    ("DSETP", Opcode(results=2, reads=(2,))),
    ("F2F", Opcode(width=lambda m: 2 if m[0] == "F64" else 1, reads=(lambda m: 2 if m[1] == "F64" else 1,))),
    ("F2I", Opcode(width=_pair_if("S64", "U64"), reads=(_pair_if("F64"),))),
    ("I2F", Opcode(width=_pair_if("F64"), reads=(_pair_if("S64", "U64"),))),
    # -- predicates
    ("ISETP UISETP FSETP HSETP2 PLOP3 UPLOP3", Opcode(results=2)),
    ("LOP3 ULOP3 SHFL", Opcode(results=_maybe_predicate)),
    ("VOTE VOTEU", Opcode(results=lambda texts: 2 if len(texts) == 3 else 1)),
    ("B2R", Opcode(results=len)),  # what a barrier that reduces left
    # -- tensor cores of four warps, with an operand in shared memory, which the descriptor of `gdesc` names
    ("HGMMA QGMMA", Opcode(width=_sums)),  # sass.py gives the widths of their sources
    # -- memory
    ("LDG LDS LDL", Opcode(results=_before_address, width=_moved)),
    ("LDC ULDC", Opcode(width=_moved)),
    ("LDSM", Opcode(results=_before_address, width=_matrices)),
    ("STG STS STL RED REDG", Opcode(results=0, reads=(_moved,), effect=Effect.STORE)),
    ("STSM", Opcode(results=0, reads=(_matrices,), effect=Effect.STORE)),
    ("ATOM ATOMG ATOMS", Opcode(results=_before_address, width=_moved, reads=(_moved,), effect=Effect.STORE)),
    ("LDGSTS CCTL", Opcode(results=0)),  # LDGSTS: from global to shared memory, past the registers
    ("LDGDEPBAR DEPBAR MEMBAR ERRBAR FENCE", Opcode(results=0)),
    # -- control flow
    ("BRA", Opcode(results=0, effect=Effect.BRANCH)),
    ("EXIT", Opcode(results=0, effect=Effect.EXIT)),
    ("BSYNC", Opcode(results=0, effect=Effect.JOIN)),
    # names where BSYNC goes on; takes threads out of those that BSYNC waits for
    ("BSSY BREAK", Opcode(results=0)),
    ("CALL", Opcode(results=0, effect=Effect.CALL)),
    ("RET", Opcode(results=0, effect=Effect.RETURN)),
    # -- threads that wait for each other, and hints
    ("BAR WARPSYNC WARPGROUP NANOSLEEP NOP", Opcode(results=0)),
]

OPCODES: dict[str, Opcode] = {name: opcode for names, opcode in _ROWS for name in names.split()}
