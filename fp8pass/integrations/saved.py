"""What callbacks share: the check of their options, and what they write into a framework's checkpoints: the state of delayed
scaling, and which recipe it belongs to."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.api import state
from fp8pass.arguments import CompileOptions
from fp8pass.attach import session_of
from fp8pass.errors import CheckpointMismatchError, NotCompiledError, OptionError
from fp8pass.recipes import Recipe
from fp8pass.rules import Rules
from fp8pass.state.reduction import is_distributed


def show(text: str) -> None:
    """Print below a progress bar, where one is running: tqdm's are drawn again below the text."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(text)
    else:
        bars.write(text)


def callback_options(recipe: Any, rules: Any, options: Mapping[str, Any]) -> CompileOptions:
    """What a callback compiles with, from its arguments, which are those of `fp8_compile`. Raises as that does."""
    for name in ("step", "in_place"):
        if name in options:
            raise OptionError(f"{name}={options[name]!r}: the callback sets {name} itself; leave it out")
    others = {name: value for name, value in options.items() if name not in ("dynamic", "fullgraph")}
    return CompileOptions.named(None, {"recipe": recipe, "rules": rules, "step": "manual", **others}, options.get("dynamic"))


def check_monitor(every: object) -> None:
    """Raise OptionError unless `every` is a number of steps, or None for no monitor."""
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise OptionError(f"monitor is {every!r}; use a positive int: 100 measures every hundredth step, or None")


def collect_state(model: Any) -> dict[str, torch.Tensor]:
    """`state(model).state_dict()` of all ranks together, on the CPU. Called by every rank; ranks other than 0 get their own."""
    own = {name: value.cpu() for name, value in state(model).state_dict().items()}
    if not is_distributed(None):
        return own
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # Entries that all ranks share have no rank in their names; rank 0 has them already.
    dist.gather_object({k: v for k, v in own.items() if k.endswith(f"@{dist.get_rank()}")}, ranks, dst=0)
    for other in ranks or ():
        own.update(other)
    return own


def describe_rules(model: Any) -> dict[str, str]:
    """The recipe of a compiled model by pattern of the rules that it was compiled with, "*" for all other GEMMs, in words equal
    in every process. What follows by a schedule is left out: the number of steps in the state says where that is."""
    session = session_of(model)
    if session is None:
        raise NotCompiledError(f"{type(model).__name__} is not compiled by fp8_compile")
    rules: Rules = session.settings.rules
    described = {rule.pattern: _describe(rule.recipe) for rule in rules.rules}
    described["*, by default"] = _describe(rules.default)
    described["select"] = f"{rules.select}, min_speedup={rules.min_speedup}"
    return described


def check_rules(saved: Mapping[str, str], model: Any, source: str) -> None:
    """Raise CheckpointMismatchError with what differs unless a checkpoint was written with the recipe and rules of `model`."""
    now = describe_rules(model)
    keys = [*saved, *(key for key in now if key not in saved)]
    differing = [
        f"{key}: {saved.get(key, 'no rule')} in the checkpoint, {now.get(key, 'no rule')} now"
        for key in keys
        if saved.get(key) != now.get(key)
    ]
    if differing or list(saved) != list(now):
        raise CheckpointMismatchError(
            f"{source} was trained with another recipe. {'; '.join(differing) or f'The rules were in the order {list(saved)}'}."
            f" Resume with the recipe and rules that it was trained with"
        )


def _describe(recipe: Recipe | None) -> str:
    if recipe is None:
        return "high precision"
    fields: Any = recipe
    options = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(fields)}
    return f"{type(recipe).__name__}({', '.join(f'{name}={_text(value)}' for name, value in options.items())})"


def _text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return str(getattr(value, "__qualname__", repr(value)))
