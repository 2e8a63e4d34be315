"""Stores, addresses and guards that depend on bits which no instruction wrote.

Bits count as written where any way that leads there writes them: a guarded load, and a store under the same guard, need no
proof that both guards agree. The stack pointer, which the ABI hands a kernel, is an address and no data: ptxas 12.8 stores it.
"""

from collections.abc import Iterator

from tests.machine_code.flow import State, found_on_any_way
from tests.machine_code.opcodes import Effect
from tests.machine_code.sass import Found, Instruction, Operand
from tests.machine_code.words import DEFINED, UNDEFINED, constant, results

#: Where kernels load the stack pointer from.
_STACK_POINTER = "c[0x0][0x28]"
_NEGATED, _ARITHMETIC = str.maketrans("01", "10"), str.maketrans("01", "??")
_DEPENDS = {"store": "what it stores depends", "address": "its address depends", "guard": "whether it happens depends"}


def undefined_uses(instructions: list[Instruction]) -> list[Found]:
    """The uses in one function, in the order of their addresses, each once."""
    return found_on_any_way(instructions, _step, _joined, _uses) if instructions else []


def _joined(a: str, b: str) -> str:
    if a == b:
        return a
    return "".join(y if x in (y, "x") else x if y == "x" else "?" for x, y in zip(a, b, strict=True))


def _never_happens(instruction: Instruction) -> bool:
    return instruction.guard is not None and instruction.guard.value == 0


def _step(state: State[str], instruction: Instruction) -> None:
    slots = _slots(instruction)
    if _never_happens(instruction) or not (instruction.results or slots):
        return
    words = [_read(state, source) for source in instruction.sources]
    if instruction.name == "STL":
        written = dict(zip(slots, [words[-1][32 * i :][:32] for i in range(len(slots))], strict=True))
    elif slots:
        written = {name: state.get(slot, DEFINED) for name, slot in zip(instruction.written, slots, strict=True)}
    elif _STACK_POINTER in [source.text for source in instruction.sources]:
        written = dict.fromkeys(instruction.written, UNDEFINED)
    else:
        written = dict(zip(instruction.written, results(instruction, words), strict=True))
    for name, word in written.items():
        state[name] = _joined(word, state.get(name, UNDEFINED)) if instruction.guard else word


def _slots(instruction: Instruction) -> list[str]:
    """Names of the words of local memory that the instruction spills to or reloads; none if its address is computed."""
    if instruction.name not in ("STL", "LDL"):
        return []
    address = next(source for source in instruction.sources if source.kind == "address")
    registers = instruction.written or instruction.sources[-1].names or ("RZ",)
    if address.names != ("R1",) or {"U8", "S8", "U16", "S16"} & set(instruction.modifiers):
        return []
    first = int(address.text.strip("[]").removeprefix("R1").removeprefix("+") or "0", 16)
    return [f"local {first + 4 * i:#x}" for i in range(len(registers))]


def _read(state: State[str], source: Operand) -> str:
    """The word of a source, or the words of a wide one in a row."""
    if source.kind == "constant" and source.value is not None:
        return constant(source.value)
    if source.text == "PR":
        return "".join(state.get(f"P{i}", UNDEFINED)[0] for i in range(7)) + "0" * 25
    if source.kind not in ("register", "predicate"):
        return DEFINED
    word = "".join(state.get(name, UNDEFINED) for name in source.names)
    if source.part:
        size = 8 if source.part[0] == "B" else 16
        word = word[size * int(source.part[1]) :][:size] * (32 // size)
    if source.sign in ("!", "~"):
        return word.translate(_NEGATED)
    return word if not source.sign else word.translate(_ARITHMETIC)


def _uses(state: State[str], instruction: Instruction) -> Iterator[Found]:
    if _never_happens(instruction):
        return
    for kind, sources in (
        ("guard", instruction.conditions),
        ("address", [source for source in instruction.sources if source.kind == "address"]),
        ("store", [source for source in instruction.sources if _is_data(instruction, source)]),
    ):
        num_bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16}.get(instruction.modifiers[-1] if instruction.modifiers else "", 32)
        for name in [name for source in sources for name in source.names]:
            word = state.get(name, UNDEFINED)
            if "x" in word[: num_bits if kind == "store" else None] and (kind, name) != ("address", "R1"):
                message = f"{_DEPENDS[kind]} on bits {word[::-1]} of {name}, of which no instruction wrote x"
                yield Found(instruction, kind, name, message)


def _is_data(instruction: Instruction, source: Operand) -> bool:
    return instruction.opcode.effect is Effect.STORE and source.kind == "register" and not _slots(instruction)
