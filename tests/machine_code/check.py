"""Analyse the machine code that a ptxas makes of every cast.

    python -m tests.machine_code.check [--arch 89 90] [--ptxas PATH] [--operation PATTERN]

Compiles every cast, of matrices with whole tiles, of others, and of one column, for this machine's GPU, or for compute
capability 9.0 where there is none, and analyses the machine code. Ends with status 1 if something is wrong. --ptxas checks
another assembler than the one that `python -m lowering.triton.check` names. The first time it takes a few minutes for an
architecture.
"""

import dataclasses
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_map_only

from benchmarks import catalogue
from benchmarks.variants import Launch, compile_launch, variant_of
from lowering.triton.assembler import Assembler, assembled_by, tritons
from lowering.triton.check import assemblers, parser_of
from tests.machine_code import Finding, disassemble, findings_of_text


@dataclasses.dataclass(frozen=True)
class Checked:
    """A variant of a kernel, as this machine would run it."""

    kernel: str
    operation: str
    """The call that launches it, in words."""
    found: tuple[Finding, ...]


#: Words of calls in the catalogue whose kernels differ from others in what no conversion depends on.
_LEFT_OUT = ("float16 ", "float32 ", "column-major", "epsilon", "power_of_2=True")


def calls(pattern: str) -> Iterator[tuple[str, catalogue.Call]]:
    """Calls in the catalogue of casts with a trial (lowering/triton/trial.py) whose operation matches; also of one column."""
    for name, call in catalogue.enumerated():
        is_asked = fnmatch.fnmatch(name.split()[0], pattern) and hasattr(call.function, "__wrapped__")
        if is_asked and not any(word in name.replace("bfloat16 ", "") for word in _LEFT_OUT):
            yield name, call
            if "511" not in name:
                yield f"{name}, one column", call._replace(arguments=tree_map_only(torch.Tensor, _one_column, call.arguments))


def _one_column(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1].contiguous() if x.dim() > 1 else x


def variants(pattern: str) -> Iterator[tuple[str, Launch]]:
    """The launches of casts whose name matches, each kind once."""
    seen: list[Any] = []
    for name, call in calls(pattern):
        for launch in call.launches():
            if (variant := variant_of(launch)) not in seen:
                seen.append(variant)
                yield name, launch


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
