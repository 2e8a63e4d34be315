"""The machine instructions of SM89, SM90 and SM100: what each writes, how wide, and what else it does. Data; no analysis.

An opcode that is not in OPCODES is refused, never taken for harmless. Every entry was read off the disassembly of kernels that
use it; NVIDIA documents only what the opcodes are for.
"""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass


class Effect(enum.Enum):
    """An effect of an instruction besides writing its results."""

    NONE = "none"
    LOAD = "load"
    STORE = "store"
    """The last operand is data, but for those that have none (asynchronous copies)."""
    ATOMIC = "atomic"
    """The operands behind the address are data."""
    BRANCH = "branch"
    """To a target; falls through if guarded, or if it has a predicate among its operands that is false."""
    INDIRECT = "branch to an address in a register"
    CALL = "call"
    RETURN = "return"
    EXIT = "exit"
    JOIN = "join"
    """Threads wait for each other and go on where the barrier says."""


class Results(enum.Enum):
    """The operands that are results."""

    NONE = "none"
    FIRST = "first"
    TWO = "the first two"
    ALL = "all"
    FIRST_AND_CARRIES = "the first, and predicates right behind it: carries"
    MAYBE_PREDICATE = "the first; the second too if the first is a predicate"
    VOTE = "the first; the second too if there are three"
    BEFORE_ADDRESS = "those before the address"
    PREDICATES = "predicates at the beginning"
    MASKED_PREDICATES = "the predicates that the last operand, a mask, names"


#: Number of registers of an operand that is no predicate, from the modifiers behind the opcode.
Width = Callable[[tuple[str, ...]], int]


def _one(modifiers: tuple[str, ...]) -> int:
    return 1


def _pair(modifiers: tuple[str, ...]) -> int:
    return 2


def _moved(modifiers: tuple[str, ...]) -> int:
    for modifier in modifiers:
        if modifier in _MOVED:
            return _MOVED[modifier]
    return 1


_MOVED = {"128": 4, "64": 2, "BF16x8": 4, "F16x8": 4, "BF16x4": 2, "F16x4": 2, "F64": 2}


def _pair_if(*names: str) -> Width:
    return lambda modifiers: 2 if any(name in modifiers for name in names) else 1


def _matrices(modifiers: tuple[str, ...]) -> int:
    return int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1


def _converted_to(modifiers: tuple[str, ...]) -> int:
    """F2F names its result first."""
    return 2 if modifiers[0] == "F64" else 1


def _converted_from(modifiers: tuple[str, ...]) -> int:
    return 2 if modifiers[1] == "F64" else 1


def _coordinates(others: int) -> Width:
    """Uniform registers of a tensor's tile: so many addresses, then a coordinate for each dimension."""
    return lambda modifiers: others + int(next(m for m in modifiers if re.fullmatch(r"\dD", m))[0])


def _fragment(part: str) -> Width:
    """Registers of one warp's matrix product m x n x k, or of the product of four warps, 64 x n x k: registers of a thread."""

    def width(modifiers: tuple[str, ...]) -> int:
        m, n, k = _shape(modifiers[0])
        size = {"a": m * k, "b": k * n, "c": m * n}[part]
        bits = _accumulator_bits(modifiers) if part == "c" else _operand_bits(modifiers)
        return size * bits // (32 * 32 * (4 if m == 64 else 1))

    return width


def _shape(text: str) -> tuple[int, int, int]:
    if "x" in text:
        m, n, k = (int(size) for size in text.split("x"))
        return m, n, k
    m_digits = 2 if text.startswith("16") else 1
    return int(text[:m_digits]), int(text[m_digits]), int(text[m_digits + 1 :])


def _accumulator_bits(modifiers: tuple[str, ...]) -> int:
    if len(modifiers) == 1:
        return 64  # DMMA names the shape alone
    return 16 if modifiers[1] == "F16" else 32  # F32, or the operands of IMMA, whose sums are int32


def _operand_bits(modifiers: tuple[str, ...]) -> int:
    for modifier, bits in _OPERAND_BITS.items():
        if modifier in modifiers[1:]:
            return bits
    return 64 if len(modifiers) == 1 else 16


_OPERAND_BITS = {"TF32": 32, "BF16": 16, "E4M3": 8, "E5M2": 8, "S8": 8, "U8": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opcode:
    """One row of the table."""

    results: Results = Results.FIRST
    width: Width = _one
    """Registers of results that are no predicates."""
    reads: tuple[Width, ...] = ()
    """Registers of sources by position; the last holds for all that follow, and one register where there is none."""
    addresses: Width = _one
    """Width of registers in brackets whose width the text leaves open."""
    effect: Effect = Effect.NONE


_ROWS: list[tuple[str, Opcode]] = [
    # -- one register of registers
    ("FADD FMUL FFMA FMNMX FMNMX3 FSEL FRND MUFU", Opcode()),  # MUFU.RCP64H reads and writes the upper half of a double
    ("HADD2 HMUL2 HFMA2 HMNMX2 HSET2 VHMNMX", Opcode()),
    ("IABS IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX VABSDIFF VABSDIFF4 IDP", Opcode()),
    ("MOV UMOV", Opcode(width=_pair_if("64"), reads=(_pair_if("64"),))),
    ("R2UR SEL USEL SHF USHF SGXT USGXT PRMT UPRMT BMSK BREV", Opcode()),
    ("POPC UPOPC FLO UFLO REDUX MOVM I2FP F2FP P2R", Opcode()),
    ("S2R S2UR LEPC", Opcode()),
    ("CS2R", Opcode(width=lambda modifiers: 1 if "32" in modifiers else 2)),
    # -- sums and products, whose third operand is as wide as the product; IMAD.HI adds 64 bits and keeps the upper half
    ("IADD3 UIADD3", Opcode(results=Results.FIRST_AND_CARRIES, width=_pair_if("64"), reads=(_pair_if("64"),))),
    ("LEA ULEA", Opcode(results=Results.FIRST_AND_CARRIES)),
    (
        "IMAD UIMAD",
        Opcode(results=Results.FIRST_AND_CARRIES, width=_pair_if("WIDE"), reads=(_one, _one, _pair_if("WIDE", "HI"), _one)),
    ),
    # -- float64
    ("DADD DMUL DFMA", Opcode(width=_pair, reads=(_pair,))),
    ("DSETP", Opcode(results=Results.TWO, reads=(_pair,))),
    ("F2F", Opcode(width=_converted_to, reads=(_converted_from,))),
    ("F2I", Opcode(width=_pair_if("S64", "U64"), reads=(_pair_if("F64"),))),
    ("I2F", Opcode(width=_pair_if("F64"), reads=(_pair_if("S64", "U64"),))),
    # -- predicates
    ("ISETP UISETP FSETP HSETP2 PLOP3 UPLOP3", Opcode(results=Results.TWO)),
    ("FCHK", Opcode()),
    ("LOP3 ULOP3 SHFL MATCH ELECT", Opcode(results=Results.MAYBE_PREDICATE)),
    ("VOTE VOTEU", Opcode(results=Results.VOTE)),
    ("R2P", Opcode(results=Results.MASKED_PREDICATES)),
    ("B2R", Opcode(results=Results.ALL)),  # what a barrier that reduces left
    # -- tensor cores: of a warp, and of four (with operands in shared memory, which the descriptor of `gdesc` names)
    ("HMMA IMMA QMMA DMMA", Opcode(width=_fragment("c"), reads=(_fragment("a"), _fragment("b"), _fragment("c"), _one))),
    ("HGMMA QGMMA IGMMA", Opcode(width=_fragment("c"))),  # sass.py gives the widths of their sources
    # -- memory
    ("LDG LDS LDL LD", Opcode(results=Results.BEFORE_ADDRESS, width=_moved, effect=Effect.LOAD)),
    ("LDC ULDC LDCU", Opcode(width=_moved, effect=Effect.LOAD)),
    ("LDSM", Opcode(results=Results.BEFORE_ADDRESS, width=_matrices, effect=Effect.LOAD)),
    ("QSPC", Opcode(results=Results.BEFORE_ADDRESS)),  # which space an address is in
    ("STG STS STL ST", Opcode(results=Results.NONE, reads=(_moved,), effect=Effect.STORE)),
    ("STSM", Opcode(results=Results.NONE, reads=(_matrices,), effect=Effect.STORE)),
    ("RED REDG", Opcode(results=Results.NONE, reads=(_moved,), effect=Effect.ATOMIC)),
    ("ATOM ATOMG ATOMS", Opcode(results=Results.BEFORE_ADDRESS, width=_moved, reads=(_moved,), effect=Effect.ATOMIC)),
    ("LDGSTS", Opcode(results=Results.NONE)),  # from global to shared memory, past the registers
    ("CCTL", Opcode(results=Results.NONE)),
    # barriers in shared memory: a state of 64 bits comes out of ARRIVE, EXCH writes 64 bits
    ("SYNCS", Opcode(results=Results.BEFORE_ADDRESS, width=_pair_if("TRANS64"), reads=(_pair_if("64"),), effect=Effect.ATOMIC)),
    ("ARRIVES", Opcode(results=Results.NONE)),
    ("UTMALDG", Opcode(results=Results.NONE, addresses=_coordinates(2))),  # the tile's address, its barrier's
    ("UTMASTG", Opcode(results=Results.NONE, addresses=_coordinates(1))),
    ("UTMACCTL", Opcode(results=Results.NONE, addresses=_pair)),
    ("UBLKCP UBLKRED UBLKPF", Opcode(results=Results.NONE, addresses=_pair)),
    ("UTMACMDFLUSH LDGDEPBAR DEPBAR MEMBAR ERRBAR CGAERRBAR FENCE", Opcode(results=Results.NONE)),
    # -- control flow
    ("BRA", Opcode(results=Results.NONE, effect=Effect.BRANCH)),
    ("BRX", Opcode(results=Results.NONE, effect=Effect.INDIRECT)),
    ("EXIT", Opcode(results=Results.NONE, effect=Effect.EXIT)),
    ("BPT", Opcode(results=Results.NONE)),  # a trap: what follows it is analysed all the same
    ("BSYNC", Opcode(results=Results.NONE, effect=Effect.JOIN)),
    # names where BSYNC goes on; takes threads out of those that BSYNC waits for
    ("BSSY BREAK", Opcode(results=Results.NONE)),
    ("CALL", Opcode(results=Results.NONE, effect=Effect.CALL)),
    ("RET", Opcode(results=Results.NONE, effect=Effect.RETURN)),
    # -- threads that wait for each other, and hints
    ("BAR WARPSYNC WARPGROUP UCGABAR_ARV UCGABAR_WAIT NANOSLEEP ACQBULK PREEXIT NOP", Opcode(results=Results.NONE)),
    ("USETMAXREG", Opcode(results=Results.PREDICATES)),
]

OPCODES: dict[str, Opcode] = {name: opcode for names, opcode in _ROWS for name in names.split()}
