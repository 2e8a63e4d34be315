"""Analyse the machine code that a ptxas makes of every cast.

    python -m tests.machine_code.check [--arch 89 90] [--ptxas PATH] [--operation PATTERN]

Compiles every cast, of matrices with whole tiles, of others, and of one column, for this machine's GPU, or for compute
capability 9.0 where there is none, and analyses the machine code. Ends with status 1 if something is wrong. --ptxas checks
another assembler than the one that `python -m lowering.triton.check` names. The first time it takes a few minutes for an
architecture.
"""

import dataclasses
import fnmatch
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

import lowering
from benchmarks.variants import Launch, compile_launch, recorded, variant_of
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.triton.assembler import Assembler, assembled_by, tritons
from lowering.triton.check import assemblers, parser_of
from tests.machine_code import Finding, disassemble, findings_of_text

SIZES = ((512, 256), (511, 257), (512, 1))

#: Values of the arguments that make other kernels, by name.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "granularity": ("block_1x128", "block_128x128"),
    "block": ((1, 128), (128, 128)),
    "square": (False, True),
    "columnwise": (False, True),
}


@dataclasses.dataclass(frozen=True)
class Checked:
    """A variant of a kernel, as this machine would run it."""

    kernel: str
    operation: str
    """The call that launches it, in words."""
    found: tuple[Finding, ...]


def casts() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Operations with a trial (lowering/triton/trial.py): those that convert. Name, and the function that launches kernels."""
    assert lowering  # registers them
    for name, operation in NAMESPACE.operations.items():
        for function in operation.implementations()[:-1]:
            if hasattr(function, "__wrapped__"):
                yield name, function.__wrapped__


#: The copies that a cast can make.
_COPIES: tuple[dict[str, bool], ...] = ({}, {"rowwise": False, "columnwise": True}, {"columnwise": True})


def calls(name: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Calls of a cast in words, with their arguments, made of its parameters; lists have one matrix, three, or a batch."""
    names = list(inspect.signature(NAMESPACE.operations[name].reference).parameters)
    chosen = [key for key in names if key in _CHOICES and not (key == "columnwise" and "rowwise" in names)]
    copies = _COPIES if "rowwise" in names else ({},)
    for form, ((rows, cols), dtype) in itertools.product(
        ("matrix", "matrices", "batch") if "xs" in names else ("matrix",),
        [*itertools.product(SIZES, (E4M3,)), (SIZES[0], E5M2)],
    ):
        for values in itertools.product(copies, *(_CHOICES[key] for key in chosen)):
            options = {**values[0], **dict(zip(chosen, values[1:], strict=True))}
            given = {key: _argument(key, "batch" in name or form == "batch", rows, cols) for key in names if key in _TENSORS}
            if form != "matrices":
                given = {key: value[:1] if isinstance(value, list) else value for key, value in given.items()}
            if "amaxes" in given:  # of the lines of both copies
                if form == "batch":
                    continue
                options = {"rowwise": True, "columnwise": True}
                given["amaxes"] = torch.ones(len(given["xs"]) * (rows + cols))
            yield f"{name} {form} {rows}x{cols} {_short(dtype)} {options or ''}", [*given.values(), dtype], options


_TENSORS = ("x", "xs", "scale", "scales", "amaxes")


def _argument(name: str, is_batch: bool, rows: int, cols: int) -> Any:
    shape = (3, rows, cols) if is_batch else (rows, cols)
    scale = torch.ones(3) if is_batch else torch.ones(())
    matrix = torch.empty(shape, dtype=torch.bfloat16)
    return {"x": matrix, "xs": [matrix] * 3, "scale": scale, "scales": [scale] * 3}.get(name)


def _short(dtype: torch.dtype) -> str:
    return "e5m2" if dtype == E5M2 else "e4m3"


def variants(pattern: str) -> Iterator[tuple[str, Launch]]:
    """The launches of casts whose name matches, each kind once."""
    seen: list[Any] = []
    for name, function in casts():
        if not fnmatch.fnmatch(name, pattern):
            continue
        for words, arguments, options in calls(name):
            for launch in recorded(function, *arguments, **options):
                if (variant := variant_of(launch)) not in seen:
                    seen.append(variant)
                    yield words, launch


def check(launches: Sequence[tuple[str, Launch]], arch: int, assembler: Assembler) -> list[Checked]:
    """Compile launches, assemble them, and analyse what comes out."""
    compiled = [compile_launch(launch, arch) for _, launch in launches]
    if assembler.path != tritons(arch).path:
        compiled = [assembled_by(each, assembler) for each in compiled]
    dumps = disassemble([each.asm["cubin"] for each in compiled])
    return [
        Checked(launch.kernel.__name__, words, tuple(findings_of_text(dump)))
        for (words, launch), dump in zip(launches, dumps, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = parser_of("python -m tests.machine_code.check", __doc__ or "")
    parser.add_argument("--operation", default="*", help="only operations of this name, * for any text")
    given = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    has_findings = False
    for arch, assembler in assemblers(given, console):
        has_findings |= _report(check(list(variants(given.operation)), arch, assembler), console)
    return int(has_findings)


def _report(checked: list[Checked], console: Console) -> bool:
    """Print the wrong variants; whether there are any."""
    wrong = [each for each in checked if each.found]
    for each in wrong:
        console.print(f"  WRONG {each.kernel} ({each.operation}): {len(each.found)} findings, the first: {each.found[0]}")
    console.print(f"  {len(checked) - len(wrong)} of {len(checked)} variants of casts are right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
