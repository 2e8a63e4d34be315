"""Starts the groups of part 0 side by side, and puts together what they found: `python3 -m benchmarks.gpu --part 0`.

`part0.jsonl` in the folder of the results has a line per case: group, number, case, status ("right", "wrong", "raised",
"skipped", "hung", "died", "not run"), figures or what failed, seconds. A group whose process ends behind a CUDA error, dies, or
hangs in a case goes on in a new process with the next case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.common import record_of, show, text
from benchmarks.part0.cases import ALONE, groups
from benchmarks.part0.worker import SPOILT
from benchmarks.processes import num_cores, share

Row = dict[str, Any]

#: Seconds: of all groups together, and of one case, in which kernels compile.
LIMIT, CASE_LIMIT = 300.0, 120.0
#: The same of a dry run, where a CPU computes and compiles C++.
DRY_LIMIT, DRY_CASE_LIMIT = 900.0, 300.0
_RIGHT = ("right", "skipped")
_STATUSES = (*_RIGHT, "wrong", "raised", "hung", "died", "not run")
_WORKER = ("-W", "ignore", "-m", "benchmarks.part0.worker")
_POLL_SECONDS = 0.1
#: In the folder of the results: rows, and what the groups printed.
RESULT, LOG = "part0.jsonl", "part0-groups.log"


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What all groups of a run have in common."""

    out: pathlib.Path
    device: str
    case_limit: float
    environment: Mapping[str, str]
    """The environment of a process, which shares the machine with the other groups."""
    rows: list[Row]

    def add(self, row: Row) -> None:
        """Write the row of a case when it is over: what ends this process leaves it."""
        self.rows.append(row)
        with (self.out / RESULT).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _group(name: str, setting: _Setting) -> Generator[None, None, None]:
    """Run the cases of a group, and yield while its process is at work. Closed before the end, it ends that process."""
    stem = setting.out / f".{name.replace(' ', '-')}"
    file, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    for path in (file, log):
        path.write_bytes(b"")
    try:
        first: int | None = 0
        while first is not None:
            first = yield from _process(name, first, file, log, setting)
    finally:
        with (setting.out / LOG).open("ab") as whole:
            whole.write(f"---- {name}\n".encode() + log.read_bytes())
        for path in (file, log):
            path.unlink()


def _process(
    name: str, first: int, file: pathlib.Path, log: pathlib.Path, setting: _Setting
) -> Generator[None, None, int | None]:
    """Run a process of a group, from a case on; the case that another one has to go on with, or None."""
    running: Row | None = None

    def read() -> bool:
        """Take what has been written since the last time; whether all cases are over."""
        nonlocal running, first, at, since
        text = file.read_bytes()[at:]
        whole = text[: text.rfind(b"\n") + 1]
        for row in map(json.loads, whole.splitlines()):
            since = time.monotonic()
            if row["status"] == "finished":
                return True
            running = row if row["status"] == "running" else None
            if running is None:
                setting.add(row)
                first = row["number"] + 1
        at += len(whole)
        return False

    at, since = file.stat().st_size, time.monotonic()
    command = [sys.executable, *_WORKER, name, setting.device, str(first), str(file)]
    with log.open("ab") as output:
        process = processes.start(command, output, env=setting.environment)
    status, why = "hung", "the time of part 0 was over"
    try:
        while True:
            exited = process.poll()
            if read():
                status = "finished"
                return None
            waited = time.monotonic() - since
            if exited == SPOILT and running is None:
                status = "finished"
                return first
            if exited is not None:
                status, why = "died", f"exit status {exited}; {_last_line(log)}"
            elif waited > setting.case_limit:
                why = f"nothing came for {waited:.0f} s"
            else:
                yield
                continue
            return None if running is None else running["number"] + 1
    finally:
        processes.end(process)
        if status != "finished" and not read():  # the case that it was in has a row that says so
            case = running or {"group": name, "number": first, "case": f"case {first}, or before it"}
            setting.add({**case, "status": status, "failed": why})


def _last_line(path: pathlib.Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _side_by_side(names: Sequence[str], at_once: int, end: float, setting: _Setting) -> None:
    """Run these groups, so many of them at the same time."""
    waiting = list(names)
    # What the user sets takes precedence.
    setting = dataclasses.replace(setting, environment=share(max(1, min(at_once, len(waiting)))) | os.environ)
    running: list[Generator[None, None, None]] = []
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < at_once:
                running.append(_group(waiting.pop(0), setting))
            running = [group for group in running if next(group, _OVER) is not _OVER]
            time.sleep(_POLL_SECONDS)
    finally:
        for group in running:
            group.close()
    for name in waiting:
        setting.add({"group": name, "number": 0, "case": "all", "status": "not run", "failed": "the time of part 0 was over"})


#: Of a group that has ended.
_OVER = object()


def run(out: pathlib.Path, chosen: Sequence[str] = (), device: str = "cuda", limit: float | None = None) -> bool:
    """Run part 0, or some of its groups, and print what came of it; whether everything is right."""
    known = list(groups())
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"part 0 has no group {', '.join(map(repr, unknown))}; its groups are {', '.join(known)}")
    names = list(chosen) or known
    out.mkdir(parents=True, exist_ok=True)
    limits = (DRY_LIMIT, DRY_CASE_LIMIT) if device == "cpu" else (LIMIT, CASE_LIMIT)
    head = {"status": "run", **record_of("part0", "python3 -m benchmarks.gpu --part 0")}
    (out / RESULT).write_text(json.dumps(head) + "\n")
    (out / LOG).unlink(missing_ok=True)
    start = time.monotonic()
    end = start + (limits[0] if limit is None else limit)
    at_once = max(1, num_cores() - (0 if device == "cpu" else 1))
    rows: list[Row] = []
    setting = _Setting(out, device, limits[1], {}, rows)
    _side_by_side([name for name in names if name == ALONE], 1, end, setting)
    _side_by_side([name for name in names if name != ALONE], at_once, end, setting)
    head["seconds"] = round(time.monotonic() - start, 1)
    lines = [json.dumps(row) for row in sorted(rows, key=lambda row: (names.index(row["group"]), row["number"]))]
    (out / RESULT).write_text("\n".join([json.dumps(head), *lines]) + "\n")
    _report(rows, names, out)
    return all(row["status"] in _RIGHT for row in rows)


def _report(rows: list[Row], names: Sequence[str], out: pathlib.Path) -> None:
    for row in rows:
        if row["group"] == ALONE and row["status"] == "right":
            print(f"{row['case']}: {_figures(row)}")
    table = []
    for name in names:
        mine = [row for row in rows if row["group"] == name]
        count = Counter(row["status"] for row in mine)
        of_statuses = {status: count[status] or None for status in _STATUSES}
        table.append({"group": name, **of_statuses, "seconds": round(sum(row.get("seconds", 0) for row in mine), 1)})
    show("part 0", table)
    for row in rows:
        if row["status"] == "skipped":
            print(f"skipped {row['group']} / {row['case']}: {row['why']}")
    for row in rows:
        if row["status"] not in _RIGHT:
            print(f"{row['status'].upper()} {row['group']} / {row['case']}: {row['failed']}")
    print(f"wrote {out / RESULT}")


def _figures(row: Row) -> str:
    figures = {key: value for key, value in row.items() if key not in ("group", "number", "case", "status", "seconds")}
    return ", ".join(f"{text(v)} {key}" if isinstance(v, float) else f"{key} {v}" for key, v in figures.items())


def main() -> None:
    """Exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.part0.run", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of part0.jsonl and part0-groups.log")
    parser.add_argument("--group", nargs="+", default=(), choices=list(groups()), help="some of the groups")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU")
    arguments = parser.parse_args()
    processes.raise_on_sigterm()
    sys.exit(0 if run(arguments.out, arguments.group, "cpu" if arguments.cpu else "cuda") else 1)


if __name__ == "__main__":
    main()
