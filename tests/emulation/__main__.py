"""Runs the checks, all of them or those of the modules that are named, and prints as JSON what each returned, or the traceback
of what it raised:

    TRITON_INTERPRET=1 python -m tests.emulation [MODULE...]
"""

import contextlib
import json
import pathlib
import sys
import tempfile
import traceback
from typing import Any

import torch

from lowering.inductor import register_lowerings
from tests.emulation import block_casts, cases, statistics, tensor_casts

MODULES = {"tensor_casts": tensor_casts, "block_casts": block_casts, "statistics": statistics, "cases": cases}


def results_of(module: Any) -> dict[str, Any]:
    """The results of the checks of a module, each with an empty folder, or what they raised."""
    results: dict[str, Any] = {}
    for name, check in module.CHECKS.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                results[name] = check(pathlib.Path(folder))
            except Exception:
                results[name] = traceback.format_exc()
    return results


if __name__ == "__main__":
    register_lowerings()
    json.dump({name: results_of(MODULES[name]) for name in sys.argv[1:] or MODULES}, sys.stdout)
