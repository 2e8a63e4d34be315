"""The analysis of definedness on a few instructions: each listing has a variant without findings and one with."""

import pytest

from tests.machine_code import findings_of_text
from tests.support.listing import PROLOGUE, STORE, listing, uses

#: name: whole kernels; of the broken one its text, or what changes in the other.
FLOWS: dict[str, tuple[str, str | tuple[str, str], tuple[str, str]]] = {
    "both ways of a branch": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA {other}\nMOV R4, R0\nBRA {end}\nother:\nMOV R4, 0x1\nend:\n" + STORE,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA {other}\nMOV R4, R0\nBRA {end}\nother:\nMOV R5, 0x1\nend:\n" + STORE,
        ("store", "R4"),
    ),
    "a loop that runs at least once": (
        """
        MOV R5, RZ
        loop:
        LDS R4, [R0]
        IADD3 R5, R5, 0x1, RZ
        ISETP.LT.AND P0, PT, R5, R0, PT
        @P0 BRA {loop}
        """ + STORE,
        """
        MOV R5, RZ
        loop:
        ISETP.GE.AND P0, PT, R5, R0, PT
        @P0 BRA {end}
        LDS R4, [R0]
        IADD3 R5, R5, 0x1, RZ
        BRA {loop}
        end:
        """ + STORE,
        ("store", "R4"),
    ),
    "what a loop carries": (
        "MOV R4, RZ\nloop:\nSTG.E [R2.64], R4\nLDS R4, [R0]\nISETP.LT.AND P0, PT, R4, R0, PT\n@P0 BRA {loop}\nEXIT",
        "loop:\nSTG.E [R2.64], R4\nLDS R4, [R0]\nISETP.LT.AND P0, PT, R4, R0, PT\n@P0 BRA {loop}\nEXIT",
        ("store", "R4"),
    ),
    "a guard": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\n@P0 STG.E [R2.64], R4\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\nSTG.E [R2.64], R4\nEXIT",
        ("store", "R4"),
    ),
    "the other guard": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\n@!P0 MOV R4, RZ\n" + STORE,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\n@!P0 STG.E [R2.64], R4\nEXIT",
        ("store", "R4"),
    ),
    "arithmetic between two instructions with one guard": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 LDS R5, [R0]\nIADD3 R4, R5, 0x1, RZ\n@P0 STG.E [R2.64], R4\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 LDS R5, [R0]\nIADD3 R4, R5, 0x1, RZ\nSTG.E [R2.64], R4\nEXIT",
        ("store", "R4"),
    ),
    "a guard that implies the other": (
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        @P0 MOV R4, R0
        ISETP.LT.AND P1, PT, R0, 0x40, P0
        @P1 STG.E [R2.64], R4
        EXIT
        """,
        ("ISETP.LT.AND P1, PT, R0, 0x40, P0", "ISETP.LT.OR P1, PT, R0, 0x40, P0"),
        ("store", "R4"),
    ),
    "a function of predicates": (  # 0x80: all three; 0xfe: any
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        ISETP.GE.AND P1, PT, R0, 0x5, PT
        @P0 MOV R4, R0
        PLOP3.LUT P2, PT, P0, P1, PT, 0x80, 0x0
        @P2 STG.E [R2.64], R4
        EXIT
        """,
        ("PLOP3.LUT P2, PT, P0, P1, PT, 0x80, 0x0", "PLOP3.LUT P2, PT, P0, P1, PT, 0xfe, 0x0"),
        ("store", "R4"),
    ),
    "a predicate that is computed anew": (
        """
        ISETP.GE.U32.AND P0, PT, R0, 0x4, PT
        @!P0 MOV R4, R0
        ISETP.GT.U32.AND P0, PT, R0, 0x3, PT
        @!P0 STG.E [R2.64], R4
        EXIT
        """,
        ("ISETP.GT.U32.AND P0, PT, R0, 0x3, PT", "ISETP.GT.U32.AND P0, PT, R0, 0x4, PT"),
        ("store", "R4"),
    ),
    "a predicate that is kept in a register": (
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        P2R R6, PR, RZ, 0x1
        @P0 MOV R4, R0
        ISETP.GE.AND P0, PT, R0, 0x40, PT
        ISETP.NE.AND P0, PT, R6, RZ, PT
        @P0 STG.E [R2.64], R4
        EXIT
        """,
        ("ISETP.NE.AND P0, PT, R6, RZ, PT", "ISETP.EQ.AND P0, PT, R6, RZ, PT"),
        ("store", "R4"),
    ),
    "two branches on one predicate": (
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        @P0 BRA {first}
        LDS R4, [R0]
        first:
        BAR.SYNC.DEFER_BLOCKING 0x0
        @P0 BRA {second}
        STG.E [R2.64], R4
        second:
        EXIT
        """,
        ("@P0 BRA {second}", "@!P0 BRA {second}"),
        ("store", "R4"),
    ),
    "a predicate of the last iteration": (
        """
        MOV R5, RZ
        loop:
        ISETP.GE.AND P0, PT, R5, 0x4, PT
        @P0 LDS R4, [R0]
        @P0 STG.E [R2.64], R4
        IADD3 R5, R5, 0x1, RZ
        ISETP.LT.AND P1, PT, R5, R0, PT
        @P1 BRA {loop}
        EXIT
        """,
        """
        MOV R5, RZ
        loop:
        ISETP.GE.AND P0, PT, R5, 0x4, PT
        @P0 STG.E [R2.64], R4
        @P0 LDS R4, [R0]
        IADD3 R5, R5, 0x1, RZ
        ISETP.LT.AND P1, PT, R5, R0, PT
        @P1 BRA {loop}
        EXIT
        """,
        ("store", "R4"),
    ),
    "a vote": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 R2UR UR4, R0\nVOTEU.ANY UP0, P0\n@UP0 UMOV UR5, UR4\n@UP0 STS [UR5], R0\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 R2UR UR4, R0\nVOTEU.ANY UP0, P0\nUMOV UR5, UR4\nSTS [UR5], R0\nEXIT",
        ("address", "UR5"),
    ),
    "a vote of all threads": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\nVOTE.ALL P1, P0\n@P1 STG.E [R2.64], R4\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\nVOTE.ANY P1, P0\n@P1 STG.E [R2.64], R4\nEXIT",
        ("store", "R4"),
    ),
    "comparisons of floats": (  # what is not less is greater, equal or not a number
        """
        FSETP.LT.AND P0, PT, R0, 4, PT
        @!P0 MOV R4, R0
        FSETP.GEU.AND P0, PT, R0, 4, PT
        @P0 STG.E [R2.64], R4
        EXIT
        """,
        ("FSETP.GEU.AND P0, PT, R0, 4, PT", "FSETP.GEU.AND P0, PT, R0, 5, PT"),
        ("store", "R4"),
    ),
    "the second result of a comparison": (
        "ISETP.GE.AND P0, P1, R0, 0x4, PT\n@P0 MOV R4, R0\n@P1 MOV R4, RZ\n" + STORE,
        "DSETP.MAX.AND P0, P1, R2, R2, PT\n@P0 MOV R4, R0\n@P1 MOV R4, RZ\n" + STORE,
        ("store", "R4"),
    ),
    "a branch of threads that diverge": (
        "UMOV UR4, 0x1\nMOV R4, R0\nBRA.DIV UR4, {end}\nMOV R4, 0x1\nend:\n" + STORE,
        "UMOV UR4, 0x1\nBRA.DIV UR4, {end}\nMOV R4, 0x1\nend:\n" + STORE,
        ("store", "R4"),
    ),
    "calls": (  # each caller has something else in R4; the routine leaves it alone
        """
        MOV R8, {first}
        MOV R4, R0
        CALL.REL.NOINC {routine}
        first:
        STG.E [R2.64], R4
        STG.E [R2.64], R6
        MOV R8, {second}
        CALL.REL.NOINC {routine}
        second:
        STG.E [R2.64], R6
        EXIT
        routine:
        IADD3 R6, R0, 0x1, RZ
        RET.REL.NODEC R8 0x0
        """,
        """
        MOV R8, {first}
        CALL.REL.NOINC {routine}
        first:
        MOV R4, R0
        STG.E [R2.64], R6
        MOV R8, {second}
        CALL.REL.NOINC {routine}
        second:
        STG.E [R2.64], R6
        EXIT
        routine:
        IADD3 R6, R4, 0x1, RZ
        RET.REL.NODEC R8 0x0
        """,
        ("store", "R6"),
    ),
    "a register of one caller": (
        """
        MOV R4, R0
        MOV R8, {first}
        CALL.REL.NOINC {routine}
        first:
        STG.E [R2.64], R4
        EXIT
        routine:
        MOV R5, R4
        RET.REL.NODEC R8 0x0
        """,
        ("MOV R5, R4", "MOV R4, R99"),
        ("store", "R4"),
    ),
    "threads that wait for each other": (
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        BSSY B0, {end}
        @P0 BRA {join}
        MOV R4, 0x2
        BREAK B0
        BRA {end}
        join:
        MOV R4, 0x1
        BSYNC B0
        end:
        """ + STORE,
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        BSSY B0, {end}
        @P0 BRA {join}
        MOV R4, 0x2
        BREAK B0
        BRA {end}
        join:
        BSYNC B0
        end:
        """ + STORE,
        ("store", "R4"),
    ),
    "a branch to an address in a register": (
        "LDC R5, c[0x2][R0]\nBRX R5 -0x60\nMOV R4, 0x1\nBRA {end}\nMOV R4, 0x2\nend:\n" + STORE,
        "LDC R5, c[0x2][R0]\nBRX R5 -0x60\nMOV R4, 0x1\nBRA {end}\nMOV R5, 0x2\nend:\n" + STORE,
        ("store", "R4"),
    ),
    "a guarded exit": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\n@!P0 EXIT\n" + STORE,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 MOV R4, R0\n@P0 EXIT\n" + STORE,
        ("store", "R4"),
    ),
    "a guarded store at the end of a block": (  # says nothing of what comes behind it
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        @P0 MOV R4, R0
        @!P0 MOV R4, RZ
        @P0 STS [R0], R0
        again:
        STG.E [R2.64], R4
        ISETP.GE.AND P1, PT, R0, 0x5, PT
        @P1 BRA {again}
        EXIT
        """,
        """
        ISETP.GE.AND P0, PT, R0, 0x4, PT
        @!P0 MOV R4, R0
        @P0 STS [R0], R0
        again:
        STG.E [R2.64], R4
        ISETP.GE.AND P1, PT, R0, 0x5, PT
        @P1 BRA {again}
        EXIT
        """,
        ("store", "R4"),
    ),
    "guards": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 EXIT\nMOV R4, R0\n" + STORE,
        "ISETP.GE.AND P0, PT, R10, 0x4, PT\n@P0 EXIT\nMOV R4, R0\n" + STORE,
        ("guard", "P0"),
    ),
    "conditions among the operands of a branch": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA !P0, {end}\nend:\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA !P1, {end}\nend:\nEXIT",
        ("guard", "P1"),
    ),
    "addresses": ("STS [R0+UR4], R0\nEXIT".replace("UR4", "0x4"), "STS [R0+UR4], R0\nEXIT", ("address", "UR4")),
    "addresses of 64 bits": ("LD.E R5, [R2]\nEXIT", "LD.E R5, [R3]\nEXIT", ("address", "R4")),
    "bytes": ("STG.E.U8 [R2.64], R10\nEXIT", "SHF.R.U32.HI R4, RZ, 0x10, R10\nSTG.E.U8 [R2.64], R4\nEXIT", ("store", "R4")),
    "all registers of a store": (
        "MOV R4, R0\nMOV R5, R0\nSTG.E.64 [R2.64], R4\nEXIT",
        "MOV R4, R0\nSTG.E.64 [R2.64], R4\nEXIT",
        ("store", "R5"),
    ),
    "the stack pointer as an address": (
        "IADD3 R1, R1, -0x10, RZ\nLEA R6, R0, R1, 0x2\nSTL [R6], R0\nSTL [R1+0x4], R0\nEXIT",
        "IADD3 R1, R1, -0x10, RZ\nLEA R6, R0, R98, 0x2\nSTL [R6], R0\nEXIT",
        ("address", "R6"),
    ),
    "the stack pointer as data": (
        "MOV R4, R0\n" + STORE,
        "LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT\n" + STORE,
        ("store", "R4"),
    ),
    "a slot that another path spilled": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\nSTL [R1], R0\n@P0 BRA {end}\nSTL [R1], R0\nend:\nLDL R4, [R1]\n" + STORE,
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\nSTL [R1], R0\n@P0 BRA {end}\nSTL [R1], R99\nend:\nLDL R4, [R1]\n" + STORE,
        ("store", "R4"),
    ),
    "local memory at a computed address": (
        "LEA R6, R0, R1, 0x2\nSTL [R6], R0\nEXIT",
        "LEA R6, R0, R1, 0x2\nSTL [R6], R99\nEXIT",
        ("store", "R99"),
    ),
    "what never happens behind a branch": (
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA {end}\nMOV R4, R0\n@P0 MOV R4, R99\n"
        + "@P0 STS [R99], R99\nSTG.E [R2.64], R4\nend:\nEXIT",
        "ISETP.GE.AND P0, PT, R0, 0x4, PT\n@P0 BRA {end}\nMOV R4, R0\n@!P0 MOV R4, R99\nSTG.E [R2.64], R4\nend:\nEXIT",
        ("store", "R4"),
    ),
    "what never happens": ("@!PT MOV R4, R99\nMOV R4, R0\n" + STORE, "@!PT MOV R4, R0\n" + STORE, ("store", "R4")),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOWS)
def test_ways_through_a_kernel(name):
    clean, broken, expected = FLOWS[name]
    broken = clean.replace(*broken) if isinstance(broken, tuple) else broken
    assert uses(clean) == []
    assert uses(broken) == [expected] * len(uses(broken))
    assert uses(broken)


def test_findings_say_what_and_where():
    (pointer,) = findings_of_text(listing(PROLOGUE + "LOP3.LUT R4, R1, 0xffff, RZ, 0xc0, !PT\n" + STORE))
    assert pointer.message == "what it stores depends on bits 0x0000ffff of R4; the stack pointer is no data"
    assert (pointer.function, pointer.address, pointer.instruction) == ("kernel", 0x50, "STG.E [R2.64], R4")
    (unwritten,) = findings_of_text(listing(PROLOGUE + "MOV R4, R10\n" + STORE))
    assert unwritten.message == "what it stores depends on bits 0xffff0000 of R4; no instruction wrote them"
    assert str(unwritten).startswith("kernel 0x0050: STG.E [R2.64], R4: what it stores")
