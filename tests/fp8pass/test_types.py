"""mypy on a user's file: no error if it is right, one for each wrong line."""

import os
import pathlib
import re
import subprocess
import sys
from typing import get_args

import pytest

from fp8pass.recipes import PRESETS, RecipeName

ROOT = pathlib.Path(__file__).parents[2]

RIGHT = """
from typing import assert_type

import torch
from torch import nn

from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, fp8_compile, inspect, state


class Net(nn.Module):
    pass


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(dim=0)


def forward(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return x @ weights["a"]


recipe = DelayedScaling(margin=1, fp8_format=Format.HYBRID, amax_compute_algo=largest)
assert_type(recipe, DelayedScaling)
assert_type(recipe.amax_history_len, int)
Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0)
Float8BlockScaling(x_block_scaling_dim=1, use_f32_scales=True)

compiled = fp8_compile(Net(), recipe, rules={"head": None, "layers.*": "current", "*:grad_weight": DelayedScaling()})
assert_type(compiled, Net)
function = fp8_compile(forward, "blockwise", backend="aot_eager", step="manual", weight_copies="save")
assert_type(function(torch.ones(1), {}), torch.Tensor)
assert_type(state(compiled).scale("head:input"), torch.Tensor)
assert_type(inspect(compiled).gemms[0].reason, str | None)
"""

WRONG = r"""
from torch import nn

from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_compile, state

model = nn.Linear(16, 16)
DelayedScaling(margn=1)  # call-arg: Unexpected keyword argument "margn" .* did you mean "margin"
DelayedScaling(1)  # call-arg: Too many positional arguments
DelayedScaling(margin="1")  # arg-type: "margin" .* "str"; expected "int"
DelayedScaling(amax_compute_algo="mx")  # arg-type: Literal\['mx'\]
DelayedScaling().margin = 2  # misc: read-only
Float8CurrentScaling(margin=1)  # call-arg: Unexpected keyword argument "margin"
Float8BlockScaling(use_f32_scales=1)  # arg-type: expected "bool"
fp8_compile(model, recipe="delaid")  # arg-type: "recipe" .*Literal\['delaid'\]
fp8_compile(model, DelayedScaling)  # arg-type: "type\[DelayedScaling\]"
fp8_compile(model, rules={"a": 3.5})  # dict-item: "float"
fp8_compile(model, rules={"a": "curent"})  # dict-item: "str"
fp8_compile(model, backend="inducter")  # arg-type: Literal\['inducter'\]"; expected "Literal\['inductor', 'aot_eager'\]"
fp8_compile(model, step="automatic")  # arg-type: Literal\['automatic'\]
fp8_compile(model, weight_copies="saved")  # arg-type: Literal\['saved'\]"; expected "Literal\['auto', 'save', .*'cache'\]"
fp8_compile(3)  # type-var: "int"
fp8_compile(model).weigth.sum()  # operator|union-attr|attr-defined: .
state(model).scale(3)  # arg-type: expected "str"
"""


def mypy(files: list[pathlib.Path], cache: pathlib.Path) -> list[str]:
    """mypy's report of files, as strict as it can be, of an installed fp8pass: our own files raise no error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", sys.executable]
    command += ["--cache-dir", str(cache), "--no-error-summary", *map(str, files)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=files[0].parent, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def cache(request) -> pathlib.Path:
    """A folder that stays: only the first run parses torch."""
    pytest.importorskip("mypy")
    if not request.config.pluginmanager.has_plugin("cacheprovider"):
        return ROOT / ".mypy_cache" / "of_tests"
    return request.config.cache.mkdir("mypy")


def test_mypy_accepts_a_right_file_and_refuses_each_line_of_a_wrong_one(tmp_path, cache):
    files = [tmp_path / "right.py", tmp_path / "wrong.py"]
    for file, text in zip(files, (RIGHT, WRONG), strict=True):
        file.write_text(text)
    report = mypy(files, cache)
    assert [line for line in report if not line.startswith("wrong.py")] == []
    expected = {i: m.groups() for i, line in enumerate(WRONG.splitlines(), 1) if (m := re.search(r"# ([\w|-]+): (.*)$", line))}
    assert len(expected) == 17
    found: dict[int, list[str]] = {}
    for line in report:
        if match := re.match(r"wrong\.py:(\d+): error: (.*)", line):
            found.setdefault(int(match[1]), []).append(match[2])
    assert found.keys() == expected.keys()
    for number, (code, text) in expected.items():
        (error,) = found[number]
        assert re.search(rf"{text}.*\[({code})\]", error), error


def test_the_names_of_recipes_are_the_presets():
    assert get_args(RecipeName) == tuple(PRESETS)
