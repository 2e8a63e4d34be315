"""The ptxas that assembles our kernels; other kernels keep theirs, and cached cubins of two assemblers are two."""

import os
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from lowering import hardware

if not hardware.triton_available():
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from lowering.triton import assembler, check
from lowering.triton.ahead import Kernel
from lowering.triton.assembler import Assembler, choose, tritons
from tests.support.cases import each

OLD, NEW = (12, 8), (13, 1)


def tool(version: tuple[int, int], name: str) -> Assembler:
    return Assembler(f"/{name}/ptxas", version, name)


@each(
    ("version", "is_chosen", "found", "expected"),
    [
        (OLD, False, [tool(OLD, "torch"), tool(NEW, "blackwell")], "/blackwell/ptxas"),
        (OLD, False, [tool((12, 9), "blackwell")], "/triton/ptxas"),
        (OLD, True, [tool(NEW, "torch")], "/triton/ptxas"),
        ((13, 0), False, [tool(NEW, "torch")], "/triton/ptxas"),
    ],
)
def test_the_users_ptxas_else_one_that_is_right(monkeypatch, version, is_chosen, found, expected):
    given = tool(version, "triton")
    monkeypatch.setattr(assembler, "tritons", lambda arch: given)
    monkeypatch.setattr(assembler, "is_chosen", lambda arch: is_chosen)
    monkeypatch.setattr(assembler, "others", lambda: found)
    for cuda in ((13, 0), ()):
        monkeypatch.setattr(hardware, "cuda_version", lambda cuda=cuda: cuda)
        assert choose(90).path == expected
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 8))
    assert choose(90) == given, "its driver need not load what CUDA 13 assembles"


def fake_ptxas(folder: Path, version: str) -> Path:
    """Triton's own, which says that it is of another release, and writes its name behind the cubin."""
    real, path = tritons(90).path, folder / f"ptxas-{version}"
    path.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        f"if '--version' in sys.argv: print('Cuda compilation tools, release {version}, V{version}.0'); sys.exit()\n"
        f"open({str(folder / 'calls')!r}, 'a').write('{version}\\n')\n"
        f"subprocess.run([{real!r}, *sys.argv[1:]], check=True)\n"
        f"open(sys.argv[sys.argv.index('-o') + 1], 'ab').write(b'by {version}')\n"
    )
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


PTX = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n"


def test_caches_do_not_mix_assemblers(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"), raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("13.0", "13.5", "13.0"):
        ptxas = Assembler(str(fake_ptxas(tmp_path, name)), tuple(map(int, name.split("."))), "test")
        assert assembler.assemble(PTX, ptxas, ["--gpu-name=sm_90a"]).endswith(f"by {name}".encode())
    assert calls(tmp_path) == ["13.0", "13.5"], "the third time out of the cache"
    with pytest.raises(RuntimeError, match=r"ptxas 12\.8 \(test: .*cannot assemble"):
        assembler.assemble("nonsense", Assembler(tritons(90).path, OLD, "test"), ["--gpu-name=sm_90a"])


@triton.jit
def doubled(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 2 * tl.load(x + tl.arange(0, BLOCK)))


@triton.jit
def tripled(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 3 * tl.load(x + tl.arange(0, BLOCK)))


def warmed_up(jit):
    """Compiled as a launch compiles it, for a device that is not there."""
    target = GPUTarget("cuda", 90, 32)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        return jit.warmup(torch.float32, BLOCK=64, grid=(1,))


def test_our_kernels_alone_are_assembled_by_it(monkeypatch, tmp_path):
    path = fake_ptxas(tmp_path, "13.7")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(assembler, "_torchs_path", lambda: path)
    before = dict(os.environ), vars(triton.knobs.nvidia).copy()
    ours, theirs = warmed_up(Kernel(doubled).jit), warmed_up(tripled)
    assert ours.kernel.endswith(b"by 13.7")
    assert ours.asm["cubin"] == ours.kernel
    assert not theirs.kernel.endswith(b"by 13.7")
    assert calls(tmp_path) == ["13.7"]
    assert (dict(os.environ), vars(triton.knobs.nvidia)) == before


def test_the_command_says_which_assembler_is_used(capsys):
    assert check.main(["--arch", "90", "100"]) == 0
    said = capsys.readouterr().out
    assert all(f"compute capability {arch / 10}: {choose(arch)}" in said for arch in (90, 100))
