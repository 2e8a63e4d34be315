"""The bits of a register that some instruction wrote, and those that are known: what each instruction makes of its sources.

The rules for instructions that move bits are exact; every other result is defined if all bits of all its sources are.
"""

import struct
from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

from tests.machine_code.sass import FULL, Instruction, Kind, Operand


class Word(NamedTuple):
    """32 bits. `known` are bits whose `value` every run of the program agrees on; they are defined."""

    defined: int
    known: int = 0
    value: int = 0


UNDEFINED = Word(0)
DEFINED = Word(FULL)


def constant(value: int) -> Word:
    return Word(FULL, FULL, value & FULL)


#: Reads a source: a word for each of its registers, one for everything that is in no register.
Read = Callable[[Operand], list[Word]]
Rule = Callable[[Instruction, Read], list[Word]]


def results(instruction: Instruction, read: Read) -> list[Word]:
    """A word for each register of each result, one after the other; a predicate is a word of one bit, repeated."""
    rule = _RULES.get(instruction.name, _strict)
    return rule(instruction, read)


def num_results(instruction: Instruction) -> int:
    return sum(max(1, len(result.names)) for result in instruction.results)


def _all_defined(words: list[Word]) -> bool:
    return all(word.defined == FULL for word in words)


def _strict(instruction: Instruction, read: Read) -> list[Word]:
    is_defined = all(_all_defined(read(source)) for source in instruction.sources)
    return [DEFINED if is_defined else UNDEFINED] * num_results(instruction)


def _loaded(instruction: Instruction, read: Read) -> list[Word]:
    """Memory counts as written; the address is checked where it is used."""
    return [DEFINED] * num_results(instruction)


def _zero(instruction: Instruction, read: Read) -> list[Word]:
    is_zero = instruction.sources[0].text == "SRZ"
    return [constant(0) if is_zero else DEFINED] * num_results(instruction)


def _first_only(word: Word, instruction: Instruction, read: Read) -> list[Word]:
    """`word` for the first result; the others, carries, need all bits."""
    return [word, *_strict(instruction, read)[1:]]


def _is_negated(sources: Iterable[Operand]) -> bool:
    return any(source.sign and source.names for source in sources)


def word_of(operand: Operand, read: Read) -> Word:
    """A source that is moved: the register, or the part of it that is read."""
    (word, *_) = read(operand)
    return word


# -- moves and shifts


def _move(instruction: Instruction, read: Read) -> list[Word]:
    if _is_negated(instruction.sources[:1]) or len(instruction.results[0].names) > 1:
        return _strict(instruction, read)
    return [word_of(instruction.sources[0], read)]


def _multiply_add(instruction: Instruction, read: Read) -> list[Word]:
    """IMAD also moves (0 * 0 + x) and shifts (x * 2**k + 0)."""
    a, b, c, *_ = instruction.sources
    if {"WIDE", "HI", "X"} & set(instruction.modifiers) or _is_negated((a, b, c)):
        return _strict(instruction, read)
    factors = [word_of(a, read), word_of(b, read)]
    addend = word_of(c, read)
    zero = constant(0)
    if zero in factors:
        return _first_only(addend, instruction, read)
    for factor, other in (factors, factors[::-1]):
        if addend == zero and factor.known == FULL and factor.value.bit_count() == 1:
            shift = factor.value.bit_length() - 1
            return _first_only(_shifted(other, UNDEFINED, shift, left=True), instruction, read)
    return _strict(instruction, read)


def _add(instruction: Instruction, read: Read) -> list[Word]:
    """IADD3, VIADD: a move where all but one operand are zero."""
    if {"X", "64", "16x2"} & set(instruction.modifiers) or _is_negated(instruction.sources):
        return _strict(instruction, read)
    others = [word for source in instruction.sources if (word := word_of(source, read)) != constant(0)]
    if len(others) > 1:
        return _strict(instruction, read)
    return _first_only(others[0] if others else constant(0), instruction, read)


def _shift(instruction: Instruction, read: Read) -> list[Word]:
    """SHF: 64 bits, of which the third source is the upper half, are shifted; the upper or the lower half comes out."""
    low, count, high = (word_of(source, read) for source in instruction.sources)
    modifiers = instruction.modifiers
    if count.known != FULL:
        return _strict(instruction, read)
    by = count.value & 31 if "W" in modifiers else count.value
    if "L" in modifiers:
        is_high = "HI" in modifiers
        return [_shifted(low, high, by, left=True, take_high=is_high)]
    fill = None
    if {"S32", "S64"} & set(modifiers):
        fill = Word(*(FULL if part >> 31 & 1 else 0 for part in high))
    return [_shifted(low, high, by, left=False, take_high="HI" in modifiers, fill=fill)]


def _shifted(low: Word, high: Word, by: int, *, left: bool, take_high: bool = False, fill: Word | None = None) -> Word:
    """`fill`: what comes in from the left; zeros if None."""
    by = min(by, 64)
    parts = []
    fill = fill or constant(0)
    for i, comes_in in enumerate((FULL, FULL, 0)):  # zeros that come in from the right: defined, known, 0
        double = high[i] << 32 | low[i]
        if left:
            double = (double << by | (comes_in if by else 0) & ((1 << min(by, 32)) - 1)) & ((1 << 64) - 1)
            if by > 32 and comes_in:
                double |= (1 << by) - 1
        else:
            extended = (fill[i] << 32 | fill[i]) << 64 | double
            double = extended >> by & ((1 << 64) - 1)
        parts.append((double >> 32 if take_high else double) & FULL)
    return Word(*parts)


def _sign_extend(instruction: Instruction, read: Read) -> list[Word]:
    """SGXT: the lowest bits, and above them zeros (U32) or the highest of them."""
    word, count = (word_of(source, read) for source in instruction.sources[:2])
    if count.known != FULL or "W" in instruction.modifiers or not 0 < count.value <= 32:
        return _strict(instruction, read)
    kept = (1 << count.value) - 1
    above = constant(0)
    if "U32" not in instruction.modifiers:
        above = Word(*(FULL if part >> (count.value - 1) & 1 else 0 for part in word))
    return [Word(*(part & kept | fill & ~kept & FULL for part, fill in zip(word, above, strict=True)))]


# -- bytes and bits


def _permute(instruction: Instruction, read: Read) -> list[Word]:
    """PRMT: each nibble of the selector names a byte of (third source, first source); with its highest bit, that byte's
    sign eight times."""
    low, selector, high = (word_of(source, read) for source in instruction.sources)
    if selector.known & 0xFFFF != 0xFFFF or instruction.modifiers:
        return _strict(instruction, read)
    return [_permuted(low, high, selector.value)]


def _permuted(low: Word, high: Word, selector: int) -> Word:
    parts = []
    for low_part, high_part in zip(low, high, strict=True):
        both, part = high_part << 32 | low_part, 0
        for i in range(4):
            nibble = selector >> (4 * i) & 0xF
            byte = both >> (8 * (nibble & 7)) & 0xFF
            part |= (0xFF * (byte >> 7) if nibble & 8 else byte) << (8 * i)
        parts.append(part)
    return Word(*parts)


def _logic(instruction: Instruction, read: Read) -> list[Word]:
    """LOP3: any function of three bits. Its predicate says whether the result is not zero."""
    *_, table, _ = instruction.sources
    word = combine([word_of(source, read) for source in instruction.sources[:3]], table.value or 0)
    if len(instruction.results) == 1:
        return [word]
    combined = read(instruction.sources[-1])
    is_defined = word.defined == FULL and _all_defined(combined)
    return [DEFINED if is_defined else UNDEFINED, word]


def combine(words: list[Word], table: int) -> Word:
    """The bits of a function of as many bits as there are words; bit (a b c) of `table`, read as a number, is its value.

    A bit of the result is undefined if some choice of undefined bits changes it. All rows of the table that are possible at
    a bit must have one value for it to be known.
    """
    rows = _TABLE_ROWS[len(words)]
    if table not in (0, 0xFF) and not any(word.known for word in words) and _all_defined(words):
        return DEFINED
    values = [table >> number & 1 for number in range(len(rows))]
    possible = []
    for row in rows:
        at = FULL
        for word, bit in zip(words, row, strict=True):
            at &= ~word.known | (word.value if bit else ~word.value)
        possible.append(at & FULL)
    can_be = [0, 0]
    for at, value in zip(possible, values, strict=True):
        can_be[value] |= at
    undefined = 0
    if any(word.defined != FULL for word in words):
        for (i, row), (j, other) in product(enumerate(rows), repeat=2):
            if i < j and values[i] != values[j]:
                at = possible[i] & possible[j]
                for word, bit, other_bit in zip(words, row, other, strict=True):
                    if bit != other_bit:
                        at &= ~word.defined
                undefined |= at
    known = can_be[0] ^ can_be[1]
    defined = FULL & ~undefined
    return Word(defined, known & defined, can_be[1] & known & defined)


_TABLE_ROWS = {3: list(product((0, 1), repeat=3))}


def _select(instruction: Instruction, read: Read) -> list[Word]:
    """SEL, FSEL: the first source where the predicate holds, else the second, bit by bit."""
    a, b, predicate = instruction.sources
    chosen = word_of(predicate, read)
    if "FTZ" in instruction.modifiers or chosen.defined != FULL:
        return _strict(instruction, read)
    words = [word_of(a, read), word_of(b, read)]
    if chosen.known == FULL:
        return [words[0] if chosen.value else words[1]]
    if instruction.name == "FSEL" and (a.sign or b.sign):
        words = [Word(word.defined) for word in words]
    known = words[0].known & words[1].known & ~(words[0].value ^ words[1].value)
    return [Word(words[0].defined & words[1].defined, known, words[0].value & known)]


def _shuffle(instruction: Instruction, read: Read) -> list[Word]:
    """SHFL: the same bits of another thread's register."""
    data, *how = instruction.sources
    is_defined = all(_all_defined(read(source)) for source in how)
    word = Word(word_of(data, read).defined) if is_defined else UNDEFINED
    return [DEFINED if is_defined else UNDEFINED, word][-len(instruction.results) :]


# -- pairs of 16 bits


def _convert_pair(instruction: Instruction, read: Read) -> list[Word]:
    """F2FP. PACK_AB: two floats become the halves of a word, the second source the lower one; as FP8 they are two bytes, and
    MERGE_C puts the lower half of the third source above them. UNPACK_B: two FP8 values in a half become two halves."""
    modifiers, sources = instruction.modifiers, instruction.sources
    to_fp8 = modifiers and any(m in ("E4M3", "E5M2") for m in modifiers) and any(m.endswith("MERGE_C") for m in modifiers)
    if to_fp8:
        above = word_of(sources[-1], read)
        if "PACK_AB_MERGE_C" in modifiers:
            upper, lower = (word_of(source, read).defined == FULL for source in sources[:2])
        else:  # two float16 in one word
            pair = word_of(sources[0], read).defined
            upper, lower = pair >> 16 == 0xFFFF, pair & 0xFFFF == 0xFFFF
        defined = 0xFF * lower | 0xFF00 * upper
        return [Word(defined | above.defined << 16 & FULL, above.known << 16 & FULL, above.value << 16 & FULL)]
    if "PACK_AB" in modifiers:
        upper, lower = (word_of(source, read).defined == FULL for source in sources)
        return [Word(0xFFFF * lower | 0xFFFF0000 * upper)]
    if "UNPACK_B" in modifiers:
        word = word_of(sources[0], read)
        pair = word.defined
        return [Word((0xFFFF if pair & 0xFF == 0xFF else 0) | (0xFFFF0000 if pair & 0xFF00 == 0xFF00 else 0))]
    return _strict(instruction, read)


def _packed(instruction: Instruction, read: Read) -> list[Word]:
    """Arithmetic on two halves. HFMA2 with zero factors is how constants come into registers."""
    literal = _packed_literal(instruction)
    if literal is not None:
        return [constant(literal)]
    if "F32" in instruction.modifiers:
        return _strict(instruction, read)
    defined = 0
    for half in (0xFFFF, 0xFFFF0000):
        words = [word_of(source, read) for source in instruction.sources]
        if all(word.defined & half == half for word in words):
            defined |= half
    return [Word(defined)]


def _packed_literal(instruction: Instruction) -> int | None:
    sources = instruction.sources
    if instruction.name != "HFMA2" or len(sources) != 4 or any(s.value != 0 or s.names for s in sources[:2]):
        return None
    if any(s.kind is not Kind.CONSTANT or s.value is not None for s in sources[2:]):
        return None
    halves = []
    for source in sources[2:]:
        number = float(source.text.lower().replace("qnan", "nan").replace("snan", "nan"))
        if number != number:
            return None
        as_bfloat16 = "BF16_V2" in instruction.modifiers
        bits = struct.unpack("<I", struct.pack("<f", number))[0] >> 16 if as_bfloat16 else _float16_bits(number)
        halves.append(bits)
    return halves[0] << 16 | halves[1]


def _float16_bits(number: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", number))[0])


def _converted(instruction: Instruction, read: Read) -> list[Word]:
    """Conversions from a type of fewer than 32 bits read no more than those."""
    word, modifiers = word_of(instruction.sources[0], read), set(instruction.modifiers)
    needed = 0xFF if {"U8", "S8"} & modifiers else 0xFFFF if {"U16", "S16", "F16"} & modifiers else FULL
    if needed == FULL:
        return _strict(instruction, read)
    return [DEFINED if word.defined & needed == needed else UNDEFINED] * num_results(instruction)


# -- predicates


def _predicate_logic(instruction: Instruction, read: Read) -> list[Word]:
    """PLOP3: two functions of three predicates."""
    *inputs, first, second = instruction.sources
    words = [word_of(source, read) for source in inputs]
    return [combine(words, table.value or 0) for table in (first, second)]


def _pack_predicates(instruction: Instruction, read: Read) -> list[Word]:
    """P2R: a bit for each predicate that the mask names; the caller reads "PR" as a word of them."""
    predicates, below, mask = (word_of(source, read) for source in instruction.sources)
    if mask.known != FULL or instruction.modifiers:
        return _strict(instruction, read)
    return [Word(*(new & mask.value | old & ~mask.value & FULL for new, old in zip(predicates, below, strict=True)))]


def _unpack_predicates(instruction: Instruction, read: Read) -> list[Word]:
    """R2P: a predicate for each bit that the mask names."""
    _, source, _ = instruction.sources
    word = word_of(source, read)
    numbers = (int(result.names[0][1:]) for result in instruction.results)
    return [DEFINED if word.defined >> number & 1 else UNDEFINED for number in numbers]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), _move),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiply_add),
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD"), _add),
    **dict.fromkeys(("SHF", "USHF"), _shift),
    **dict.fromkeys(("SGXT", "USGXT"), _sign_extend),
    **dict.fromkeys(("PRMT", "UPRMT"), _permute),
    **dict.fromkeys(("LOP3", "ULOP3"), _logic),
    **dict.fromkeys(("SEL", "USEL", "FSEL"), _select),
    **dict.fromkeys(("HADD2", "HMUL2", "HFMA2", "HMNMX2", "VHMNMX"), _packed),
    **dict.fromkeys(("PLOP3", "UPLOP3"), _predicate_logic),
    **dict.fromkeys(("S2R", "S2UR", "B2R", "LEPC", "ELECT"), _loaded),
    **dict.fromkeys(("I2F", "MUFU", "FRND"), _converted),
    "CS2R": _zero,
    "SHFL": _shuffle,
    "F2FP": _convert_pair,
    "P2R": _pack_predicates,
    "R2P": _unpack_predicates,
}
_RULES |= dict.fromkeys(
    ("LDG", "LDS", "LDL", "LD", "LDC", "ULDC", "LDCU", "LDSM", "ATOM", "ATOMG", "ATOMS", "SYNCS", "QSPC"), _loaded
)
