"""A recipe: options, decisions about operands and GEMMs, and the checks that recipes share."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeGuard, TypeVar, dataclass_transform, get_args

import torch

from fp8pass.errors import Reason, ReasonKind, RecipeError, nearest
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization
from lowering.formats import E4M3, E5M2, Granularity

T = TypeVar("T")

BackwardOverride = Literal["high_precision", "dequantized"]
"""Operands of backward GEMMs that do not run in FP8: the original operands, or the forward's FP8 copies converted back."""


class Format(enum.Enum):
    """FP8 formats of a recipe: one dtype for the forward's tensors and one for gradients."""

    E4M3 = "e4m3"
    """E4M3 everywhere: more precision, less range."""
    E5M2 = "e5m2"
    """E5M2 everywhere. No FP8 GEMM takes two E5M2 operands, so no recipe accepts it."""
    HYBRID = "hybrid"
    """E4M3 for inputs and weights, E5M2 for gradients."""

    @property
    def forward(self) -> torch.dtype:
        """dtype of inputs and weights."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def backward(self) -> torch.dtype:
        """dtype of output gradients."""
        return E4M3 if self is Format.E4M3 else E5M2


class Recipe(abc.ABC):
    """The options of a recipe and what it decides. Subclasses are frozen dataclasses and hashable.

    Only `name` and `quantization` are required. `fast_accum_output`, `fast_accum_grad_input` and `fast_accum_grad_weight` are
    read where a subclass has them as fields.
    """

    name: ClassVar[str]
    """The name in tables and records."""
    keeps_state: ClassVar[bool] = False
    """Scales and amax histories of its tensors are in the state: DelayedScaling and its subclasses."""
    has_gemms: ClassVar[bool] = True
    """GEMMs run in FP8 under it."""
    backward_override: BackwardOverride | None = None
    """TransformerEngine's option: see `BackwardOverride`. A field of recipes that have it."""

    @abc.abstractmethod
    def quantization(self, operand: Operand, role: str) -> Quantization:
        """Decide about an operand of a GEMM. role: "output", "grad_input" or "grad_weight"; the operand's `kind` is "input",
        "weight" or "grad_output"."""

    def saved(self) -> Quantization:
        """Decide how values are saved for the backward with `saved_activations="fp8"`: E4M3 with a scale per 1x128 values."""
        return Quantization(E4M3, Granularity.BLOCK_1X128, power_of_2=True)

    def fast_accum(self, role: str) -> bool:
        """True if the GEMM of a role may accumulate in the tensor cores' shorter accumulator, where it has the choice."""
        chosen: bool = getattr(self, f"fast_accum_{role}", False)
        return chosen

    def obstacle(self, site: GemmSite) -> Reason | None:
        """The reason why this GEMM is kept in high precision by the recipe, besides what holds for all with such scales."""
        if self.backward_override is None or site.role == "output":
            return None
        return Reason(ReasonKind.RECIPE, f"backward_override={self.backward_override!r} keeps high precision")


@dataclasses.dataclass(frozen=True)
class NoRecipe(Recipe):
    """`recipe=None`: all GEMMs run in high precision, except those that rules name another recipe for."""

    name: ClassVar[str] = "none"
    has_gemms: ClassVar[bool] = False

    def quantization(self, operand: Operand, role: str) -> Quantization:
        raise AssertionError(f"{role} of {operand.value.root} is not quantized")

    def obstacle(self, site: GemmSite) -> Reason | None:
        return Reason(ReasonKind.RECIPE, "recipe=None keeps GEMMs in high precision")


NO_RECIPE = NoRecipe()


#: Recipes by the names that users give, and other projects' words -> these names: see `named`.
NAMED: dict[str, Callable[[], Recipe]] = {}
WORDS: dict[str, str] = {}


def named(name: str, words: str = "", **options: Any) -> Callable[[type[T]], type[T]]:
    """Name a recipe with options, for users and for the error that a word of torchao, TransformerEngine, vLLM, a paper or a
    configuration file gets. words: those words in lower case, with underscores, separated by spaces."""

    def declare(cls: type[T]) -> type[T]:
        made: Any = cls
        NAMED[name] = functools.partial(made, **options) if options else made
        WORDS.update(dict.fromkeys(words.split(), name))
        return cls

    return declare


@dataclass_transform(frozen_default=True, kw_only_default=True)
def recipe(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose constructor names the nearest right option for a wrong one."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    generated: Callable[..., None] = made.__init__
    known = [f.name for f in dataclasses.fields(made)]

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if args:
            raise RecipeError(f"{cls.__name__} takes keyword options only, got {args[0]!r}; write for example {known[0]}=...")
        for option in options:
            if option not in known:
                raise RecipeError(
                    f"{cls.__name__} has no option {option!r}.{nearest(option, known)} Its options are {', '.join(known)}"
                )
        generated(self, **options)

    made.__init__ = __init__
    return made


def check(recipe: Any, option: str, is_right: bool, fix: str) -> None:
    """Raise RecipeError with the option's value and the fix unless `is_right`."""
    if not is_right:
        raise RecipeError(f"{type(recipe).__name__}({option}={getattr(recipe, option)!r}): {fix}")


def is_int(value: object) -> TypeGuard[int]:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_options(recipe: Any, **unused: object) -> None:
    """Check the options that several recipes have: `fp8_format`, `amax_epsilon`, `backward_override`, and all that are True or
    False. unused: options that only FP8 backward GEMMs read, and their defaults, besides those of fast accumulation."""
    defaults = {f.name: f.default for f in dataclasses.fields(recipe)}
    if "fp8_format" in defaults:
        _check_format(recipe)
    if "amax_epsilon" in defaults:
        epsilon = recipe.amax_epsilon
        is_number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
        check(recipe, "amax_epsilon", is_number and 0.0 <= epsilon < float("inf"), "use a finite number of 0.0 or more")
    for option in (name for name, default in defaults.items() if isinstance(default, bool)):
        check(recipe, option, isinstance(getattr(recipe, option), bool), "use True or False")
    if "backward_override" in defaults:
        _check_override(recipe, unused)


def _check_format(recipe: Any) -> None:
    """Raise RecipeError unless `fp8_format` is a Format that GEMMs exist for."""
    value = recipe.fp8_format
    if not isinstance(value, Format):
        home, name = home_of(value), getattr(value, "name", None)
        if home is not None and name in Format.__members__:
            check(recipe, "fp8_format", False, f"this is {home}'s; use fp8pass.Format.{name}")
        check(recipe, "fp8_format", False, "use Format.HYBRID or Format.E4M3 (from fp8pass import Format)")
    fix = "no GEMM takes two E5M2 operands; use Format.HYBRID or Format.E4M3"
    check(recipe, "fp8_format", value is not Format.E5M2, fix)


def home_of(value: object) -> str | None:
    """ "transformer_engine" or "torchao" for a class, an object or a function of theirs; None for everything else."""
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package if package in ("transformer_engine", "torchao") else None


def _check_override(recipe: Any, unused: dict[str, object]) -> None:
    """Raise RecipeError unless `backward_override` is None or known, and nothing is set that only FP8 backward GEMMs read."""
    choice, known = recipe.backward_override, get_args(BackwardOverride)
    hint = nearest(choice, known) if isinstance(choice, str) else ""
    is_known = choice is None or (isinstance(choice, str) and choice in known)
    check(recipe, "backward_override", is_known, f"use None, 'high_precision' or 'dequantized'.{hint}")
    if choice is None:
        return
    fast_accum = ("fast_accum_grad_input", "fast_accum_grad_weight")
    without_fp8 = {option: False for option in fast_accum if hasattr(recipe, option)} | unused
    for option, default in without_fp8.items():
        fix = f"no backward GEMM runs in FP8 with backward_override={choice!r}; leave {option} at {default!r}"
        check(recipe, option, getattr(recipe, option) == default, fix)


def fp8_dtype(recipe: Any, operand: Operand) -> torch.dtype:
    """The FP8 dtype of an operand by the recipe's `fp8_format`."""
    formats = recipe.fp8_format
    dtype: torch.dtype = formats.backward if operand.kind == "grad_output" else formats.forward
    return dtype


def in_words(recipe: Recipe, *, changed_only: bool = False) -> str:
    """A recipe with its options, in words equal in every process. changed_only: without those that are as by default."""
    fields: Any = recipe
    options = ((f.name, getattr(recipe, f.name), f.default) for f in dataclasses.fields(fields))
    shown = (f"{name}={_text(value)}" for name, value, default in options if not changed_only or value != default)
    return f"{type(recipe).__name__}({', '.join(shown)})"


def _text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return str(getattr(value, "__qualname__", repr(value)))
