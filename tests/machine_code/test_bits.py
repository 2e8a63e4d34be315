"""Bits of results. Instructions that move bits are executed: a result's bit is undefined exactly if an undefined bit of a
source changes it."""

import itertools
import random

import pytest

from tests.machine_code.bits import Word, combine, constant, results
from tests.machine_code.sass import FULL, Operand, parse_instruction

#: A bit that nothing wrote, one that was written, and two that are known.
UNDEFINED, WRITTEN, ZERO, ONE = Word(0), Word(FULL), constant(0), constant(FULL)


def values_of(bit: Word) -> tuple[int, ...]:
    return (bit.value & 1,) if bit.known else (0, 1)


@pytest.mark.parametrize("table", range(256))
def test_functions_of_three_bits(table):
    for bits in itertools.product((UNDEFINED, WRITTEN, ZERO, ONE), repeat=3):
        written = [values_of(bit) if bit.defined else (None,) for bit in bits]
        outcomes = []
        for chosen in itertools.product(*written):
            rows = itertools.product(*((0, 1) if value is None else (value,) for value in chosen))
            outcomes.append({table >> (4 * a + 2 * b + c) & 1 for a, b, c in rows})
        found = combine(list(bits), table)
        is_defined = all(len(outcome) == 1 for outcome in outcomes)
        is_known = is_defined and len(set.union(*outcomes)) == 1
        assert found.defined == (FULL if is_defined else 0), bits
        assert found.known == (FULL if is_known else 0), bits
        assert not is_known or found.value == (FULL if outcomes[0] == {1} else 0)


def word(state: random.Random) -> Word:
    """Bits of all four kinds."""
    defined = state.getrandbits(32) | (FULL if state.random() < 0.3 else 0)
    known = state.getrandbits(32) & defined
    return Word(defined, known, state.getrandbits(32) & known)


def permute(low: int, selector: int, high: int) -> int:
    both = (high << 32 | low).to_bytes(8, "little")
    chosen = [selector >> (4 * i) & 0xF for i in range(4)]
    return int.from_bytes(bytes((0xFF if both[n & 7] > 127 else 0) if n & 8 else both[n] for n in chosen), "little")


def shift_left(low: int, by: int, high: int, take_high: bool) -> int:
    double = (high << 32 | low) << by
    return (double >> 32 if take_high else double) & FULL


def shift_right(low: int, by: int, high: int, take_high: bool, signed: bool) -> int:
    double = high << 32 | low
    if signed and high >> 31:
        double -= 1 << 64
    double >>= by
    return (double >> 32 if take_high else double) & FULL


def extend(value: int, count: int, signed: bool) -> int:
    value &= (1 << count) - 1
    return value - (1 << count) & FULL if signed and value >> (count - 1) else value


#: Text with {} for a number, which numbers, and the execution of (R1, number, R2).
MOVES = {
    "PRMT R4, R1, {}, R2": (range(0, 0x10000, 997), permute),
    "SHF.L.U32 R4, R1, {}, RZ": (range(36), lambda a, n, b: shift_left(a, n, 0, False)),
    "SHF.L.U64.HI R4, R1, {}, R2": (range(65), lambda a, n, b: shift_left(a, n, b, True)),
    "SHF.L.W.U32.HI R4, R1, {}, R2": (range(40), lambda a, n, b: shift_left(a, n & 31, b, True)),
    "SHF.R.U32.HI R4, RZ, {}, R2": (range(36), lambda a, n, b: shift_right(0, n, b, True, False)),
    "SHF.R.S32.HI R4, RZ, {}, R2": (range(36), lambda a, n, b: shift_right(0, n, b, True, True)),
    "SHF.R.U64 R4, R1, {}, R2": (range(65), lambda a, n, b: shift_right(a, n, b, False, False)),
    "SHF.R.S64 R4, R1, {}, R2": (range(65), lambda a, n, b: shift_right(a, n, b, False, True)),
    "SGXT R4, R1, {}": (range(1, 33), lambda a, n, b: extend(a, n, True)),
    "SGXT.U32 R4, R1, {}": (range(1, 33), lambda a, n, b: extend(a, n, False)),
    "IMAD.SHL.U32 R4, R1, {}, RZ": ([1 << i for i in range(32)], lambda a, n, b: a * n & FULL),
}


@pytest.mark.parametrize("text", MOVES)
def test_moves(text):
    numbers, execute = MOVES[text]
    state = random.Random(0)
    for number in numbers:
        words = {"R1": word(state), "R2": word(state)}
        (found,) = results(parse_instruction(0, text.format(hex(number))), lambda source, words=words: read(source, words))
        base = {name: w.value | state.getrandbits(32) & ~w.known for name, w in words.items()}
        reference = execute(base["R1"], number, base["R2"])
        changed = varying = 0
        for name, bit in itertools.product(words, range(32)):
            other = base | {name: base[name] ^ 1 << bit}
            difference = execute(other["R1"], number, other["R2"]) ^ reference
            changed |= difference if not words[name].defined >> bit & 1 else 0
            varying |= difference if not words[name].known >> bit & 1 else 0
        assert found.defined == FULL & ~changed, hex(number)
        assert found.known == FULL & ~varying
        assert found.value == reference & ~varying


def read(source: Operand, words: dict[str, Word]) -> list[Word]:
    return [words[source.names[0]]] if source.names else [constant(source.value or 0)]
