"""Imports fp8pass where rich is missing: nothing that is measured prints fp8pass's tables, which alone need it.

A machine that has torch for its GPU, Triton and numpy can measure then. Whatever uses rich there raises ModuleNotFoundError.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from typing import Any, NoReturn

_FP8PASS = pathlib.Path(__file__).parents[1] / "fp8pass"


class _Absent:
    """What a name of rich stands for."""

    def __init__(self, name: str):
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ModuleNotFoundError(f"{self._name} is used, and rich is not installed: pip install rich", name="rich")

    def __getattr__(self, _: str) -> NoReturn:
        self()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes rich and its modules, all of whose names are absent."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_rich = name.partition(".")[0] == "rich"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_rich else None

    def exec_module(self, module: types.ModuleType) -> None:
        def absent(name: str) -> _Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Absent(f"{module.__name__}.{name}")

        module.__getattr__ = absent  # type: ignore[method-assign]


def import_fp8pass() -> None:
    """If rich is missing, import all of fp8pass that uses it. No module of that name stays: later imports fail."""
    if importlib.util.find_spec("rich") is not None:
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        for path in sorted(_FP8PASS.rglob("*.py")):
            if re.search(r"^(from|import) rich\b", path.read_text(), re.MULTILINE):
                importlib.import_module(".".join(path.relative_to(_FP8PASS.parent).with_suffix("").parts))
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            del sys.modules[name]
