"""The text of machine code, of many cubins at once.

NOTE [one file] A disassembler takes a third of a second to start, and a hundredth for a kernel. It reads ELF files one by one,
but instructions without a header in any number: those of all functions of all cubins make one file, and their addresses tell
where each begins. What it says of them is what `cuobjdump -sass` says, but for the addresses that branches name.
"""

import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from tests.machine_code.sass import LINE

#: An address in the same function; WARPSYNC's is not read.
_TARGET = re.compile(r"((?:@!?U?P\w )?(?:BRA|CALL|RET|BSSY)\b.*)\b(0x[0-9a-f]+)")


def disassemble(cubins: Sequence[bytes]) -> list[str]:
    """Disassemble these cubins by `cuobjdump -sass`: of each "Function : name", then the instructions at their addresses.

    Needs Triton, which ships the disassembler. RuntimeError: one of them cannot be disassembled.
    """
    functions = [list(_functions(cubin)) for cubin in cubins]
    lines = iter(LINE.findall(_printed(b"".join(code for of_cubin in functions for _, code in of_cubin))))
    dumps, base = [], 0
    for of_cubin in functions:
        text = ""
        for name, code in of_cubin:
            own = (next(lines) for _ in range(len(code) // 16))
            text += "\n".join([f"Function : {name}", *(_moved(int(at, 16), line, base) for at, line in own), ""])
            base += len(code)
        dumps.append(text)
    return dumps


def _moved(address: int, text: str, base: int) -> str:
    """A line of a function that begins at `base`, as if it began at 0."""
    target = _TARGET.fullmatch(text)
    moved = text if target is None else f"{target[1]}{int(target[2], 16) - base:#x}"
    return f"/*{address - base:04x}*/ {moved} ;"


def _printed(code: bytes) -> str:
    from triton import knobs

    nvdisasm = knobs.nvidia.nvdisasm.path
    with tempfile.NamedTemporaryFile() as file:
        pathlib.Path(file.name).write_bytes(code)
        done = subprocess.run([nvdisasm, "--binary", "SM90a", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{nvdisasm} cannot read this code: {done.stderr.strip() or done.stdout[:200]}")
    return done.stdout


def _functions(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections .text.NAME of an ELF file of 64 bits, for SM90 by the flags, which are elsewhere since CUDA's ABI 8."""
    if cubin[:4] != b"\x7fELF" or cubin[49 if cubin[8] >= 8 else 48] != 90:
        raise RuntimeError(f"cannot read this cubin, which begins with {cubin[:8]!r}: pass an ELF file for SM90")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I20xQQ", cubin, start + i * size) for i in range(count)]  # name, offset, length
    _, names, _ = sections[of_names]
    for name_at, offset, length in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[offset : offset + length]
