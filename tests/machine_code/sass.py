"""The text that `cuobjdump -sass` prints, as frozen instructions whose results and sources are registers by name and width."""

import dataclasses
import enum
import functools
import re
from typing import NamedTuple

from tests.machine_code.opcodes import OPCODES, Effect, Opcode, Results

FULL = 0xFFFFFFFF
#: Byte offsets in constant bank 0 from which kernels load the stack pointer: up to SM90, and from SM100 on.
STACK_POINTER_AT = ("c[0x0][0x28]", "c[0x0][0x37c]")


class UnknownInstruction(ValueError):
    """An opcode or an operand that the analysis does not know: nothing can be said of the kernel."""


class Kind(enum.Enum):
    REGISTER = "register"
    PREDICATE = "predicate"
    CONSTANT = "constant"
    """An immediate value, or RZ and PT."""
    BANK = "constant bank"
    ADDRESS = "address"
    OTHER = "other"
    """Special registers, barriers, labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One operand as written, and the registers that it names."""

    text: str
    kind: Kind
    names: tuple[str, ...] = ()
    """Registers in ascending order, "R4", "UR7", "P0", "UP1"; of an address, those that it is computed from."""
    value: int | None = None
    """The value of a constant whose 32 bits the text gives. PT is 32 ones, as predicates are words of equal bits."""
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
    def conditions(self) -> tuple[Operand, ...]:
        """Predicates that must all hold for the instruction to happen, or for the branch to be taken."""
        guard = (self.guard,) if self.guard else ()
        if self.opcode.effect is Effect.BRANCH:
            return guard + tuple(s for s in self.sources if s.kind is Kind.PREDICATE)
        return guard

    @property
    def bytes_moved(self) -> int:
        """The bytes of the first register that is loaded or stored: 1, 2 or 4."""
        return 1 if {"U8", "S8"} & set(self.modifiers) else 2 if {"U16", "S16"} & set(self.modifiers) else 4


class Found(NamedTuple):
    """Something that an instruction must not do."""

    instruction: Instruction
    kind: str
    """The use of bits that nothing wrote: the data of a "store", an "address", a "guard" (the condition of a branch or of any
    other instruction). What is wrong with FP8 bytes: a "layout" that an element does not reach, a "byte" stored among elements
    that is none. "unfinished": a register that a matrix product still has."""
    register: str
    message: str


LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"(?:@(!?)(U?P(?:\d|T))\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"([-~!|]*)(U?[RP])(\d+|Z|T)((?:\.\w+)*)\|?((?:\.\w+)*)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|INF|[SQ]?NAN)")
_IN_BRACKETS = re.compile(r"\b(U?R)(\d+|Z)((?:\.\w+)*)")
_BANK = re.compile(r"[-~|]*c(?:x?\[[^]]*\]){2}\|?((?:\.\w+)*)")
_ADDRESS = re.compile(r"g?(?:desc)?(?:\[[^]]*\])+((?:\.\w+)*)")
_OTHER = re.compile(r"SRZ?(?:_[\w.]+)?|PR|SB\d|gsb\d|B\d+|\{[\d,]*\}")
_PARTS = re.compile(r"H[01](?:_H[01])?|B[0-3]")


def functions(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of each function of a dump, in the order of their addresses; "" for a listing that names none.

    UnknownInstruction for what is in no table, ValueError for text without instructions.
    """
    starts = [(match[1], match.start(), match.end()) for match in _FUNCTION.finditer(sass)] or [("", 0, 0)]
    ends = [start for _, start, _ in starts[1:]] + [len(sass)]
    found = {name: parse(sass[begin:end]) for (name, _, begin), end in zip(starts, ends, strict=True)}
    if not any(found.values()):
        raise ValueError(f"no instructions in this dump: {sass[:200]!r}")
    return found


def parse(listing: str) -> list[Instruction]:
    """The instructions of one function."""
    return [parse_instruction(int(address, 16), text) for address, text in LINE.findall(listing)]


def parse_instruction(address: int, text: str) -> Instruction:
    """One line: its address, and what stands between the comments, without the semicolon."""
    match = _INSTRUCTION.fullmatch(text)
    if match is None or match[3] not in OPCODES:
        raise UnknownInstruction(f"{address:#06x}: {text}: {match[3] if match else 'this'} is in no table")
    negation, guard_name, name, suffixes, rest = match.groups()
    modifiers = tuple(suffixes.split(".")[1:])
    if "SP" in modifiers:
        raise UnknownInstruction(f"{address:#06x}: {text}: products of sparse matrices are not covered")
    opcode = OPCODES[name]
    try:
        texts, target = _operands(opcode.effect, name, rest)
        num_results = _num_results(opcode.results, texts)
        results = [_operand(t, opcode.width(modifiers)) for t in texts[:num_results]]
        widths = _source_widths(opcode, name, modifiers, texts, num_results)
        sources = [_operand(t, w) for t, w in zip(texts[num_results:], widths, strict=True)]
        if name.endswith("GMMA") and sources[1].text.startswith("gdesc"):
            sources[1] = dataclasses.replace(sources[1], names=sources[1].names[2:])
    except (UnknownInstruction, IndexError, ValueError, StopIteration) as error:
        raise UnknownInstruction(f"{address:#06x}: {text}: {error}") from error
    if opcode.results is Results.MASKED_PREDICATES:
        mask = sources[-1].value or 0
        results = [Operand(f"P{i}", Kind.PREDICATE, (f"P{i}",)) for i in range(8) if mask >> i & 1]
    if opcode.effect in (Effect.ATOMIC, Effect.LOAD, Effect.STORE) and "E" in modifiers:
        sources = [_with_wide_address(source) for source in sources]
    guard = _operand(negation + guard_name, 1) if guard_name else None
    return Instruction(address, text, guard, name, modifiers, tuple(results), tuple(sources), target)


def _operands(effect: Effect, name: str, rest: str) -> tuple[list[str], int | None]:
    """The operands' texts, and the target if there is one."""
    if effect in (Effect.RETURN, Effect.INDIRECT):  # RET.REL.NODEC R4 0x0; BRX R2 -0x130
        return [rest.split()[0]], None
    texts = _split(rest)
    if effect in (Effect.BRANCH, Effect.CALL) or name in ("BSSY", "LEPC", "WARPSYNC"):
        match = re.fullmatch(r"(?:`\()?(0x[0-9a-f]+)\)?`?", texts[-1]) if texts else None
        if match and name != "WARPSYNC":
            return texts[:-1], int(match[1], 16)
        if match:  # WARPSYNC 0xffffffff: a mask; with a register before it, the end of what the threads do together
            return texts[:-1], None
        if effect is Effect.BRANCH:
            raise UnknownInstruction("the target is not in the dump")
    return texts, None


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "[({") - (char in "])}")
        if char == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"U?P[\dT]", text) is not None


def _num_results(results: Results, texts: list[str]) -> int:
    if results in (Results.NONE, Results.MASKED_PREDICATES):
        return 0
    if results is Results.TWO:
        return 2
    if results is Results.ALL:
        return len(texts)
    if results is Results.VOTE:
        return 2 if len(texts) == 3 else 1
    if results is Results.MAYBE_PREDICATE:
        return 2 if _is_predicate(texts[0]) else 1
    if results is Results.BEFORE_ADDRESS:
        return next(i for i, text in enumerate(texts) if "[" in text)
    if results is Results.FIRST_AND_CARRIES:
        return next(i for i, text in enumerate(texts) if i and not _is_predicate(text))
    if results is Results.PREDICATES:
        return next((i for i, text in enumerate(texts) if not _is_predicate(text)), len(texts))
    return 1


def _source_widths(opcode: Opcode, name: str, modifiers: tuple[str, ...], texts: list[str], num_results: int) -> list[int]:
    sources = texts[num_results:]
    if name.endswith("GMMA"):
        return _widths_of_group_product(opcode, modifiers, sources)
    widths = []
    position = 0
    for text in sources:
        if "[" in text and not text.lstrip("-~|").startswith("c"):
            is_descriptor = name in ("UTMALDG", "UTMASTG") and text is not sources[0]
            widths.append(2 if is_descriptor else opcode.addresses(modifiers))
            continue
        reads = opcode.reads[min(position, len(opcode.reads) - 1)] if opcode.reads else None
        widths.append(reads(modifiers) if reads else 1)
        position += 1
    return widths


def _widths_of_group_product(opcode: Opcode, modifiers: tuple[str, ...], sources: list[str]) -> list[int]:
    """gdesc[UR8] names a descriptor of two registers for each operand, of which the right one's is alone where the left operand
    is in registers.

    64 rows of 32 bytes in the 128 threads of four warps are 4 registers, whatever the dtype.
    """
    widths, sums = [], opcode.width(modifiers)
    for i, text in enumerate(sources):
        widths.append(4 if text.startswith("gdesc") or i == 0 else sums)
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
        return Operand(plain, Kind.CONSTANT, value=value & FULL)
    if _NUMBER.fullmatch(plain):
        return Operand(plain, Kind.CONSTANT)
    for pattern, kind in ((_BANK, Kind.BANK), (_ADDRESS, Kind.ADDRESS)):
        match = pattern.fullmatch(plain)
        if match:
            return Operand(plain, kind, _names_in_brackets(plain, width), part=_part(match[1]))
    if _OTHER.fullmatch(plain):
        return Operand(plain, Kind.OTHER)
    raise UnknownInstruction(f"operand {text!r} is not understood")


def _register(text: str, match: re.Match[str], width: int) -> Operand:
    sign, file, number, inner, outer = match.groups()
    sign, suffixes = "".join(sorted(set(sign))), (inner + outer).split(".")[1:]
    if number in "ZT":
        if file.endswith("P"):
            return Operand(text, Kind.CONSTANT, value=0 if "!" in sign else FULL, sign=sign)
        return Operand(text, Kind.CONSTANT, value=FULL if "~" in sign else 0, sign=sign)
    if file.endswith("P"):
        return Operand(text, Kind.PREDICATE, (file + number,), sign=sign)
    width = 2 if "64" in suffixes else width
    names = tuple(f"{file}{int(number) + i}" for i in range(width))
    return Operand(text, Kind.REGISTER, names, sign=sign, part=_part(inner + outer))


def _part(suffixes: str) -> str:
    return next((s for s in suffixes.split(".") if _PARTS.fullmatch(s)), "")


def _names_in_brackets(text: str, width: int) -> tuple[str, ...]:
    names: list[str] = []
    for match in _IN_BRACKETS.finditer(text):
        file, number, suffixes = match.groups()
        if number == "Z":
            continue
        is_descriptor = text.startswith("desc[") and match.start() == len("desc[")
        num = 2 if "64" in suffixes.split(".") or is_descriptor else 1 if "]+" in text or "+UR" in text else width
        names += [f"{file}{int(number) + i}" for i in range(num)]
    return tuple(names)


def _with_wide_address(source: Operand) -> Operand:
    """`.E` means addresses of 64 bits, which a single register in brackets, `[R4]` or `[R4+0x8]`, leaves out."""
    match = re.fullmatch(r"\[R(\d+)([+-].*)?\]", source.text)
    if source.kind is not Kind.ADDRESS or match is None or "UR" in source.text:
        return source
    return dataclasses.replace(source, names=(f"R{match[1]}", f"R{int(match[1]) + 1}"))
