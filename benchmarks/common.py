"""What benchmarks share: the command line, the record of where figures come from, tables and JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
from typing import Any

import torch
import torch._dynamo

from benchmarks.isolation import Attempts, Spoilt
from lowering import hardware

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: How often one function may be compiled: each contestant compiles the same model, and Dynamo counts them together. Beyond its
#: limit of 8 it would run them eagerly.
_COMPILATIONS = 256
#: Exit status of a benchmark that this machine cannot run.
SKIPPED = 77


@dataclasses.dataclass
class Result:
    """Figures of one run."""

    rows: Iterable[dict[str, Any]]
    """One line of the table each; numbers with the unit in the key. A generator may make them while it adds to `checks` and
    `notes`: each row is written when it is there."""
    baseline: str
    """What the ratios compare with, measured in the same run."""
    checks: list[str]
    """What was verified before anything was timed."""
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    """Through which the rows' generator tries what may fail."""
    notes: list[str] = dataclasses.field(default_factory=list)
    where: str = ""
    """What the figures belong to, in the file's name; the kind of device if empty."""


class SkipBenchmark(Exception):
    """The machine cannot run it; the text says what is missing."""


def has_gpu() -> bool:
    """Whether there is a CUDA device with FP8 tensor cores."""
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


def require(condition: bool, text: str, checks: list[str]) -> None:
    """The correctness gate: no figure without it."""
    if not condition:
        raise AssertionError(f"not correct, so not timed: {text}")
    checks.append(text)


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
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table in plain text, as wide as it is: nothing is cut off. Numbers stand to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    are_left = [any(isinstance(row.get(column), str) for row in rows) for column in columns]
    print(title)
    for line in [*lines[:1], ["-" * width for width in widths], *lines[1:]]:
        cells = zip(line, widths, are_left, strict=True)
        print(*(text.ljust(width) if is_left else text.rjust(width) for text, width, is_left in cells), sep="  ")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def record_of(name: str, command: str) -> dict[str, Any]:
    """Where figures come from: the command, the date, the commit and the machine."""
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


def run_and_report(
    name: str, run: Callable[..., Result], quick: bool, out: pathlib.Path = RESULTS, resume: bool = False, **options: Any
) -> pathlib.Path:
    """Run, write the JSON after every row, print the table; returns the file's path.

    resume: a process before this one has begun the file, and a CUDA error ended it.
    """
    result = run(quick, **options)
    where = result.where or ("gpu" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{where}{'-quick' if quick else ''}.json"
    before = json.loads(path.read_text()) if resume else {"rows": [], "checks": []}
    result.checks[:0] = before["checks"]
    figures = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in ("where", "attempts")}
    record = record_of(name, _command(name, quick, options)) | figures
    rows: dict[str, dict[str, Any]] = {row["what"]: row for row in before["rows"]}
    record["is_complete"] = False

    def add(row: dict[str, Any]) -> None:
        rows[row["what"]] = row
        record["rows"] = list(rows.values())
        _write(path, record)

    result.attempts.resume(before["rows"])
    result.attempts.on_failure = add
    with torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
        for row in result.rows:
            add(row)
    record |= {"rows": list(rows.values()), "is_complete": True}
    _write(path, record)
    show(f"{name} (baseline: {result.baseline})", list(rows.values()))
    for note in result.notes:
        print(f"note: {note}")
    print(f"wrote {path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path}")
    return path


def failures(path: pathlib.Path) -> list[str]:
    """What failed in a benchmark that wrote this file, each with its error."""
    return [f"{row['what']}: {row['failed']}" for row in json.loads(path.read_text())["rows"] if "failed" in row]


def _command(name: str, quick: bool, options: dict[str, Any]) -> str:
    values = {key: value if isinstance(value, (list, tuple)) else [value] for key, value in options.items() if value}
    given = [f"--{key} {' '.join(map(str, value))}" for key, value in values.items()]
    return " ".join([f"python -m benchmarks.{name}", *(["--quick"] if quick else []), *given])


def _write(path: pathlib.Path, record: dict[str, Any]) -> None:
    """At once: whoever is stopped in between leaves the record before."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)


def _start_again(name: str) -> None:
    """Replace this process, whose CUDA context is lost, by one that goes on. Nothing is inherited: the driver frees the memory
    of a context when its files are closed."""
    for number in os.listdir("/proc/self/fd"):
        if int(number) > 2:
            with contextlib.suppress(OSError):  # the folder's own, closed by now
                os.set_inheritable(int(number), False)
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *given, "--resume"])


def main(name: str, run: Callable[..., Result], add_options: Callable[[argparse.ArgumentParser], None] | None = None) -> None:
    """The command line of one benchmark; `add_options` adds arguments, which `run` gets by name."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, few repetitions, CPU allowed")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--resume", action="store_true", help="go on with the file that a CUDA error interrupted")
    if add_options is not None:
        add_options(parser)
    arguments = vars(parser.parse_args())
    try:
        path = run_and_report(name, run, arguments.pop("quick"), arguments.pop("out"), arguments.pop("resume"), **arguments)
    except SkipBenchmark as skipped:
        print(f"{name}: skipped, {skipped}")
        sys.exit(SKIPPED)
    except Spoilt as spoilt:
        print(f"{name}: {spoilt} has spoilt this process; what is left runs in another one", flush=True)
        _start_again(name)
    if failed := failures(path):
        print(*(f"FAILED {text}" for text in failed), sep="\n")
        sys.exit(1)
