"""The ways of FP8 bytes, on a few instructions: each listing has a variant without findings and one with."""

import pytest

from tests.machine_code import Finding, findings_of_text
from tests.support.listing import listing

#: Short for the conversions.
OPCODES = {
    "E4M3 ": "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C ",
    "E5M2 ": "F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C ",
    "E4M3.F16 ": "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C ",
}
#: Floats in R4 to R7, other data in R20, addresses in R2, R3 and R0.
PROLOGUE = """
    LDC R1, c[0x0][0x28]
    LDC.64 R2, c[0x0][0x210]
    S2R R0, SR_TID.X
    LDG.E.128 R4, [R2.64]
    LDG.E R20, [R2.64+0x40]
"""
#: R9 has the bytes of R4, R5, R6 and R7.
CONVERT = """
    E4M3 R8, R7, R6, RZ
    E4M3 R9, R5, R4, R8
"""
BOTH = "STG.E [R2.64], R9\nSTS [R0], R10\nEXIT"
ROW = "STG.E [R2.64], R9\n"

#: name: (clean, broken, kinds and registers found in the broken one)
CASES: dict[str, tuple[str, str, set[tuple[str, str]]]] = {
    "both copies": (
        CONVERT + "MOV R10, R9\n" + BOTH,
        CONVERT + "MOV R10, R20\n" + "STG.E [R2.64], R9\nPRMT R10, R9, 0x7610, R20\nSTS [R0], R10\nEXIT",
        {("layout", "R6"), ("layout", "R7"), ("byte", "R10")},
    ),
    "a half that is read before it is made": (  # R8 has something else by then
        CONVERT + "LOP3.LUT R11, R8, 0xffff, RZ, 0xc0, !PT\nPRMT R10, R9, 0x5410, R11\n" + BOTH,
        "MOV R8, R20\nLOP3.LUT R11, R8, 0xffff, RZ, 0xc0, !PT\n" + CONVERT + "PRMT R10, R9, 0x5410, R11\n" + BOTH,
        {("layout", "R6"), ("layout", "R7"), ("byte", "R10")},
    ),
    "another order of bytes": (
        CONVERT + "PRMT R10, R9, 0x0213, RZ\n" + BOTH,
        CONVERT + "PRMT R10, R9, 0x0212, RZ\n" + BOTH,
        {("layout", "R7")},
    ),
    "bytes one by one": (
        CONVERT
        + ROW
        + "STS.U8 [R0], R9\nSHF.R.U32.HI R11, RZ, 0x8, R9\nSTS.U8 [R0+0x1], R11\n"
        + "PRMT R12, R9, 0x7632, RZ\nSTS.U8 [R0+0x2], R12\n"
        + "SHF.R.U32.HI R13, RZ, 0x18, R9\nSTS.U8 [R0+0x3], R13\nEXIT",
        CONVERT
        + ROW
        + "STS.U8 [R0], R9\nSHF.R.U32.HI R11, RZ, 0x8, R9\nSTS.U8 [R0+0x1], R11\n"
        + "PRMT R12, R9, 0x7632, RZ\nSTS.U8 [R0+0x2], R12\n"
        + "SHF.R.U32.HI R13, RZ, 0x18, R20\nSTS.U8 [R0+0x3], R13\nEXIT",
        {("layout", "R7")},
    ),
    "packed by logic and products": (
        CONVERT
        + "LOP3.LUT R11, R9, 0xff00ff, RZ, 0xc0, !PT\nLOP3.LUT R12, R9, 0xff00ff00, RZ, 0xc0, !PT\n"
        + "LOP3.LUT R13, R11, R12, RZ, 0xfc, !PT\nIMAD R10, R13, 0x1, RZ\nPRMT R14, R13, 0x1032, RZ\n"
        + "LOP3.LUT R15, R14, 0xffff, RZ, 0xc0, !PT\nIMAD R10, R13, 0x10000, R15\n"
        + BOTH,
        CONVERT
        + "LOP3.LUT R11, R9, 0xff00ff, RZ, 0xc0, !PT\nLOP3.LUT R12, R20, 0xff00ff00, RZ, 0xc0, !PT\n"
        + "LOP3.LUT R10, R11, R12, RZ, 0xfc, !PT\n"
        + BOTH,
        {("layout", "R5"), ("layout", "R7"), ("byte", "R10")},
    ),
    "copies that are converted each by itself": (
        CONVERT
        + ROW
        + "LDG.E R12, [R2.64+0x80]\nLDG.E R13, [R2.64+0xc0]\nE5M2 R10, R12, R13, RZ\nSTS.U16 [R0], R10\nEXIT",
        CONVERT
        + ROW
        + "LDG.E R12, [R2.64+0x80]\nE4M3 R10, R12, R4, RZ\nSTS.U16 [R0], R10\nEXIT",
        {("layout", "R5"), ("layout", "R6"), ("layout", "R7"), ("layout", "R12")},
    ),
    "conversions that are repeated": (
        CONVERT
        + ROW
        + "MOV R12, R4\nE4M3 R10, R5, R12, RZ\nSTS.U16 [R0], R10\n"
        + "E4M3 R11, R7, R6, RZ\nSTS.U16 [R0+0x2], R11\nEXIT",
        CONVERT
        + ROW
        + "E5M2 R10, R5, R4, R8\nSTS [R0], R10\nEXIT",
        {("layout", "R4"), ("layout", "R5")},
    ),
    "values that are computed twice": (
        "FMUL R14, R4, R20\nE4M3 R9, R5, R14, RZ\nSTG.E.U16 [R2.64], R9\n"
        + "FMUL R15, R4, R20\nE4M3 R10, R5, R15, RZ\nSTS.U16 [R0], R10\nEXIT",
        "FMUL R14, R4, R20\nE4M3 R9, R5, R14, RZ\nSTG.E.U16 [R2.64], R9\n"
        + "FADD R15, R4, R20\nE4M3 R10, R5, R15, RZ\nSTS.U16 [R0], R10\nEXIT",
        {("layout", "R14"), ("layout", "R15")},
    ),
    "one layout": (
        CONVERT + ROW + "EXIT",
        CONVERT + "PRMT R9, R9, 0x4210, R20\nSTG.E [R2.64], R9\nEXIT",
        {("byte", "R9")},
    ),
    "padding": (
        "E4M3 R9, RZ, R4, RZ\nSTG.E [R2.64], R9\nEXIT",
        "E4M3 R9, RZ, R4, R20\nSTG.E [R2.64], R9\nEXIT",
        {("byte", "R9")},
    ),
    "a half that nothing reads": (
        "E4M3 R9, R20, R4, RZ\nSTG.E.U8 [R2.64], R9\nSTS.U8 [R0], R9\nEXIT",
        "E4M3 R9, R20, R4, RZ\nSTG.E.U16 [R2.64], R9\nSTS.U8 [R0], R9\nEXIT",
        {("layout", "R20")},
    ),
    "masked elements": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "SEL R9, R9, RZ, P0\nMOV R10, R9\n" + BOTH,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "SEL R9, R9, RZ, P0\nPRMT R10, R9, 0x7410, R20\n" + BOTH,
        {("layout", "R6"), ("layout", "R7"), ("byte", "R10")},
    ),
    "guarded stores": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "@P0 MOV R10, R9\n@!P0 MOV R10, RZ\n" + BOTH,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "@P0 PRMT R10, R9, 0x3210, R20\n@!P0 PRMT R10, RZ, 0x7210, R9\n"
        + "PRMT R10, R10, 0x2210, RZ\n" + BOTH,
        {("layout", "R7")},
    ),
    "paths that meet": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "@P0 BRA {end}\nMOV R9, RZ\nend:\nMOV R10, R9\n" + BOTH,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n" + CONVERT + "@P0 BRA {end}\nMOV R9, RZ\nend:\nPRMT R10, R9, 0x2210, RZ\n" + BOTH,
        {("layout", "R7")},
    ),
    "a loop": (
        "MOV R15, RZ\nloop:\nLDG.E.128 R4, [R2.64]\n" + CONVERT + "STG.E [R2.64], R9\nSTS [R0], R9\nIADD3 R15, R15, 0x1, RZ\n"
        + "ISETP.LT.AND P0, PT, R15, R0, PT\n@P0 BRA {loop}\nEXIT",
        "MOV R15, RZ\nMOV R8, R20\nloop:\nLDG.E.128 R4, [R2.64]\n" + "PRMT R10, R8, 0x1010, RZ\n" + CONVERT
        + "PRMT R10, R9, 0x5410, R20\nSTG.E [R2.64], R9\nSTS [R0], R10\nIADD3 R15, R15, 0x1, RZ\n"
        + "ISETP.LT.AND P0, PT, R15, R0, PT\n@P0 BRA {loop}\nEXIT",
        {("layout", "R6"), ("layout", "R7"), ("byte", "R10")},
    ),
    "spilled words": (
        CONVERT + "STL [R1], R9\nMOV R9, R20\nLDL R10, [R1]\nMOV R9, R10\n" + BOTH,
        CONVERT + "STL [R1], R9\nSTL [R1+0x4], R20\nLDL R11, [R1+0x4]\nPRMT R10, R9, 0x4210, R11\n" + BOTH,
        {("layout", "R7"), ("byte", "R10")},
    ),
    "another thread's bytes": (
        CONVERT + "SHFL.IDX PT, R10, R9, R0, 0x1f\n" + BOTH,
        CONVERT + "SHFL.IDX PT, R10, R9, R0, 0x1f\nPRMT R10, R10, 0x1210, RZ\n" + BOTH,
        {("layout", "R7")},
    ),
    "float16 on SM89": (
        "F2FP.F16.F32.PACK_AB.RZ R8, R5, R4\nE4M3.F16 R9, R8, RZ\nSTG.E.U16 [R2.64], R9\nSTS.U16 [R0], R9\nEXIT",
        "F2FP.F16.F32.PACK_AB.RZ R8, R5, R4\nE4M3.F16 R9, R8, RZ\nSTG.E.U16 [R2.64], R9\nSTS.U8 [R0], R9\nEXIT",
        {("layout", "R8")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_elements_reach_every_layout(name):
    clean, broken, expected = CASES[name]
    assert found(clean) == set()
    assert found(broken) == expected


def findings(text: str) -> list[Finding]:
    for short, opcode in OPCODES.items():
        text = text.replace(short, opcode)
    return findings_of_text(listing(PROLOGUE + text))


def found(text: str) -> set[tuple[str, str]]:
    return {(finding.kind, finding.register) for finding in findings(text)}


def test_kernels_without_conversions_have_nothing_to_compare():
    assert found("STG.E [R2.64], R4\nSTS [R0], R5\nEXIT") == set()


def test_messages():
    (byte,) = findings(CASES["one layout"][1])
    assert byte.message == "byte 3 of R9 is stored among converted bytes; no conversion made it, and it is no constant"
    (layout,) = findings(CASES["another order of bytes"][1])
    assert layout.message == "what is made of R7 goes to global memory, and not to shared memory as its neighbours do"
    assert "F2FP" in layout.instruction
