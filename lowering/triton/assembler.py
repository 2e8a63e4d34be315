"""The ptxas that assembles our kernels: 13.0 or newer, where there is one (docs/gpu-status.md).

NOTE [assembled again] Triton's knobs belong to the process. Set for our kernels, they would hold for what other threads compile
in the meantime, and Triton asks for its assembler's version only once, so that its cache would mix the two. So Triton compiles
our kernels as it would, and the PTX that it keeps is assembled once more, by the newer ptxas. The cubin has a place of its
own in Triton's cache, whose key is the PTX, the assembler and its options. Nothing else in the process changes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from lowering import hardware

#: The first release that uses no value before it is defined (lowering/formats.py).
RIGHT = (13, 0)


@dataclasses.dataclass(frozen=True)
class Assembler:
    """A ptxas."""

    path: str
    version: tuple[int, int]
    origin: str  # Whose it is, in words.

    def __str__(self) -> str:
        return f"ptxas {self.version[0]}.{self.version[1]} ({self.origin}: {self.path})"

    @property
    def is_right(self) -> bool:
        return self.version >= RIGHT


def choose(arch: int) -> Assembler:
    """The ptxas for our kernels on compute capability arch / 10: the user's, else Triton's if it is new enough, else a newer
    one that came with torch or with Triton, else Triton's. A driver for CUDA 12 need not load what CUDA 13 assembles; torch for
    CUDA 13 runs on no such driver."""
    given = tritons(arch)
    if given.is_right or is_chosen(arch) or () < hardware.cuda_version() < RIGHT:
        return given
    return next((found for found in others() if found.is_right), given)


def tritons(arch: int) -> Assembler:
    """The ptxas that Triton takes by itself."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    return Assembler(tool.path, _parsed(tool.version), "the one chosen" if is_chosen(arch) else "Triton's")


def is_chosen(arch: int) -> bool:
    """True if a user has told Triton which ptxas to use. Inductor tells it, too: torch's own, which counts as not chosen."""
    from triton import knobs

    name = "ptxas_blackwell" if arch >= 100 else "ptxas"
    variable = os.environ.get(f"TRITON_{name.upper()}_PATH")
    return name in vars(knobs.nvidia) or variable not in (None, "", str(_torchs_path()))


def others() -> list[Assembler]:
    """The assemblers that came with torch and with Triton for newer GPUs, which assemble for all others, too."""
    from triton import knobs

    tools = [(str(_torchs_path()), "torch's")] if os.access(_torchs_path(), os.X_OK) else []
    tools.append((knobs.nvidia.ptxas_blackwell.path, "Triton's for Blackwell"))
    return [Assembler(path, version, origin) for path, origin in tools if (version := _version_of(path)) is not None]


def of_path(path: str) -> Assembler:
    """A ptxas that somebody names. ValueError if it is none, or does not run."""
    version = _version_of(path)
    if version is None:
        raise ValueError(f"{path} is not a ptxas that runs here: it must print its release for --version")
    return Assembler(path, version, "given")


def _torchs_path() -> pathlib.Path:
    return pathlib.Path(torch.__file__).parent / "bin" / "ptxas"


def _version_of(path: str) -> tuple[int, int] | None:
    """None if it does not run: a file of another platform."""
    from triton.knobs import NvidiaTool

    tool = NvidiaTool.from_path(path)  # remembered by path
    return None if tool is None else _parsed(tool.version)


def _parsed(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def options_of(arch_name: str, enable_fp_fusion: bool, extra: str | None) -> list[str]:
    """The options that Triton 3.7 passes to ptxas. It passes the level of register allocation because of a fault of ptxas 13,
    and Triton 3.6 does not know of it."""
    fusion = [] if enable_fp_fusion else ["--fmad=false"]
    return ["-lineinfo", *fusion, "--regAllocOptLevel=2", *(extra or "").split(), f"--gpu-name={arch_name}"]


def assemble(ptx: str, assembler: Assembler, options: list[str]) -> bytes:
    """The cubin, out of Triton's cache if it is there."""
    from triton.runtime.cache import get_cache_manager

    key = "\n".join([ptx, assembler.path, str(assembler.version), *options])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    found = cache.get_file("kernel.cubin")
    if found is not None:
        return pathlib.Path(found).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        run = subprocess.run(
            [assembler.path, *options, str(source), "-o", str(target)], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise RuntimeError(f"{assembler} cannot assemble a kernel of lowering: {run.stderr or run.stdout}")
        cubin = target.read_bytes()
    cache.put(cubin, "kernel.cubin")
    return cubin


def assembled_by(compiled: Any, assembler: Assembler) -> Any:
    """Triton's compiled kernel with the cubin of another ptxas."""
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    metadata = compiled.metadata
    name = sm_arch_from_capability(metadata.target.arch)
    options = options_of(name, metadata.enable_fp_fusion, metadata.ptx_options)
    compiled.asm["cubin"] = compiled.kernel = assemble(compiled.asm["ptx"], assembler, options)
    return compiled


def _compile(compile_kernel: Callable[..., Any], source: Any, *, target: Any, **options: Any) -> Any:
    compiled = compile_kernel(source, target=target, **options)
    if target.backend != "cuda":
        return compiled
    assembler = choose(target.arch)
    return compiled if assembler.path == tritons(target.arch).path else assembled_by(compiled, assembler)


def assemble_anew(jit: Any) -> None:
    """Let what Triton compiles of this function, and of no other, be assembled by `choose`'s ptxas."""
    from triton.runtime.jit import JITFunction

    if not isinstance(jit, JITFunction):  # Triton's interpreter
        return
    create_binder = jit.create_binder

    def create() -> Any:
        """Triton's, which sets the function that compiles."""
        binder = create_binder()
        jit.compile = functools.partial(_compile, jit.compile)
        return binder

    jit.device_caches = collections.defaultdict(create)
