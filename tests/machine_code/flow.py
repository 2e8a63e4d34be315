"""The control flow of a function, and what is found on any way through it.

NOTE [calls] A routine that is called (the slow path of a division) is analysed once for each chain of calls that leads to it:
a node of the graph is a block of instructions with the addresses to return to. So what one caller had in a register is not
mixed with what another had. The return address is in a register of the caller's choice; it is the address behind the call.

NOTE [joins] BSSY names where threads go on after BSYNC, which as a rule is behind the BSYNC.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from tests.machine_code.opcodes import Effect
from tests.machine_code.sass import Found, Instruction, UnknownInstruction

#: Nested calls; a routine that calls itself would have more.
MAX_CALLS = 8

Value = TypeVar("Value")
#: What is known of registers; nothing of one that is missing.
State = dict[str, Value]

#: What does not go on with the next instruction if it happens.
_TRANSFERS = (Effect.BRANCH, Effect.CALL, Effect.RETURN, Effect.EXIT)


class Node(NamedTuple):
    """A block, by the position of its first instruction, and the positions that its callers return to."""

    start: int
    returns: tuple[int, ...] = ()


def found_on_any_way(
    instructions: list[Instruction],
    step: Callable[[State[Value], Instruction], None],
    join: Callable[[Value, Value], Value],
    uses: Callable[[State[Value], Instruction], Iterator[Found]],
) -> list[Found]:
    """What `uses` finds in the states before instructions, each once. `step` changes the state as an instruction does, `join`
    merges what two ways know of a register; there must be no endless chain of values that it merges."""
    program, entry = Program(instructions), Node(0)
    states: dict[Node, State[Value]] = {entry: {}}
    waiting = [entry]
    while waiting:
        node = heapq.heappop(waiting)
        state, block = dict(states[node]), program.block(node.start)
        for i in block:
            step(state, instructions[i])
        for successor in program.successors(node, block[-1]):
            old = states.get(successor)
            merged = state if old is None else {**old, **{k: join(old[k], v) if k in old else v for k, v in state.items()}}
            if merged != old:
                states[successor] = dict(merged)
                heapq.heappush(waiting, successor)
    found: dict[tuple[int, str, str], Found] = {}
    for node, state in states.items():
        for i in program.block(node.start):
            for use in uses(state, instructions[i]):
                found.setdefault((use.instruction.address, use.kind, use.register), use)
            step(state, instructions[i])
    return [found[key] for key in sorted(found)]


class Program:
    """The instructions of a function as blocks."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        self._position = {instruction.address: i for i, instruction in enumerate(instructions)}
        self._joins: dict[str, set[int]] = {}
        targets = set()
        for instruction in instructions:
            if instruction.name == "BSSY":
                self._joins.setdefault(instruction.sources[0].text, set()).add(self._target(instruction))
            if instruction.target is not None:
                targets.add(self._target(instruction))
        ends = {i + 1 for i, x in enumerate(instructions) if x.opcode.effect in (*_TRANSFERS, Effect.JOIN)}
        self._starts = sorted(start for start in {0} | targets | ends if start < len(instructions))
        self._end = dict(zip(self._starts, [*self._starts[1:], len(instructions)], strict=True))

    def _target(self, instruction: Instruction) -> int:
        if instruction.target not in self._position:
            raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: leads out of the function")
        return self._position[instruction.target]

    def block(self, start: int) -> range:
        """Positions of the instructions of a block."""
        return range(start, self._end[start])

    def successors(self, node: Node, last: int) -> Iterator[Node]:
        """The places where control goes behind the instruction at `last`."""
        instruction, returns, behind = self.instructions[last], node.returns, last + 1
        effect = instruction.opcode.effect
        if effect is Effect.BRANCH:
            yield Node(self._target(instruction), returns)
        elif effect is Effect.CALL and instruction.target is not None:
            if len(returns) == MAX_CALLS:
                raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: more than {MAX_CALLS} nested calls")
            yield Node(self._target(instruction), (*returns, behind))
        elif effect is Effect.RETURN and returns:  # else it is what stands behind a call that does not come back
            yield Node(returns[-1], returns[:-1])
        elif effect is Effect.JOIN:
            ways = self._joins.get(instruction.sources[0].text, set())
            if behind not in ways:
                yield from (Node(start, returns) for start in ways)
                return
        if _falls_through(instruction) and behind < len(self.instructions):
            yield Node(behind, returns)


def _falls_through(instruction: Instruction) -> bool:
    """True if the next instruction may run behind it (behind a call, it runs when the call returns)."""
    effect = instruction.opcode.effect
    to_a_register = effect is Effect.CALL and instruction.target is None
    for_some_threads = effect is Effect.BRANCH and bool(instruction.sources)  # BRA.DIV UR4
    return effect not in _TRANSFERS or to_a_register or for_some_threads or bool(instruction.conditions)
