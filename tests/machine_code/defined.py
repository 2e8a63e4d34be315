"""Stores, addresses and guards that depend on bits which no instruction wrote."""

from collections.abc import Iterator

from tests.machine_code import bits as rules
from tests.machine_code.bits import Word
from tests.machine_code.flow import TRANSFERS, Node, Program, solve
from tests.machine_code.numbers import POINTER, TRUE, Condition, Conditions, Numbers
from tests.machine_code.opcodes import Effect
from tests.machine_code.sass import FULL, STACK_POINTER_AT, Found, Instruction, Kind, Operand, UnknownInstruction
from tests.machine_code.state import Bits, State, join, simplified


def undefined_uses(instructions: list[Instruction]) -> list[Found]:
    """The uses in one function, in the order of their addresses, each once."""
    if not instructions:
        return []
    program = Program(instructions)
    analysis = _Definedness(program)
    found: dict[tuple[int, str, str], Found] = {}
    for node, state in solve(program, analysis).items():
        state = state.copy()
        for i in program.block(node.start):
            instruction = program.instructions[i]
            for use in analysis.uses(state, instruction, node):
                found.setdefault((instruction.address, use.kind, use.register), use)
            analysis.step(state, instruction, node)
    return [found[key] for key in sorted(found)]


class _Definedness:
    """The data-flow problem."""

    def __init__(self, program: Program):
        self.program = program
        self.numbers = Numbers()

    def start(self) -> State:
        return State()

    def copy(self, state: State) -> State:
        return state.copy()

    def join(self, states: list[State], node: Node) -> State:
        return join(states, self.numbers, node)

    def follow(self, state: State, instruction: Instruction, taken: bool) -> State:
        """The state on one of the ways on: the conditions of a branch hold where it is taken."""
        conditions = [self.numbers.condition(source, state.values) for source in instruction.conditions]
        if not conditions or instruction.opcode.effect not in TRANSFERS or (not taken and len(conditions) > 1):
            return state
        state = state.copy()
        state.assume(self.numbers.closure(conditions if taken else [conditions[0].negated()]))
        return state

    # -- one instruction

    def step(self, state: State, instruction: Instruction, node: Node) -> None:
        if instruction.opcode.effect is Effect.RETURN:
            self._check_return(state, instruction, node)
        guard = self.guard(state, instruction)
        if guard == TRUE.negated() or guard.negated() in state.facts:
            return  # never, on the way here
        for name, stored in self._spilled(state, instruction):
            state.registers[name] = self._guarded(state, guard, stored, state.get(name))
        if not instruction.results:
            return
        names = [name for result in instruction.results for name in (result.names or ("",))]
        found = self._results(state, instruction, guard)
        values = self.numbers.results(instruction, state.values, (node.returns, instruction.address))
        old = [self.numbers.read(state.values, name) if name else TRUE for name in names]
        happens = guard == TRUE or guard in state.facts
        self.numbers.track_bits(instruction, state.values, TRUE if happens else guard)
        for name, bits, value, before in zip(names, found, values, old, strict=True):
            if name:
                state.registers[name] = self._guarded(state, guard, bits, state.get(name))
                state.values[name] = value if happens else self.numbers.guarded(guard, value, before)

    def guard(self, state: State, instruction: Instruction) -> Condition:
        return self.numbers.condition(instruction.guard, state.values) if instruction.guard else TRUE

    def _assumed(self, state: State, guard: Condition) -> Conditions:
        """Conditions that hold where an instruction with this guard happens."""
        return state.facts if guard == TRUE or guard in state.facts else state.facts | self.numbers.closure([guard])

    def _spilled(self, state: State, instruction: Instruction) -> Iterator[tuple[str, Bits]]:
        """Words of local memory as the instruction leaves them."""
        if instruction.name == "STL":
            data = instruction.sources[-1]
            for i, slot in enumerate(self.program.slots(instruction)):
                yield slot, state.get(data.names[i]) if data.names else Bits(rules.constant(0))

    def _results(self, state: State, instruction: Instruction, guard: Condition) -> list[Bits]:
        """The value of each register written, as if there were no guard."""
        slots = self.program.slots(instruction) if instruction.name == "LDL" else ()
        if slots:
            return [state.registers.get(slot, Bits(rules.DEFINED)) for slot in slots]
        if instruction.results[0].names == ("R1",) and any(s.text in STACK_POINTER_AT for s in instruction.sources):
            return [Bits(Word(0), {POINTER: FULL})]
        base = self._assumed(state, guard)
        words = rules.results(instruction, _reader(state, base))
        more = {
            condition
            for source in instruction.sources
            for name in source.names
            for condition in state.get(name).when
            if condition not in base and condition.negated() not in base
        }
        if not more:
            return [Bits(word) for word in words]
        when: list[dict[Condition, int]] = [{} for _ in words]
        for condition in more:
            under = rules.results(instruction, _reader(state, base | self.numbers.closure([condition])))
            for found, word in zip(when, under, strict=True):
                found[condition] = word.defined
        return [simplified(word, found, base) for word, found in zip(words, when, strict=True)]

    def _guarded(self, state: State, guard: Condition, new: Bits, old: Bits) -> Bits:
        """A register of which `new` was written under a guard."""
        if guard == TRUE or guard in state.facts:
            return new
        closure = self.numbers.closure
        after, before = closure([guard]), closure([guard.negated()])
        new_word, old_word = new.under(state.facts | after), old.under(state.facts | before)
        known = new_word.known & old_word.known & ~(new_word.value ^ old_word.value)
        word = Word(new_word.defined & old_word.defined, known, new_word.value & known)
        when = {guard: new_word.defined, guard.negated(): old_word.defined}
        for condition in {*new.when, *old.when} - set(when):
            assumed = closure([condition])
            of_new, of_old = new.under(after | assumed).defined, old.under(before | assumed).defined
            when[condition] = of_new if guard in assumed else of_old if guard.negated() in assumed else of_new & of_old
        return simplified(word, when, state.facts)

    def _check_return(self, state: State, instruction: Instruction, node: Node) -> None:
        word = state.get(instruction.sources[0].names[0]).word
        expected = self.program.instructions[node.returns[-1]].address if node.returns else None
        if word.known == FULL and word.value != expected:
            raise UnknownInstruction(
                f"{instruction.address:#06x}: {instruction.text}: returns to {word.value:#x}, not the caller"
            )

    # -- what must be defined

    def uses(self, state: State, instruction: Instruction, node: Node) -> Iterator[Found]:
        """Uses of undefined bits by one instruction."""
        guard = self.guard(state, instruction)
        if guard == TRUE.negated() or guard.negated() in state.facts:
            return  # never, on the way here
        assumed = self._assumed(state, guard)
        for source in instruction.conditions:
            for name in source.names:
                yield from _use(state, instruction, "guard", name, state.facts, FULL)
        for source in instruction.sources:
            if source.kind in (Kind.ADDRESS, Kind.BANK):
                for name in source.names:
                    yield from _use(state, instruction, "address", name, assumed | {POINTER}, FULL)
        needed = {1: 0xFF, 2: 0xFFFF, 4: FULL}[instruction.bytes_moved]
        for source in _data(instruction):
            if not (instruction.name == "STL" and self.program.slots(instruction)):
                for name in source.names:
                    yield from _use(state, instruction, "store", name, assumed, needed)


def _data(instruction: Instruction) -> list[Operand]:
    """Sources that go to memory."""
    effect = instruction.opcode.effect
    if effect is Effect.STORE:
        return [instruction.sources[-1]]
    if effect is Effect.ATOMIC:
        return [source for source in instruction.sources if source.kind is Kind.REGISTER]
    return []


def _use(state: State, instruction: Instruction, kind: str, name: str, assumed: Conditions, needed: int) -> Iterator[Found]:
    bits = state.get(name)
    missing = needed & ~bits.under(assumed).defined
    if missing:
        is_pointer = not missing & ~bits.under(assumed | {POINTER}).defined
        origin = "the stack pointer is no data" if is_pointer else "no instruction wrote them"
        yield Found(instruction, kind, name, f"{_DEPENDS[kind]} on bits {missing:#010x} of {name}; {origin}")


_DEPENDS = {"store": "what it stores depends", "address": "its address depends", "guard": "whether it happens depends"}


# -- reading


def _reader(state: State, assumed: Conditions) -> rules.Read:
    """Sources as `bits` wants them: parts of registers spread over the word, predicates as 32 equal bits."""

    def read(source: Operand) -> list[Word]:
        if source.kind is Kind.CONSTANT:
            return [rules.constant(source.value) if source.value is not None else rules.DEFINED]
        if source.text == "PR":
            return [_predicates(state, assumed)]
        if source.kind not in (Kind.REGISTER, Kind.PREDICATE):
            return [rules.DEFINED]
        words = [state.get(name).under(assumed) for name in source.names]
        if source.part:
            words = [Word(*(_spread(part, source.part) for part in word)) for word in words]
        if source.sign:
            words = [_signed(word, source.sign) for word in words]
        return words

    return read


def _spread(bits: int, part: str) -> int:
    """The part of a word that an operand reads, repeated over the word."""
    size, number = (8, int(part[1])) if part.startswith("B") else (16, int(part[1]))
    kept = bits >> (size * number) & ((1 << size) - 1)
    return kept * (0x01010101 if size == 8 else 0x00010001)


def _signed(word: Word, sign: str) -> Word:
    if sign in ("!", "~"):
        return Word(word.defined, word.known, ~word.value & word.known)
    return Word(word.defined)


def _predicates(state: State, assumed: Conditions) -> Word:
    parts = [0, 0, 0]
    for i in range(7):
        for k, part in enumerate(state.get(f"P{i}").under(assumed)):
            parts[k] |= (part & 1) << i
    high = FULL & ~0x7F  # PR has 7 bits; above them are zeros
    return Word(parts[0] | high, parts[1] | high, parts[2])
