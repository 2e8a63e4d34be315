"""Registers that an asynchronous matrix product (WGMMA) still reads or writes, and what touches them meanwhile.

A GMMA instruction returns at once. Its sums, and its left operand where that is in registers, belong to the tensor cores until
WARPGROUP.DEPBAR has waited for the group of products that it is in; PTX calls any access before undefined
(wgmma.wait_group). ptxas 12.9 reuses registers of the left operand too early (triton#11781). Descriptors, which are uniform
registers, are read when the instruction is issued. What happens in shared memory is not seen here.
"""

from collections.abc import Iterator

from tests.machine_code.flow import State, found_on_any_way
from tests.machine_code.sass import Found, Instruction, UnknownInstruction

#: The operand of the last product of a group, and of the barrier that waits for groups.
GROUP = "gsb0"
#: Of products whose group is not closed: no barrier waits for them.
OPEN = -1
#: Groups behind which the exact number does not matter: barriers wait for fewer.
MAX_AGE = 8


def unfinished_uses(instructions: list[Instruction]) -> list[Found]:
    """The touches in one function, in the order of their addresses, one per instruction and register.

    States hold "writes R24" and "reads R40" of registers that unfinished products have, and how many groups were closed since
    the youngest such product's.
    """
    if not any(_is_product(instruction) for instruction in instructions):
        return []
    return found_on_any_way(instructions, _step, min, _touches)


def _is_product(instruction: Instruction) -> bool:
    return instruction.name.endswith("GMMA")


def _left_operand(instruction: Instruction) -> tuple[str, ...]:
    left = instruction.sources[0]
    return left.names if left.kind == "register" else ()


def _touches(state: State[int], instruction: Instruction) -> Iterator[Found]:
    written = instruction.written
    touched = [*written, *(name for source in instruction.sources for name in source.names)]
    if _is_product(instruction):
        # Products of one shape add to the same sums in order; any other overlap is a mistake.
        touched = [*_left_operand(instruction), *([] if _adds_to_the_same(state, instruction) else written)]
    for does, names in (("writes", touched), ("reads", written)):
        for name in [name for name in names if f"{does} {name}" in state]:
            message = f"a matrix product still {does} {name}: no barrier waited for it"
            yield Found(instruction, "unfinished", name, message)


def _adds_to_the_same(state: State[int], instruction: Instruction) -> bool:
    """True if the product adds to all sums of a group that has them, or to none that is unfinished."""
    written = instruction.written
    held = [name for name in written if f"writes {name}" in state]
    descriptor = next(i for i, source in enumerate(instruction.sources) if source.text.startswith("gdesc"))
    sums = instruction.sources[descriptor + 1]
    adds = sums.kind == "register" and sums.names == tuple(written)
    return not held or (len(held) == len(written) and (adds or sums.kind == "constant"))


def _step(state: State[int], instruction: Instruction) -> None:
    if _is_product(instruction):
        state.update((f"writes {name}", OPEN) for name in instruction.written)
        state.update((f"reads {name}", OPEN) for name in _left_operand(instruction))
        if instruction.sources[-1].text == GROUP:
            state.update((name, min(age + 1, MAX_AGE)) for name, age in state.items())
    elif instruction.name == "WARPGROUP" and instruction.modifiers[:1] == ("DEPBAR",):
        groups, *left = instruction.sources
        if instruction.modifiers != ("DEPBAR", "LE") or groups.text != GROUP or left[0].value is None:
            raise UnknownInstruction(f"{instruction.address:#06x}: {instruction.text}: what this waits for is not known")
        for name in [name for name, age in state.items() if age >= left[0].value]:
            del state[name]
