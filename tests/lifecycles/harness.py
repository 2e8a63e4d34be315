"""Runs a program with the product and with the reference, and compares what it noted.

A program is a user's training loop, `program(fp8)`. `fp8` compiles models, and is told what a user would tell `fp8pass.state`;
the same text runs with both.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import fp8pass
from tests.lifecycles import reference

STEPS = 10

#: dB. Both multiply the same FP8 values in float32, in the same order, so what they compute is equal bit for bit.
EQUAL = math.inf

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

    is_reference = False

    def __init__(self, recipe: str, option: str = "") -> None:
        super().__init__({})
        self.recipe, self.option = recipe, option
        self.monitors: list[Any] = []

    def compile(self, model: Any, **options: Any) -> Any:
        """`fp8_compile`."""
        given = {"backend": "aot_eager", "select": "all", **OPTIONS[self.option], **options}
        if self.option == "by name":
            return torch.compile(model, backend="fp8pass", options={"recipe": RECIPES[self.recipe], **given})
        compiled = fp8pass.fp8_compile(model, RECIPES[self.recipe], **given)
        if self.option == "monitor":
            self.monitors.append(fp8pass.monitor(compiled, every=3))
        return compiled

    def end_step(self, *compiled: Any) -> None:
        """The end of a step, for manual steps."""
        for model in compiled if self.option == "manual" else ():
            fp8pass.state(model).step()

    def save(self, compiled: Any) -> Any:
        """The state, as a user saves it."""
        return fp8pass.state(compiled).state_dict()

    def load(self, compiled: Any, saved: Any) -> None:
        """Continue from `save`."""
        fp8pass.state(compiled).load_state_dict(saved)

    def forget(self, compiled: Any) -> None:
        """Weights that were exchanged."""
        fp8pass.state(compiled).forget_weights()

    def scales(self, compiled: Any) -> None:
        """Note the scales of delayed scaling, which must be equal."""
        if reference.RECIPES[self.recipe].kind == "delayed":
            view = fp8pass.state(compiled)
            for name in view.tensors:
                self.note(**{f"scale {name}": view.scale(name)})


class Oracle(Notes):
    """`fp8` of a program: the reference."""

    is_reference = True

    def __init__(self, recipe: str, option: str = "") -> None:
        super().__init__({})
        self.recipe, self.option = reference.RECIPES[recipe], option

    def compile(self, model: Any, **options: Any) -> Any:
        """The reference in the place of `fp8_compile`."""
        step = {"manual": "manual", "by name": "graphs"}.get(options.get("step", self.option), "auto")
        schedule = _SCHEDULE if self.option == "schedule" else None
        in_place = options.get("in_place", self.option == "in place") and isinstance(model, nn.Module)
        return reference.compile_reference(model, self.recipe, step=step, schedule=schedule, in_place=in_place)

    def end_step(self, *compiled: Any) -> None:
        """As above."""
        for model in compiled if self.option == "manual" else ():
            reference.reference_of(model).state.end_step()

    def save(self, compiled: Any) -> Any:
        """As above."""
        return reference.reference_of(compiled).state.saved()

    def load(self, compiled: Any, saved: Any) -> None:
        """As above."""
        reference.reference_of(compiled).state.load(saved)

    def forget(self, compiled: Any) -> None:
        """As above."""
        histories = reference.reference_of(compiled).state.histories
        for name in [name for name in histories if name.endswith(":weight")]:
            del histories[name]

    def scales(self, compiled: Any) -> None:
        """As above. A tensor without a history has scale 1 to read."""
        if self.recipe.kind == "delayed":
            state = reference.reference_of(compiled).state
            for name, history in state.histories.items():
                self.note(**{f"scale {name}": torch.tensor(1.0) if history.scale is None else history.scale})


Program = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program of the table."""

    program: Program
    recipes: tuple[str, ...]
    options: tuple[str, ...] = ("",)
    """Those that touch it, besides none."""
    bound: float = EQUAL
    why: str = ""
    """Where results need not be equal, why."""
    fault: str = ""
    """A known fault, because of which the program differs under every recipe: its cases must fail until it is mended."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Option -> the error that may end the program instead: with this option the user promises what the program does not do."""

    @property
    def name(self) -> str:
        """The program's."""
        return self.program.__name__


TABLE: list[Entry] = []
ALL_RECIPES = tuple(RECIPES)


def program(**how: Any) -> Callable[[Program], Program]:
    """Enter a program into the table; `how` are fields of `Entry`. Without recipes: one of each kind, by turns."""

    def enter(function: Program) -> Program:
        turn = len(TABLE) % 4
        with_state, of_lines = ALL_RECIPES[turn], ALL_RECIPES[5 + turn]
        recipes = how.pop("recipes", (with_state, "current", of_lines))
        TABLE.append(Entry(function, recipes, ("", *how.pop("options", ())), **how))
        return function

    return enter


def run(entry: Entry, recipe: str, option: str) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """What the product and the reference found."""
    found = []
    for fp8 in (Oracle(recipe, option), Product(recipe, option)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with reference.without_checkpointing() if fp8.is_reference else contextlib.nullcontext():
            entry.program(fp8)
        found.append(fp8.found)
    return found[1], found[0]


def differences(product: Mapping[str, Any], wanted: Mapping[str, Any], bound: float) -> list[str]:
    """What differs, one line per name, with the first step where it does."""
    lines = []
    for name in sorted({*product, *wanted}):
        ours, theirs = product.get(name, []), wanted.get(name, [])
        if len(ours) != len(theirs):
            lines.append(f"{name}: noted {len(ours)} times, {len(theirs)} by the reference")
            continue
        each = [decibels(a, b) for a, b in zip(ours, theirs, strict=True)]
        low = [i for i, db in enumerate(each) if not db >= bound]
        if low:
            worst = min(each[i] if not math.isnan(each[i]) else -math.inf for i in low)
            lines.append(f"{name}: {worst:.1f} dB at worst, first in note {low[0]} of {len(each)} ({each[low[0]]:.1f} dB)")
    return lines


def decibels(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The size of `wanted` above the difference from it; inf where they are equal."""
    if x.shape != wanted.shape:
        return -math.inf
    x, wanted = x.double(), wanted.double()
    if torch.equal(x, wanted) or bool(((x == wanted) | (x.isnan() & wanted.isnan())).all()):
        return math.inf
    noise, signal = (x - wanted).norm().item(), wanted.norm().item()
    return 20 * math.log10(signal / noise) if signal and noise else (math.inf if not noise else -math.inf)


def failures(entry: Entry, recipe: str, option: str) -> list[str]:
    """What differs, or the error that ended the program, if that is not the right one."""
    try:
        with _quiet():
            product, wanted = run(entry, recipe, option)
    except Exception as error:
        name = type(error).__name__
        if name == entry.refused.get(option):
            return []
        raise
    return differences(product, wanted, entry.bound) if wanted else ["the program noted nothing"]


def check(entry: Entry, recipe: str, option: str) -> None:
    """Raise AssertionError with what differs."""
    lines = failures(entry, recipe, option)
    assert not lines, f"{entry.name}, {recipe}, {option or 'defaults'}:\n" + "\n".join(lines)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the product's advice, and what torch says to these programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
