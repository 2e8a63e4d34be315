"""Runs the cases of a group, from one of them on, and appends a line of JSON for each to a file.

    python -m benchmarks.part0.worker GROUP DEVICE FIRST FILE

A line when a case begins, so that it is known which one hangs or ends the process, and one with what it found. Exit status
`SPOILT` after a CUDA error, which the process does not survive.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import traceback
import warnings
from typing import Any

import torch
import torch._dynamo

from benchmarks.isolation import cuda_error, in_words
from benchmarks.part0 import cases
from benchmarks.part0.cases import Case, SkipCase

SPOILT = 100


def outcome(case: Case, on: torch.device) -> dict[str, Any]:
    """A row: "status" is right, wrong (an AssertionError, the gates'), raised or skipped."""
    start = time.perf_counter()
    row: dict[str, Any]
    try:
        found = case.run()
        if on.type == "cuda":
            torch.cuda.synchronize()
        row = {"status": "right", **found}
    except SkipCase as skipped:
        row = {"status": "skipped", "why": str(skipped)}
    except Exception as error:
        status = "wrong" if isinstance(error, AssertionError) else "raised"
        row = {"status": status, "failed": in_words(error), "traceback": traceback.format_exc()[-4000:]}
    if (fault := cuda_error()) is not None:
        row |= {"status": "raised", "failed": row.get("failed", fault), "cuda_error": fault}
    return row | {"seconds": round(time.perf_counter() - start, 3)}


def work(group: str, on: torch.device, first: int, path: pathlib.Path) -> int:
    """The cases from `first` on; the exit status."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with path.open("a") as file, torch._dynamo.config.patch(recompile_limit=256):

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps({"group": group, **row}) + "\n")
            file.flush()

        for number, case in enumerate(cases.groups()[group](on)):
            if number < first:
                continue
            head = {"number": number, "case": case.name}
            write({**head, "status": "running"})
            row = outcome(case, on)
            write({**head, **row})
            if "cuda_error" in row:
                return SPOILT
        write({"status": "finished"})
    return 0


if __name__ == "__main__":
    group, device, first, path = sys.argv[1:]
    sys.exit(work(group, torch.device(device), int(first), pathlib.Path(path)))
