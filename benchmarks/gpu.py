"""One command for a machine with a GPU and torch installed: what works, tests, benchmarks; each part ends after nine minutes.

    python3 -m benchmarks.gpu --out FOLDER             all parts
    python3 -m benchmarks.gpu --out FOLDER --part 0    one of them; of part 0, some groups: --group rates GEMMs
    python3 -m benchmarks.gpu --part 0 --cpu           without a GPU: everything that can run there, and what is missing

The folder gets the benchmarks' JSON files, part0.jsonl, a log for each part, the tests' junit files, and a summary in Markdown
that ends with the figures beside their estimates (`benchmarks.compare_with_estimates`). Exit status 1 if a command or a
contestant failed or a figure is below its estimate. `make gpu PART=0 RESULTS=FOLDER` is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.common import RESULTS, failures, record_of
from benchmarks.compare_with_estimates import SLACK, Verdict, verdicts
from benchmarks.preflight import Lack, missing, pytest_obstacle
from benchmarks.processes import num_cores

#: Seconds for all commands of a part.
LIMIT = 9 * 60 - 20
#: Status of a command that this machine cannot run.
_SKIPPED = "skipped"
_TEST = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors")


@dataclasses.dataclass(frozen=True)
class Part:
    """Commands that run together."""

    title: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of Python."""
    dry: tuple[tuple[str, ...], ...]
    """Their stand-ins without a GPU."""


#: Where a dry run leaves what it makes; git ignores it.
DRY = RESULTS.parents[1] / "out" / "gpu-dry"


def _shorter(folder: pathlib.Path) -> str:
    return folder.relative_to(RESULTS.parents[1]).as_posix()


def _benchmark(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *options)


PARTS = {
    0: Part("what works, and how fast it is", (_benchmark("part0.run"),), (_benchmark("part0.run", "--cpu"),)),
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
    5: Part("choices", (_benchmark("tune"),), (_benchmark("tune", "--quick"),)),
    6: Part(
        "8B block, 16384 tokens",
        (_benchmark("train_step", "--blocks", "8B", "--tokens", "16384"),),
        (_benchmark("train_step", "--quick", "--blocks", "tiny", "--tokens", "128"),),
    ),
}

#: In which all parts run: what a run that is cut short should have comes first.
ORDER = (0, 5, 3, 6, 4, 1, 2)


def _complete(command: tuple[str, ...], out: pathlib.Path, junit: str, groups: Sequence[str]) -> list[str]:
    """The whole command line: workers and a junit file for tests, the folder for benchmarks."""
    extra: list[str] = []
    if command[1] == "pytest":
        if "--collect-only" not in command:
            extra = [f"--junitxml={out / junit}.xml"]
            if importlib.util.find_spec("xdist") is not None:
                extra += ["-n", str(max(1, min(14, num_cores() - 2)))]
    else:
        extra = ["--out", str(out)]
        if command[1] == "benchmarks.part0.run" and groups:
            extra += ["--group", *groups]
    return [sys.executable, *command, *extra]


def run_part(number: int, dry: bool, out: pathlib.Path, groups: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the commands of a part; what came of each. A command that the limit ends leaves what it has written, and no process.
    The output of all goes to a log, too."""
    part, end = PARTS[number], time.monotonic() + LIMIT
    records = []
    with (out / f"part{number}.log").open("wb") as log:
        for i, command in enumerate(part.dry if dry else part.commands):
            line = _complete(command, out, f"part{number}-{i}" if i else f"part{number}", groups)
            shown = _shown(line)
            obstacle = pytest_obstacle() if command[1] == "pytest" else None
            if obstacle is not None:
                print(f"part {number}, {part.title}: {_SKIPPED}, {obstacle}", flush=True)
                records.append({"part": number, "command": shown, "status": f"{_SKIPPED}, {obstacle}", "seconds": 0.0})
                continue
            print(f"part {number}, {part.title}: {shown}", flush=True)
            log.write(f"{shown}\n".encode())
            start = time.monotonic()
            found = processes.run(line, log, max(1, end - start))
            status: int | str = f"stopped after {LIMIT} s of its part" if found is None else found
            if status == 5 and "--collect-only" in command:  # pytest's "no tests": they are skipped by their own marks
                status = 0
            seconds = round(time.monotonic() - start, 1)
            records.append({"part": number, "command": shown, "status": status, "seconds": seconds})
    return records


def _shown(line: list[str]) -> str:
    return " ".join(["python3", *line[1:]])


def _failed(out: pathlib.Path, names: Iterable[str], since: float) -> list[str]:
    """The contestants that failed in these benchmarks, in files that are as new as this run."""
    paths = [path for name in names for path in sorted(out.glob(f"{name}-*.json")) if path.stat().st_mtime >= since]
    return [f"{path.stem}: {text}" for path in paths for text in failures(path)]


def summary(
    records: list[dict[str, Any]],
    found: list[Verdict],
    lacks: Sequence[Lack],
    dry: bool,
    out: pathlib.Path,
    failed: Sequence[str] = (),
    unjudged: Sequence[str] = (),
) -> str:
    """The report in Markdown; what is judged comes last."""
    machine = record_of("gpu", "python3 -m benchmarks.gpu")
    lines = ["# GPU run" + (", dry" if dry else ""), "", f"{machine['date']}, {json.dumps(machine['machine'])}", ""]
    if dry:
        lines += ["On a machine with a GPU, in parts that end after nine minutes at most:", ""]
        for n in dict.fromkeys(r["part"] for r in records):
            commands = [_shown(_complete(c, out, f"part{n}", ())) for c in PARTS[n].commands]
            lines += [f"- part {n}, {PARTS[n].title}: `{command}`" for command in commands]
        lines += ["", "Here:", ""]
    lines += ["| part | command | status | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['part']} | `{r['command']}` | {r['status']} | {r['seconds']} |" for r in records]
    if lacks:
        lines += ["", "Missing here:", "", *(f"- {text}" for text in lacks)]
    if failed:
        lines += ["", "Failed:", "", *(f"- {text}" for text in failed)]
    if unjudged:
        lines += ["", "No verdict:", "", *(f"- {text}" for text in unjudged)]
    if found:
        lines += ["", f"Measured beside the cost model's estimate. Pass: at least {SLACK:g} of it.", ""]
        lines += ["| figure | measured | estimate | |", "|---|---|---|---|"]
        for v in found:
            lines.append(f"| {v.what} | {v.measured:.2f} | {v.expected:.2f} | {'pass' if v.passes else '**fail**'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=list(PARTS), help="one part; all of them by default")
    parser.add_argument("--group", nargs="+", default=(), metavar="GROUP", help="of part 0: some of its groups")
    parser.add_argument("--cpu", "--dry", dest="dry", action="store_true", help="run what a machine without a GPU can")
    parser.add_argument(
        "--out", type=pathlib.Path, help=f"folder of the results; {_shorter(RESULTS)}, of a dry run {_shorter(DRY)}"
    )
    arguments = parser.parse_args()
    if arguments.group and arguments.part != 0:
        parser.error("--group is for --part 0")
    lacks = missing()
    fatal = "".join(f"\n- {lack}" for lack in lacks if lack.is_fatal)
    if fatal and not arguments.dry:
        sys.exit(f"benchmarks.gpu cannot measure here without:{fatal}\n--cpu (make gpu DRY=1) runs what can run here")
    for lack in lacks:
        print(f"missing: {lack}", flush=True)
    out = (arguments.out or (DRY if arguments.dry else RESULTS)).absolute()
    out.mkdir(parents=True, exist_ok=True)
    processes.raise_on_sigterm()
    since = time.time()
    records: list[dict[str, Any]] = []
    names: set[str] = set()
    is_right = True
    for number in ORDER if arguments.part is None else [arguments.part]:
        records += run_part(number, arguments.dry, out, arguments.group)
        names |= {command[1].removeprefix("benchmarks.") for command in PARTS[number].commands}
        found, unjudged = verdicts(out, () if arguments.dry else names)
        failed = _failed(out, sorted(names), since)
        text = summary(records, found, lacks, arguments.dry, out, failed, unjudged)
        _write(out, text, records, arguments)  # after each part: what ends this process leaves the report of those before
        is_right = all(_is_right(r["status"]) for r in records) and all(v.passes for v in found)
    print(text)
    sys.exit(0 if is_right else 1)


def _is_right(status: int | str) -> bool:
    return status == 0 or str(status).startswith(_SKIPPED)


def _write(out: pathlib.Path, text: str, records: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """The report, and its commands as JSON."""
    name = f"gpu{'' if arguments.part is None else f'-part{arguments.part}'}{'-dry' if arguments.dry else ''}"
    record = record_of("gpu", " ".join(["python3 -m benchmarks.gpu", *sys.argv[1:]])) | {"commands": records}
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
