"""The needs of `benchmarks.gpu`: torch, Triton, numpy and a C compiler; it names the rest and does without."""

import json
import shutil
import subprocess
import sys
import sysconfig
import types

import pytest
import torch

from benchmarks import gpu, preflight
from benchmarks.preflight import compiler_obstacle, missing
from lowering import hardware
from tests.support import minimal

needs_compiler = pytest.mark.skipif(compiler_obstacle() is not None, reason="needs a C compiler and Python.h")
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton")


def named(text):
    """The lacks whose text begins so."""
    return [lack for lack in missing() if str(lack).startswith(text)]


# -- what Triton compiles its launcher with


@needs_compiler
def test_a_compiler_is_looked_for_where_triton_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert compiler_obstacle() == f"a C compiler that runs ({tmp_path / 'nothing'}: No such file or directory)"
    monkeypatch.delenv("CC")
    found = shutil.which("gcc") or shutil.which("clang")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_obstacle() == "a C compiler (gcc, clang, or the one that CC names)"
    assert [lack.is_fatal for lack in named("a C compiler")] == [True]
    if found is not None:
        monkeypatch.setenv("CC", found)
        assert "that runs" not in str(compiler_obstacle())


@needs_compiler
def test_without_the_headers_of_python(tmp_path, monkeypatch):
    for variable in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (lack,) = named("Python.h")
    assert lack.is_fatal
    assert f"Python.h in {tmp_path} (the package python3.{sys.version_info.minor}-dev or" in str(lack)


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot find ld' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert compiler_obstacle() == f"a C compiler that compiles ({broken}: cannot find ld)"


# -- what Triton looks for


@needs_triton
def test_no_ptxas_is_fatal_and_an_old_one_is_a_note(monkeypatch):
    def none(arch):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(preflight.assembler, "choose", none)
    (lack,) = named("ptxas (RuntimeError: Cannot find ptxas)")
    assert lack.is_fatal
    old = preflight.assembler.Assembler("/there", (12, 8), "Triton's")
    monkeypatch.setattr(preflight.assembler, "choose", lambda arch: old)
    (lack,) = named("ptxas 13.0 or newer: kernels are assembled by ptxas 12.8 (Triton's: /there)")
    assert not lack.is_fatal


@needs_triton
@needs_compiler
@pytest.mark.parametrize("fails", [True, False])
def test_what_triton_talks_to_the_gpu_with_is_tried(fails, monkeypatch):
    """On a machine that has everything else."""
    import triton.runtime

    class Driver:
        @property
        def active(self):
            if fails:
                raise AssertionError("libcuda.so cannot found!")
            return types.SimpleNamespace(utils=object())

    asked = []
    monkeypatch.setattr(preflight, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(preflight.assembler, "choose", lambda arch: asked.append(arch) or types.SimpleNamespace(is_right=True))
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    found = [str(lack) for lack in missing() if lack.is_fatal]
    expected = "Triton's own driver (AssertionError: libcuda.so cannot found!): no kernel is launched without it"
    assert found == ([expected] if fails else [])
    assert asked == [89]


# -- what is there


def test_everything_that_is_missing_is_named_what_is_fatal_first(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    monkeypatch.setattr(preflight.hardware, "triton_available", lambda: False)
    lacks = missing()
    fatal = [str(lack).split(":")[0] for lack in lacks if lack.is_fatal]
    assert [text.split(" (")[0] for text in fatal] == ["a CUDA device with FP8 tensor cores", "a C compiler", "numpy", "triton"]
    assert lacks[: len(fatal)] == [lack for lack in lacks if lack.is_fatal]
    others = {lack.what.split(" (")[0] for lack in lacks if not lack.is_fatal}
    assert others == {*preflight._OPTIONAL, "nvidia-smi", "a C++ compiler"}


def test_what_torch_sees_in_the_place_of_a_gpu(monkeypatch):
    wanted = "a CUDA device with FP8 tensor cores (compute capability 8.9 or newer): no kernel runs; "
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, text in ((None, "sees no GPU: it is built without CUDA"), ("13.0", "sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert str(missing()[0]) == f"{wanted}torch {torch.__version__} {text}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert str(missing()[0]) == f"{wanted}torch sees NVIDIA A100, compute capability 8.0"


def test_an_old_pytest(monkeypatch):
    monkeypatch.setattr(preflight, "version", lambda name: "7.4.4")
    assert [str(lack) for lack in named("pytest 8")] == [
        "pytest 8 or newer (pytest 7.4.4 is older than 8): parts 1 and 2 are left out"
    ]


def test_a_run_stops_with_all_that_is_fatal(monkeypatch, tmp_path):
    lacks = [
        preflight.Lack("a GPU", "no", is_fatal=True),
        preflight.Lack("cc", "none", is_fatal=True),
        preflight.Lack("rich", ""),
    ]
    monkeypatch.setattr(gpu, "missing", lambda: lacks)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert str(stopped.value).splitlines()[:3] == ["benchmarks.gpu cannot measure here without:", "- a GPU: no", "- cc: none"]
    assert not (tmp_path / "out").exists()


def test_tests_are_left_out_where_pytest_is_missing(monkeypatch, tmp_path, capsys):
    """And the run is right."""
    monkeypatch.setattr(gpu, "pytest_obstacle", lambda: "pytest is missing")
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--part", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    assert "part 2, all other GPU tests: skipped, pytest is missing" in capsys.readouterr().out
    assert "| skipped, pytest is missing |" in (tmp_path / "gpu-part2-dry.md").read_text()


# -- a machine with torch, Triton and numpy


def run(environment, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=minimal.ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_dry_run_with_torch_triton_and_numpy_alone(tmp_path):
    """Casts and a recipe of part 0, and a benchmark, in processes that find nothing else."""
    environment, out = minimal.environment(tmp_path), tmp_path / "out"
    dry = ("-m", "benchmarks.gpu", "--cpu", "--out", str(out))
    printed = run(environment, *dry, "--part", "0", "--group", "casts state", "recipe current")
    for package in ("rich", "pytest", "pytest_timeout", "xdist", "hypothesis", "torchao"):
        assert f"missing: {package}: " in printed
    rows = [json.loads(line) for line in (out / "part0.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows[1:]} == {"right"}
    run(environment, "-m", "benchmarks.cost_model", "--quick", "--out", str(out))
    assert "skipped, pytest is missing" in run(environment, *dry, "--part", "1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_folder_of_wheels_is_found_and_tests_need_no_plugin(tmp_path):
    """pytest alone, in a folder that PYTHONPATH names: every test file is read, those that need more are skipped."""
    environment = minimal.environment(tmp_path)
    minimal.install(tmp_path, "pytest")
    printed = run(environment, "-m", "benchmarks.gpu", "--cpu", "--part", "2", "--out", str(tmp_path / "out"))
    assert "missing: pytest:" not in printed
    assert "missing: hypothesis:" in printed
    log = (tmp_path / "out" / "part2.log").read_text()
    assert "could not import 'hypothesis'" in log
    assert "error" not in log.splitlines()[-1]
