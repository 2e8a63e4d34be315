"""accelerate takes backends from a list of its own, not from torch's registry; importing this module adds "fp8pass" to it.

    import fp8pass.integrations.accelerate
    from accelerate import Accelerator

    accelerator = Accelerator(dynamo_backend="fp8pass")
    model, optimizer = accelerator.prepare(model, optimizer)

`TrainingArguments(torch_compile_backend="fp8pass")` of transformers goes the same way. `keep_state(accelerator, model)` lets
accelerate's checkpoints hold the state of delayed scaling.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from fp8pass.api import state
from fp8pass.integrations.saved import collect_state

_NAME = "FP8PASS"


def _extend(backends: Any) -> None:
    """Give accelerate's enum a member, for which Python has no way: others hold the enum, so it has to be the same one."""
    if _NAME not in backends._value2member_map_:
        member = str.__new__(backends, _NAME)
        member._name_ = member._value_ = _NAME
        backends._value2member_map_[_NAME] = backends._member_map_[_NAME] = member
        backends._member_names_.append(_NAME)


_extend(DynamoBackend)


def keep_state(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Let `accelerator.save_state` write the state of delayed scaling, and `load_state` read it.

    model: one compiled by `fp8_compile(model, in_place=True)`, prepared or not, or by the backend's name, which has a state to
    load into from its first call on. Raises NotCompiledError for any other model.
    """
    state(model)
    accelerator.register_for_checkpointing(
        types.SimpleNamespace(
            state_dict=lambda: collect_state(model),  # accelerate calls it on every rank, and writes what rank 0 gives
            load_state_dict=lambda saved: state(model).load_state_dict(saved),
        )
    )
