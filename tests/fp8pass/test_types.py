"""mypy on a user's file: no error if it is right, one for each wrong line."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

RIGHT = """
from typing import assert_type

import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, Format, fp8_compile, inspect, state


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(dim=0)


recipe = DelayedScaling(margin=1, fp8_format=Format.HYBRID, amax_compute_algo=largest)
Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0)

compiled = fp8_compile(nn.Linear(16, 16), recipe, rules={"head": None, "layers.*": "current", "*:grad_weight": recipe})
assert_type(compiled, nn.Linear)
function = fp8_compile(largest, "blockwise", backend="aot_eager", step="manual", weight_copies="save")
assert_type(function(torch.ones(1)), torch.Tensor)
assert_type(state(compiled).scale("head:input"), torch.Tensor)
assert_type(inspect(compiled).gemms[0].reason, str | None)
"""

WRONG = r"""
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, state

model = nn.Linear(16, 16)
DelayedScaling(margn=1)  # call-arg: Unexpected keyword argument "margn" .* did you mean "margin"
DelayedScaling(margin="1")  # arg-type: "margin" .* "str"; expected "int"
DelayedScaling(amax_compute_algo="mx")  # arg-type: Literal\['mx'\]
DelayedScaling().margin = 2  # misc: read-only
fp8_compile(model, recipe="delaid")  # arg-type: "recipe" .*Literal\['delaid'\]
fp8_compile(model, rules={"a": "curent"})  # dict-item: "str"
fp8_compile(model, backend="inducter")  # arg-type: Literal\['inducter'\]"; expected "Literal\['inductor', 'aot_eager'\]"
fp8_compile(3)  # type-var: "int"
fp8_compile(model).weigth.sum()  # operator|union-attr|attr-defined: .
state(model).scale(3)  # arg-type: expected "str"
"""


@pytest.fixture
def cache(request) -> pathlib.Path:
    """A folder that stays: only the first run parses torch."""
    pytest.importorskip("mypy")
    if not request.config.pluginmanager.has_plugin("cacheprovider"):
        return ROOT / ".mypy_cache" / "of_tests"
    return request.config.cache.mkdir("mypy")


def test_mypy_accepts_a_right_file_and_refuses_each_line_of_a_wrong_one(tmp_path, cache):
    """As strict as it can be, of an installed fp8pass: our own files raise no error."""
    for name, text in (("right.py", RIGHT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", sys.executable]
    command += ["--cache-dir", str(cache), "--no-error-summary", "right.py", "wrong.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 1, done.stderr
    errors = [re.match(r"wrong\.py:(\d+): error: (.*)", line) for line in done.stdout.splitlines() if ": note: " not in line]
    assert all(errors), done.stdout
    expected = {i: m.groups() for i, line in enumerate(WRONG.splitlines(), 1) if (m := re.search(r"# ([\w|-]+): (.*)$", line))}
    assert [int(error[1]) for error in errors] == list(expected)
    for error, (code, text) in zip(errors, expected.values(), strict=True):
        assert re.search(rf"{text}.*\[({code})\]", error[2]), error[2]
