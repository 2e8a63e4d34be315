"""What each instruction makes of the bits of its sources, in four states as hardware designers have them.

A word is 32 characters, the lowest bit first: "0" and "1" are the same in every run of the program, "?" is any bit that was
computed, "x" one that no instruction wrote. A predicate is a word of equal bits. Instructions that move bits of registers of
which kernels write a part have exact rules; every other result is "x" if one bit of its sources is.
"""

import functools
import itertools
from collections.abc import Callable

from tests.machine_code.opcodes import is_predicate
from tests.machine_code.sass import Instruction

UNDEFINED, DEFINED, ZERO = "x" * 32, "?" * 32, "0" * 32


def constant(value: int) -> str:
    return f"{value:032b}"[::-1]


def number(word: str) -> int | None:
    """The value of a word that is known."""
    return int(word[::-1], 2) if set(word) <= {"0", "1"} else None


def strict(*words: str) -> str:
    """A result that needs every bit."""
    return UNDEFINED if any("x" in word for word in words) else DEFINED


def results(instruction: Instruction, words: list[str]) -> list[str]:
    """A word for each register that is written, from those of the sources (of which wide ones are longer)."""
    rule = _RULES.get(instruction.name)
    word = rule(instruction, words) if rule else None
    if word is None:
        return [strict(*words)] * len(instruction.written)
    # Carries, or whether the word is zero, combined with predicates.
    sources = [other for other, source in zip(words, instruction.sources, strict=True) if is_predicate(source.text)]
    return [strict(word, *sources) if is_predicate(result.text) else word for result in instruction.results]


def _moved(instruction: Instruction, words: list[str]) -> str | None:
    return words[0] if len(words[0]) == 32 else None


def _multiply_add(instruction: Instruction, words: list[str]) -> str | None:
    """IMAD also moves (0 * 0 + x) and shifts (x * 2**k + 0)."""
    a, b, c, *_ = words
    if {"WIDE", "HI", "X"} & set(instruction.modifiers):
        return None
    if ZERO in (a, b):
        return c
    for factor, other in ((a, b), (b, a)):
        if c == ZERO and number(factor) and factor.count("1") == 1:
            return ("0" * factor.index("1") + other)[:32]
    return None


def _shift(instruction: Instruction, words: list[str]) -> str | None:
    """SHF: 64 bits, of which the third source is the upper half, are shifted; the upper or the lower half comes out."""
    low, count, high = words
    modifiers = set(instruction.modifiers)
    by = number(count)
    if by is None:
        return None
    by = by & 31 if "W" in modifiers else min(by, 64)
    if "L" in modifiers:
        double = "0" * by + low + high
    else:
        double = (low + high + (high[31] if modifiers & {"S32", "S64"} else "0") * 64)[by:]
    return double[32:64] if "HI" in modifiers else double[:32]


def _permute(instruction: Instruction, words: list[str]) -> str | None:
    """PRMT: each nibble of the selector names a byte of (third source, first source); with its highest bit, that byte's
    sign eight times."""
    low, selectors, high = words
    selector = number(selectors[:16])
    if selector is None or instruction.modifiers:
        return None
    nibbles = [selector >> (4 * i) & 0xF for i in range(4)]
    chosen = [(n, (low + high)[8 * (n & 7) :][:8]) for n in nibbles]
    return "".join(byte[7] * 8 if n & 8 else byte for n, byte in chosen)


def combine(words: list[str], table: int) -> str:
    """Any function of three bits: bit (a b c) of `table`, read as a number, is its value."""
    return "".join(_of_table(table, bits) for bits in zip(*words, strict=True))


@functools.cache
def _of_table(table: int, bits: tuple[str, ...]) -> str:
    """Undefined if, for some choice of the other bits, an undefined one changes the outcome."""
    outcomes: dict[tuple[int, ...], set[int]] = {}
    for chosen in itertools.product(*((int(bit),) if bit in "01" else (0, 1) for bit in bits)):
        written = tuple(value for value, bit in zip(chosen, bits, strict=True) if bit != "x")
        outcomes.setdefault(written, set()).add(table >> (4 * chosen[0] + 2 * chosen[1] + chosen[2]) & 1)
    if any(len(found) > 1 for found in outcomes.values()):
        return "x"
    values = set.union(*outcomes.values())
    return "?" if len(values) > 1 else str(values.pop())


def _logic(instruction: Instruction, words: list[str]) -> str:
    return combine(words[:3], instruction.sources[3].value or 0)


def _converted_pair(instruction: Instruction, words: list[str]) -> str | None:
    """F2FP. PACK_AB: two floats become the halves of a word, the second source the lower one; as FP8 they are two bytes, and
    MERGE_C puts the lower half of the third source above them. UNPACK_B: two FP8 values in a half become two halves."""
    modifiers, pair = instruction.modifiers, words[0]
    if any(m.endswith("MERGE_C") for m in modifiers):
        # two floats, or two float16 in one word
        upper, lower = words[:2] if "PACK_AB_MERGE_C" in modifiers else (pair[16:], pair[:16])
        return strict(lower)[:8] + strict(upper)[:8] + words[-1][:16]
    if "PACK_AB" in modifiers:
        return strict(words[1])[:16] + strict(words[0])[:16]
    if "UNPACK_B" in modifiers:
        return strict(pair[:8])[:16] + strict(pair[8:16])[:16]
    return None


def _packed_predicates(instruction: Instruction, words: list[str]) -> str | None:
    """P2R: a bit for each predicate that the mask names; "PR" is a word of them."""
    predicates, below, mask = words
    return None if number(mask) is None or instruction.modifiers else combine([mask, predicates, below], 0xCA)


_RULES: dict[str, Callable[[Instruction, list[str]], str | None]] = {
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), _moved),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiply_add),
    **dict.fromkeys(("SHF", "USHF"), _shift),
    **dict.fromkeys(("PRMT", "UPRMT"), _permute),
    **dict.fromkeys(("LOP3", "ULOP3"), _logic),
    "F2FP": _converted_pair,
    "P2R": _packed_predicates,
}
