"""Runs a program with the product and with the reference, and compares what it noted.

A program is a user's training loop, `program(fp8)`. `fp8` compiles models, and is told what a user would tell `fp8pass.state`;
the same text runs with both.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import fp8pass
from tests.lifecycles import parts, reference

RECIPES: dict[str, Any] = {
    "delayed": fp8pass.DelayedScaling(),
    "short": fp8pass.DelayedScaling(amax_history_len=3),
    "recent": fp8pass.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    "one": fp8pass.DelayedScaling(amax_history_len=2, initial_scale="one"),
    "current": "current",
    "blockwise": "blockwise",
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise_with_gw_hp",
    "mxfp8": "mxfp8",
}

#: Option -> arguments of `fp8_compile`. "monitor" and "by name" are other ways to begin.
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "save": {"weight_copies": "save"},
    "recompute": {"weight_copies": "recompute"},
    "cache": {"weight_copies": "cache"},
    "release": {"release_frozen": True},
    "in place": {"in_place": True},
    "manual": {"step": "manual"},
    "strict": {"strict": True},
    "monitor": {},
    "by name": {},
    "schedule": {"schedule": {4: {"*:grad_weight": None}, 7: {"*:grad_input": None}}},
}
_SCHEDULE = {4: ("grad_weight",), 7: ("grad_input",)}


@dataclasses.dataclass
class Notes:
    """What a program has seen, by name, in order."""

    found: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def note(self, **tensors: Any) -> None:
        """Numbers, tensors, or modules, whose gradients are meant."""
        for name, value in tensors.items():
            if isinstance(value, nn.Module):
                for path, parameter in value.named_parameters():
                    if parameter.grad is not None:
                        self.found.setdefault(f"{name}.{path}", []).append(parameter.grad.detach().clone())
            else:
                self.found.setdefault(name, []).append(torch.as_tensor(value).detach().clone().float())


class Product(Notes):
    """`fp8` of a program: the product."""

    def __init__(self, recipe, option=""):
        super().__init__({})
        self.recipe, self.option, self.monitors = recipe, option, []

    def compile(self, model, **options):
        """`fp8_compile`."""
        given = {"backend": "aot_eager", "select": "all", **OPTIONS[self.option], **options}
        if self.option == "by name":
            return torch.compile(model, backend="fp8pass", options={"recipe": RECIPES[self.recipe], **given})
        compiled = fp8pass.fp8_compile(model, RECIPES[self.recipe], **given)
        if self.option == "monitor":
            self.monitors.append(fp8pass.monitor(compiled, every=3))
        return compiled

    def end_step(self, *compiled):
        """The end of a step, for manual steps."""
        for model in compiled if self.option == "manual" else ():
            fp8pass.state(model).step()

    def save(self, compiled):
        """The state, as a user saves it."""
        return fp8pass.state(compiled).state_dict()

    def load(self, compiled, saved):
        """Continue from `save`."""
        fp8pass.state(compiled).load_state_dict(saved)

    def forget(self, compiled):
        """Weights that were exchanged."""
        fp8pass.state(compiled).forget_weights()

    def use_rules(self, compiled, rules):
        """`fp8pass.use_rules`."""
        fp8pass.use_rules(compiled, rules)

    def scales(self, compiled):
        """Note the scales of delayed scaling, which must be equal, of tensors that have a history."""
        if reference.RECIPES[self.recipe].kind == "delayed":
            view = fp8pass.state(compiled)
            self.note(**{f"scale {n}": view.scale(n) for n in view.tensors if view.amax_history(n)[1:].any()})


class Oracle(Notes):
    """`fp8` of a program: the reference. Its methods do what those of `Product` do."""

    def __init__(self, recipe, option=""):
        super().__init__({})
        self.recipe, self.option = reference.RECIPES[recipe], option

    def compile(self, model, **options):
        step = {"manual": "manual", "by name": "graphs"}.get(options.get("step", self.option), "auto")
        schedule = _SCHEDULE if self.option == "schedule" else None
        in_place = options.get("in_place", self.option == "in place") and isinstance(model, nn.Module)
        return reference.compile_reference(model, self.recipe, step=step, schedule=schedule, in_place=in_place)

    def end_step(self, *compiled):
        for model in compiled if self.option == "manual" else ():
            reference.reference_of(model).state.end_step()

    def save(self, compiled):
        reference.reference_of(compiled).follow()
        return reference.reference_of(compiled).state.saved()

    def load(self, compiled, saved):
        reference.reference_of(compiled).follow()
        reference.reference_of(compiled).state.load(saved)

    def forget(self, compiled):
        histories = reference.reference_of(compiled).state.histories
        for name in [name for name in histories if name.endswith(":weight")]:
            del histories[name]

    def use_rules(self, compiled, rules):
        reference.reference_of(compiled).state.use_rules(rules)

    def scales(self, compiled):
        if self.recipe.kind == "delayed":
            histories = reference.reference_of(compiled).state.histories
            self.note(**{f"scale {n}": h.scale for n, h in histories.items() if h.scale is not None})


Program = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program of the table."""

    name: str
    program: Program
    recipes: tuple[str, ...]
    options: tuple[str, ...]
    """Those that touch it, besides none."""
    refused: Mapping[str, str]
    """Option -> the error that may end the program instead: with this option the user promises what the program does not do."""


TABLE: list[Entry] = []
ALL_RECIPES = tuple(RECIPES)


def enter(name: str, program: Program, recipes: Any = (), options: tuple[str, ...] = (), refused: Any = None) -> None:
    """Enter a program into the table. Without recipes: one of each kind, by turns."""
    turn = len(TABLE) % 4
    TABLE.append(Entry(name, program, recipes or (ALL_RECIPES[turn], "current", ALL_RECIPES[5 + turn]), options, refused or {}))


def program(**how: Any) -> Callable[[Program], Program]:
    """Enter a function, by its name."""
    return lambda function: enter(function.__name__, function, **how) or function


def loop(name: str, make: Callable[[], nn.Module], recipes: Any = (), options: tuple[str, ...] = (), **how: Any) -> None:
    """Enter `parts.train` of the model that `make` makes; `how` are its arguments."""
    enter(name, functools.partial(_train, make, how), recipes, options)


def _train(make: Callable[[], nn.Module], how: Mapping[str, Any], fp8: Any) -> None:
    parts.train(fp8, make(), **how)


def differences(product, wanted):
    """One line per name that differs, with the first step where it does. Both multiply the same FP8 values in float32, in the
    same order, so what they compute is equal bit for bit."""
    lines = []
    for name in sorted({*product, *wanted}):
        ours, theirs = product.get(name, []), wanted.get(name, [])
        if len(ours) != len(theirs):
            lines.append(f"{name}: noted {len(ours)} times, {len(theirs)} by the reference")
            continue
        each = [decibels(a, b) for a, b in zip(ours, theirs, strict=True)]
        low = [i for i, db in enumerate(each) if db < math.inf]
        if low:
            first, worst = low[0], min(each[i] for i in low)
            lines.append(f"{name}: {worst:.1f} dB at worst, first in note {first} of {len(each)} ({each[first]:.1f} dB)")
    return lines


def decibels(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The size of `wanted` above the difference from it; inf where they are equal, -inf where they are not comparable."""
    x, wanted = x.double(), wanted.double()
    if x.shape != wanted.shape:
        return -math.inf
    if bool(((x == wanted) | (x.isnan() & wanted.isnan())).all()):
        return math.inf
    noise, signal = (x - wanted).norm().item(), wanted.norm().item()
    return 20 * math.log10(signal / noise) if signal > 0 and 0 < noise < math.inf else -math.inf


def failures(entry: Entry, recipe: str, option: str) -> list[str]:
    """What differs between the product and the reference. An error that ends the program is raised, if it is not the right one.
    The product's advice, and what torch says to these programs, is left out."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fp8 in (Oracle(recipe, option), Product(recipe, option)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            try:
                with reference.without_checkpointing() if isinstance(fp8, Oracle) else contextlib.nullcontext():
                    entry.program(fp8)
            except Exception as error:
                if type(error).__name__ == entry.refused.get(option):
                    return []
                raise
            found.append(fp8.found)
    return differences(found[1], found[0]) if found[0] else ["the program noted nothing"]


def check(entry: Entry, recipe: str, option: str) -> None:
    """Raise AssertionError with what differs."""
    lines = failures(entry, recipe, option)
    assert not lines, f"{entry.name}, {recipe}, {option or 'defaults'}:\n" + "\n".join(lines)
