"""The analysis on a few instructions: each listing has a variant without findings and one with.

Whole kernels that are wrong are in tests/lowering/ptx.
"""

import pytest

from tests.machine_code import findings_of_text
from tests.machine_code.sass import UnknownInstruction
from tests.support.listing import PROLOGUE, STORE, listing, uses, variants

#: Of instructions before R4 is stored: <what leaves it defined|what does not>. The upper half of R10 is undefined.
RESULTS = {
    "a register that nothing wrote": "MOV R4, <R0|R99>",
    "PRMT takes bytes": "PRMT R4, R10, <0x1010|0x2010>, RZ",
    "PRMT with a selector in a register": "<MOV R5, 0x1010|LDS R5, [R0]>; PRMT R4, R10, R5, RZ",
    "LOP3 masks": "LOP3.LUT R4, R10, <0xffff|0x1ffff>, RZ, 0xc0, !PT",
    "LOP3 chooses": "LOP3.LUT R4, <0xffff0000|0xfffe0000>, R0, R10, 0xca, !PT",  # (a & b) | (~a & c) for a constant a
    "shifts": "SHF.R.U32.HI R5, RZ, <0x10|0x8>, R10; SHF.L.U32 R5, R10, 0x10, RZ; <MOV R4, R5|SHF.R.S32.HI R4, RZ, 0x1, R10>",
    "products that shift": "<IMAD.U32 R4, R10, 0x10000, RZ|IMAD.SHL.U32 R4, R10, 0x8000, RZ>",
    "F2FP merges a half": "<|PRMT R10, R10, 0x1032, RZ;> F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C R4, R0, R0, R10",
    "F2FP to float16": "F2FP.F16.E4M3.UNPACK_B R4, <R10|R10.H1>",
    "F2FP to bfloat16": "F2FP.BF16.F32.PACK_AB R4, RZ, <R0|R10>",
    "spilled and reloaded": "STL [R1], R10; LDL <R5|R4>, [R1]<; PRMT R4, R5, 0x1010, RZ|>",
    "the stack pointer as data": "<MOV R4, R0|LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT>",
    # -- ways through a kernel
    "a loop": "MOV R5, RZ; loop: IADD3 R5, R5, 0x1, RZ; @P0 MOV <R4|R6>, R0; @P0 BRA {loop}",
    "behind a branch": "@P0 BRA {other}; MOV <R4|R5>, R0; BRA {end}; other: MOV R5, 0x1; end:",
    "threads that wait for each other": (
        "BSSY B0, {end}; @P0 BRA {join}; BREAK B0; BRA {end}; join: <MOV R4, 0x1;|> BSYNC B0; end:"
    ),
    "what never happens": "@!PT MOV R4, <R99; MOV R4,|> R0",
}

#: Whole kernels, and what is found.
FLOWS = {
    "a register of one caller": (
        "MOV R4, R0; MOV R8, {first}; CALL.REL.NOINC {routine}; first: STG.E [R2.64], R5; MOV R4, <R0|R99>; MOV R8, {second};"
        "CALL.REL.NOINC {routine}; second: STG.E [R2.64], R5; EXIT; routine: MOV R5, R4; RET.REL.NODEC R8 0x0 -> store R5"
    ),
    "guards": "ISETP.GE.AND P2, PT, <R0|R10>, 0x4, PT; @P2 EXIT; MOV R4, R0" + STORE + " -> guard P2",
    "conditions among the operands of a branch": "@P0 BRA <!P0|!P1>, {end}; end: -> guard P1",
    "addresses": "STS [R0+<0x4|UR4>], R0 -> address UR4",
    "addresses of 64 bits": "LDG.E R5, [<R2|R3>] -> address R4",
    "bytes": "<NOP|SHF.R.U32.HI R10, RZ, 0x10, R10>; STG.E.U8 [R2.64], R10 -> store R10",
    "all registers of a store": "MOV R4, R0; <MOV R5, R0;|> STG.E.64 [R2.64], R4 -> store R5",
}


@pytest.mark.parametrize("text", [*(text + STORE for text in RESULTS.values()), *FLOWS.values()], ids=[*RESULTS, *FLOWS])
def test_undefined_bits_are_found(text):
    text, _, expected = text.partition(" -> ")
    clean, broken = variants(text + "; EXIT")
    assert uses(clean) == []
    assert set(uses(broken)) == {expected or "store R4"}


#: PRODUCT and LAST have sums in R24 to R27; FROM_REGISTERS has its left operand in R40 to R43, too; DONE leaves so many groups.
SHORT = {
    "PRODUCT": "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT",
    "LAST": "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0",
    "NEXT": "QGMMA.64x8x32.F32.E4M3.E4M3 R32, gdesc[UR8], R32, gsb0",
    "FROM_REGISTERS": "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0",
    "DONE": "WARPGROUP.DEPBAR.LE gsb0,",
}


@pytest.mark.parametrize(
    ("text", "touched"),
    [
        ("PRODUCT; LAST; <DONE 0x0;|> FADD R0, R24, R27", "R24 R27"),
        ("LAST; MOV <R23|R25>, RZ", "R25"),
        ("LAST; <NEXT|NOP>; DONE 0x1; MOV R0, R24", "R24"),
        ("LAST; <NEXT|LAST>; DONE 0x1; MOV R0, R24", "R24"),  # added to by a younger group
        ("<LAST|PRODUCT>; DONE 0x0; MOV R0, R24", "R24"),  # a group that is not closed
        ("FROM_REGISTERS; <MOV R0, R41|MOV R41, RZ>", "R41"),
        ("LAST; QGMMA.64x<8|16>x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0", "R24 R25 R26 R27"),  # another shape
        # The left operand is converted while the product of the step before still reads it (triton#9433).
        ("loop: LDS R41, [R3]; FROM_REGISTERS; DONE <0x0|0x1>; @P0 BRA {loop}; DONE 0x0; FADD R0, R24, R25", "R41"),
        ("LAST; <DONE 0x0;|> @P0 BRA {end}; DONE 0x0; end: MOV R0, R24", "R24"),  # a wait on one way is not enough
    ],
)
def test_touches_of_unfinished_products_are_found(text, touched):
    for short, instruction in SHORT.items():
        text = text.replace(short, instruction)
    clean, broken = (findings_of_text(listing(PROLOGUE + variant + "; EXIT")) for variant in variants(text))
    assert [found.register for found in clean if found.kind == "unfinished"] == []
    assert [found.register for found in broken if found.kind == "unfinished"] == touched.split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("@P0 FROB R1", "FROB is in no table"),
        ("MOV R1, frob[R2]", "'frob\\[R2\\]' is not understood"),
        ("BRA 0x5000", "leads out of the function"),
        ("MOV R4, {behind}; routine: CALL.REL.NOINC {routine}; behind: RET.REL.NODEC R4 0x0", "nested calls"),
        ("QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT; WARPGROUP.DEPBAR.EQ gsb0, 0x0", "waits for is not known"),
    ],
)
def test_what_is_not_known_is_refused(text, says):
    with pytest.raises(UnknownInstruction, match=says):
        findings_of_text(listing(f"MOV R0, 0x1; {text}; EXIT"))
