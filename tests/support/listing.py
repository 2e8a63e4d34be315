"""Listings of a few instructions in the form of `cuobjdump -sass`, for tests of the analysis of machine code."""

import re

from tests.machine_code.defined import undefined_uses
from tests.machine_code.sass import functions


def listing(text: str) -> str:
    """One instruction a line; a line `name:` is a label, which operands name as {name}."""
    labels: dict[str, str] = {}
    instructions: list[str] = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if re.fullmatch(r"\w+:", line):
            labels[line[:-1]] = f"{16 * len(instructions):#x}"
        else:
            instructions.append(line)
    lines = (f"        /*{16 * i:04x}*/   {line.format_map(labels)} ;" for i, line in enumerate(instructions))
    return "\n".join(["\t\tFunction : kernel", *lines])


#: Addresses in R2 and R3; the lower half of R10 is zero, its upper half that of R99, which nothing wrote.
PROLOGUE = """
    LDC R1, c[0x0][0x28]
    LDC.64 R2, c[0x0][0x210]
    S2R R0, SR_TID.X
    LOP3.LUT R10, R99, 0xffff0000, RZ, 0xc0, !PT
"""
STORE = "STG.E [R2.64], R4\nEXIT"


def uses(text: str) -> list[tuple[str, str]]:
    """The uses of undefined bits in PROLOGUE and these instructions: kinds and registers."""
    (instructions,) = functions(listing(PROLOGUE + text)).values()
    return [(use.kind, use.register) for use in undefined_uses(instructions)]
