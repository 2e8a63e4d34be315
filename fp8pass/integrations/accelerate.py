"""accelerate takes backends from a list of its own, not from torch's registry; importing this module adds "fp8pass" to it.

    import fp8pass.integrations.accelerate
    from accelerate import Accelerator

    accelerator = Accelerator(dynamo_backend="fp8pass")
    model, optimizer = accelerator.prepare(model, optimizer)

`TrainingArguments(torch_compile_backend="fp8pass")` of transformers goes the same way.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import DynamoBackend

_NAME = "FP8PASS"


def _extend(backends: Any) -> None:
    """Give accelerate's enum a member, for which Python has no way: others hold the enum, so it has to be the same one."""
    if _NAME not in backends._value2member_map_:
        member = str.__new__(backends, _NAME)
        member._name_ = member._value_ = _NAME
        backends._value2member_map_[_NAME] = backends._member_map_[_NAME] = member
        backends._member_names_.append(_NAME)


_extend(DynamoBackend)
