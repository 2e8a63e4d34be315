"""The reader of machine code: operands and their widths, control flow, and what is refused."""

import pytest

from tests.machine_code import findings_of_text
from tests.machine_code.opcodes import OPCODES
from tests.machine_code.sass import UnknownInstruction, functions, parse_instruction
from tests.support.listing import listing


def names(count: int, first: int, file: str = "R") -> tuple[str, ...]:
    return tuple(f"{file}{i}" for i in range(first, first + count))


@pytest.mark.parametrize(
    ("text", "results", "sources"),
    [
        ("LDG.E.128 R4, desc[UR6][R2.64+0x10]", [names(4, 4)], [("UR6", "UR7", "R2", "R3")]),
        ("LDG.E R4, [R2.64]", [("R4",)], [("R2", "R3")]),
        ("LDS.64 R4, [R8+UR4+0x80]", [names(2, 4)], [("R8", "UR4")]),
        ("LDC.64 R4, c[0x0][0x210]", [names(2, 4)], [()]),
        ("LDC R4, c[0x2][R0]", [("R4",)], [("R0",)]),
        ("STG.E.U8 desc[UR6][R4.64+0x1], R33", [], [("UR6", "UR7", "R4", "R5"), ("R33",)]),
        ("STS.128 [UR10+0x10], R8", [], [("UR10",), names(4, 8)]),
        ("STSM.16.M88.2 [R11+0x200], R28", [], [("R11",), names(2, 28)]),
        ("LDSM.16.MT88.4 R24, [R31]", [names(4, 24)], [("R31",)]),
        ("REDG.E.ADD.BF16x8.RN.STRONG.GPU desc[UR4][R2.64], R4", [], [("UR4", "UR5", "R2", "R3"), names(4, 4)]),
        ("ATOMG.E.CAS.64 PT, R18, [R28+-0x8], R12, R14", [(), names(2, 18)], [names(2, 28), names(2, 12), names(2, 14)]),
        ("ATOMS.CAS R9, [R9+0x4], R4, R5", [("R9",)], [("R9",), ("R4",), ("R5",)]),
        ("IADD3 R2, P1, P2, R53, UR12, R56", [("R2",), ("P1",), ("P2",)], [("R53",), ("UR12",), ("R56",)]),
        ("IADD3.X R15, PT, PT, R45, R29, R31, P4, !PT", [("R15",), (), ()], [("R45",), ("R29",), ("R31",), ("P4",), ()]),
        ("IMAD.WIDE.U32 R26, P1, R4, R31, R26", [names(2, 26), ("P1",)], [("R4",), ("R31",), names(2, 26)]),
        ("IMAD.HI.U32 R8, R7, R9, R6", [("R8",)], [("R7",), ("R9",), names(2, 6)]),
        ("IMAD.X R23, R10, 0x1, R55, P6", [("R23",)], [("R10",), (), ("R55",), ("P6",)]),
        ("LOP3.LUT P1, RZ, R22, 0x1f, RZ, 0xc0, !PT", [("P1",), ()], [("R22",), (), (), (), ()]),
        ("ISETP.LT.AND.EX P3, PT, R9, R17, !P0, P3", [("P3",), ()], [("R9",), ("R17",), ("P0",), ("P3",)]),
        ("PLOP3.LUT P2, PT, PT, PT, UP1, 0x80, 0x0", [("P2",), ()], [(), (), ("UP1",), (), ()]),
        ("VOTE.ANY R38, PT, P4", [("R38",), ()], [("P4",)]),
        ("VOTEU.ANY UP0, P1", [("UP0",)], [("P1",)]),
        ("SHFL.DOWN P3, R8, R4, R5, 0x1f", [("P3",), ("R8",)], [("R4",), ("R5",), ()]),
        ("R2P PR, R0.B1, 0x3", [("P0",), ("P1",)], [(), ("R0",), ()]),
        ("DFMA R14, R16, -UR8, R12", [names(2, 14)], [names(2, 16), names(2, 8, "UR"), names(2, 12)]),
        ("F2F.F32.F64 R3, R2", [("R3",)], [names(2, 2)]),
        ("F2I.S64.F64.TRUNC R20, R2", [names(2, 20)], [names(2, 2)]),
        ("I2F.U64.RP R0, R14", [("R0",)], [names(2, 14)]),
        ("CS2R R4, SRZ", [names(2, 4)], [()]),
        ("HFMA2.BF16_V2 R7, -RZ.H0_H0, RZ.H0_H0, |R5|.H1_H1", [("R7",)], [(), (), ("R5",)]),
        ("HMMA.16816.F32.BF16 R108, R4.reuse, R152, R108", [names(4, 108)], [names(4, 4), names(2, 152), names(4, 108)]),
        ("HMMA.1688.F32.TF32 R8, R4, R2, R8", [names(4, 8)], [names(4, 4), names(2, 2), names(4, 8)]),
        ("HMMA.16816.F16 R8, R4, R2, R8", [names(2, 8)], [names(4, 4), names(2, 2), names(2, 8)]),
        ("IMMA.16832.S8.S8.SAT R84, R172.ROW, R32.COL, R84", [names(4, 84)], [names(4, 172), names(2, 32), names(4, 84)]),
        ("QMMA.16832.F32.E5M2.E4M3 R4, R60.ROW, R108.COL, RZ", [names(4, 4)], [names(4, 60), names(2, 108), ()]),
        ("DMMA.16x8x16 R232, R32, R168, R232", [names(8, 232)], [names(16, 32), names(8, 168), names(8, 232)]),
        ("QGMMA.64x64x32.F32.E5M2.E4M3 R24, gdesc[UR8], RZ, !UPT", [names(32, 24)], [names(4, 8, "UR"), (), ()]),
        ("HGMMA.64x16x16.F16 R24, R4, gdesc[UR8], R24", [names(4, 24)], [names(4, 4), names(2, 10, "UR"), names(4, 24)]),
        ("UTMALDG.2D [UR8], [UR16]", [], [names(4, 8, "UR"), names(2, 16, "UR")]),
        ("UTMASTG.3D [UR12], [UR6]", [], [names(4, 12, "UR"), names(2, 6, "UR")]),
        ("SYNCS.EXCH.64 URZ, [UR6+0x80], UR4", [()], [("UR6",), names(2, 4, "UR")]),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R13+UR9+0x20140], R10", [("P0",)], [("R13", "UR9"), ("R10",)]),
        ("LDGSTS.E.BYPASS.128 [R13+0x1000], desc[UR14][R16.64], P0", [], [("R13",), ("UR14", "UR15", "R16", "R17"), ("P0",)]),
        ("B2R.RESULT RZ, P0", [(), ("P0",)], []),
        ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8", [("UP0",)], [()]),
        ("RET.REL.NODEC R4 0x0", [], [("R4",)]),
        ("DEPBAR.LE SB0, 0x4, {3,2}", [], [(), (), ()]),
    ],
)  # fmt: skip
def test_what_an_instruction_writes_and_reads(text, results, sources):
    instruction = parse_instruction(0, text)
    assert [operand.names for operand in instruction.results] == results
    assert [operand.names for operand in instruction.sources] == sources


def test_guards_targets_and_constants():
    branch = parse_instruction(0x20, "@!P0 BRA !P1, 0x5060")
    assert [(operand.names, operand.sign) for operand in branch.conditions] == [(("P0",), "!"), (("P1",), "!")]
    assert branch.target == 0x5060
    assert parse_instruction(0, "@!UPT MOV R1, R2").guard.value == 0
    assert [s.value for s in parse_instruction(0, "IADD3 R4, -0x1, ~0xf, RZ").sources] == [0xFFFFFFFF, 0xFFFFFFF0, 0]
    assert parse_instruction(0, "FMUL R4, R4, +INF").sources[1].value is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROB.X R1, R2", "FROB is in no table"),
        ("@P0 FROB R1", "FROB is in no table"),
        ("MOV R1, frob[R2]", "'frob\\[R2\\]' is not understood"),
        ("HMMA.SP.16832.F32 R4, R8, R12, R4, R16, 0x0", "sparse"),
        ("UTMALDG [UR8], [UR16]", "UTMALDG"),
        ("BRA `(.L_x_7)", "the target is not in the dump"),
    ],
)
def test_what_is_not_known_is_refused(text, says):
    with pytest.raises(UnknownInstruction, match=says):
        findings_of_text(listing(f"MOV R0, 0x1; {text}; EXIT"))


def test_refusals_of_whole_listings():
    with pytest.raises(ValueError, match="no instructions"):
        findings_of_text("Fatbin elf code:")
    with pytest.raises(UnknownInstruction, match="leads out of the function"):
        findings_of_text(listing("BRA 0x5000\nEXIT"))
    recursion = "MOV R4, {behind}\nroutine:\nCALL.REL.NOINC {routine}\nbehind:\nRET.REL.NODEC R4 0x0"
    with pytest.raises(UnknownInstruction, match="nested calls"):
        findings_of_text(listing(recursion))
    elsewhere = "MOV R4, 0x0\nCALL.REL.NOINC {routine}\nEXIT\nroutine:\nRET.REL.NODEC R4 0x0"
    with pytest.raises(UnknownInstruction, match="returns to 0x0, not the caller"):
        findings_of_text(listing(elsewhere))


def test_functions_of_a_dump():
    first = listing("MOV R1, 0x1\nEXIT")
    found = functions(first + "\n" + first.replace("kernel", "other"))
    assert {name: len(instructions) for name, instructions in found.items()} == {"kernel": 2, "other": 2}
    assert all(name.isupper() for name in OPCODES)
