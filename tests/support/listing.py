"""Listings of a few instructions in the form of `cuobjdump -sass`, for tests of the analysis of machine code.

Instructions are separated by semicolons; `name:` before one is a label, which operands name as {name}. STORE is a store
of R4.
"""

import re

from tests.machine_code.defined import undefined_uses
from tests.machine_code.sass import functions


def listing(text: str) -> str:
    """The dump of one function, "kernel"."""
    labels: dict[str, str] = {}
    instructions: list[str] = []
    for part in re.split(r"[;\n]", text.replace("STORE", "STG.E [R2.64], R4")):
        *names, instruction = re.split(r":\s*", part.strip())
        labels |= dict.fromkeys(names, f"{16 * len(instructions):#x}")
        instructions += [instruction] if instruction else []
    lines = (f"        /*{16 * i:04x}*/   {line.format_map(labels)} ;" for i, line in enumerate(instructions))
    return "\n".join(["\t\tFunction : kernel", *lines])


def variants(text: str) -> tuple[str, str]:
    """The text with the first, and with the second of all alternatives <first|second>."""
    return tuple(re.sub(r"<([^|>]*)\|([^>]*)>", rf"\{i}", text) for i in (1, 2))  # type: ignore[return-value]


#: Addresses in R2 and R3; the lower half of R10 is zero, its upper half that of R99, which nothing wrote; P0 is R0 >= 4.
PROLOGUE = """LDC R1, c[0x0][0x28]; LDC.64 R2, c[0x0][0x210]; S2R R0, SR_TID.X
    LOP3.LUT R10, R99, 0xffff0000, RZ, 0xc0, !PT; ISETP.GE.AND P0, PT, R0, 0x4, PT; """
STORE = "; STORE; EXIT"


def uses(text: str) -> list[str]:
    """The uses of undefined bits in PROLOGUE and these instructions: kinds and registers."""
    (instructions,) = functions(listing(PROLOGUE + text)).values()
    return [f"{use.kind} {use.register}" for use in undefined_uses(instructions)]
