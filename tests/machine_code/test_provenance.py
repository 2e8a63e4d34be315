"""The ways of FP8 bytes, on a few instructions: each listing has a variant without findings and one with."""

import pytest

from tests.machine_code import Finding, findings_of_text
from tests.support.listing import PROLOGUE, listing, variants

#: Short for the conversions, for those that make R9 of R4, R5, R6 and R7, and for the stores of R9 and R10 in two layouts.
SHORT = {
    "CONVERT": "E4M3 R8, R7, R6, RZ; E4M3 R9, R5, R4, R8",
    "BOTH": "ROW; STS [R0], R10",
    "ROW": "STG.E [R2.64], R9",
    "E4M3 ": "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C ",
    "E5M2 ": "F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C ",
    "E4M3.F16 ": "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C ",
}
LOADED = PROLOGUE + "LDG.E.128 R4, [R2.64]; LDG.E R20, [R2.64+0x40]; "  # floats in R4 to R7, other data in R20

#: <right|wrong> -> kinds and registers found in the wrong one.
CASES = {
    "both copies": "CONVERT; <MOV R10, R9|PRMT R10, R9, 0x7610, R20>; BOTH -> layout R6, layout R7, byte R10",
    "a half that is read before it is made": (  # R8 has something else by then
        "<CONVERT|MOV R8, R20>; LOP3.LUT R11, R8, 0xffff, RZ, 0xc0, !PT; <|CONVERT;> PRMT R10, R9, 0x5410, R11; BOTH"
        " -> layout R6, layout R7, byte R10"
    ),
    "another order of bytes": "CONVERT; PRMT R10, R9, <0x0213|0x0212>, RZ; BOTH -> layout R7",
    "bytes one by one": (
        "CONVERT; ROW; STS.U8 [R0], R9; SHF.R.U32.HI R11, RZ, 0x8, R9; STS.U8 [R0+0x1], R11; PRMT R12, R9, 0x7632, RZ;"
        "STS.U8 [R0+0x2], R12; SHF.R.U32.HI R13, RZ, 0x18, <R9|R20>; STS.U8 [R0+0x3], R13 -> layout R7"
    ),
    "packed by logic": (
        "CONVERT; LOP3.LUT R11, R9, 0xff00ff, RZ, 0xc0, !PT; LOP3.LUT R12, <R9|R20>, 0xff00ff00, RZ, 0xc0, !PT;"
        "LOP3.LUT R10, R11, R12, RZ, 0xfc, !PT; BOTH -> layout R5, layout R7, byte R10"
    ),
    "packed by logic and products": (
        "CONVERT; LOP3.LUT R11, R9, 0xff00ff, RZ, 0xc0, !PT; LOP3.LUT R12, R9, 0xff00ff00, RZ, 0xc0, !PT;"
        "LOP3.LUT R13, R11, R12, RZ, 0xfc, !PT; IMAD R10, R13, 0x1, RZ; PRMT R14, R13, 0x1032, RZ;"
        "LOP3.LUT R15, <R14|R13>, 0xffff, RZ, 0xc0, !PT; IMAD R10, R13, 0x10000, R15; BOTH -> layout R6, layout R7"
    ),
    "copies that are converted each by itself": (
        "CONVERT; ROW; LDG.E R12, [R2.64+0x80]; LDG.E R13, [R2.64+0xc0]; <E5M2 R10, R12, R13|E4M3 R10, R12, R4>, RZ;"
        "STS.U16 [R0], R10 -> layout R5, layout R6, layout R7, layout R12"
    ),
    "conversions that are repeated": (
        "CONVERT; ROW; MOV R12, R4; <E4M3 R10, R5, R12, RZ; STS.U16 [R0], R10; E4M3 R11, R7, R6, RZ; STS.U16 [R0+0x2], R11"
        "|E5M2 R10, R5, R4, R8; STS [R0], R10> -> layout R4, layout R5"
    ),
    "values that are computed twice": (
        "FMUL R14, R4, R20; E4M3 R9, R5, R14, RZ; STG.E.U16 [R2.64], R9; <FMUL|FADD> R15, R4, R20; E4M3 R10, R5, R15, RZ;"
        "STS.U16 [R0], R10 -> layout R14, layout R15"
    ),
    "one layout": "CONVERT; PRMT R9, R9, <0x3210|0x4210>, R20; ROW -> byte R9",
    "padding": "E4M3 R9, RZ, R4, <RZ|R20>; ROW -> byte R9",
    "a half that nothing reads": "E4M3 R9, R20, R4, RZ; STG.E.<U8|U16> [R2.64], R9; STS.U8 [R0], R9 -> layout R20",
    "masked elements": (
        "CONVERT; SEL R9, R9, RZ, P0; <MOV R10, R9|PRMT R10, R9, 0x7410, R20>; BOTH -> layout R6, layout R7, byte R10"
    ),
    "guarded stores": (
        "CONVERT; @P0 <MOV R10, R9|PRMT R10, R9, 0x3210, R20>; @!P0 <MOV R10, RZ|PRMT R10, RZ, 0x7210, R9;"
        "PRMT R10, R10, 0x2210, RZ>; BOTH -> layout R7"
    ),
    "paths that meet": "CONVERT; @P0 BRA {end}; MOV R9, RZ; end: PRMT R10, R9, <0x3210|0x2210>, RZ; BOTH -> layout R7",
    "a loop": (
        "MOV R15, RZ; MOV R8, R20; loop: LDG.E.128 R4, [R2.64]; CONVERT; PRMT R10, R9, <0x3210|0x5410>, R20; BOTH;"
        "IADD3 R15, R15, 0x1, RZ; ISETP.LT.AND P0, PT, R15, R0, PT; @P0 BRA {loop} -> layout R6, layout R7, byte R10"
    ),
    "spilled words": (
        "CONVERT; STL [R1], R9; STL [R1+0x4], R20; <MOV R9, R20;|> LDL R11, <[R1]; MOV R9, R11|[R1+0x4]>;"
        "PRMT R10, R9, <0x3210|0x4210>, R11; BOTH -> layout R7, byte R10"
    ),
    "another thread's bytes": (
        "CONVERT; SHFL.IDX PT, R10, R9, R0, 0x1f; PRMT R10, R10, <0x3210|0x1210>, RZ; BOTH -> layout R7"
    ),
    "float16 on SM89": (
        "F2FP.F16.F32.PACK_AB.RZ R8, R5, R4; E4M3.F16 R9, R8, RZ; STG.E.U16 [R2.64], R9; STS.<U16|U8> [R0], R9 -> layout R8"
    ),
}  # fmt: skip


def findings(text: str) -> list[Finding]:
    for short, opcode in SHORT.items():
        text = text.replace(short, opcode)
    return findings_of_text(listing(LOADED + text + "; EXIT"))


def found(text: str) -> set[str]:
    return {f"{finding.kind} {finding.register}" for finding in findings(text)}


@pytest.mark.parametrize("name", CASES)
def test_elements_reach_every_layout(name):
    text, _, expected = CASES[name].partition(" -> ")
    clean, broken = variants(text)
    assert found(clean) == set()
    assert found(broken) == set(expected.split(", "))


def test_kernels_without_conversions_have_nothing_to_compare():
    assert found("STG.E [R2.64], R4; STS [R0], R5") == set()


def test_messages():
    (byte,) = findings("E4M3 R9, RZ, R4, RZ; PRMT R9, R9, 0x4210, R20; ROW")
    assert byte.message == "byte 3 of R9 is stored among converted bytes; no conversion made it, and it is no constant"
    (layout,) = findings("CONVERT; PRMT R10, R9, 0x0212, RZ; BOTH")
    assert layout.message == "what is made of R7 goes to global memory, and not to shared memory as its neighbours do"
    assert "F2FP" in layout.instruction
