"""Labels of bytes: what each instruction that moves bytes makes of the labels of its sources.

A label is a set, for paths and selections leave open which of several bytes a byte is. It may name too much, where a shift or a
mask is not made of whole bytes, and is empty for what arithmetic makes.
"""

import functools
from collections.abc import Callable

from tests.machine_code.sass import Instruction, Operand

#: The label of bytes that are the same in every run.
CONSTANT = -1

Byte = frozenset[int]
"""The elements that a byte may be of, and CONSTANT if it may be none."""
Label = tuple[Byte, Byte, Byte, Byte]
"""Bytes of a register, lowest first."""

NOTHING: Byte = frozenset()
PLAIN: Label = (NOTHING, NOTHING, NOTHING, NOTHING)
FIXED: Byte = frozenset((CONSTANT,))
ZEROS: Label = (FIXED, FIXED, FIXED, FIXED)

Read = Callable[[Operand], Label]
Constant = Callable[[Operand], int | None]


def union(*labels: Label) -> Label:
    """Byte by byte."""
    if all(label is PLAIN for label in labels):
        return PLAIN
    a, b, c, d = (NOTHING.union(*(label[i] for label in labels)) for i in range(4))
    return a, b, c, d


def moved(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """The label of the first result that is no predicate."""
    rule = _RULES.get(instruction.name)
    if rule is None or len(instruction.results[-1].names) > 1:
        return PLAIN
    return rule(instruction, read, constant)


def _copied(instruction: Instruction, read: Read, constant: Constant) -> Label:
    return read(instruction.sources[-1])


def _summed(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """IADD3 moves where it adds zeros."""
    others = [source for source in instruction.sources if constant(source) != 0]
    return read(others[0]) if len(others) == 1 else PLAIN


def _multiplied(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """IMAD: x * 256**n + y."""
    a, b, c, *_ = instruction.sources
    if {"WIDE", "HI"} & set(instruction.modifiers):
        return PLAIN
    for factor, other in ((a, b), (b, a)):
        value = constant(factor)
        if value == 0:
            return read(c)
        if value is not None and value.bit_count() == 1 and value > 1:
            return merged(shifted(read(other), value.bit_length() - 1), read(c))
    return PLAIN


def _scaled(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """LEA: (x << n) + y."""
    if {"HI", "X"} & set(instruction.modifiers):
        return PLAIN
    a, b, count, *_ = instruction.sources
    by = constant(count)
    return PLAIN if by is None else merged(shifted(read(a), by), read(b))


def shifted(label: Label, by: int) -> Label:
    """To the left by so many bits, to the right if negative; a byte that is split has parts in two."""
    parts = [label[j] if 0 <= (j := i - by // 8) < 4 else FIXED for i in range(4)]
    if by % 8:
        parts = [mixed(parts[i], label[j] if 0 <= (j := i - by // 8 - 1) < 4 else FIXED) for i in range(4)]
    return parts[0], parts[1], parts[2], parts[3]


def mixed(*bytes_: Byte) -> Byte:
    """A byte computed from all of these: constant if all are, and not labelled if one of them is not."""
    elements = NOTHING.union(*bytes_) - FIXED
    return elements or (FIXED if all(bytes_) else NOTHING)


def merged(*labels: Label) -> Label:
    """Words put together, byte by byte."""
    a, b, c, d = (mixed(*(label[i] for label in labels)) for i in range(4))
    return a, b, c, d


def _shift(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """SHF of two words."""
    low, count, high = instruction.sources
    by = constant(count)
    if by is None:
        return PLAIN
    by = by & 31 if "W" in instruction.modifiers else min(by, 64)
    is_high = "HI" in instruction.modifiers
    if "L" in instruction.modifiers:
        if is_high:
            return merged(shifted(read(high), by), shifted(read(low), by - 32))
        return shifted(read(low), by)
    if is_high:
        return shifted(read(high), -by)
    return merged(shifted(read(low), -by), shifted(read(high), 32 - by))


def _permuted(instruction: Instruction, read: Read, constant: Constant) -> Label:
    low, selector, high = instruction.sources
    both, chosen = read(low) + read(high), constant(selector)
    if chosen is None or instruction.modifiers:
        everything = NOTHING.union(*both)
        return everything, everything, everything, everything
    # With the highest bit of its nibble, a byte is replaced by its sign.
    a, b, c, d = (NOTHING if chosen >> (4 * i) & 8 else both[chosen >> (4 * i) & 7] for i in range(4))
    return a, b, c, d


def _logic(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """LOP3: a byte of each operand that some bit of the result depends on."""
    operands = instruction.sources[:3]
    table = instruction.sources[3].value or 0
    labels, values = [read(operand) for operand in operands], [constant(operand) for operand in operands]
    parts = []
    for i in range(4):
        at_byte = tuple(None if v is None else v >> (8 * i) & 0xFF for v in values)
        read_by = [label[i] for k, label in enumerate(labels) if at_byte[k] is None and _depends(table, k, at_byte)]
        parts.append(mixed(*read_by))
    return parts[0], parts[1], parts[2], parts[3]


@functools.cache
def _depends(table: int, k: int, values: tuple[int | None, ...]) -> bool:
    """True if a function of three bytes, some of them constant, depends on the k-th at any of their bits."""
    for bit in range(8):
        for row in range(8):
            fits = all(v is None or (v >> bit & 1) == (row >> (2 - j) & 1) for j, v in enumerate(values) if j != k)
            if fits and (table >> row & 1) != (table >> (row ^ 4 >> k) & 1):
                return True
    return False


def _selected(instruction: Instruction, read: Read, constant: Constant) -> Label:
    return union(*map(read, instruction.sources[:2]))


def _extended(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """SGXT keeps the lowest bits."""
    label, count = read(instruction.sources[0]), constant(instruction.sources[1])
    kept = 4 if count is None else -(-count // 8)
    a, b, c, d = (byte if i < kept else FIXED for i, byte in enumerate(label))
    return a, b, c, d


def _of_other_thread(instruction: Instruction, read: Read, constant: Constant) -> Label:
    """SHFL."""
    return read(instruction.sources[0])


_RULES: dict[str, Callable[[Instruction, Read, Constant], Label]] = {
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), _copied),
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD"), _summed),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiplied),
    **dict.fromkeys(("LEA", "ULEA"), _scaled),
    **dict.fromkeys(("SHF", "USHF"), _shift),
    **dict.fromkeys(("PRMT", "UPRMT"), _permuted),
    **dict.fromkeys(("LOP3", "ULOP3"), _logic),
    **dict.fromkeys(("SEL", "USEL", "FSEL"), _selected),
    **dict.fromkeys(("SGXT", "USGXT"), _extended),
    **dict.fromkeys(("SHFL", "MOVM"), _of_other_thread),
}
