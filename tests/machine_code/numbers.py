"""Value numbers: two registers with one number hold the same value. Predicates have conditions, numbers with a truth value.

An expression of equal numbers has one number wherever it is computed, so values that a compiler computes twice are one, and
`a < 4` is the negation of `a >= 4`. What cannot be followed (loads, other threads' values) is named by its place. Where paths
meet with different values, the place names the result, so no number outlives an iteration of the loop that computed it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import product
from typing import NamedTuple

from tests.machine_code.opcodes import Effect
from tests.machine_code.sass import FULL, Instruction, Kind, Operand


class Condition(NamedTuple):
    """A predicate's value: the number of what it says, and whether that holds."""

    number: int
    holds: bool = True

    def negated(self) -> Condition:
        return Condition(self.number, not self.holds)


Conditions = frozenset[Condition]
Value = int | Condition
Values = dict[str, Value]

TRUE = Condition(0)
#: Not a predicate's: see NOTE [stack pointer] in state.py.
POINTER = Condition(1)


class Numbers:
    """The numbers of one function."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {"true": 0, "stack pointer": 1}
        self._constants: dict[int, int] = {}
        self._implied: dict[Condition, Conditions] = {}
        self._stands_for: dict[int, Condition] = {}
        self._closures: dict[Condition, Conditions] = {}
        self._masked: set[str] = set()

    def number(self, key: Hashable) -> int:
        """The number of an expression or of a place."""
        return self._numbers.setdefault(key, len(self._numbers))

    def constant(self, value: int) -> int:
        number = self.number(("constant", value))
        self._constants[number] = value
        return number

    def value_of(self, number: Value) -> int | None:
        """The number of a constant."""
        return self._constants.get(number) if isinstance(number, int) else None

    def stands_for(self, number: Value | None) -> Condition | None:
        """The condition under which a register is not zero, if that is all it says; a predicate's own condition."""
        return number if isinstance(number, Condition) else self._stands_for.get(number) if number is not None else None

    def closure(self, conditions: Iterable[Condition]) -> Conditions:
        """These conditions and all that they imply."""
        return frozenset().union(*map(self._closure, conditions))

    def _closure(self, condition: Condition) -> Conditions:
        found = self._closures.get(condition)
        if found is None:
            found = frozenset((condition,)) | self.closure(self._implied.get(condition, ()))
            self._closures[condition] = found
        return found

    def fresh(self, name: str, place: Hashable) -> Value:
        """The value of a register, named by a place."""
        number = self.number((place, name))
        return Condition(number) if _is_predicate(name) else number

    def read(self, values: Values, name: str) -> Value:
        """A register's value; one that nothing wrote has the value that it has at the entry."""
        return values[name] if name in values else self.fresh(name, "entry")

    # -- conditions

    def imply(self, condition: Condition, *others: Condition) -> None:
        """Say that the others hold wherever the condition does. To be said before anything is asked of it."""
        self._implied[condition] = self._implied.get(condition, frozenset()).union(others)

    def implied(self, condition: Condition) -> Conditions:
        """The relations that were said of it."""
        return self._implied.get(condition, frozenset())

    def both(self, a: Condition, b: Condition) -> Condition:
        """a AND b."""
        if a in (TRUE, b):
            return b
        if b == TRUE:
            return a
        if TRUE.negated() in (a, b) or a == b.negated():
            return TRUE.negated()
        condition = Condition(self.number(("and", *sorted((a, b)))))
        self.imply(condition, a, b)
        return condition

    def either(self, a: Condition, b: Condition) -> Condition:
        """a OR b."""
        return self.both(a.negated(), b.negated()).negated()

    def equal(self, a: Value, b: Value) -> Condition:
        if self.value_of(a) is not None and self.value_of(b) is not None:
            return TRUE if a == b else TRUE.negated()
        condition = self.stands_for(a)
        if condition is not None and self.value_of(b) == 0:
            return condition.negated()
        return Condition(self.number(("equal", a, b)))

    def less(self, a: Value, b: Value, kind: str) -> Condition:
        """a < b, of integers of a kind; c < b of a constant is the negation of b < c + 1."""
        limit, other = self.value_of(a), self.value_of(b)
        if limit is not None and other is not None:
            sign = 0 if kind == "U32" else 1 << 31
            return TRUE if limit ^ sign < other ^ sign else TRUE.negated()
        if limit is not None and limit != (FULL if kind == "U32" else FULL >> 1):
            return self.less(b, self.constant(limit + 1 & FULL), kind).negated()
        return Condition(self.number(("less", kind, a, b)))

    def select(self, condition: Condition, a: Value, b: Value) -> int:
        """a where the condition holds, else b, of registers."""
        number = self.number(("select", condition, a, b))
        values = self.value_of(a), self.value_of(b)
        if values[0] == 0 and values[1]:
            self._stands_for[number] = condition.negated()
        elif values[1] == 0 and values[0]:
            self._stands_for[number] = condition
        return number

    def join(self, found: list[Values], place: Hashable) -> tuple[Values, list[dict[Condition, Condition]]]:
        """The values where paths meet, and for each path what it calls the conditions that have a new name there."""
        joined: Values = {}
        renamed: list[dict[Condition, Condition]] = [{} for _ in found]
        for name in set().union(*found):
            ways = [self.read(values, name) for values in found]
            first = ways[0]
            if all(value == first for value in ways):
                joined[name] = first
                continue
            joined[name] = new = self.fresh(name, place)
            old = [self.stands_for(value) for value in ways]
            if isinstance(new, int) and None not in old:
                self._stands_for[new] = Condition(self.number((place, name, "stands for")))
            condition = self.stands_for(new)
            for renames, was in zip(renamed, old, strict=True):
                if condition is not None and was is not None:
                    renames[condition], renames[condition.negated()] = was, was.negated()
        return joined, renamed

    # -- instructions

    def results(self, instruction: Instruction, values: Values, place: Hashable) -> list[Value]:
        """A value for each register of each result, as if there were no guard. `place`: of the instruction, on this path."""
        names = [name for result in instruction.results for name in (result.names or ("",))]
        rule = _RULES.get(instruction.name)
        found = rule(self, instruction, values) if rule else None
        if found is not None:
            return found if len(found) == len(names) else found * len(names)
        if (
            instruction.opcode.effect is not Effect.NONE and instruction.name not in _CONSTANT_MEMORY
        ) or instruction.name in _NOT_PURE:
            key: Hashable = place
        else:
            key = (instruction.name, instruction.modifiers, tuple(self.key(source, values) for source in instruction.sources))
        return [self.fresh("P" if _is_predicate(name) else "R", (key, i)) for i, name in enumerate(names)]

    def guarded(self, guard: Condition, new: Value, old: Value) -> Value:
        """The number of a register that was written under a guard."""
        if new == old:
            return new
        if isinstance(new, Condition):
            return Condition(self.number(("select", guard, new, old)))
        return self.select(guard, new, old)

    def track_bits(self, instruction: Instruction, values: Values, guard: Condition) -> None:
        """Keep the conditions of bits that LOP3 sets, clears and leaves: "P12 of R4" stands for bit 12 of R4."""
        names, masking = {name for result in instruction.results for name in result.names}, _masking(instruction)
        self._masked |= names if masking else set()
        for name, i in product(self._masked & names, range(32)):
            bit, new = f"P{i} of {name}", None
            old = values.pop(bit, None)
            if masking:
                source, mask, sets = masking
                of_source = old if source == name else values.get(f"P{i} of {source}")
                new = (TRUE if sets else TRUE.negated()) if bool(mask >> i & 1) is sets else of_source
            if guard != TRUE and new != old:
                new = {(TRUE, TRUE.negated()): guard, (TRUE.negated(), TRUE): guard.negated()}.get((new, old))
            if new is not None:
                values[bit] = new

    def operand(self, operand: Operand, values: Values) -> Value:
        """The value of a source of one register."""
        if operand.kind is Kind.PREDICATE:
            return self.condition(operand, values)
        if operand.kind is Kind.CONSTANT and operand.value is not None:
            return self.constant(operand.value)
        if operand.kind is Kind.REGISTER and not operand.sign and not operand.part and len(operand.names) == 1:
            return self.read(values, operand.names[0])
        return self.number(self.key(operand, values))

    def condition(self, operand: Operand, values: Values) -> Condition:
        """The condition of a predicate among the sources, or of a guard."""
        if operand.kind is Kind.CONSTANT:
            return TRUE if operand.value else TRUE.negated()
        condition = self.read(values, operand.names[0])
        assert isinstance(condition, Condition)
        return condition.negated() if "!" in operand.sign else condition

    def key(self, operand: Operand, values: Values) -> Hashable:
        """The condition on one of the operands of an expression."""
        if operand.kind in (Kind.REGISTER, Kind.PREDICATE):
            return (operand.sign, operand.part, *(self.read(values, name) for name in operand.names))
        return (operand.text, *(self.read(values, name) for name in operand.names))


def _is_predicate(name: str) -> bool:
    return name.startswith(("P", "UP"))


#: Their memory does not change while a kernel runs.
_CONSTANT_MEMORY = ("LDC", "ULDC", "LDCU")
#: What they give depends on other threads, or on when they run.
_NOT_PURE = ("SHFL", "REDUX", "MATCH", "ELECT", "MOVM", "CS2R", "B2R", "HGMMA", "QGMMA", "IGMMA", "USETMAXREG")


def _moved(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    source = instruction.sources[-1]
    return None if len(source.names) > 1 else [numbers.operand(source, values)]


def _sum(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """IADD3 and IMAD also move: x + 0 + 0, 0 * 0 + x."""
    if {"X", "64", "WIDE", "HI"} & set(instruction.modifiers) or len(instruction.results) > 1:
        return None
    if instruction.name in ("IMAD", "UIMAD"):
        is_move = 0 in (instruction.sources[0].value, instruction.sources[1].value)
        return _moved(numbers, instruction, values) if is_move else None
    others = [source for source in instruction.sources if source.value != 0]
    return [numbers.operand(others[0], values)] if len(others) == 1 else None


def _selected(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value]:
    a, b, predicate = instruction.sources
    return [numbers.select(numbers.condition(predicate, values), numbers.operand(a, values), numbers.operand(b, values))]


def _packed(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """P2R of one predicate."""
    _, below, mask = instruction.sources
    if below.value != 0 or mask.value not in _ONE_BIT:
        return None
    condition = numbers.read(values, f"P{_ONE_BIT[mask.value]}")
    assert isinstance(condition, Condition)
    return [numbers.select(condition, numbers.constant(mask.value), numbers.constant(0))]


_ONE_BIT = {1 << i: i for i in range(7)}


def _compared(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """A comparison and its negation, each combined with a predicate."""
    left, right, combined, *carry = instruction.sources
    modifiers = set(instruction.modifiers)
    a, b = numbers.operand(left, values), numbers.operand(right, values)
    is_integer = instruction.name in ("ISETP", "UISETP")
    relation = instruction.modifiers[0]
    if relation not in (*_RELATIONS, *_OPPOSITES, *_OPPOSITES.values()) or "XOR" in modifiers:
        return None  # DSETP.MAX: the second result is something else
    if carry or not is_integer:
        opposite = _OPPOSITES.get(relation, relation)
        key = (instruction.name, opposite, tuple(sorted(modifiers - {relation, "AND", "OR"})))
        keys = tuple(numbers.key(source, values) for source in (left, right, *carry))
        compared = Condition(numbers.number((*key, keys)), relation == opposite)
    else:
        kind = "U32" if "U32" in modifiers else "S32"
        compared = {
            "EQ": lambda: numbers.equal(a, b),
            "NE": lambda: numbers.equal(a, b).negated(),
            "LT": lambda: numbers.less(a, b, kind),
            "GE": lambda: numbers.less(a, b, kind).negated(),
            "GT": lambda: numbers.less(b, a, kind),
            "LE": lambda: numbers.less(b, a, kind).negated(),
        }[relation]()
    other = numbers.condition(combined, values)
    combine = numbers.either if "OR" in modifiers else numbers.both
    return [combine(compared, other), combine(compared.negated(), other)]


_RELATIONS = ("EQ", "NE", "LT", "GE", "GT", "LE")
#: Of floats, whose NaN makes the unordered relations the opposites.
_OPPOSITES = {"GEU": "LT", "GTU": "LE", "LEU": "GT", "LTU": "GE", "NEU": "EQ", "EQU": "NE", "NUM": "NAN"}


def _masking(instruction: Instruction) -> tuple[str, int, bool] | None:
    """The register, the mask and True for `register | mask`, False for `register & mask`, of a LOP3 that computes one."""
    if instruction.name != "LOP3":
        return None
    a, mask, _, table, _ = instruction.sources
    is_plain = a.kind is Kind.REGISTER and not a.sign and not a.part and mask.value is not None
    return (a.names[0], mask.value or 0, table.value == 0xFC) if is_plain and table.value in (0xC0, 0xFC) else None


def _logic(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """LOP3 whose predicate says that the result is not zero."""
    *_, combined = instruction.sources
    key = (instruction.name, tuple(numbers.key(source, values) for source in instruction.sources[:4]))
    number = numbers.number(key)
    if len(instruction.results) == 1:
        return [number]
    nonzero = numbers.equal(number, numbers.constant(0)).negated()
    if (masking := _masking(instruction)) and masking[1].bit_count() == 1 and not masking[2]:
        bit = values.get(f"P{masking[1].bit_length() - 1} of {masking[0]}", nonzero)
        nonzero = bit if isinstance(bit, Condition) else nonzero
    return [numbers.either(nonzero, numbers.condition(combined, values)), number]


def _of_tables(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value]:
    """PLOP3."""
    inputs = [numbers.condition(source, values) for source in instruction.sources[:3]]
    return [_of_table(numbers, inputs, source.value or 0) for source in instruction.sources[3:5]]


def _of_table(numbers: Numbers, inputs: list[Condition], table: int) -> Condition:
    """A function of three conditions, and what it implies of each of them."""
    known = {TRUE: 1, TRUE.negated(): 0}
    rows = [r for r in range(8) if all(known.get(c, r >> (2 - i) & 1) == r >> (2 - i) & 1 for i, c in enumerate(inputs))]
    condition = Condition(numbers.number(("table", table, *inputs)))
    for outcome in (condition, condition.negated()):
        at = [row for row in rows if bool(table >> row & 1) is outcome.holds]
        if not at:
            return TRUE if outcome == condition.negated() else TRUE.negated()
        for i, c in enumerate(inputs):
            found = {row >> (2 - i) & 1 for row in at}
            if c not in known and len(found) == 1:
                implied = c if found == {1} else c.negated()
                numbers.imply(outcome, implied)
    for implied in numbers.implied(condition):
        if implied.negated() in numbers.implied(condition.negated()):
            return implied
    return condition


def _voted(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """A predicate of all threads holds for each, one of none for none. A uniform register that some thread's guard
    let be written is written for all, so that in uniform code "any" is as good as the guard."""
    if len(instruction.results) > 1 or not _is_predicate("".join(instruction.results[0].names)):
        return None
    source = numbers.condition(instruction.sources[-1], values)
    if instruction.name == "VOTEU" and "ANY" in instruction.modifiers:
        return [source]
    condition = Condition(numbers.number(("vote", instruction.modifiers, source)))
    if "ALL" in instruction.modifiers:
        numbers.imply(condition, source)
    elif "ANY" in instruction.modifiers:
        numbers.imply(condition.negated(), source.negated())
    return [condition]


def _cleared(numbers: Numbers, instruction: Instruction, values: Values) -> list[Value] | None:
    """CS2R of SRZ, which is how ptxas clears two registers."""
    return [numbers.constant(0)] if instruction.sources[0].text == "SRZ" else None


_RULES = {
    "CS2R": _cleared,
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), _moved),
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD", "IMAD", "UIMAD"), _sum),
    **dict.fromkeys(("SEL", "USEL", "FSEL"), _selected),
    **dict.fromkeys(("ISETP", "UISETP", "FSETP", "DSETP"), _compared),
    **dict.fromkeys(("LOP3", "ULOP3"), _logic),
    **dict.fromkeys(("PLOP3", "UPLOP3"), _of_tables),
    **dict.fromkeys(("VOTE", "VOTEU"), _voted),
    "P2R": _packed,
}
