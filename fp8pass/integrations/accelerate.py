"""accelerate takes backends from a list of its own, not from torch's registry; this adds "fp8pass" to it.

    import fp8pass
    from accelerate import Accelerator

    accelerator = Accelerator(dynamo_backend="fp8pass")
    model, optimizer = accelerator.prepare(model, optimizer)

`TrainingArguments(torch_compile_backend="fp8pass")` of transformers goes the same way. Importing fp8pass is all that is needed:
the list is extended when accelerate is imported, or now if it was before. accelerate itself is not imported here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.utils.dataclasses"
_NAME = "FP8PASS"


def extend_backends() -> None:
    """Let accelerate take the backend "fp8pass", as soon as it is imported."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _extend(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds the module as others do, and extends it after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of accelerate's module, with a loader that extends it; None for all other modules."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _extend(module)

            loader.exec_module = exec_module
        return spec


def _extend(module: ModuleType) -> None:
    backends = getattr(module, "DynamoBackend", None)
    if backends is None or _NAME in backends._value2member_map_:
        return
    member = str.__new__(backends, _NAME)
    member._name_ = member._value_ = _NAME
    backends._value2member_map_[_NAME] = backends._member_map_[_NAME] = member
    backends._member_names_.append(_NAME)
