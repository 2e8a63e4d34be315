"""Recipes: how tensors are scaled. Frozen data with TransformerEngine's names and defaults, checked when they are made."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import torch

from fp8pass.errors import RecipeError, nearest
from lowering.formats import E4M3, E5M2

_T = TypeVar("_T")
AmaxAlgo = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


class Format(enum.Enum):
    """FP8 formats of a recipe: one dtype for the forward's tensors and one for gradients."""

    E4M3 = "e4m3"
    """E4M3 everywhere: more precision, less range."""
    E5M2 = "e5m2"
    """E5M2 everywhere. No GEMM takes two E5M2 operands, so no recipe accepts it."""
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


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def _recipe(cls: type[_T]) -> type[_T]:
    """A frozen keyword-only dataclass whose constructor names the nearest right option for a wrong one."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    generated = made.__init__
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
    return cls


def _check(recipe: Any, option: str, is_right: bool, fix: str) -> None:
    if not is_right:
        raise RecipeError(f"{type(recipe).__name__}({option}={getattr(recipe, option)!r}): {fix}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_format(recipe: Any) -> None:
    value = recipe.fp8_format
    if not isinstance(value, Format):
        names = [f.name for f in Format]
        hint = nearest(value.upper(), names) if isinstance(value, str) else ""
        _check(recipe, "fp8_format", False, f"use Format.HYBRID or Format.E4M3.{hint}")
    _check(recipe, "fp8_format", value is not Format.E5M2, "no GEMM takes two E5M2 operands; use Format.HYBRID or Format.E4M3")


def _check_bools(recipe: Any, *options: str) -> None:
    for option in options:
        _check(recipe, option, isinstance(getattr(recipe, option), bool), "use True or False")


def _check_epsilon(recipe: Any) -> None:
    epsilon = recipe.amax_epsilon
    is_number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    _check(recipe, "amax_epsilon", is_number and 0.0 <= epsilon < float("inf"), "use a finite number of 0.0 or more")


_FAST_ACCUM = ("fast_accum_output", "fast_accum_grad_input", "fast_accum_grad_weight")


class _PerTensor:
    """What recipes with one scale per tensor share."""

    keeps_state: ClassVar[bool] = False
    is_blockwise: ClassVar[bool] = False


@_recipe
class DelayedScaling(_PerTensor):
    """One scale per tensor, from the amaxes of earlier steps: each tensor is read once. Source: TransformerEngine."""

    name: ClassVar[str] = "delayed"
    keeps_state: ClassVar[bool] = True

    margin: int = 0
    """The scale leaves 2**margin of headroom: scale = fp8_max / 2**margin / amax."""
    fp8_format: Format = Format.HYBRID
    """Formats of the forward's tensors and of gradients."""
    amax_history_len: int = 1024
    """Number of steps whose amaxes a scale looks at, at least 1."""
    amax_compute_algo: AmaxAlgo = "max"
    """"max" or "most_recent" of the history, or a function amax_history[len, n] -> amax[n] (row 0: the current step)."""
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    """A function (amax[n], scale[n], fp8_max[n], recipe) -> scale[n], or None for the formula above."""
    reduce_amax: bool = True
    """Whether amaxes are reduced (MAX) over `amax_reduction_group` at each step boundary."""
    fast_accum_output: bool = True
    """Whether the forward GEMM may accumulate in the tensor cores' shorter accumulator."""
    fast_accum_grad_input: bool = False
    """The same for the grad_input GEMM."""
    fast_accum_grad_weight: bool = False
    """The same for the grad_weight GEMM."""

    def __post_init__(self) -> None:
        _check_format(self)
        _check(self, "margin", _is_int(self.margin) and -100 <= self.margin <= 100, "use an int between -100 and 100")
        length = self.amax_history_len
        _check(self, "amax_history_len", _is_int(length) and length >= 1, "use an int of at least 1")
        algo = self.amax_compute_algo
        hint = nearest(algo, ("max", "most_recent")) if isinstance(algo, str) else ""
        is_algo = algo in ("max", "most_recent") if isinstance(algo, str) else callable(algo)
        _check(self, "amax_compute_algo", is_algo, f"use 'max', 'most_recent' or a function.{hint}")
        factor = self.scaling_factor_compute_algo
        _check(self, "scaling_factor_compute_algo", factor is None or callable(factor), "use a function or None")
        _check_bools(self, "reduce_amax", *_FAST_ACCUM)


@_recipe
class Float8CurrentScaling(_PerTensor):
    """One scale per tensor, from the tensor itself: its amax is read first. Source: TransformerEngine."""

    name: ClassVar[str] = "current"

    fp8_format: Format = Format.HYBRID
    """Formats of the forward's tensors and of gradients."""
    use_power_2_scales: bool = False
    """Whether scales are rounded down to powers of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes count as this one."""
    fast_accum_output: bool = True
    """Whether the forward GEMM may accumulate in the tensor cores' shorter accumulator."""
    fast_accum_grad_input: bool = False
    """The same for the grad_input GEMM."""
    fast_accum_grad_weight: bool = False
    """The same for the grad_weight GEMM."""

    def __post_init__(self) -> None:
        _check_format(self)
        _check_epsilon(self)
        _check_bools(self, "use_power_2_scales", *_FAST_ACCUM)


@_recipe
class Float8BlockScaling:
    """One scale per 128 values or per 128x128 tile (DeepSeek-V3). Source: TransformerEngine."""

    name: ClassVar[str] = "blockwise"
    keeps_state: ClassVar[bool] = False
    is_blockwise: ClassVar[bool] = True

    fp8_format: Format = Format.E4M3
    """Formats of the forward's tensors and of gradients."""
    x_block_scaling_dim: int = 1
    """1: inputs have a scale per 1x128 values along K; 2: per 128x128 tile."""
    w_block_scaling_dim: int = 2
    """The same for weights."""
    grad_block_scaling_dim: int = 1
    """The same for output gradients."""
    use_f32_scales: bool = False
    """Whether scales may be any float32; by default they are powers of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes count as this one."""

    def __post_init__(self) -> None:
        _check_format(self)
        _check_epsilon(self)
        _check_bools(self, "use_f32_scales")
        dims = {o: getattr(self, o) for o in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")}
        for option, value in dims.items():
            _check(self, option, _is_int(value) and value in (1, 2), "use 1 (1x128) or 2 (128x128)")
        two = [option for option, value in dims.items() if value == 2]
        if len(two) > 1:
            raise RecipeError(
                f"Float8BlockScaling({two[0]}=2, {two[1]}=2): these two tensors meet in one GEMM, and none takes 128x128 by"
                f" 128x128; set one of them to 1"
            )


Recipe = DelayedScaling | Float8CurrentScaling | Float8BlockScaling

PRESETS: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "blockwise": Float8BlockScaling,
}


def as_recipe(value: object) -> Recipe:
    """The recipe that `value` is or names; raises RecipeError otherwise."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str):
        if value in PRESETS:
            return PRESETS[value]()
        raise RecipeError(f"no recipe is called {value!r}.{nearest(value, PRESETS)} Use one of {', '.join(PRESETS)}")
    hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, Recipe) else ""
    known = ", ".join(PRESETS)
    raise RecipeError(f"recipe is {value!r}, a {type(value).__name__}; use a recipe object or one of {known}{hint}")
