"""The command line of benchmarks, the record of where figures come from, tables and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch._dynamo

from benchmarks.isolation import Bench, Row, Spoilt
from lowering import hardware

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: How often one function may be compiled: each contestant compiles the same model, and Dynamo counts them together. Beyond its
#: limit of 8 it would run them eagerly.
_COMPILATIONS = 256
#: Exit status of a benchmark that this machine cannot run.
SKIPPED = 77


#: A benchmark: sets what its record says, and returns its rows: a line of the table each, the unit of a number in its key.
Run = Callable[..., Iterable[Row]]


class SkipBenchmark(Exception):
    """The machine cannot run it; the text says what is missing."""


def has_gpu() -> bool:
    """True with a CUDA device that has FP8 tensor cores."""
    return torch.cuda.is_available() and hardware.has_fp8_tensor_cores(torch.device("cuda"))


def device(quick: bool) -> torch.device:
    """The GPU, or the CPU for a smoke run; SkipBenchmark where figures of the CPU would mean nothing."""
    if has_gpu():
        return torch.device("cuda")
    if quick:
        return torch.device("cpu")
    raise SkipBenchmark("needs a CUDA device with FP8 tensor cores (--quick: a smoke run on the CPU)")


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def _machine() -> dict[str, Any]:
    packages = ("triton", "torchao", "transformer_engine")
    versions = {p: _version(p) for p in packages if importlib.util.find_spec(p) is not None}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table in plain text, as wide as it is: nothing is cut off. Numbers stand to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    are_left = [any(isinstance(row.get(column), str) for row in rows) for column in columns]
    print(title)
    for line in [*lines[:1], ["-" * width for width in widths], *lines[1:]]:
        cells = zip(line, widths, are_left, strict=True)
        print(*(text.ljust(width) if is_left else text.rjust(width) for text, width, is_left in cells), sep="  ")


def text(value: Any) -> str:
    """A value in a table: three digits of a number below 100, the whole ones of a larger one."""
    if value is None:
        return "-"
    return str(value) if not isinstance(value, float) else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def record_of(name: str, command: str) -> dict[str, Any]:
    """The source of figures: the command, the date, the commit and the machine."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"benchmark": name, "command": command, "date": date, "commit": commit_of(ROOT), "machine": _machine()}


def commit_of(folder: pathlib.Path) -> str | None:
    """The commit of the code that runs, with "-dirty" behind it where files besides results differ; None where git is missing,
    or does not take the folder for a repository."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
        return None if done.returncode else done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return commit and commit + ("-dirty" if changed else "")


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The record of a file; an empty one where there is none."""
    return json.loads(path.read_text()) if path.exists() else {"rows": [], "checks": []}


def run_and_report(
    name: str, run: Run, quick: bool, out: pathlib.Path = RESULTS, resume: bool = False, part: str = "", **options: Any
) -> pathlib.Path:
    """Run, write the JSON after every row, print the table; returns the file's path.

    resume: a process before this one has begun the file, and a CUDA error ended it. part: of a benchmark with several.
    """
    bench = Bench(quick, _command(name, quick, {"what": part} | options))
    made = run(bench, **options)
    path = out / f"{name}-{part + '-' if part else ''}{bench.where}{'-quick' if quick else ''}.json"
    before = _read(path) if resume or bench.keeps_rows else {"rows": [], "checks": []}
    rows: dict[str, Row] = {row["what"]: row for row in before["rows"]}
    if resume:
        bench.resume(before["rows"])
        bench.checks += before["checks"]
    record = record_of(name, bench.command)

    def add(row: Row) -> None:
        made_by = {"command": bench.command, "commit": record["commit"], "date": record["date"]} if bench.keeps_rows else {}
        rows[row["what"]] = row | made_by
        write(False)

    def write(is_complete: bool) -> None:
        """At once: a run that is stopped in between leaves the record before."""
        record.update({"rows": list(rows.values()), "baseline": bench.baseline, "checks": bench.checks, "notes": bench.notes})
        out.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(record | {"is_complete": is_complete}, indent=1) + "\n")
        path.with_suffix(".new").replace(path)

    bench.on_failure = add
    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
        for row in made:
            add(row)
    write(True)
    show(f"{name}{' of ' if part else ''}{part} (baseline: {bench.baseline})", list(rows.values()))
    for note in bench.notes:
        print(f"note: {note}")
    print(f"wrote {path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path}")
    return path


def failures(path: pathlib.Path) -> list[str]:
    """The failures in a file that a benchmark wrote, each with its error."""
    return [f"{row['what']}: {row['failed']}" for row in json.loads(path.read_text())["rows"] if "failed" in row]


def _command(name: str, quick: bool, options: dict[str, Any]) -> str:
    values = {
        key: value if isinstance(value, (list, tuple)) else [value] for key, value in options.items() if value not in (None, "")
    }
    given = [f"--{key} {' '.join(map(str, value))}" for key, value in values.items()]
    return " ".join([f"python -m benchmarks.{name}", *(["--quick"] if quick else []), *given])


def _start_again(name: str) -> None:
    """Replace this process, whose CUDA context is lost, by one that goes on. Nothing is inherited: the driver frees the memory
    of a context when its files are closed."""
    for number in os.listdir("/proc/self/fd"):
        if int(number) > 2:
            with contextlib.suppress(OSError):  # the folder's own, closed by now
                os.set_inheritable(int(number), False)
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *given, "--resume"])


def main(name: str, run: Run | Mapping[str, Run], add_options: Callable[[argparse.ArgumentParser], None] | None = None) -> None:
    """The command line of one benchmark, or of one with several parts, by name, each of which writes a file.

    `add_options` adds arguments, which `run` gets by name.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, few repetitions, CPU allowed")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--resume", action="store_true", help="go on with the file that a CUDA error interrupted")
    parts = run if isinstance(run, Mapping) else {"": run}
    if isinstance(run, Mapping):
        parser.add_argument("--what", nargs="+", choices=list(parts), default=list(parts), help="default: all")
    if add_options is not None:
        add_options(parser)
    arguments = vars(parser.parse_args())
    failed, num_skipped = [], 0
    chosen = arguments.pop("what", [""])
    for part in chosen:
        try:
            failed += failures(run_and_report(name, parts[part], part=part, **arguments))
        except SkipBenchmark as skipped:
            num_skipped += 1
            print(f"{name}{' of ' if part else ''}{part}: skipped, {skipped}")
        except Spoilt as spoilt:
            print(f"{name}: {spoilt} has spoilt this process; what is left runs in another one", flush=True)
            _start_again(name)
    if failed:
        print(*(f"FAILED {text}" for text in failed), sep="\n")
        sys.exit(1)
    if num_skipped == len(chosen):
        sys.exit(SKIPPED)
