"""The reader of machine code: operands and their widths, control flow, and what is refused."""

import pytest

from tests.machine_code import findings_of_text
from tests.machine_code.sass import UnknownInstruction, parse_instruction
from tests.support.listing import listing


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
