"""The text that `cuobjdump -sass` prints, as frozen instructions whose results and sources are registers by name and width."""

import dataclasses
import functools
import itertools
import re
from typing import NamedTuple

from tests.machine_code.opcodes import OPCODES, Effect, Opcode, count

FULL = 0xFFFFFFFF


class UnknownInstruction(ValueError):
    """An opcode or an operand that the analysis does not know: nothing can be said of the kernel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One operand as written, and the registers that it names."""

    text: str
    kind: str = "other"
    """A "register", a "predicate", a "constant" (an immediate value, or RZ and PT), an "address" in a register or a constant
    bank; "other": special registers, barriers, labels."""
    names: tuple[str, ...] = ()
    """Registers in ascending order, "R4", "UR7", "P0", "UP1"; of an address, those that it is computed from."""
    value: int | None = None
    """The value of a constant whose 32 bits the text gives. PT is 32 ones."""
    sign: str = ""
    """The characters of "-", "~", "!" and "|" (a magnitude) that the text has."""
    part: str = ""
    """"H0_H0" for the lower half twice, "B1" for the second byte and so on; "" for the whole register."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    text: str
    """Without its address and encoding, with its guard."""
    guard: Operand | None
    """The predicate without which nothing happens."""
    name: str
    modifiers: tuple[str, ...]
    results: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    target: int | None = None
    """Address that a branch or a call goes to, or at which a JOIN lets threads go on."""

    @property
    def opcode(self) -> Opcode:
        return OPCODES[self.name]

    @property
    def written(self) -> list[str]:
        """Registers of all results; "" for one that is thrown away."""
        return [name for result in self.results for name in (result.names or ("",))]

    @property
    def conditions(self) -> tuple[Operand, ...]:
        """Predicates that must all hold for the instruction to happen, or for the branch to be taken."""
        guard = (self.guard,) if self.guard else ()
        is_branch = self.opcode.effect is Effect.BRANCH
        return guard + tuple(s for s in self.sources if is_branch and s.kind == "predicate")


class Found(NamedTuple):
    """Something that an instruction must not do."""

    instruction: Instruction
    kind: str
    """The use of bits that nothing wrote: the data of a "store", an "address", a "guard" (the condition of a branch or of any
    other instruction). "unfinished": a register that a matrix product still has."""
    register: str
    message: str

    def __str__(self) -> str:
        return f"{self.instruction.address:#06x}: {self.instruction.text}: {self.message}"


LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"(?:@(!?)(U?P(?:\d|T))\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"([-~!|]*)(U?[RP])(\d+|Z|T)((?:\.\w+)*)\|?((?:\.\w+)*)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|INF|[SQ]?NAN)")
_IN_BRACKETS = re.compile(r"\b(U?R)(\d+)((?:\.\w+)*)")
_ADDRESS = re.compile(r"[-~|]*c(?:x?\[[^]]*\]){2}\|?(?:\.\w+)*|g?(?:desc)?(?:\[[^]]*\])+(?:\.\w+)*")
_OTHER = re.compile(r"SRZ?(?:_[\w.]+)?|PR|SB\d|gsb\d|B\d+|\{[\d,]*\}")
_PARTS = re.compile(r"H[01](?:_H[01])?|B[0-3]")
_TARGET = re.compile(r"(?:`\()?(0x[0-9a-f]+)\)?`?")


def functions(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of each function of a dump, in the order of their addresses.

    UnknownInstruction for what is in no table, ValueError for text without instructions.
    """
    _, *parts = _FUNCTION.split(sass)
    found = {
        name: [parse_instruction(int(address, 16), text) for address, text in LINE.findall(listing)]
        for name, listing in zip(parts[::2], parts[1::2], strict=True)
    }
    if not any(found.values()):
        raise ValueError(f"no instructions in this dump: {sass[:200]!r}")
    return found


def parse_instruction(address: int, text: str) -> Instruction:
    """One line: its address, and what stands between the comments, without the semicolon."""
    match = _INSTRUCTION.fullmatch(text)
    if match is None or match[3] not in OPCODES:
        raise UnknownInstruction(f"{address:#06x}: {text}: {match[3] if match else 'this'} is in no table")
    negation, guard_name, name, suffixes, rest = match.groups()
    modifiers = tuple(suffixes.split(".")[1:])
    opcode = OPCODES[name]
    try:
        texts, target = _operands(opcode.effect, name, rest)
        num_results = count(opcode.results, texts)
        results = [_operand(t, count(opcode.width, modifiers)) for t in texts[:num_results]]
        widths = _source_widths(opcode, name, modifiers, texts[num_results:])
        sources = [_operand(t, width) for t, width in zip(texts[num_results:], widths, strict=True)]
    except (UnknownInstruction, IndexError, ValueError, StopIteration) as error:
        raise UnknownInstruction(f"{address:#06x}: {text}: {error}") from error
    if name.endswith("GMMA") and sources[1].text.startswith("gdesc"):  # the left operand is in registers
        sources[1] = dataclasses.replace(sources[1], names=sources[1].names[2:])
    guard = _operand(negation + guard_name, 1) if guard_name else None
    return Instruction(address, text, guard, name, modifiers, tuple(results), tuple(sources), target)


def _operands(effect: Effect, name: str, rest: str) -> tuple[list[str], int | None]:
    """The operands' texts, and the target if there is one."""
    if effect is Effect.RETURN:  # RET.REL.NODEC R4 0x0
        return [rest.split()[0]], None
    texts = [text.strip() for text in re.findall(r"(?:[^,\[({]|\[[^]]*\]|\([^)]*\)|\{[^}]*\})+", rest)]
    if effect in (Effect.BRANCH, Effect.CALL) or name in ("BSSY", "WARPSYNC"):
        match = _TARGET.fullmatch(texts[-1]) if texts else None
        if match:  # WARPSYNC's is a mask, or the end of what the threads do together
            return texts[:-1], None if name == "WARPSYNC" else int(match[1], 16)
        if effect is Effect.BRANCH:
            raise UnknownInstruction("the target is not in the dump")
    return texts, None


def _source_widths(opcode: Opcode, name: str, modifiers: tuple[str, ...], sources: list[str]) -> list[int]:
    """How many registers each source has where its text does not say."""
    if name.endswith("GMMA"):
        # gdesc[UR8] names a descriptor of two registers for each operand; 64 rows of 32 bytes are 4 registers of 128 threads.
        return [4 if text.startswith("gdesc") or i == 0 else count(opcode.width, modifiers) for i, text in enumerate(sources)]
    widths, reads = [], itertools.chain(opcode.reads, itertools.repeat(opcode.reads[-1]))
    for text in sources:
        if "[" in text and not text.lstrip("-~|").startswith("c"):
            is_wide = "E" in modifiers and "UR" not in text and name != "LDGSTS"  # an address of 64 bits: [R4]
            widths.append(2 if is_wide else 1)
        else:
            widths.append(count(next(reads), modifiers))
    return widths


@functools.cache
def _operand(text: str, width: int) -> Operand:
    """An operand of so many registers where the text does not say. Predicates are one wide."""
    plain = text.replace(".reuse", "")
    match = _REGISTER.fullmatch(plain)
    if match:
        return _register(plain, match, width)
    if re.fullmatch(r"[-~]?0x[0-9a-f]+", plain):
        value = int(plain.lstrip("-~"), 16)
        value = -value if plain[0] == "-" else ~value if plain[0] == "~" else value
        return Operand(plain, "constant", value=value & FULL)
    if _NUMBER.fullmatch(plain):
        return Operand(plain, "constant")
    if _ADDRESS.fullmatch(plain):
        return Operand(plain, "address", _names_in_brackets(plain, width))
    if _OTHER.fullmatch(plain):
        return Operand(plain)
    raise UnknownInstruction(f"operand {text!r} is not understood")


def _register(text: str, match: re.Match[str], width: int) -> Operand:
    sign, file, number, inner, outer = match.groups()
    suffixes = (inner + outer).split(".")[1:]
    is_predicate = file.endswith("P")
    if number in "ZT":
        return Operand(text, "constant", value=FULL if is_predicate != bool({"~", "!"} & set(sign)) else 0)
    width = 1 if is_predicate else 2 if "64" in suffixes else width
    names = tuple(f"{file}{int(number) + i}" for i in range(width))
    part = next((s for s in suffixes if _PARTS.fullmatch(s)), "")
    return Operand(text, "predicate" if is_predicate else "register", names, sign=sign, part=part)


def _names_in_brackets(text: str, width: int) -> tuple[str, ...]:
    names: list[str] = []
    for match in _IN_BRACKETS.finditer(text):
        file, number, suffixes = match.groups()
        is_descriptor = text.startswith("desc[") and match.start() == len("desc[")
        num = 2 if "64" in suffixes.split(".") or is_descriptor else 1 if "]+" in text or "+UR" in text else width
        names += [f"{file}{int(number) + i}" for i in range(num)]
    return tuple(names)
