"""The package as pip installs it: its entry point, without the repository on the path."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import sys
from importlib.metadata import entry_points

import torch

assert "fp8pass" in torch._dynamo.list_backends()
assert "fp8pass" not in sys.modules, "naming the backend is enough"
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
compiled = torch.compile(model, backend="fp8pass", options={"recipe": "delayed", "backend": "aot_eager"})
compiled(torch.randn(16, 32)).sum().backward()

import fp8pass

assert fp8pass.__file__.startswith(sys.argv[1]), fp8pass.__file__
assert fp8pass.state(compiled).tensors == ["0:input", "0:weight", "1:input", "1:weight", "1:grad_output", "0:grad_output"]
assert [module for module in ("accelerate", "lightning", "transformers") if module in sys.modules] == []
print(sum(gemm.quantized for gemm in fp8pass.inspect(compiled).gemms))
"""


@pytest.mark.slow
def test_the_entry_point_of_an_installed_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source, target = tmp_path / "source", tmp_path / "site"
    files = ["pyproject.toml", "README.md", "LICENSE", "fp8pass", "lowering"]
    source.mkdir()
    for name in files:  # building leaves files beside the sources
        (source / name).symlink_to(ROOT / name)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-c", SCRIPT, str(target)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 5
