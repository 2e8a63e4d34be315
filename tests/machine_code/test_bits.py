"""Bits of results. Instructions that move bits are executed: a result's bit is undefined exactly if an undefined bit of a
source changes it. All kinds are tried in pairs of listings, of which one has a finding."""

import itertools
import random

import pytest

from tests.machine_code.bits import Word, combine, constant, results
from tests.machine_code.sass import FULL, Operand, parse_instruction
from tests.support.listing import STORE, uses

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


#: name: the instructions before R4 is stored, of which the first leave R4 defined and the second do not.
RESULTS: dict[str, tuple[str, str]] = {
    "a register that nothing wrote": ("MOV R4, R0", "MOV R4, R99"),
    "moves": ("IMAD.MOV.U32 R10, RZ, RZ, R0\nMOV R4, R10", "IMAD.MOV.U32 R4, RZ, RZ, R10"),
    "moves by uniform registers": ("R2UR UR4, R0\nIMAD.U32 R4, RZ, RZ, UR4", "R2UR UR4, R10\nIMAD.U32 R4, RZ, RZ, UR4"),
    "PRMT takes bytes": ("PRMT R4, R10, 0x1010, RZ", "PRMT R4, R10, 0x2010, RZ"),
    "PRMT with a selector in a register": (
        "MOV R5, 0x1010\nPRMT R4, R10, R5, RZ",
        "LDS R5, [R0]\nPRMT R4, R10, R5, RZ",
    ),
    "LOP3 masks": ("LOP3.LUT R4, R10, 0xffff, RZ, 0xc0, !PT", "LOP3.LUT R4, R10, 0x1ffff, RZ, 0xc0, !PT"),
    "LOP3 sets": ("LOP3.LUT R4, R99, 0xffffffff, RZ, 0xfc, !PT", "LOP3.LUT R4, R99, 0xfffffff7, RZ, 0xfc, !PT"),
    "LOP3 chooses": (  # (a & b) | (~a & c) for a constant a
        "LOP3.LUT R4, 0xffff0000, R0, R10, 0xca, !PT",
        "LOP3.LUT R4, 0xfffe0000, R0, R10, 0xca, !PT",
    ),
    "LOP3 of a mask in a register": (
        "MOV R5, 0xffff\nLOP3.LUT R4, R10, R5, RZ, 0xc0, !PT",
        "LDS R5, [R0]\nLOP3.LUT R4, R10, R5, RZ, 0xc0, !PT",
    ),
    "products that shift": ("IMAD.U32 R4, R10, 0x10000, RZ", "IMAD.SHL.U32 R4, R10, 0x8000, RZ"),
    "other products need all bits": ("IMAD R4, R0, 0x3, RZ", "IMAD R4, R10, 0x30000, RZ"),
    "sums need all bits": ("IADD3 R4, R0, 0x1, RZ", "IADD3 R4, R10, 0x1, RZ"),
    "F2FP of two floats": (
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R0, R0, RZ",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R10, R0, RZ",
    ),
    "F2FP merges the lower half": (
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R0, R0, R10",
        "PRMT R10, R10, 0x1032, RZ\nF2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C R4, R0, R0, R10",
    ),
    "F2FP reads a half before it is made": (
        """
        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R5, R0, R0, RZ
        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R0, R0, R5
        """,
        """
        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R0, R0, R5
        F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R5, R0, R0, RZ
        """,
    ),
    "F2FP of float16": (
        "PRMT R5, R10, 0x1010, RZ\nF2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R4, R5, RZ",
        "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R4, R10, RZ",
    ),
    "F2FP to float16": ("F2FP.F16.E4M3.UNPACK_B R4, R10", "F2FP.F16.E4M3.UNPACK_B R4, R10.H1"),
    "F2FP to bfloat16": ("F2FP.BF16.F32.PACK_AB R4, RZ, R0", "F2FP.BF16.F32.PACK_AB R4, RZ, R10"),
    "halves": ("HADD2 R5, R10, R0\nPRMT R4, R5, 0x1010, RZ", "HADD2 R5, R10, R0\nPRMT R4, R5, 0x3210, RZ"),
    "one half twice": ("HMUL2 R4, R10.H0_H0, R0", "HMUL2 R4, R10.H1_H1, R0"),
    "a half as float32": ("HADD2.F32 R4, -RZ, R10.H0_H0", "HADD2.F32 R4, -RZ, R10.H1_H1"),
    "constants by HFMA2": (
        "HFMA2.MMA R5, -RZ, RZ, 0, 0.000606536865234375\nPRMT R4, R10, R5, RZ",  # 0x10f8: bytes 0, 1 and sign of 0
        "HFMA2.MMA R5, -RZ, RZ, 0, 0.25\nPRMT R4, R10, R5, RZ",  # 0x3400: byte 3
    ),
    "selections": ("SEL R4, R0, RZ, P0", "SEL R4, R0, R10, P0"),
    "another thread's bits": ("SHFL.BFLY PT, R5, R10, 0x1, 0x1f\nPRMT R4, R5, 0x1010, RZ", "SHFL.BFLY PT, R4, R10, 0x1, 0x1f"),
    "spilled and reloaded": (
        "STL [R1], R10\nLDL R5, [R1]\nPRMT R4, R5, 0x1010, RZ",
        "STL [R1], R10\nLDL R4, [R1]",
    ),
    "products on tensor cores": (
        "MOV R8, R0\nMOV R9, R0\nHMMA.1688.F32 R4, R8, R0, RZ",
        "MOV R8, R0\nHMMA.1688.F32 R4, R8, R0, RZ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_bits_of_results(name):
    clean, broken = (f"ISETP.GE.AND P0, PT, R0, 0x4, PT\n{text}\n{STORE}" for text in RESULTS[name])
    assert uses(clean) == []
    assert uses(broken) == [("store", "R4")]
