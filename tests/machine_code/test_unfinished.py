"""The analysis of unfinished products on a few instructions."""

import pytest

from tests.machine_code import UnknownInstruction, findings_of_text
from tests.machine_code.sass import functions
from tests.machine_code.unfinished import unfinished_uses
from tests.support.listing import listing

PRODUCT = "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT\n"  # sums in R24 to R27
LAST = "QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0\n"
OTHER = "QGMMA.64x8x32.F32.E4M3.E4M3 R32, gdesc[UR8], R32, gsb0\n"
FROM_REGISTERS = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0\n"  # left operand in R40 to R43
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1\n"
EXIT = "EXIT"


def touched(text: str) -> list[tuple[str, bool]]:
    (instructions,) = functions(listing(text)).values()
    return [(touch.register, touch.is_sum) for touch in unfinished_uses(instructions)]


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "waited for": (PRODUCT + LAST + WAIT + "FADD R0, R24, R27", []),
        "read at once": (PRODUCT + LAST + "FADD R0, R24, R27", [("R24", True), ("R27", True)]),
        "overwritten": (LAST + "MOV R25, RZ", [("R25", True)]),
        "other registers": (LAST + "FADD R0, R23, R28", []),
        "descriptors are read when it is issued": (LAST + "UMOV UR8, URZ", []),
        "stored": (LAST + "STG.E.128 [R2.64], R24", [(f"R{i}", True) for i in range(24, 28)]),
        "a wait that leaves this group": (LAST + WAIT_FOR_ALL_BUT_ONE + "MOV R0, R24", [("R24", True)]),
        "a wait that leaves the next group": (LAST + OTHER + WAIT_FOR_ALL_BUT_ONE + "MOV R0, R24", []),
        "and that group itself": (LAST + OTHER + WAIT_FOR_ALL_BUT_ONE + "MOV R0, R32", [("R32", True)]),
        "added to by a younger group": (LAST + LAST + WAIT_FOR_ALL_BUT_ONE + "MOV R0, R24", [("R24", True)]),
        "a group that is not closed": (PRODUCT + WAIT + "MOV R0, R24", [("R24", True)]),
        "the left operand is overwritten": (FROM_REGISTERS + "MOV R41, RZ", [("R41", False)]),
        "the left operand is read": (FROM_REGISTERS + "MOV R0, R41", []),
        "the left operand, when all is done": (FROM_REGISTERS + WAIT + "MOV R41, RZ", []),
        "a left operand that is a sum": (
            LAST + FROM_REGISTERS.replace("R40", "R24").replace("R24, R24, ", "R48, R24, ", 1),
            [(f"R{i}", True) for i in range(24, 28)],
        ),
        "a shape that overlaps the sums": (
            LAST + LAST.replace("64x8x", "64x16x").replace("R24, gsb0", "R24, gsb0"),
            [(f"R{i}", True) for i in range(24, 28)],
        ),
        "sums over the left operand": (
            FROM_REGISTERS + LAST.replace("R24", "R40"),
            [(f"R{i}", False) for i in range(40, 44)],
        ),
    }.values(),
)
def test_straight_code(text, expected):
    assert touched(text + "\n" + EXIT) == expected


LOOP = """
loop:
{convert}
HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0
{wait}
IADD3 R5, R5, 0x1, RZ
ISETP.LT.AND P0, PT, R5, R0, PT
@P0 BRA {{loop}}
WARPGROUP.DEPBAR.LE gsb0, 0x0
FADD R0, R24, R25
EXIT
"""


@pytest.mark.parametrize(
    ("wait", "expected"), [(WAIT, []), (WAIT_FOR_ALL_BUT_ONE, [("R41", False)]), ("NOP", [("R41", False)])]
)
def test_what_a_loop_carries(wait, expected):
    """The left operand is converted while the product of the step before still reads it (triton#9433)."""
    assert touched(LOOP.format(convert="LDS R41, [R3]", wait=wait)) == expected


def test_one_way_of_a_branch_is_enough():
    text = LAST + "ISETP.LT.AND P0, PT, R5, R0, PT\n@P0 BRA {{end}}\n{wait}end:\nMOV R0, R24\n" + EXIT
    assert touched(text.format(wait=WAIT)) == [("R24", True)]
    assert touched((WAIT + text).format(wait=WAIT)) == [("R24", True)]
    assert touched(text.replace("@P0", WAIT + "@P0").format(wait=WAIT)) == []


def test_a_wait_for_something_else_is_refused():
    with pytest.raises(UnknownInstruction, match="what this waits for is not known"):
        touched(LAST + "WARPGROUP.DEPBAR.EQ gsb0, 0x0\n" + EXIT)


def test_what_is_found_is_said():
    text = listing(PRODUCT + LAST + "MOV R4, R26\n" + EXIT)
    (found,) = (found for found in findings_of_text(text) if found.kind == "unfinished")
    assert found.register == "R26"
    assert "a matrix product still writes R26" in str(found)
