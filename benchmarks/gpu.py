"""One command for a machine with a GPU and torch installed: tests, then benchmarks, each part in less than nine minutes.

    make gpu                all parts
    make gpu PART=1         one of them
    make gpu PART=1 DRY=1   on a machine without a GPU: everything that can run there, and what is missing

Results are JSON files and a summary in Markdown beside the estimates (`benchmarks.layer_cost`, `benchmarks.kernel_cost`), in
`--out`. Exit status 1 if a command failed or a figure is below its estimate.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

from benchmarks.common import RESULTS, has_gpu, record_of
from benchmarks.verdicts import Verdict, verdicts

#: Seconds for all commands of a part.
LIMIT = 9 * 60 - 20
#: As pyproject.toml says.
_LEAST_PYTEST = 8
_TEST = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")


@dataclasses.dataclass(frozen=True)
class Part:
    """Commands that run together."""

    title: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of Python."""
    dry: tuple[tuple[str, ...], ...]
    """What stands for them without a GPU."""


#: Where a dry run leaves what it makes; git ignores it.
DRY = RESULTS.parents[1] / "out" / "gpu-dry"


def _shorter(folder: pathlib.Path) -> str:
    return folder.relative_to(RESULTS.parents[1]).as_posix()


def _benchmark(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *options)


PARTS = {
    1: Part(
        "GPU tests of the kernels",
        ((*_TEST, "tests/lowering"),),
        (
            (*_TEST, "--collect-only", "tests/lowering"),
            ("-m", "pytest", "-q", "tests/lowering/test_kernels_compile.py"),
        ),
    ),
    2: Part(
        "all other GPU tests",
        ((*_TEST, "tests", "--ignore=tests/lowering"),),
        ((*_TEST, "--collect-only", "tests", "--ignore=tests/lowering"),),
    ),
    3: Part("casts", (_benchmark("casts"),), (_benchmark("casts", "--quick"),)),
    4: Part("layer of 12 GEMMs", (_benchmark("gemm_layer"),), (_benchmark("gemm_layer", "--quick"),)),
    5: Part("choices", (_benchmark("sweep"),), (_benchmark("sweep", "--quick"),)),
    6: Part(
        "8B block, 16384 tokens",
        (_benchmark("train_step", "--blocks", "8B", "--tokens", "16384"),),
        (_benchmark("train_step", "--quick", "--blocks", "tiny", "--tokens", "128"),),
    ),
}


def missing() -> list[str]:
    """What this machine lacks to run the parts in full."""
    lacks = []
    if not has_gpu():
        lacks.append("a CUDA device with FP8 tensor cores (compute capability 8.9 or newer)")
    packages = {
        "triton": "kernels",
        "pytest": "parts 1 and 2",
        "pytest_timeout": "the tests' time limits, without which pytest refuses the project's settings (pytest-timeout)",
        "xdist": "tests in parallel (pytest-xdist)",
        "hypothesis": "parts 1 and 2",
        "torchao": "its columns",
    }
    lacks += [f"{name}, for {what}" for name, what in packages.items() if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("pytest") is not None and int(version("pytest").partition(".")[0]) < _LEAST_PYTEST:
        lacks.append(f"pytest {_LEAST_PYTEST} or newer, for parts 1 and 2 (this is {version('pytest')})")
    if shutil.which("nvidia-smi") is None:
        lacks.append("nvidia-smi, for the record of clocks")
    return lacks


def _complete(command: tuple[str, ...], out: pathlib.Path) -> list[str]:
    """The whole command line: workers for tests, the folder for benchmarks."""
    extra: list[str] = []
    if command[1] == "pytest":
        if importlib.util.find_spec("xdist") is not None and "--collect-only" not in command:
            extra = ["-n", str(max(1, min(14, (os.cpu_count() or 2) - 2)))]
    else:
        extra = ["--out", str(out)]
    return [sys.executable, *command, *extra]


def run_part(number: int, dry: bool, out: pathlib.Path) -> list[dict[str, Any]]:
    """Run the commands of a part; what came of each. A command that the limit ends leaves what it has written."""
    part, end = PARTS[number], time.monotonic() + LIMIT
    records = []
    for command in part.dry if dry else part.commands:
        line = _complete(command, out)
        shown = _shown(line)
        print(f"part {number}, {part.title}: {shown}", flush=True)
        start = time.monotonic()
        try:
            status: int | str = subprocess.run(line, timeout=max(1, end - start), check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {LIMIT} s of its part"
        if status == 5 and "--collect-only" in command:  # pytest's "no tests": they are skipped by their own marks
            status = 0
        records.append({"part": number, "command": shown, "status": status, "seconds": round(time.monotonic() - start, 1)})
    return records


def _shown(line: list[str]) -> str:
    return " ".join(["python", *line[1:]])


def summary(records: list[dict[str, Any]], found: list[Verdict], lacks: list[str], dry: bool, out: pathlib.Path) -> str:
    """The report in Markdown."""
    machine = record_of("gpu", "make gpu")
    lines = ["# GPU run" + (", dry" if dry else ""), "", f"{machine['date']}, {json.dumps(machine['machine'])}", ""]
    if dry:
        lines += ["On a machine with a GPU, in parts that end after nine minutes at most:", ""]
        numbers = dict.fromkeys(r["part"] for r in records)
        lines += [f"- part {n}, {PARTS[n].title}: `{_shown(_complete(c, out))}`" for n in numbers for c in PARTS[n].commands]
        lines += ["", "Here:", ""]
    lines += ["| part | command | status | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['part']} | `{r['command']}` | {r['status']} | {r['seconds']} |" for r in records]
    if found:
        lines += ["", "Measured beside the estimate, which nothing was timed for. Pass: at least the lower estimate.", ""]
        lines += ["| figure | measured | estimate, low | high | |", "|---|---|---|---|---|"]
        lines += [
            f"| {v.what} | {v.measured:.2f} | {v.low:.2f} | {v.high:.2f} | {'pass' if v.passes else '**fail**'} |"
            for v in found
        ]
    if lacks:
        lines += ["", "Missing here:", "", *(f"- {text}" for text in lacks)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=list(PARTS), help="one part; all of them by default")
    parser.add_argument("--dry", action="store_true", help="run what a machine without a GPU can")
    parser.add_argument(
        "--out", type=pathlib.Path, help=f"folder of the results; {_shorter(RESULTS)}, of a dry run {_shorter(DRY)}"
    )
    arguments = parser.parse_args()
    lacks = missing()
    if not (arguments.dry or has_gpu()):
        sys.exit(f"make gpu needs {lacks[0]}; make gpu DRY=1 runs what can run without one")
    out = arguments.out or (DRY if arguments.dry else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    parts = [arguments.part] if arguments.part else list(PARTS)
    records = [record for number in parts for record in run_part(number, arguments.dry, out)]
    names = {command[1].removeprefix("benchmarks.") for number in parts for command in PARTS[number].commands}
    found = [] if arguments.dry else verdicts(out, names)
    text = summary(records, found, lacks, arguments.dry, out)
    name = f"gpu{'' if arguments.part is None else f'-part{arguments.part}'}{'-dry' if arguments.dry else ''}"
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps(record_of("gpu", "make gpu") | {"commands": records}, indent=1) + "\n")
    print(text)
    if any(r["status"] != 0 for r in records) or not all(v.passes for v in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
