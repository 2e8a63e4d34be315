"""The command line of benchmarks, the record of where figures come from, tables and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch._dynamo

from benchmarks.isolation import Bench, Row
from lowering import hardware

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: How often one function may be compiled: each contestant compiles the same model, and Dynamo counts them together. Beyond its
#: limit of 8 it would run them eagerly.
_COMPILATIONS = 256

#: A benchmark: sets what its record says, and returns its rows: a line of the table each, the unit of a number in its key.
Run = Callable[..., Iterable[Row]]


class SkipBenchmark(Exception):
    """The machine cannot run it; the text says what is missing."""


def has_gpu() -> bool:
    """True with a CUDA device that has FP8 tensor cores."""
    return torch.cuda.is_available() and hardware.has_fp8_tensor_cores(torch.device("cuda"))


def device(quick: bool) -> torch.device:
    """The GPU, or the CPU for a smoke run; SkipBenchmark where figures of the CPU would mean nothing."""
    if not has_gpu() and not quick:
        raise SkipBenchmark("needs a CUDA device with FP8 tensor cores (--quick: a smoke run on the CPU)")
    return torch.device("cuda" if has_gpu() else "cpu")


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table in plain text, as wide as it is: nothing is cut off."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        print(*(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), sep="  ")


def _text(value: Any) -> str:
    """Three digits of a number below 100, the whole ones of a larger one."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def record_of(name: str, command: str) -> dict[str, Any]:
    """The source of figures: the command, the date, the commit and the machine."""
    is_gpu = torch.cuda.is_available()
    machine = {
        "device": torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in ("triton", "torchao"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            machine[package] = metadata.version(package)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"benchmark": name, "command": command, "date": date, "commit": commit_of(ROOT), "machine": machine}


def commit_of(folder: pathlib.Path) -> str | None:
    """The commit of the code that runs, with "-dirty" behind it where files besides results differ; None where git is missing,
    or does not take the folder for a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def run_and_report(
    name: str, run: Run, quick: bool, out: pathlib.Path, part: str = "", keeps_rows: bool = False, **options: Any
) -> list[Row]:
    """Run, write the JSON after every row, print the table; returns the rows of failures. part: of a benchmark with several.
    keeps_rows: rows of earlier runs that this one does not make again stay in the file."""
    bench = Bench(quick, lambda row: add(row))
    title = " of ".join(filter(None, (name, part)))
    where = "gpu" if torch.cuda.is_available() else "cpu"
    path = out / f"{'-'.join(filter(None, (name, part, where, 'quick' * quick)))}.json"
    record = record_of(name, " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]))
    made_by = {key: record[key] for key in ("command", "commit", "date")} if keeps_rows else {}
    before = json.loads(path.read_text())["rows"] if keeps_rows and path.exists() else []
    rows: dict[str, Row] = {row["what"]: row for row in before}

    def add(row: Row) -> None:
        """Written at once: a run that is stopped has its rows, and one that is stopped meanwhile the record before."""
        rows[row["what"]] = row | made_by
        record.update(rows=list(rows.values()), baseline=bench.baseline, checks=bench.checks, notes=bench.notes)
        out.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".new").replace(path)

    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
        for row in run(bench, **options):
            add(row)
    show(f"{title} (baseline: {bench.baseline})", list(rows.values()))
    print(*(f"note: {note}" for note in bench.notes), f"wrote {path}", sep="\n")
    return bench.failed


def main(
    name: str,
    run: Run | Mapping[str, Run],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    keeps_rows: bool = False,
) -> None:
    """The command line of one benchmark, or of one with several parts, by name, each of which writes a file. `add_options` adds
    arguments, which `run` gets by name."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, few repetitions, CPU allowed")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    parts = run if isinstance(run, Mapping) else {"": run}
    if isinstance(run, Mapping):
        parser.add_argument("--what", nargs="+", choices=list(parts), default=list(parts), help="default: all")
    add_options(parser)
    arguments = vars(parser.parse_args())
    failed: list[Row] = []
    for part in arguments.pop("what", [""]):
        try:
            failed += run_and_report(name, parts[part], part=part, keeps_rows=keeps_rows, **arguments)
        except SkipBenchmark as skipped:
            print(f"{name} {part}: skipped, {skipped}")
    if failed:
        sys.exit("\n".join(f"FAILED {row['what']}: {row['failed']}" for row in failed))
