"""Find, before anything starts, everything that a machine lacks for `benchmarks.gpu`, and the parts that are then left out."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version

import torch

from benchmarks.common import has_gpu
from benchmarks.isolation import in_words
from lowering import hardware
from lowering.triton import assembler

#: As pyproject.toml says.
_LEAST_PYTEST = 8
#: Packages that the run does without, and what it then leaves out.
_OPTIONAL = {
    "rich": "tests of printed tables fail; nothing that is measured needs it",
    "pytest": "parts 1 and 2 are left out",
    "pytest_timeout": "a test that hangs is ended with its part (pytest-timeout)",
    "xdist": "tests run in one process, which a CUDA error ends with all tests behind it (pytest-xdist)",
    "hypothesis": "the test files that need it are skipped",
    "torchao": "its columns of part 6 are left out",
}


@dataclasses.dataclass(frozen=True)
class Lack:
    """Something that is missing."""

    what: str
    consequence: str
    is_fatal: bool = False
    """True if nothing can be measured on a GPU without it."""

    def __str__(self) -> str:
        return f"{self.what}: {self.consequence}"


def missing() -> list[Lack]:
    """List everything that this machine lacks to run the parts in full, what is fatal first."""
    lacks = []
    if not has_gpu():
        wanted = "a CUDA device with FP8 tensor cores (compute capability 8.9 or newer)"
        lacks.append(_fatal(wanted, f"no kernel runs; {_seen_by_torch()}"))
        if cxx_compiler() is None:
            lacks.append(Lack("a C++ compiler (CXX, g++ or clang++)", "dry runs fail in Inductor"))
    if (obstacle := compiler_obstacle()) is not None:
        lacks.append(_fatal(obstacle, "Triton compiles what launches its kernels"))
    if importlib.util.find_spec("numpy") is None:
        lacks.append(_fatal("numpy", "the benchmarks use it, and torch"))
    if not hardware.triton_available():
        lacks.append(_fatal("triton", "all kernels are Triton's"))
    else:
        lacks += _tritons_own(has_driver=not lacks)
    lacks += [Lack(name, what) for name, what in _OPTIONAL.items() if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("pytest") is not None and (obstacle := pytest_obstacle()) is not None:
        lacks.append(Lack(f"pytest {_LEAST_PYTEST} or newer ({obstacle})", _OPTIONAL["pytest"]))
    if shutil.which("nvidia-smi") is None:
        lacks.append(Lack("nvidia-smi", "rows have no clocks, power and temperature"))
    return sorted(lacks, key=lambda lack: not lack.is_fatal)


def _fatal(what: str, consequence: str) -> Lack:
    return Lack(what, consequence, is_fatal=True)


def _seen_by_torch() -> str:
    """Describe the device that torch sees instead."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU{'' if torch.version.cuda else ': it is built without CUDA'}"
    return "torch sees {}, compute capability {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())


def pytest_obstacle() -> str | None:
    """Why parts 1 and 2 cannot run, or None."""
    if importlib.util.find_spec("pytest") is None:
        return "pytest is missing"
    found = version("pytest")
    return None if int(found.partition(".")[0]) >= _LEAST_PYTEST else f"pytest {found} is older than {_LEAST_PYTEST}"


def cxx_compiler() -> str | None:
    """The C++ compiler that Inductor takes for a CPU."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in candidates if name and (found := shutil.which(name)) is not None), None)


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
        release = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python.h in {include} (the package python{release}-dev or python{release}-devel has it)"
    return f"a C compiler that compiles ({compiler}: {' | '.join(done.stderr.splitlines()[:3])[:300]})"


def _tritons_own(has_driver: bool) -> list[Lack]:
    """Find out what Triton itself lacks. has_driver: whether it can compile and load
    what it talks to the GPU with."""
    major, minor = torch.cuda.get_device_capability() if has_gpu() else (9, 0)
    lacks = []
    try:
        chosen = assembler.choose(10 * major + minor)
    except RuntimeError as error:  # Triton's, which finds none
        lacks.append(_fatal(f"ptxas ({in_words(error)})", "Triton assembles its kernels with it"))
    else:
        if not chosen.is_right:
            lacks.append(Lack("ptxas 13.0 or newer", f"kernels are assembled by {chosen}; see docs/gpu-status.md"))
    if has_driver:
        try:
            from triton.runtime import driver

            assert driver.active.utils is not None
        except Exception as error:  # whatever it is, every launch would raise it
            lacks.append(_fatal(f"Triton's own driver ({in_words(error)})", "no kernel is launched without it"))
    return lacks
