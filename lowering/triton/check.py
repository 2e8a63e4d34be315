"""Tell which ptxas assembles our kernels on this machine, and whether it is known to be wrong (docs/gpu-status.md).

    python -m lowering.triton.check [--arch 89 90] [--ptxas PATH]

For this machine's GPU, or for compute capability 9.0 where there is none. --ptxas asks about another assembler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from lowering import hardware
from lowering.triton.assembler import Assembler, choose, of_path, others, tritons


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command about assemblers."""
    parser = argparse.ArgumentParser(prog=command, description=description.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", help="compute capabilities, times 10: 89, 90, 100")
    parser.add_argument("--ptxas", help="the assembler to check, instead of the one that would be used")
    return parser


def assemblers(given: argparse.Namespace, console: Console) -> Iterator[tuple[int, Assembler]]:
    """Print versions and assemblers, and yield each compute capability with the assembler of its kernels."""
    import triton

    device = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    name = "no GPU" if device is None else f"{torch.cuda.get_device_name()} ({device[0]}.{device[1]})"
    console.print(f"torch {torch.__version__}, Triton {triton.__version__}, {name}")
    for arch in given.arch or [90 if device is None else 10 * device[0] + device[1]]:
        assembler = choose(arch) if given.ptxas is None else of_path(given.ptxas)
        console.print(f"\ncompute capability {arch / 10}: {assembler}")
        for other in [tritons(arch), *others()]:
            if other.path != assembler.path:
                console.print(f"  not used: {other}")
        yield arch, assembler


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 where no kernel runs."""
    given = parser_of("python -m lowering.triton.check", __doc__ or "").parse_args(arguments)
    console = Console(soft_wrap=True)
    if not hardware.triton_available():
        console.print("Triton is not installed, so no kernel of lowering runs here.")
        return 1
    for _, assembler in assemblers(given, console):
        if assembler.is_right:
            console.print("  not known to be wrong")
        else:
            console.print(
                "  KNOWN TO BE WRONG about some kernels that convert to FP8, not about the casts of lowering: the first launch"
                " of each is compared with the reference"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
