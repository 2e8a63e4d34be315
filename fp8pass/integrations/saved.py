"""The shared part of callbacks: the check of their options, and the content of a framework's checkpoints: the state of delayed
scaling, and the recipe that it belongs to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.api import parts_of, state
from fp8pass.errors import CheckpointMismatchError, OptionError
from fp8pass.options import CompileOptions, StepMode
from fp8pass.recipes import Recipe
from fp8pass.recipes.recipe import in_words, is_int
from fp8pass.rules import Rules
from fp8pass.runtime.session import Session
from fp8pass.scales.reduction import is_distributed


def show(text: str) -> None:
    """Print below a progress bar, where one is running: tqdm's are drawn again below the text."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(text)
    else:
        bars.write(text)


def callback_options(recipe: Any, rules: Any, options: Mapping[str, Any]) -> CompileOptions:
    """The options of a callback, from its arguments, which are those of `fp8_compile`. Raises as that does."""
    for name in ("step", "in_place"):
        if name in options:
            raise OptionError(f"{name}={options[name]!r}: the callback sets {name} itself; leave it out")
    others = {name: value for name, value in options.items() if name not in ("dynamic", "fullgraph")}
    return CompileOptions.named(None, {"recipe": recipe, "rules": rules, **others}, options.get("dynamic"))


def check_monitor(every: object) -> None:
    """Raise OptionError unless `every` is a number of steps, or None for no monitor."""
    if every is not None and (not is_int(every) or every < 1):
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
    return _describe_rules(sessions_of(model)[0].options.first_rules)


def _describe_rules(rules: Rules) -> dict[str, str]:
    described = {rule.pattern: _describe(rule.recipe) for rule in rules.rules}
    described["*, by default"] = _describe(rules.default)
    described["select"] = f"{rules.select}, min_speedup={rules.min_speedup}"
    return described


def check_rules(saved: Mapping[str, str], model: Any, source: str) -> None:
    """Raise CheckpointMismatchError with what differs unless a checkpoint was written with the recipe and rules of `model`."""
    now = describe_rules(model)
    differing = _differences(saved, now, "in the checkpoint", "now")
    if differing or list(saved) != list(now):
        raise CheckpointMismatchError(
            f"{source} was trained with another recipe. {'; '.join(differing) or f'The rules were in the order {list(saved)}'}."
            f" Resume with the recipe and rules that it was trained with"
        )


def check_alike(model: Any, options: CompileOptions) -> None:
    """Raise OptionError with what differs unless a model that is compiled is compiled with these options, but for `step`."""
    for session in sessions_of(model):
        before, now = (_describe_options(own) for own in (session.options, options))
        differing = _differences(before, now, "so far", "in this callback")
        if (session.options.later_rules, session.options.strict) != (options.later_rules, options.strict):
            differing.append("schedule or strict")
        if differing or list(before) != list(now):
            raise OptionError(
                f"{type(model).__name__} is compiled in place already, in another way: "
                f"{'; '.join(differing) or f'its rules are in the order {list(before)}'}. Give the callback the same"
                f" arguments, or call fp8_uncompile on the compiled module first, which discards its FP8 state"
            )


def _describe_options(options: CompileOptions) -> dict[str, str]:
    others = {"patches": repr(options.patches), "amax_reduction_group": repr(options.amax_reduction_group)}
    return {**_describe_rules(options.first_rules), **options.in_words(), **others}


def _differences(before: Mapping[str, str], now: Mapping[str, str], then_words: str, now_words: str) -> list[str]:
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f"{key}: {before.get(key, 'no rule')} {then_words}, {now.get(key, 'no rule')} {now_words}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def sessions_of(model: Any) -> list[Session]:
    """The sessions of a model, or of modules of it that are compiled one by one. Raises NotCompiledError if nothing is."""
    return list(dict.fromkeys(part.session for part in parts_of(model)))


def use_steps(model: Any, mode: StepMode) -> None:
    """Let a callback end the steps of a model ("manual"), or the model itself again ("auto")."""
    if mode == "auto":
        state(model).step()
    for session in sessions_of(model):
        session.use_steps(mode)


def keeps_state(model: Any) -> bool:
    """Say whether a recipe of the model has scales of its own, so that weights and state belong together."""
    return any(session.rules.stateful for session in sessions_of(model))


def _describe(recipe: Recipe | None) -> str:
    return "high precision" if recipe is None else in_words(recipe)
