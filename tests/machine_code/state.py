"""Knowledge of the registers at a point of a function: bits that are defined, always or under a condition.

NOTE [conditions] A guarded instruction defines its result under its guard alone. So a register has bits that are defined on
every path, and more bits under conditions, values of predicates. A mask that is "row in range AND column in range" implies
both. Where paths meet, what either of them defined stays defined under the condition that led to it.

NOTE [stack pointer] The ABI hands a kernel its stack pointer. Bits computed from it are defined under a condition of their
own, POINTER, which holds for addresses alone: they are no data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from tests.machine_code.bits import Word
from tests.machine_code.numbers import POINTER, Condition, Conditions, Numbers, Values
from tests.machine_code.sass import FULL

_NOTHING: Mapping[Condition, int] = {}


class Bits(NamedTuple):
    """A register."""

    word: Word
    """The knowledge of every path."""
    when: Mapping[Condition, int] = _NOTHING
    """Defined bits under a condition, for conditions that define more."""

    def under(self, assumed: Conditions) -> Word:
        """The state under these conditions."""
        if not self.when:
            return self.word
        defined, known, value = self.word
        for condition, bits in self.when.items():
            if condition in assumed:
                defined |= bits
        return Word(defined, known, value)


UNDEFINED = Bits(Word(0))


class State:
    """Registers, and the conditions that hold."""

    __slots__ = ("facts", "registers", "values")

    def __init__(self) -> None:
        self.registers: dict[str, Bits] = {}
        self.values: Values = {}
        self.facts: Conditions = frozenset()
        """Conditions that hold here, with all that they imply."""

    def copy(self) -> State:
        other = State()
        other.registers, other.values, other.facts = dict(self.registers), dict(self.values), self.facts
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def get(self, name: str) -> Bits:
        return self.registers.get(name, UNDEFINED)

    def assume(self, conditions: Conditions) -> None:
        """On the path from here, these hold; with all that they imply."""
        new = conditions - self.facts
        self.facts |= new
        for name, bits in self.registers.items():
            if bits.when:
                self.registers[name] = simplified(bits.under(new), bits.when, self.facts)


def simplified(word: Word, when: Mapping[Condition, int], facts: Conditions) -> Bits:
    """Without conditions that hold, cannot hold, or define no more than `word`."""
    if not when:
        return Bits(word)
    missing = ~word.defined
    kept = {c: bits for c, bits in when.items() if bits & missing and c not in facts and c.negated() not in facts}
    return Bits(word, kept or _NOTHING)


def join(states: list[State], numbers: Numbers, place: Hashable) -> State:
    """Merge what is known where several paths meet. `place` names values that differ on them."""
    if len(states) == 1:
        return states[0]
    joined = State()
    joined.values, renamed = numbers.join([state.values for state in states], place)
    # Each path has what it knows of a condition of its own under the common name too.
    facts = [
        state.facts | {new for new, old in renames.items() if old in state.facts}
        for state, renames in zip(states, renamed, strict=True)
    ]
    joined.facts = frozenset.intersection(*facts)
    live = _live(joined.values, numbers)
    for name in set().union(*(state.registers for state in states)):
        found = [state.get(name) for state in states]
        if all(bits is found[0] for bits in found) and not found[0].when:
            joined.registers[name] = found[0]
        else:
            joined.registers[name] = _join_bits(found, facts, renamed, live, joined.facts)
    return joined


def _live(values: Values, numbers: Numbers) -> Conditions:
    """Conditions that some register still holds, or that one of these implies: nothing else can be asked for later."""
    held = {condition for value in values.values() if (condition := numbers.stands_for(value)) is not None}
    return numbers.closure([*held, *(condition.negated() for condition in held)]) | {POINTER}


def _join_bits(
    found: list[Bits], facts: list[Conditions], renamed: list[dict[Condition, Condition]], live: Conditions, common: Conditions
) -> Bits:
    defined, known, value = found[0].word
    for bits in found[1:]:
        defined &= bits.word.defined
        known &= bits.word.known & ~(bits.word.value ^ value)
    word = Word(defined, known & defined, value & known & defined)
    if defined == FULL:
        return Bits(word)
    when = {}
    for condition in live:
        under = FULL
        for bits, of_path, renames in zip(found, facts, renamed, strict=True):
            if condition.negated() not in of_path:  # else it holds never on this path
                under &= bits.word.defined | bits.when.get(renames.get(condition, condition), 0)
        when[condition] = under
    return simplified(word, when, common)
