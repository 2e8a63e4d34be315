"""Find, before anything starts, everything that a machine lacks for `benchmarks.gpu`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from typing import NamedTuple

import torch

from benchmarks.common import has_gpu
from lowering import hardware
from lowering.triton import assembler

#: As pyproject.toml says.
_LEAST_PYTEST = 8
#: Packages that the run does without, and what it then leaves out.
_OPTIONAL = {
    "rich": "tests of printed tables fail; nothing that is measured needs it",
    "pytest_timeout": "a test that hangs is ended with its part (pytest-timeout)",
    "xdist": "tests run in one process, which a CUDA error ends with all tests behind it (pytest-xdist)",
    "hypothesis": "the test files that need it are skipped",
    "torchao": "its columns of part 3 are left out",
}


class Lack(NamedTuple):
    """Something that is missing; fatal where nothing can be measured on a GPU without it."""

    what: str
    consequence: str
    is_fatal: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.consequence}"


def missing() -> list[Lack]:
    """List everything that this machine lacks to run the parts in full, what is fatal first."""
    fatal: dict[str, str] = {}
    if not has_gpu():
        seen = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        wanted = "a CUDA device with FP8 tensor cores (compute capability 8.9 or newer)"
        fatal[wanted] = f"no kernel runs; torch {torch.__version__} sees {seen}"
    if (obstacle := compiler_obstacle()) is not None:
        fatal[obstacle] = "Triton compiles what launches its kernels"
    if importlib.util.find_spec("numpy") is None:
        fatal["numpy"] = "the benchmarks use it, and torch"
    other = {name: what for name, what in _OPTIONAL.items() if importlib.util.find_spec(name) is None}
    if (obstacle := pytest_obstacle()) is not None:
        other[f"pytest {_LEAST_PYTEST} or newer ({obstacle})"] = "parts 4 and 5 are left out"
    if not hardware.triton_available():
        fatal["triton"] = "all kernels are Triton's"
    else:
        major, minor = torch.cuda.get_device_capability() if has_gpu() else (9, 0)
        chosen = assembler.choose(10 * major + minor)
        if not chosen.is_right:
            other["ptxas 13.0 or newer"] = f"kernels are assembled by {chosen}; see docs/gpu-status.md"
    return [Lack(what, why, lacks is fatal) for lacks in (fatal, other) for what, why in lacks.items()]


def pytest_obstacle() -> str | None:
    """Why parts 4 and 5 cannot run, or None."""
    if importlib.util.find_spec("pytest") is None:
        return "pytest is missing"
    found = version("pytest")
    return None if int(found.partition(".")[0]) >= _LEAST_PYTEST else f"pytest {found} is older than {_LEAST_PYTEST}"


def compiler_obstacle() -> str | None:
    """Why Triton cannot compile its launcher here, or None: tried with the compiler and the folder that it takes
    (triton/runtime/build.py)."""
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None:
        return "a C compiler (gcc, clang, or the one that CC names)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = pathlib.Path(sysconfig.get_paths(scheme=scheme)["include"])
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "launcher.c"
        source.write_text("#include <Python.h>\n")
        command = [compiler, str(source), "-shared", "-fPIC", "-o", f"{source}.so", f"-I{include}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"a C compiler that runs ({compiler}: {error.strerror})"
    if done.returncode == 0:
        return None
    if "Python.h" in done.stderr:
        return f"Python.h in {include} (a package such as python3-dev or python3-devel has it)"
    return f"a C compiler that compiles ({compiler}: {' | '.join(done.stderr.splitlines()[:3])[:300]})"
