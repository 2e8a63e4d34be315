"""The resources that every configuration of every hand-written kernel takes, beside the GPU's limits: sm_89, 90, 100 and 120.

A row per kernel and kind of GPU, with the most that any of its configurations takes, as the installed Triton compiles them for
it; nothing runs. "over" counts configurations that the GPU could not launch, or that spill because they may not take more
registers. Below that limit ptxas sometimes spills a few bytes of its own accord, in order that one more program fits a
multiprocessor: those are in "spilled bytes" alone. Only GEMMs have other Triton code for another GPU: `--every 4` compiles each
configuration of the other kernels for one kind, by turns, and `--gemms` says so of GEMMs. benchmarks/catalogue.py makes them,
lowering/triton/limits.py has the limits.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import catalogue
from benchmarks.catalogue import Configuration
from benchmarks.common import main
from benchmarks.cubin import dump
from benchmarks.isolation import Bench, Row
from benchmarks.variants import compile_launch
from lowering.triton.limits import BY_CAPABILITY, Limits

ARCHS = (89, 90, 100, 120)

#: Of each thread, of all threads of a program together, and threads of a program: of every device with FP8 tensor cores.
#: Source: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications.
REGISTERS_PER_THREAD = 255
REGISTERS = 65536
THREADS = 1024


class Used(NamedTuple):
    """The resources that a compiled kernel takes."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread in local memory: spilled registers, for our kernels have no local arrays."""
    most_registers: int
    """Per thread that the launch allows."""
    shared: int
    """Bytes."""
    threads: int
    tensor_memory: int
    """Columns."""

    def over(self, of: Limits) -> list[str]:
        """Everything that exceeds a GPU's limits, in words."""
        registers = -(-self.registers // 8) * 8 * self.threads  # a warp gets them by 256
        taken = {
            "registers a thread": (self.registers, REGISTERS_PER_THREAD),
            "registers": (registers, REGISTERS),
            "spilled bytes a thread": (self.stack if self.registers >= self.most_registers else 0, 0),
            "bytes of shared memory": (self.shared, of.shared_memory),
            "threads": (self.threads, THREADS),
            "columns of tensor memory": (self.tensor_memory, of.tensor_memory),
        }
        return [f"{number} {what} of {most}" for what, (number, most) in taken.items() if number > most]


def used(compiled: Any) -> Used:
    """Read the resources of Triton's compiled kernel."""
    ((registers, *memory),) = re.findall(r"REG:(\d+) STACK:(\d+)\b.*\bLOCAL:(\d+)", dump(compiled.asm["cubin"], "-res-usage"))
    metadata = compiled.metadata
    threads = 32 * metadata.num_warps
    most = min(REGISTERS_PER_THREAD, REGISTERS // threads, metadata.maxnreg or REGISTERS_PER_THREAD)
    tensor_memory = getattr(metadata, "tmem_size", None) or 0
    return Used(int(registers), sum(map(int, memory)), most, metadata.shared, threads, tensor_memory)


def limits_of(arch: int) -> Limits:
    return BY_CAPABILITY[divmod(arch, 10)]


def by_kernel(found: dict[catalogue.Key, list[Configuration]]) -> dict[str, list[Configuration]]:
    """Configurations by their kernels."""
    kernels: dict[str, list[Configuration]] = defaultdict(list)
    for (module, name, *_), variants in sorted(found.items(), key=lambda each: each[0][:2]):
        kernels[f"{module.removeprefix('lowering.')}.{name}"] += variants
    return kernels


def chosen(archs: Sequence[int], every: int, gemms: int) -> Iterator[tuple[str, int, list[Configuration]]]:
    """The launches to compile: a kernel, the kind of GPU, configurations. GEMMs come first."""
    for arch in archs:
        for name, found in by_kernel(catalogue.configurations(catalogue.gemms(), divmod(arch, 10))).items():
            yield name, arch, turn_of(found, arch, gemms)
    for name, found in by_kernel(catalogue.configurations(catalogue.casts())).items():
        for arch in archs:
            yield name, arch, turn_of(found, arch, every)


def turn_of(configurations: list[Configuration], arch: int, every: int) -> list[Configuration]:
    """One of so many, and one at least; another one for each kind of GPU."""
    start = ARCHS.index(arch) * -(-every // len(ARCHS)) % every
    return configurations[start % len(configurations) :: every]


def row_of(what: str, arch: int, configurations: Sequence[Configuration]) -> dict[str, Any]:
    """The most that any of a kernel's configurations takes, and how many are over a limit."""
    of = limits_of(arch)
    each = [used(compile_launch(configuration.launch, arch)) for configuration in configurations]
    over = [(c.name, words) for c, taken in zip(configurations, each, strict=True) if (words := taken.over(of))]
    return {
        "what": what,
        "configurations": len(configurations),
        "registers": max(taken.registers for taken in each),
        "spilled bytes": max(taken.stack for taken in each),
        "shared bytes": max(taken.shared for taken in each),
        "shared bytes of the GPU": of.shared_memory,
        "threads": max(taken.threads for taken in each),
        "tensor memory": max(taken.tensor_memory for taken in each),
        "over": len(over),
        "the first": f"{over[0][0]}: {', '.join(over[0][1])}" if over else None,
    }


def run(bench: Bench, arch: Sequence[int] = ARCHS, every: int = 1, gemms: int = 1) -> Iterable[Row]:
    """`quick`: one configuration of each kernel."""
    import triton

    bench.baseline, bench.where = "the limits of each GPU", f"triton-{triton.__version__}"
    bench.notes.append("compiled, not run")
    return _rows(bench, arch, every, gemms)


def _rows(bench: Bench, archs: Sequence[int], every: int, gemms: int) -> Iterator[Row]:
    for name, arch, configurations in chosen(archs, every, gemms):
        what = f"{name} on sm_{arch}"
        if not bench.has_row(what):
            yield from bench.row(what, row_of, what, arch, configurations[:1] if bench.quick else configurations)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS, help="compute capabilities, times 10"
    )
    parser.add_argument("--every", type=int, default=1, help="of kernels but GEMMs, one of so many configurations")
    parser.add_argument("--gemms", type=int, default=1, help="of GEMMs, one of so many")


if __name__ == "__main__":
    main("kernel_limits", run, _options)
