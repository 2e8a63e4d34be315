"""Faults of assembled kernels, read off their machine code (SASS): results that depend on bits which no instruction computed,
and registers that are used while a matrix product still has them.

Assemblers are trusted with everything that tests on the CPU check, and ptxas 12.8 and 12.9 get kernels wrong that store an
FP8 conversion in two layouts. `findings` says what is wrong with a cubin; an instruction that is not known is an error.
"""

from dataclasses import dataclass

from tests.machine_code.defined import undefined_uses
from tests.machine_code.disassembly import disassemble
from tests.machine_code.sass import UnknownInstruction, functions
from tests.machine_code.unfinished import unfinished_uses

__all__ = ["Finding", "UnknownInstruction", "disassemble", "findings", "findings_of_text"]


@dataclass(frozen=True)
class Finding:
    """One thing that machine code must not do."""

    function: str
    """Name of the kernel."""
    address: int
    """The place of the instruction, in bytes from the beginning of the function."""
    instruction: str
    """Its text."""
    kind: str
    """As in `Found`."""
    register: str
    message: str

    def __str__(self) -> str:
        return f"{self.function} {self.address:#06x}: {self.instruction}: {self.message}"


def findings(cubin: bytes) -> list[Finding]:
    """Find what is wrong with the kernels of a cubin for SM89, SM90 or SM100; empty if nothing is.

    Needs Triton, which ships the disassembler. UnknownInstruction: the cubin has an instruction that is in no table, so that
    nothing can be said of it. RuntimeError: it cannot be disassembled.
    """
    return findings_of_text(*disassemble([cubin]))


def findings_of_text(sass: str) -> list[Finding]:
    """Find it in a dump, or in a listing of one function in its form."""
    return [
        Finding(name, found.instruction.address, found.instruction.text, found.kind, found.register, found.message)
        for name, instructions in functions(sass).items()
        for analysis in (undefined_uses, unfinished_uses)
        for found in analysis(instructions)
    ]
