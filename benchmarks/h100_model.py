"""A Hopper GPU on paper: its constants, each with its source, and what a kernel's instruction counts say of its time.

Everything that these functions return is an estimate. It orders kernels and shows what limits them; only a GPU measures them.
"""

from __future__ import annotations

import dataclasses
import math

from fp8pass.cost import H200

#: Streaming multiprocessors of an H200 and of an H100 SXM: NVIDIA H100 Tensor Core GPU Architecture, table of its GPUs.
MULTIPROCESSORS = 132
#: Hz. An assumption: below the 1.98 GHz that the board may reach, for a training step runs at the limit of its power.
CLOCK = 1.755e9
#: Bytes per second of a plain copy on an H200, reads and writes together.
COPY_BANDWIDTH = H200.memory_bandwidth
#: Bytes per second that the L2 cache delivers to all multiprocessors. An assumption: what microbenchmarks of an H100 PCIe read
#: (5.5 to 5.7e12); NVIDIA publishes none.
L2_BANDWIDTH = 5.5e12
#: Products of FP8 that a multiprocessor's tensor cores add per clock: 1979e12 / 2 per second at 1.83 GHz and 132 of them, the
#: table of the same document.
FP8_PRODUCTS = 4096
#: Seconds from a load to its data while memory is busy. An assumption; with the bandwidth above, Little's law asks for some
#: 26 KB under way in every multiprocessor.
LATENCY = 800e-9

#: CUDA C++ Programming Guide, "Compute Capabilities", 9.0: registers, shared bytes (1 KB of a program's is reserved),
#: warps and programs of a multiprocessor; schedulers, each of which issues an instruction per clock.
REGISTERS = 65536
SHARED_BYTES = 233472
SHARED_RESERVED = 1024
WARPS = 64
PROGRAMS = 32
SCHEDULERS = 4
#: Clocks from an instruction of a warp to its next one, where no other warp has anything to issue: half the latency of
#: arithmetic (4 clocks), for every other instruction is independent of the one before.
CLOCKS_PER_INSTRUCTION = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a kernel: what was compiled, and what it moves."""

    registers: int
    """Per thread."""
    shared: int
    """Bytes."""
    warps: int
    instructions: float
    """SASS that each warp issues."""
    load_bytes: float
    """Read from global memory, by the tensors' sizes: what is read again comes from the cache."""
    store_bytes: float


def resident(program: Program) -> int:
    """Programs that share a multiprocessor."""
    by_registers = REGISTERS // SCHEDULERS // (math.ceil(program.registers * 32 / 256) * 256) * SCHEDULERS // program.warps
    by_shared = SHARED_BYTES // (program.shared + SHARED_RESERVED)
    return min(by_registers, by_shared, WARPS // program.warps, PROGRAMS)


def memory_clocks(num_bytes: float, bandwidth: float = COPY_BANDWIDTH) -> float:
    """Clocks in which a multiprocessor's share of the memory moves them."""
    return num_bytes / (bandwidth / MULTIPROCESSORS) * CLOCK


def issue_clocks(program: Program) -> float:
    """Clocks in which four schedulers issue a program's instructions."""
    return program.instructions * program.warps / SCHEDULERS


def issue_to_memory(program: Program) -> float:
    """Above some 0.6, instructions and not memory limit a kernel in practice."""
    return issue_clocks(program) / memory_clocks(program.load_bytes + program.store_bytes)


def bytes_in_flight(program: Program) -> float:
    """Loads under way in a multiprocessor if all its programs were loading: an upper bound."""
    return resident(program) * program.load_bytes


def share_of_copy(program: Program, bandwidth: float = COPY_BANDWIDTH) -> float:
    """Share of a plain copy's bandwidth, which is `bandwidth` itself.

    A program takes the time of its slowest resource: memory, schedulers, or its own length (latency, then instructions one
    after the other) divided among the programs that are resident. Near each other the three add up: root of the squares.
    """
    memory = memory_clocks(program.load_bytes + program.store_bytes, bandwidth)
    length = LATENCY * CLOCK + CLOCKS_PER_INSTRUCTION * program.instructions
    return memory / math.hypot(memory, issue_clocks(program), length / resident(program))
