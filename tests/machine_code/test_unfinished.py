"""The analysis of unfinished products on a few instructions."""

import pytest

from tests.machine_code import UnknownInstruction, findings_of_text
from tests.machine_code.sass import functions
from tests.machine_code.unfinished import unfinished_uses
from tests.support.listing import listing

#: PRODUCT and LAST have sums in R24 to R27; FROM_REGISTERS has its left operand in R40 to R43, too; DONE leaves so many groups.
SHORT = {
    "PRODUCT": "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT",
    "LAST": "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0",
    "FROM_REGISTERS": "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0",
    "DONE": "WARPGROUP.DEPBAR.LE gsb0,",
}
SUMS = "R24 R25 R26 R27"
LOOP = (
    "loop: LDS R41, [R3]; FROM_REGISTERS; {}; IADD3 R5, R5, 0x1, RZ; ISETP.LT.AND P0, PT, R5, R0, PT; @P0 BRA {{loop}};"
    "DONE 0x0; FADD R0, R24, R25"
)
BRANCH = "{}LAST; ISETP.LT.AND P0, PT, R5, R0, PT; {}@P0 BRA {{end}}; {}end: MOV R0, R24"


def written(text: str) -> str:
    for short, instruction in SHORT.items():
        text = text.replace(short, instruction)
    return listing(text + "; EXIT")


@pytest.mark.parametrize(
    ("text", "sums", "operands"),
    [
        ("PRODUCT; LAST; DONE 0x0; FADD R0, R24, R27", "", ""),
        ("PRODUCT; LAST; FADD R0, R24, R27", "R24 R27", ""),
        ("LAST; MOV R25, RZ", "R25", ""),
        ("LAST; FADD R0, R23, R28", "", ""),
        ("LAST; UMOV UR8, URZ", "", ""),  # descriptors are read when it is issued
        ("LAST; STG.E.128 [R2.64], R24", SUMS, ""),
        ("LAST; DONE 0x1; MOV R0, R24", "R24", ""),
        ("LAST; QGMMA.64x8x32.F32.E4M3.E4M3 R32, gdesc[UR8], R32, gsb0; DONE 0x1; MOV R0, R24", "", ""),
        ("LAST; QGMMA.64x8x32.F32.E4M3.E4M3 R32, gdesc[UR8], R32, gsb0; DONE 0x1; MOV R0, R32", "R32", ""),
        ("LAST; LAST; DONE 0x1; MOV R0, R24", "R24", ""),  # added to by a younger group
        ("PRODUCT; DONE 0x0; MOV R0, R24", "R24", ""),  # a group that is not closed
        ("FROM_REGISTERS; MOV R41, RZ", "", "R41"),
        ("FROM_REGISTERS; MOV R0, R41", "", ""),
        ("FROM_REGISTERS; DONE 0x0; MOV R41, RZ", "", ""),
        ("LAST; HGMMA.64x8x16.F32.BF16 R48, R24, gdesc[UR8], R24, gsb0", SUMS, ""),  # a left operand that is a sum
        ("LAST; QGMMA.64x16x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0", SUMS, ""),  # another shape
        ("FROM_REGISTERS; QGMMA.64x8x32.F32.E4M3.E4M3 R40, gdesc[UR8], R40, gsb0", "", "R40 R41 R42 R43"),
        # The left operand is converted while the product of the step before still reads it (triton#9433).
        (LOOP.format("DONE 0x0"), "", ""),
        (LOOP.format("DONE 0x1"), "", "R41"),
        (LOOP.format("NOP"), "", "R41"),
        # A wait on one way of a branch is not enough.
        (BRANCH.format("", "", "DONE 0x0; "), "R24", ""),
        (BRANCH.format("DONE 0x0; ", "", "DONE 0x0; "), "R24", ""),
        (BRANCH.format("", "DONE 0x0; ", "DONE 0x0; "), "", ""),
    ],
)
def test_touches(text, sums, operands):
    (instructions,) = functions(written(text)).values()
    found = [(touch.register, "still writes" in touch.message) for touch in unfinished_uses(instructions)]
    assert found == [(name, True) for name in sums.split()] + [(name, False) for name in operands.split()]


def test_a_wait_for_something_else_is_refused():
    with pytest.raises(UnknownInstruction, match="what this waits for is not known"):
        findings_of_text(written("LAST; WARPGROUP.DEPBAR.EQ gsb0, 0x0"))


def test_findings_name_the_register():
    (found,) = (found for found in findings_of_text(written("PRODUCT; LAST; MOV R4, R26")) if found.kind == "unfinished")
    assert found.register == "R26"
    assert "a matrix product still writes R26" in str(found)
