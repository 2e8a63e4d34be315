"""The ways of the bytes of FP8 conversions: elements that are stored together must be stored in the same layouts.

NOTE [ways] A kernel that stores two layouts of a tile converts each element once and sends its byte two ways: to global memory
from the thread that made it, and through shared memory to the thread that stores it in the other layout. An element is a
float's value and the format that it is converted to, so conversions that a compiler repeats are one. Elements are neighbours
if one store has both of them, and all neighbours must go the same ways: what lacks one was replaced by something else. Copies
that are converted each by itself, kernels of one layout, and tensors that are stored in one layout beside others in two have
neighbours that agree.

NOTE [foreign bytes] A store of elements has nothing else in it: a byte of it that no conversion made, and that is no constant
(padding, a matrix of one column), was left in its register by other work. Such a byte is defined, so nothing else finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.machine_code.flow import Node, Program, solve
from tests.machine_code.labels import FIXED, NOTHING, PLAIN, ZEROS, Byte, Label, moved, union
from tests.machine_code.numbers import TRUE, Numbers, Values
from tests.machine_code.sass import Found, Instruction, Kind, Operand


class Followed(NamedTuple):
    """State of the data-flow problem."""

    labels: dict[str, Label]
    """Registers of which no byte has a label are left out."""
    values: Values


class Made(NamedTuple):
    """An element that a conversion makes, and the register that it is converted from."""

    element: int
    register: str


def astray(instructions: list[Instruction]) -> list[Found]:
    """The elements and bytes of one function that are astray, in the order of their addresses."""
    if not any(_format(instruction) for instruction in instructions):
        return []
    program = Program(instructions)
    analysis = _Provenance(program)
    ways = _Ways()
    for node, state in solve(program, analysis).items():
        state = analysis.copy(state)
        for i in program.block(node.start):
            ways.add(program.instructions[i], state, analysis)
            analysis.step(state, program.instructions[i], node)
    return sorted(ways.astray(), key=lambda found: (found.instruction.address, found.kind, found.register, found.message))


class _Ways:
    """The ways of the elements, and the elements that are neighbours."""

    def __init__(self) -> None:
        self.goes: dict[int, set[str]] = {}
        self.made_by: dict[int, tuple[Instruction, str]] = {}
        self.parents: dict[int, int] = {}
        self.foreign: set[tuple[Instruction, str, int]] = set()

    def add(self, instruction: Instruction, state: Followed, analysis: _Provenance) -> None:
        """An instruction, and the state before it."""
        if _format(instruction):
            for element, register in filter(None, analysis.made(instruction, state)):
                self.goes.setdefault(element, set())
                if element not in self.made_by or instruction.address < self.made_by[element][0].address:
                    self.made_by[element] = instruction, register
        way = _WAYS.get(instruction.name)
        if way is not None:
            names, size = instruction.sources[-1].names, instruction.bytes_moved
            stored = [(name, i, state.labels.get(name, PLAIN)[i]) for name in names for i in range(size)]
            elements = NOTHING.union(*(byte for _, _, byte in stored)) - FIXED
            for element in elements:
                self.goes.setdefault(element, set()).add(way)
            self._join(byte for _, _, byte in stored)
            if elements:
                self.foreign |= {(instruction, name, i) for name, i, byte in stored if not byte}

    def _join(self, stored: Iterable[Byte]) -> None:
        """These are neighbours: of bytes that are certain."""
        elements = [element for byte in stored if len(byte - FIXED) == 1 for element in byte - FIXED]
        for element in elements[1:]:
            self.parents[self._root(element)] = self._root(elements[0])

    def _root(self, element: int) -> int:
        while self.parents.get(element, element) != element:
            element = self.parents[element]
        return element

    def astray(self) -> Iterator[Found]:
        groups: dict[int, list[int]] = {}
        for element in self.goes:
            groups.setdefault(self._root(element), []).append(element)
        for elements in groups.values():
            everywhere = frozenset[str]().union(*(self.goes[element] for element in elements))
            for element in elements:
                missing = everywhere - self.goes[element]
                if missing:
                    found, gone = " and ".join(sorted(self.goes[element])), " and ".join(sorted(missing))
                    instruction, register = self.made_by[element]
                    message = f"what is made of {register} goes to {found}, and not to {gone} as its neighbours do"
                    yield Found(instruction, "layout", register, message)
        for instruction, register, i in self.foreign:
            message = f"byte {i} of {register} is stored among converted bytes; no conversion made it, and it is no constant"
            yield Found(instruction, "byte", register, message)


_WAYS = {"STG": "global memory", "ST": "global memory", "STS": "shared memory", "STSM": "shared memory"}


def _format(instruction: Instruction) -> str | None:
    """The elements of a conversion to FP8."""
    if instruction.name != "F2FP" or not any(modifier.endswith("MERGE_C") for modifier in instruction.modifiers):
        return None
    return next((modifier for modifier in instruction.modifiers if modifier in ("E4M3", "E5M2")), None)


class _Provenance:
    """The data-flow problem."""

    def __init__(self, program: Program):
        self.program = program
        self.numbers = Numbers()

    def start(self) -> Followed:
        return Followed({}, {})

    def copy(self, state: Followed) -> Followed:
        return Followed(dict(state.labels), dict(state.values))

    def follow(self, state: Followed, instruction: Instruction, taken: bool) -> Followed:
        return state

    def join(self, states: list[Followed], node: Node) -> Followed:
        if len(states) == 1:
            return states[0]
        values, _ = self.numbers.join([state.values for state in states], node)
        labels = dict(states[0].labels)
        for state in states[1:]:
            for name, label in state.labels.items():
                labels[name] = union(labels.get(name, PLAIN), label)
        return Followed(labels, values)

    def step(self, state: Followed, instruction: Instruction, node: Node) -> None:
        guard = self.numbers.condition(instruction.guard, state.values) if instruction.guard else TRUE
        if guard == TRUE.negated():
            return
        names = [name for result in instruction.results for name in (result.names or ("",))]
        slots = self.program.slots(instruction) if instruction.name in ("STL", "LDL") else ()
        if instruction.name == "STL":
            data = instruction.sources[-1].names or ("",) * len(slots)
            for slot, name in zip(slots, data, strict=False):
                self._set(state, slot, state.labels.get(name, PLAIN), guard == TRUE)
        if not names:
            return
        label = self.label(instruction, state)
        values = self.numbers.results(instruction, state.values, (node.returns, instruction.address))
        new = [state.labels.get(slot, PLAIN) for slot in slots] or [PLAIN] * (len(names) - 1) + [label]
        new = [
            ZEROS if self.numbers.value_of(value) is not None else of_name for value, of_name in zip(values, new, strict=True)
        ]
        before = [self.numbers.read(state.values, name) if name else TRUE for name in names]
        for name, value, old, of_name in zip(names, values, before, new, strict=True):
            if name:
                state.values[name] = value if guard == TRUE else self.numbers.guarded(guard, value, old)
                self._set(state, name, of_name, guard == TRUE)

    def _set(self, state: Followed, name: str, label: Label, always: bool) -> None:
        label = label if always else union(label, state.labels.get(name, PLAIN))
        if any(label):
            state.labels[name] = label
        else:
            state.labels.pop(name, None)

    def label(self, instruction: Instruction, state: Followed) -> Label:
        """The bytes of the last register of the results."""

        def read(operand: Operand) -> Label:
            if operand.kind is Kind.CONSTANT:
                return ZEROS
            return state.labels.get(operand.names[0], PLAIN) if operand.kind is Kind.REGISTER else PLAIN

        if not _format(instruction):
            return moved(instruction, read, lambda operand: self._constant(operand, state)) if state.labels else PLAIN
        low, high = (frozenset((made.element,)) if made else FIXED for made in self.made(instruction, state))
        above = read(instruction.sources[-1])
        return low, high, above[0], above[1]

    def _constant(self, operand: Operand, state: Followed) -> int | None:
        if operand.kind not in (Kind.REGISTER, Kind.CONSTANT):
            return None
        return self.numbers.value_of(self.numbers.operand(operand, state.values))

    def made(self, instruction: Instruction, state: Followed) -> list[Made | None]:
        """The bytes that a conversion makes of floats, lower byte first; None of a constant."""
        *floats, _ = instruction.sources
        how = (_format(instruction), "RELU" in instruction.modifiers)
        values = [self.numbers.operand(source, state.values) for source in floats]
        if len(floats) == 1:  # two float16 in a register
            return [Made(self.numbers.number((how, half, values[0])), floats[0].text) for half in (0, 1)]
        found = []
        for source, value in zip(reversed(floats), reversed(values), strict=True):
            is_constant = source.kind is Kind.CONSTANT or self.numbers.value_of(value) is not None
            found.append(None if is_constant else Made(self.numbers.number((how, value)), source.text))
        return found
