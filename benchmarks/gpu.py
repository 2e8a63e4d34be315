"""One command for a machine with a GPU and torch installed: what works, tests, benchmarks; each part ends after nine minutes.

    python3 -m benchmarks.gpu --out FOLDER             all parts
    python3 -m benchmarks.gpu --out FOLDER --part 0    one of them
    python3 -m benchmarks.gpu --cpu                    without a GPU: everything that can run there, and what is missing

The folder gets the benchmarks' JSON files, a log for each part, the tests' junit files, and a summary in Markdown. Exit status
1 if a part failed. `make gpu PART=0 RESULTS=FOLDER` is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import signal
import sys
import time
from collections.abc import Sequence

from benchmarks import processes
from benchmarks.common import RESULTS, ROOT, record_of
from benchmarks.isolation import Row
from benchmarks.preflight import missing, pytest_obstacle

#: Seconds of a part.
LIMIT = 9 * 60 - 20
#: Where a dry run leaves what it makes; git ignores it.
DRY = ROOT / "out" / "gpu-dry"
_TEST = ("pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors")

#: A title, and a module with its arguments, in the order in which all of them run: what a run that is cut short should have
#: comes first.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("operations", ("benchmarks.part0", "--what", "operations")),
    ("recipes", ("benchmarks.part0", "--what", "recipes")),
    ("casts", ("benchmarks.casts",)),
    ("8B block, 16384 tokens", ("benchmarks.train_step", "--blocks", "8B", "--tokens", "16384")),
    ("GPU tests of the kernels", (*_TEST, "tests/lowering")),
    ("all other GPU tests", (*_TEST, "tests", "--ignore=tests/lowering")),
)


def command_of(number: int, dry: bool, out: pathlib.Path) -> list[str]:
    """The command line of a part, or of its stand-in without a GPU."""
    _, (module, *options) = PARTS[number]
    if module != "pytest":
        options += [*(["--quick"] if dry else []), "--out", str(out)]
    elif dry:
        options += ["--collect-only"]
    else:
        options += [f"--junitxml={out / f'part{number}.xml'}"]
        if importlib.util.find_spec("xdist") is not None:
            options += ["-n", str(max(1, min(14, processes.num_cores() - 2)))]
    return [sys.executable, "-m", module, *options]


def run_part(number: int, dry: bool, out: pathlib.Path) -> Row:
    """Run a part and print what it printed; what came of it. One that the limit ends leaves what it has written."""
    line, start = command_of(number, dry, out), time.monotonic()
    row: Row = {"part": number, "title": PARTS[number][0], "command": " ".join(["python3", *line[1:]])}
    print(f"part {number}, {row['title']}: {row['command']}", flush=True)
    obstacle = pytest_obstacle() if "pytest" in line else None
    if obstacle is not None:
        return row | {"status": f"skipped, {obstacle}", "seconds": 0.0}
    path = out / f"part{number}.log"
    with path.open("wb") as log:
        status = processes.run(line, log, LIMIT)
    print(path.read_text(errors="replace"), flush=True)
    if status == 5 and dry:  # pytest's "no tests": their own marks skip them
        status = 0
    seconds = round(time.monotonic() - start, 1)
    return row | {"status": f"stopped after {LIMIT} s" if status is None else status, "seconds": seconds}


def summary(rows: Sequence[Row], lacks: Sequence[object], out: pathlib.Path) -> str:
    """The report in Markdown."""
    machine = record_of("gpu", "")
    lines = ["# GPU run", "", f"{machine['date']}, {json.dumps(machine['machine'])}", ""]
    lines += ["| part | title | command | on a GPU | status | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        on_gpu = " ".join(["python3", *command_of(row["part"], False, out)[1:]])
        cells = (row["part"], row["title"], f"`{row['command']}`", f"`{on_gpu}`", row["status"], row["seconds"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, *(["", "Missing here:", ""] if lacks else []), *(f"- {lack}" for lack in lacks), ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=range(len(PARTS)), help="one part; all of them by default")
    parser.add_argument("--cpu", action="store_true", help="run what a machine without a GPU can")
    folders = " and ".join(folder.relative_to(ROOT).as_posix() for folder in (RESULTS, DRY))
    parser.add_argument("--out", type=pathlib.Path, help=f"folder of the results (default: {folders} with --cpu)")
    arguments = parser.parse_args()
    lacks = missing()
    fatal = "".join(f"\n- {lack}" for lack in lacks if lack.is_fatal)
    if fatal and not arguments.cpu:
        sys.exit(f"benchmarks.gpu cannot measure here without:{fatal}\n--cpu (make gpu DRY=1) runs what can run here")
    out = (arguments.out or (DRY if arguments.cpu else RESULTS)).absolute()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it ends what it has started
    name = f"gpu{'' if arguments.part is None else f'-part{arguments.part}'}{'-dry' if arguments.cpu else ''}.md"
    rows: list[Row] = []
    for number in range(len(PARTS)) if arguments.part is None else [arguments.part]:
        rows.append(run_part(number, arguments.cpu, out))
        text = summary(rows, lacks, out)
        (out / name).write_text(text)  # after each part: what ends this process leaves the report of those before
    print(text)
    sys.exit(any(row["status"] != 0 and not str(row["status"]).startswith("skipped") for row in rows))


if __name__ == "__main__":
    main()
