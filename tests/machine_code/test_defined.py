"""The analysis of definedness on a few instructions: each listing has a variant without findings and one with."""

import pytest

from tests.machine_code import findings_of_text
from tests.support.listing import PROLOGUE, STORE, listing, uses, variants

#: Of instructions before R4 is stored: <what leaves it defined|what does not>.
RESULTS = {
    "a register that nothing wrote": "MOV R4, <R0|R99>",
    "moves": "<IMAD.MOV.U32 R10, RZ, RZ, R0; MOV R4, R10|IMAD.MOV.U32 R4, RZ, RZ, R10>",
    "moves by uniform registers": "R2UR UR4, <R0|R10>; IMAD.U32 R4, RZ, RZ, UR4",
    "PRMT takes bytes": "PRMT R4, R10, <0x1010|0x2010>, RZ",
    "PRMT with a selector in a register": "<MOV R5, 0x1010|LDS R5, [R0]>; PRMT R4, R10, R5, RZ",
    "LOP3 masks": "LOP3.LUT R4, R10, <0xffff|0x1ffff>, RZ, 0xc0, !PT",
    "LOP3 sets": "LOP3.LUT R4, R99, <0xffffffff|0xfffffff7>, RZ, 0xfc, !PT",
    "LOP3 chooses": "LOP3.LUT R4, <0xffff0000|0xfffe0000>, R0, R10, 0xca, !PT",  # (a & b) | (~a & c) for a constant a
    "LOP3 of a mask in a register": "<MOV R5, 0xffff|LDS R5, [R0]>; LOP3.LUT R4, R10, R5, RZ, 0xc0, !PT",
    "products that shift": "<IMAD.U32 R4, R10, 0x10000, RZ|IMAD.SHL.U32 R4, R10, 0x8000, RZ>",
    "other products need all bits": "<IMAD R4, R0, 0x3, RZ|IMAD R4, R10, 0x30000, RZ>",
    "sums need all bits": "IADD3 R4, <R0|R10>, 0x1, RZ",
    "F2FP of two floats": "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, <R0|R10>, R0, RZ",
    "F2FP merges a half": "<|PRMT R10, R10, 0x1032, RZ;> F2FP.SATFINITE.<E4M3|E5M2>.F32.PACK_AB_MERGE_C R4, R0, R0, R10",
    "F2FP reads a half before it is made": "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C <R5, R0, R0, RZ|R4, R0, R0, R5>;"
    "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C <R4, R0, R0, R5|R5, R0, R0, RZ>",
    "F2FP of float16": "PRMT R5, R10, 0x1010, RZ; F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R4, <R5|R10>, RZ",
    "F2FP to float16": "F2FP.F16.E4M3.UNPACK_B R4, <R10|R10.H1>",
    "F2FP to bfloat16": "F2FP.BF16.F32.PACK_AB R4, RZ, <R0|R10>",
    "halves": "HADD2 R5, R10, R0; PRMT R4, R5, <0x1010|0x3210>, RZ",
    "one half twice": "HMUL2 R4, <R10.H0_H0|R10.H1_H1>, R0",
    "a half as float32": "HADD2.F32 R4, -RZ, <R10.H0_H0|R10.H1_H1>",
    # 0x10f8: bytes 0, 1 and the sign of 0; 0x3400: byte 3
    "constants by HFMA2": "HFMA2.MMA R5, -RZ, RZ, 0, <0.000606536865234375|0.25>; PRMT R4, R10, R5, RZ",
    "selections": "SEL R4, R0, <RZ|R10>, P0",
    "another thread's bits": "SHFL.BFLY PT, <R5|R4>, R10, 0x1, 0x1f<; PRMT R4, R5, 0x1010, RZ|>",
    "spilled and reloaded": "STL [R1], R10; LDL <R5|R4>, [R1]<; PRMT R4, R5, 0x1010, RZ|>",
    "products on tensor cores": "MOV R8, R0; <MOV R9, R0;|> HMMA.1688.F32 R4, R8, R0, RZ",
    # -- ways through a kernel
    "both ways of a branch": "@P0 BRA {other}; MOV R4, R0; BRA {end}; other: MOV <R4|R5>, 0x1; end:",
    "the other guard": "@P0 MOV R4, R0; <@!P0 MOV R4, RZ|@!P0 STORE; EXIT>",
    "the second result of a comparison": (
        "<ISETP.GE.AND P0, P1, R0, 0x4, PT|DSETP.MAX.AND P0, P1, R2, R2, PT>; @P0 MOV R4, R0; @P1 MOV R4, RZ"
    ),
    "threads that diverge": "UMOV UR4, 0x1; <MOV R4, R0;|> BRA.DIV UR4, {end}; MOV R4, 0x1; end:",
    "threads that wait for each other": (
        "BSSY B0, {end}; @P0 BRA {join}; MOV R4, 0x2; BREAK B0; BRA {end}; join: <MOV R4, 0x1;|> BSYNC B0; end:"
    ),
    "an address in a register": "LDC R5, c[0x2][R0]; BRX R5 -0x60; MOV R4, 0x1; BRA {end}; MOV <R4|R5>, 0x2; end:",
    "a guarded exit": "@P0 MOV R4, R0; <@!P0|@P0> EXIT",
    "the stack pointer as data": "<MOV R4, R0|LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT>",
    "a slot of another path": "STL [R1], R0; @P0 BRA {end}; STL [R1], <R0|R99>; end: LDL R4, [R1]",
    "what never happens": "@!PT MOV R4, <R99; MOV R4,|> R0",
    "a loop that runs at least once": (
        "MOV R5, RZ; loop: <|ISETP.GE.AND P0, PT, R5, R0, PT; @P0 BRA {end};> LDS R4, [R0]; IADD3 R5, R5, 0x1, RZ;"
        "<ISETP.LT.AND P0, PT, R5, R0, PT; @P0|> BRA {loop}; end:"
    ),
}

#: Whole kernels.
FLOWS = {
    "what a loop carries": "<MOV R4, RZ|NOP>; loop: STORE; LDS R4, [R0]; ISETP.LT.AND P0, PT, R4, R0, PT; @P0 BRA {loop}",
    "a guard": "@P0 MOV R4, R0; <@P0|> STORE",
    "arithmetic between instructions with one guard": "@P0 LDS R5, [R0]; IADD3 R4, R5, 0x1, RZ; <@P0|> STORE",
    "a guard that implies the other": "@P0 MOV R4, R0; ISETP.LT.<AND|OR> P1, PT, R0, 0x40, P0; @P1 STORE",
    "a function of predicates": (  # 0x80: all three; 0xfe: any
        "ISETP.GE.AND P1, PT, R0, 0x5, PT; @P0 MOV R4, R0; PLOP3.LUT P2, PT, P0, P1, PT, <0x80|0xfe>, 0x0; @P2 STORE"
    ),
    "a predicate that is computed anew": (
        "ISETP.GE.U32.AND P0, PT, R0, 0x4, PT; @!P0 MOV R4, R0; ISETP.GT.U32.AND P0, PT, R0, <0x3|0x4>, PT; @!P0 STORE"
    ),
    "a predicate that is kept in a register": (
        "P2R R6, PR, RZ, 0x1; @P0 MOV R4, R0; ISETP.GE.AND P0, PT, R0, 0x40, PT; ISETP.<NE|EQ>.AND P0, PT, R6, RZ, PT;"
        "@P0 STORE"
    ),
    "a predicate that is kept in a bit": (
        "LOP3.LUT R6, R0, 0xffffefff, RZ, 0xc0, !PT; @P0 LOP3.LUT R6, R6, 0x1000, RZ, 0xfc, !PT; @P0 MOV R4, R0;"
        "loop: LOP3.LUT R6, R6, 0xfffffffe, RZ, 0xc0, !PT; ISETP.LT.AND P0, PT, R0, 0x40, PT;"
        "@P0 LOP3.LUT R6, R6, 0x1, RZ, 0xfc, !PT; LOP3.LUT P1, RZ, R6, <0x1000|0x1>, RZ, 0xc0, !PT; @P1 STORE;"
        "ISETP.LT.AND P2, PT, R0, R2, PT; @P2 BRA {loop}"
    ),
    "a bit of another value": (
        "LOP3.LUT R6, R0, 0xffffefff, RZ, 0xc0, !PT; @P0 LOP3.LUT R6, R6, 0x1000, RZ, 0xfc, !PT; @P0 MOV R4, R0;"
        "<MOV R7, R6|LDS R6, [R0]>; LOP3.LUT P1, RZ, R6, 0x1000, RZ, 0xc0, !PT; @P1 STORE"
    ),
    "two branches on one predicate": (
        "@P0 BRA {first}; LDS R4, [R0]; first: BAR.SYNC.DEFER_BLOCKING 0x0; <@P0|@!P0> BRA {second}; STORE; second:"
    ),
    "a predicate of the last iteration": (
        "MOV R5, RZ; loop: ISETP.GE.AND P0, PT, R5, 0x4, PT; <@P0 LDS R4, [R0];|> @P0 STORE; @P0 LDS R4, [R0];"
        "IADD3 R5, R5, 0x1, RZ; ISETP.LT.AND P1, PT, R5, R0, PT; @P1 BRA {loop}"
    ),
    "a vote": "@P0 R2UR UR4, R0; VOTEU.ANY UP0, P0; <@UP0|> UMOV UR5, UR4; <@UP0|> STS [UR5], R0 -> address UR5",
    "a vote of all threads": "@P0 MOV R4, R0; VOTE.<ALL|ANY> P1, P0; @P1 STORE",
    "comparisons of floats": (  # what is not less is greater, equal or not a number
        "FSETP.LT.AND P0, PT, R0, 4, PT; @!P0 MOV R4, R0; FSETP.GEU.AND P0, PT, R0, <4|5>, PT; @P0 STORE"
    ),
    "calls": (  # each caller has something else in R4; the routine leaves it alone
        "MOV R8, {first}; <MOV R4, R0;|> CALL.REL.NOINC {routine}; first: <STORE|MOV R4, R0>; STG.E [R2.64], R6;"
        "MOV R8, {second}; CALL.REL.NOINC {routine}; second: STG.E [R2.64], R6; EXIT;"
        "routine: IADD3 R6, <R0|R4>, 0x1, RZ; RET.REL.NODEC R8 0x0 -> store R6"
    ),
    "a register of one caller": (
        "MOV R4, R0; MOV R8, {first}; CALL.REL.NOINC {routine}; first: STORE; EXIT;"
        "routine: MOV <R5, R4|R4, R99>; RET.REL.NODEC R8 0x0"
    ),
    "a guarded store at the end of a block": (  # says nothing of what comes behind it
        "@<P0|!P0> MOV R4, R0; <@!P0 MOV R4, RZ;|> @P0 STS [R0], R0; again: STORE; ISETP.GE.AND P1, PT, R0, 0x5, PT;"
        "@P1 BRA {again}"
    ),
    "guards": "ISETP.GE.AND P0, PT, <R0|R10>, 0x4, PT; @P0 EXIT; MOV R4, R0" + STORE + " -> guard P0",
    "conditions among the operands of a branch": "@P0 BRA <!P0|!P1>, {end}; end: -> guard P1",
    "addresses": "STS [R0+<0x4|UR4>], R0 -> address UR4",
    "addresses of 64 bits": "LD.E R5, [<R2|R3>] -> address R4",
    "bytes": "<NOP|SHF.R.U32.HI R10, RZ, 0x10, R10>; STG.E.U8 [R2.64], R10 -> store R10",
    "all registers of a store": "MOV R4, R0; <MOV R5, R0;|> STG.E.64 [R2.64], R4 -> store R5",
    "the stack pointer as an address": (
        "IADD3 R1, R1, -0x10, RZ; LEA R6, R0, <R1|R98>, 0x2; STL [R6], R0; STL [R1+0x4], R0 -> address R6"
    ),
    "local memory at a computed address": "LEA R6, R0, R1, 0x2; STL [R6], <R0|R99> -> store R99",
    "what never happens behind a branch": (
        "@P0 BRA {end}; MOV R4, R0; <@P0|@!P0> MOV R4, R99; @P0 STS [R99], R99; STORE; end:"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", [*(text + STORE for text in RESULTS.values()), *FLOWS.values()], ids=[*RESULTS, *FLOWS])
def test_undefined_bits_are_found(text):
    text, _, expected = text.partition(" -> ")
    clean, broken = variants(text + "; EXIT")
    assert uses(clean) == []
    assert set(uses(broken)) == {expected or "store R4"}


def test_findings_say_what_and_where():
    (pointer,) = findings_of_text(listing(PROLOGUE + "LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT" + STORE))
    assert pointer.message == "what it stores depends on bits 0x0000ffff of R4; the stack pointer is no data"
    assert (pointer.function, pointer.address, pointer.instruction) == ("kernel", 0x60, "STG.E [R2.64], R4")
    (unwritten,) = findings_of_text(listing(PROLOGUE + "MOV R4, R10" + STORE))
    assert unwritten.message == "what it stores depends on bits 0xffff0000 of R4; no instruction wrote them"
    assert str(unwritten).startswith("kernel 0x0060: STG.E [R2.64], R4: what it stores")
