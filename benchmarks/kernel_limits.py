"""The resources that a configuration of a hand-written kernel takes, beside the limits of the GPUs that it is compiled for:
sm_89, 90, 100 and 120. Nothing runs. `benchmarks/catalogue.py` has the configurations, `lowering/triton/limits.py` the limits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from typing import Any, NamedTuple

from benchmarks import catalogue
from benchmarks.catalogue import Configuration
from lowering.triton.limits import BY_CAPABILITY, Limits

ARCHS = (89, 90, 100, 120)

#: Of each thread, of all threads of a program together, and threads of a program: of every device with FP8 tensor cores.
#: Source: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications.
REGISTERS_PER_THREAD, REGISTERS, THREADS = 255, 65536, 1024


class Used(NamedTuple):
    """The resources that a compiled kernel takes."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread in local memory: spilled registers, for our kernels have no local arrays."""
    most_registers: int
    """Per thread that the launch allows. Below, ptxas sometimes spills in order that one more program fits a multiprocessor."""
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
    """Read the resources of Triton's compiled kernel, by the `cuobjdump` that Triton ships."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, *memory),) = re.findall(r"REG:(\d+) STACK:(\d+)\b.*\bLOCAL:(\d+)", printed)
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


def turn_of(configurations: list[Configuration], arch: int, every: int) -> list[Configuration]:
    """One of so many, and one at least; another one for each kind of GPU."""
    start = ARCHS.index(arch) * -(-every // len(ARCHS)) % every
    return configurations[start % len(configurations) :: every]
