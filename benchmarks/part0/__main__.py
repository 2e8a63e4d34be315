"""What works on this machine: parts 0 and 1 of `python3 -m benchmarks.gpu`.

operations: every registered operation against its reference. recipes: every recipe through Inductor, with CUDA graphs and with
experts. A row per case; one that is wrong has failed, one that the machine cannot run says why. A CUDA
error, behind which nothing else is right, ends the run.
"""

from __future__ import annotations

from benchmarks.common import main
from benchmarks.part0 import operations, recipes
from benchmarks.part0.cases import as_benchmark

PARTS = {part.__name__.rpartition(".")[2]: as_benchmark(part.cases) for part in (operations, recipes)}

if __name__ == "__main__":
    main("part0", PARTS)
