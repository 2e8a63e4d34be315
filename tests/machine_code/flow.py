"""The control flow of a function, and the solution of forward data-flow problems over it.

NOTE [calls] A routine that is called (the slow path of a division) is analysed once for each chain of calls that leads to it:
a node of the graph is a block of instructions with the addresses to return to. So what one caller had in a register is not
mixed with what another had. The return address is in a register of the caller's choice; it is the address behind the call.

NOTE [joins] BSSY names where threads go on after BSYNC, which as a rule is behind the BSYNC. An indirect branch goes to the
blocks that nothing else leads to, since a dump does not print its table.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

from tests.machine_code.opcodes import Effect
from tests.machine_code.sass import Instruction, Kind, UnknownInstruction

#: Nested calls; a routine that calls itself would have more.
MAX_CALLS = 8
#: How often a block is gone through until nothing changes; loops need a handful.
MAX_VISITS = 200

State = TypeVar("State")


class Node(NamedTuple):
    """A block, by the position of its first instruction, and the positions that its callers return to."""

    returns: tuple[int, ...]
    start: int


class Analysis(Protocol[State]):
    """A data-flow problem. States are changed by `step` alone; `start`, `copy` and `join` make new ones."""

    def start(self) -> State: ...
    def copy(self, state: State) -> State: ...
    def step(self, state: State, instruction: Instruction, node: Node) -> None: ...
    def follow(self, state: State, instruction: Instruction, taken: bool) -> State: ...
    def join(self, states: list[State], node: Node) -> State: ...


class Program:
    """The instructions of a function as blocks."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        self.position = {instruction.address: i for i, instruction in enumerate(instructions)}
        self._joins: dict[str, set[int]] = {}
        for instruction in instructions:
            if instruction.name == "BSSY":
                self._joins.setdefault(instruction.sources[0].text, set()).add(self._target(instruction))
        self.starts = self._block_starts()
        self._indirect = self._unreached()
        self.slots_are_fixed = self._slots_are_fixed()

    def _target(self, instruction: Instruction) -> int:
        if instruction.target not in self.position:
            raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: leads out of the function")
        return self.position[instruction.target]

    def _block_starts(self) -> list[int]:
        starts = {0}
        for i, instruction in enumerate(self.instructions):
            effect = instruction.opcode.effect
            if effect in TRANSFERS or effect is Effect.JOIN:
                starts.add(i + 1)
            if effect is Effect.BRANCH or (effect is Effect.CALL and instruction.target is not None):
                starts.add(self._target(instruction))
        starts |= {target for targets in self._joins.values() for target in targets}
        return sorted(start for start in starts if start < len(self.instructions))

    def _unreached(self) -> list[int]:
        """Starts of blocks that follow a transfer which never falls through, and are no target."""
        targets = {self.position[x.target] for x in self.instructions if x.target in self.position and x.name != "LEPC"}
        before = ((start, self.instructions[start - 1]) for start in self.starts if start)
        return [start for start, last in before if start not in targets and not falls_through(last)]

    def _slots_are_fixed(self) -> bool:
        """True if the stack pointer is set once: then its offsets name the same memory everywhere."""
        changes = [x for x in self.instructions for result in x.results if result.names == ("R1",)]
        return sum(any("R1" in source.names for source in x.sources) for x in changes) <= 1

    def slots(self, instruction: Instruction) -> tuple[str, ...]:
        """Names of the words of local memory that the instruction spills to or reloads; () if its address is computed."""
        address = next((source for source in instruction.sources if source.kind is Kind.ADDRESS), None)
        if address is None or address.names != ("R1",) or not self.slots_are_fixed or instruction.bytes_moved < 4:
            return ()
        offset = address.text.strip("[]").removeprefix("R1").removeprefix("+")
        first = int(offset or "0", 16)
        opcode = instruction.opcode
        num_words = opcode.width(instruction.modifiers) if instruction.results else opcode.reads[0](instruction.modifiers)
        return tuple(f"local {first + 4 * i:#x}" for i in range(num_words))

    def block(self, start: int) -> range:
        """Positions of the instructions of a block."""
        following = next((s for s in self.starts if s > start), len(self.instructions))
        return range(start, following)

    def successors(self, node: Node, last: int) -> Iterator[tuple[Node, bool]]:
        """The places where control goes behind the instruction at `last`, each with a flag: the branch is taken."""
        instruction = self.instructions[last]
        effect = instruction.opcode.effect
        behind = last + 1
        if effect is Effect.BRANCH:
            yield Node(node.returns, self._target(instruction)), True
        elif effect is Effect.CALL and instruction.target is not None:
            if len(node.returns) == MAX_CALLS:
                raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: more than {MAX_CALLS} nested calls")
            yield Node((*node.returns, behind), self._target(instruction)), True
        elif effect is Effect.RETURN:
            if node.returns:  # else it is what stands behind a call that does not come back
                yield Node(node.returns[:-1], node.returns[-1]), True
        elif effect is Effect.INDIRECT:
            yield from ((Node(node.returns, start), True) for start in self._indirect)
        elif effect is Effect.JOIN and behind not in self._joins.get(instruction.sources[0].text, ()):
            yield from ((Node(node.returns, start), True) for start in self._joins.get(instruction.sources[0].text, ()))
            return
        if falls_through(instruction) and behind < len(self.instructions):
            yield Node(node.returns, behind), False


#: What does not go on with the next instruction if it happens.
TRANSFERS = (Effect.BRANCH, Effect.INDIRECT, Effect.CALL, Effect.RETURN, Effect.EXIT)


def falls_through(instruction: Instruction) -> bool:
    """True if the next instruction may run behind it (behind a call, it runs when the call returns)."""
    effect = instruction.opcode.effect
    if effect is Effect.CALL and instruction.target is None:
        return True
    if effect is Effect.BRANCH and instruction.sources:  # BRA.DIV UR4: for threads that diverge
        return True
    if effect in TRANSFERS:
        return bool(instruction.conditions)
    return True


def solve(program: Program, analysis: Analysis[State]) -> dict[Node, State]:
    """The state at the beginning of every block that control reaches."""
    entry = Node((), 0)
    arriving: dict[Node, dict[tuple[Node, bool] | None, State]] = {entry: {None: analysis.start()}}
    found: dict[Node, State] = {}
    visits: dict[Node, int] = {}
    waiting = [(0, entry)]
    while waiting:
        _, node = heapq.heappop(waiting)
        state = analysis.join(list(arriving[node].values()), node)
        if node in found and found[node] == state:
            continue
        visits[node] = visits.get(node, 0) + 1
        if visits[node] > MAX_VISITS:
            raise RuntimeError(f"no fixed point after {MAX_VISITS} visits of {program.instructions[node.start].address:#06x}")
        found[node] = state
        state = analysis.copy(state)
        block = program.block(node.start)
        for i in block:
            analysis.step(state, program.instructions[i], node)
        last = program.instructions[block[-1]]
        for successor, taken in program.successors(node, block[-1]):
            arriving.setdefault(successor, {})[node, taken] = analysis.follow(state, last, taken)
            heapq.heappush(waiting, (successor.start, successor))
    return found
