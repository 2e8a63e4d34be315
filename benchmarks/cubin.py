"""Registers, instructions and bytes moved of a compiled kernel, on a machine without a GPU: `read_cubin` asks the `cuobjdump`
that Triton ships."""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

#: Instructions; what handles infinities takes hundreds.
TAIL = 64


class Cubin(NamedTuple):
    """One kernel, as `cuobjdump` describes it."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread in local memory: spilled registers, for our kernels have no local arrays."""
    instructions: int
    """All, but for the padding behind the last EXIT."""
    executed: int
    """Instructions that a warp issues where no branch is taken that costs more than its alternative (`executed_path`)."""
    load_bytes: int
    """Read from global memory by one thread on that path."""
    store_bytes: int


class Instruction(NamedTuple):
    address: int
    guarded: bool
    text: str


def dump(cubin: bytes, *options: str) -> str:
    """The output of Triton's `cuobjdump` for a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_cubin(cubin: bytes, loop_steps: int = 1) -> Cubin:
    """Registers and instruction counts of a cubin of one kernel, whose loops take `loop_steps` steps."""
    text = dump(cubin, "-sass", "-res-usage")
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    program = instructions_of(text)
    path_counts = executed_path(program, loop_steps)
    return Cubin(int(usage[0]), int(usage[1]), len(program), *path_counts)


def instructions_of(sass: str) -> list[Instruction]:
    """The instructions of a dump, without the jump to itself and the NOPs that fill up the last cache line."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][^;]*?)\s*;", sass, re.MULTILINE)
    program = [Instruction(int(address, 16), bool(guard), text) for address, guard, text in lines]
    while program and (program[-1].text == "NOP" or _target(program[-1]) == program[-1].address):
        program.pop()
    assert program, sass[:2000]
    return program


def _target(instruction: Instruction) -> int | None:
    """The target of a branch; None for everything else. Calls come back, so they are no branches here."""
    match = re.match(r"BRA(?:\.\w+)* .*?(0x[0-9a-f]+)", instruction.text)
    return int(match[1], 16) if match else None


_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _moved(instruction: Instruction, kind: str) -> int:
    """Bytes that one thread moves between registers and global memory by this instruction."""
    if not instruction.text.startswith(kind):
        return 0
    return next((_WIDTHS[part] for part in instruction.text.split()[0].split(".") if part in _WIDTHS), 4)


def loops_of(program: list[Instruction]) -> list[tuple[int, int]]:
    """The positions of the first and the last instruction of each loop."""
    return [(target, i) for i, target in enumerate(_targets(program)) if target is not None and target <= i]


def _targets(program: list[Instruction]) -> list[int | None]:
    """The target of each instruction, by position; None for those that do not."""
    position = {instruction.address: i for i, instruction in enumerate(program)}
    return [None if (address := _target(it)) is None else position[address] for it in program]


def executed_path(program: list[Instruction], loop_steps: int) -> tuple[int, int, int]:
    """Instructions, bytes loaded and bytes stored on the cheapest way from the first instruction to an EXIT.

    Kernels branch around what hardly ever happens, or leave before it (an infinity in the tile, the slow path of a
    division), so the cheapest way is the usual one. A guarded EXIT before less than TAIL instructions lets threads go that
    are masked off in the last stores: the others go on. A loop is walked `loop_steps` times, whatever guards it.
    """
    targets, loops = _targets(program), loops_of(program)
    in_loop = [any(first <= i <= last for first, last in loops) for i in range(len(program))]

    def is_end(i: int) -> bool:
        tail = (it for it in program[i : i + TAIL] if it.text.startswith("EXIT") and not it.guarded)
        return program[i].text.startswith("EXIT") and (not program[i].guarded or next(tail, None) is None)

    def ways_on(i: int) -> list[int]:
        """The positions after i: every instruction of a loop counts, and no loop is jumped over."""
        target = targets[i]
        if target is None or target <= i or in_loop[i]:
            return [i + 1]
        passes_loop = any(i < first and last < target for first, last in loops)
        return [i + 1] * (program[i].guarded or passes_loop) + [target] * (not passes_loop)

    cheapest, cost, before = [(0, 0)], {0: 0}, {}
    while cheapest:
        spent, i = heapq.heappop(cheapest)
        if spent > cost[i] or is_end(i):
            continue
        step = loop_steps if in_loop[i] else 1
        for way in ways_on(i):
            if way < len(program) and spent + step < cost.get(way, spent + step + 1):
                cost[way], before[way] = spent + step, i
                heapq.heappush(cheapest, (cost[way], way))
    end = min((i for i in cost if is_end(i)), key=lambda i: cost[i])
    path = [end]
    while path[-1]:
        path.append(before[path[-1]])
    steps = {i: loop_steps if in_loop[i] else 1 for i in path}
    moved = (sum(_moved(program[i], kind) * count for i, count in steps.items()) for kind in ("LDG", "STG"))
    return cost[end] + 1, *moved
