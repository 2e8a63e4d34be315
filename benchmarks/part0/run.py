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
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.common import record_of, show
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


@dataclasses.dataclass
class _Group:
    """A group that is being run."""

    name: str
    file: pathlib.Path
    log: pathlib.Path
    device: str
    case_limit: float
    environment: Mapping[str, str]
    """The environment of its process, which shares the machine with the other groups."""
    result: pathlib.Path
    """Gets the row of each case when it is over: what ends this process leaves them."""
    process: subprocess.Popen[bytes] | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    """Rows of its finished cases."""
    running: Row | None = None
    is_finished: bool = False
    read: int = 0
    """Bytes of the file that were read."""
    since: float = 0.0
    """When its process last wrote."""

    def start(self, first: int) -> None:
        command = [sys.executable, *_WORKER]
        with self.log.open("ab") as log:
            self.process = processes.start(
                [*command, self.name, self.device, str(first), str(self.file)], log, env=self.environment
            )
        self.running, self.since = None, time.monotonic()

    def look(self) -> None:
        """Read what has been written since the last time."""
        if not self.file.exists():
            return
        text = self.file.read_bytes()[self.read :]
        whole = text[: text.rfind(b"\n") + 1]
        for row in map(json.loads, whole.splitlines()):
            self.since = time.monotonic()
            if row["status"] == "running":
                self.running = row
            elif row["status"] == "finished":
                self.is_finished = True
            else:
                self.running = None
                self._add(row)
        self.read += len(whole)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        with self.result.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def stop(self, status: str, why: str) -> None:
        """End the process; the case that it was in has a row that says so."""
        assert self.process is not None
        processes.end(self.process)
        self.look()
        if self.running is not None or not self.is_finished:
            running = self.running or {"group": self.name, "number": self.next, "case": f"case {self.next}, or before it"}
            self._add({**running, "status": status, "failed": why})
        self.running = self.process = None

    @property
    def next(self) -> int:
        """The number of the case behind the last one that has a row."""
        return max((row["number"] for row in self.rows), default=-1) + 1

    def step(self) -> bool:
        """See to the process; whether the group is still being run."""
        assert self.process is not None
        status = self.process.poll()
        self.look()
        if status is None:
            waited = time.monotonic() - self.since
            if waited <= self.case_limit:
                return True
            return self._go_on("hung", f"nothing came for {waited:.0f} s")
        if self.is_finished:
            self.process = None
            return False
        if status == SPOILT and self.running is None:
            self.start(self.next)
            return True
        return self._go_on("died", f"exit status {status}; {_last_line(self.log)}")

    def _go_on(self, status: str, why: str) -> bool:
        """Behind the case that a process did not survive; not where it did not come to one."""
        came_to_one = self.running is not None
        self.stop(status, why)
        if came_to_one:
            self.start(self.next)
        return came_to_one


def _last_line(path: pathlib.Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _side_by_side(
    names: Sequence[str], at_once: int, out: pathlib.Path, device: str, case_limit: float, end: float
) -> list[Row]:
    """The rows of these groups; so many of them run at the same time."""
    waiting = list(names)
    # What the user sets takes precedence.
    environment = share(max(1, min(at_once, len(waiting)))) | os.environ
    running: list[_Group] = []
    rows: list[Row] = []
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < at_once:
                stem = waiting[0].replace(" ", "-")
                files = (out / f".{stem}.jsonl", out / f".{stem}.log")
                group = _Group(waiting.pop(0), *files, device, case_limit, environment, out / RESULT)
                for path in files:
                    path.unlink(missing_ok=True)
                group.start(0)
                running.append(group)
            for group in list(running):
                if not group.step():
                    running.remove(group)
                    rows += _closed(group)
            time.sleep(_POLL_SECONDS)
    finally:
        for group in running:
            group.stop("hung", "the time of part 0 was over")
            rows += _closed(group)
    for name in waiting:
        rows.append({"group": name, "number": 0, "case": "all", "status": "not run", "failed": "the time of part 0 was over"})
    return rows


def _closed(group: _Group) -> list[Row]:
    """Its rows. What it printed joins the log of all groups."""
    with group.result.with_name(LOG).open("ab") as log:
        log.write(f"---- {group.name}\n".encode() + group.log.read_bytes())
    for path in (group.file, group.log):
        path.unlink(missing_ok=True)
    return group.rows


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
    rows = _side_by_side([name for name in names if name == ALONE], 1, out, device, limits[1], end)
    rows += _side_by_side([name for name in names if name != ALONE], at_once, out, device, limits[1], end)
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
    return ", ".join(
        f"{_text(value)} {key}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
