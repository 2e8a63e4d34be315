"""Registers that an asynchronous matrix product (WGMMA) still reads or writes, and what touches them meanwhile.

A GMMA instruction returns at once. Its sums, and its left operand where that is in registers, belong to the tensor cores until
WARPGROUP.DEPBAR has waited for the group of products that it is in; PTX calls any access before undefined
(wgmma.wait_group). ptxas 12.9 reuses registers of the left operand too early (triton#11781). Descriptors, which are uniform
registers, are read when the instruction is issued. What happens in shared memory is not seen here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.machine_code.flow import Node, Program, solve
from tests.machine_code.sass import Found, Instruction, Kind, UnknownInstruction

#: The operand of the last product of a group, and of the barrier that waits for groups.
GROUP = "gsb0"
#: Of products whose group is not closed: no barrier waits for them.
OPEN = -1
#: Groups behind which the exact number does not matter: barriers wait for fewer.
MAX_AGE = 8


class Pending(NamedTuple):
    """The registers that unfinished products hold: register -> number of groups closed since that of its youngest product."""

    sums: dict[str, int]
    operands: dict[str, int]


def unfinished_uses(instructions: list[Instruction]) -> list[Found]:
    """The touches in one function, in the order of their addresses, one per instruction and register."""
    if not any(_is_product(instruction) for instruction in instructions):
        return []
    program, analysis = Program(instructions), _Pendency()
    found: dict[tuple[int, str], Found] = {}
    for node, state in solve(program, analysis).items():
        state = analysis.copy(state)
        for i in program.block(node.start):
            instruction = program.instructions[i]
            for touch in _touches(state, instruction):
                found.setdefault((instruction.address, touch.register), touch)
            analysis.step(state, instruction, node)
    return [found[key] for key in sorted(found)]


def _is_product(instruction: Instruction) -> bool:
    return instruction.name.endswith("GMMA")


def _touches(state: Pending, instruction: Instruction) -> Iterator[Found]:
    written = [name for result in instruction.results for name in result.names]
    touched = [*written, *(name for source in instruction.sources for name in source.names)]
    if _is_product(instruction):
        # Products of one shape add to the same sums in order; any other overlap is a mistake.
        touched = [*_left_operand(instruction), *([] if _adds_to_the_same(state, instruction, written) else written)]
    for does, names, held in (("writes", touched, state.sums), ("reads", written, state.operands)):
        for name in [name for name in names if name in held]:
            message = f"a matrix product still {does} {name}: no barrier waited for it"
            yield Found(instruction, "unfinished", name, message)


def _adds_to_the_same(state: Pending, instruction: Instruction, written: list[str]) -> bool:
    """True if the product adds to all sums of a group that has them, or to none that is unfinished."""
    held = [name for name in written if name in state.sums]
    descriptor = next(i for i, source in enumerate(instruction.sources) if source.text.startswith("gdesc"))
    sums = instruction.sources[descriptor + 1]
    adds = sums.kind is Kind.REGISTER and sums.names == tuple(written)
    return not held or (len(held) == len(written) and (adds or sums.kind is Kind.CONSTANT))


def _left_operand(instruction: Instruction) -> tuple[str, ...]:
    left = instruction.sources[0]
    return left.names if left.kind is Kind.REGISTER else ()


class _Pendency:
    """The data-flow problem."""

    def start(self) -> Pending:
        return Pending({}, {})

    def copy(self, state: Pending) -> Pending:
        return Pending(dict(state.sums), dict(state.operands))

    def join(self, states: list[Pending], node: Node) -> Pending:
        """Merge what is unfinished on any way here, as young as on any."""
        joined = self.start()
        for state in states:
            for mine, theirs in zip(joined, state, strict=True):
                for name, age in theirs.items():
                    mine[name] = min(age, mine.get(name, age))
        return joined

    def follow(self, state: Pending, instruction: Instruction, taken: bool) -> Pending:
        return state

    def step(self, state: Pending, instruction: Instruction, node: Node) -> None:
        if _is_product(instruction):
            state.sums.update((name, OPEN) for result in instruction.results for name in result.names)
            state.operands.update((name, OPEN) for name in _left_operand(instruction))
            if instruction.sources[-1].text == GROUP:
                _close_group(state)
        elif instruction.name == "WARPGROUP" and instruction.modifiers[:1] == ("DEPBAR",):
            _wait(state, _groups_left(instruction))


def _close_group(state: Pending) -> None:
    for held in state:
        held.update((name, min(age + 1, MAX_AGE)) for name, age in held.items())


def _groups_left(instruction: Instruction) -> int:
    """The number of the youngest groups that the barrier does not wait for."""
    texts = [source.text for source in instruction.sources]
    if instruction.modifiers != ("DEPBAR", "LE") or texts[0] != GROUP or instruction.sources[1].value is None:
        raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: what this waits for is not known")
    return instruction.sources[1].value


def _wait(state: Pending, groups_left: int) -> None:
    for held in state:
        for name in [name for name, age in held.items() if age >= groups_left]:
            del held[name]
