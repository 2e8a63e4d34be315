"""Faults of assembled kernels, read off their machine code (SASS): results that depend on bits which no instruction computed,
and registers that are used while a matrix product still has them.

Assemblers are trusted with everything that tests on the CPU check, and ptxas 12.8 and 12.9 get kernels wrong that store an
FP8 conversion in two layouts. `findings` says what is wrong with a cubin; an instruction that is not known is an error.
"""

from tests.machine_code.defined import undefined_uses
from tests.machine_code.disassembly import disassemble
from tests.machine_code.sass import Found, UnknownInstruction, functions
from tests.machine_code.unfinished import unfinished_uses

__all__ = ["Found", "UnknownInstruction", "disassemble", "findings", "findings_of_text"]


def findings(cubin: bytes) -> list[Found]:
    """Find what is wrong with the kernels of a cubin for SM90; empty if nothing is.

    Needs Triton, which ships the disassembler. UnknownInstruction: the cubin has an instruction that is in no table, so that
    nothing can be said of it. RuntimeError: it cannot be disassembled.
    """
    return findings_of_text(*disassemble([cubin]))


def findings_of_text(sass: str) -> list[Found]:
    """Find it in a dump, or in a listing of one function in its form."""
    return [
        found for each in functions(sass).values() for analysis in (undefined_uses, unfinished_uses) for found in analysis(each)
    ]
