"""Everything that a user is told: errors, whose texts name the value and the fix, warnings, and reasons for high precision."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType, MappingProxyType

import torch


class Fp8Error(Exception):
    """Base of all errors that fp8pass raises on purpose."""


class RecipeError(Fp8Error, ValueError):
    """A recipe option is unknown or has an invalid value."""


class OptionError(Fp8Error, ValueError):
    """An argument of `fp8_compile` has an invalid value."""


class RuleError(Fp8Error, ValueError):
    """A rule's pattern or value is malformed, or one compiled graph would have to follow two different rules."""


class NotCompiledError(Fp8Error, TypeError):
    """The object passed to `inspect` or `state` did not come from `fp8_compile`."""


class UnknownTensorError(Fp8Error, KeyError):
    """No quantized tensor has this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointMismatchError(Fp8Error, ValueError):
    """A saved state does not fit this model and recipe; the state was left as it was."""


class UnsupportedDeviceError(Fp8Error, RuntimeError):
    """The device has no FP8 tensor cores."""


class UnsupportedCopyError(Fp8Error, TypeError):
    """A compiled model cannot be copied or pickled."""


class UnsupportedError(Fp8Error, RuntimeError):
    """A feature of torch does not work with a compiled model: `torch.export`, batched gradients, Inductor's `nan_asserts`,
    steps that reduce over ranks under torch.distributed's `Join`."""


class RankMismatchError(Fp8Error, RuntimeError):
    """Ranks that train one model together compile it with different recipes, rules or options."""


class AmaxReductionError(RankMismatchError):
    """Ranks disagree on the set of tensors whose amaxes they reduce."""


class StrictError(Fp8Error, RuntimeError):
    """An `Fp8Warning`, raised because of `strict=True`."""


class NotTracedError(Fp8Error, RuntimeError):
    """A graph came from torch's cache and cannot be traced any more."""


class ExportError(Fp8Error, ValueError):
    """A model cannot be exported as requested; no file of an earlier export was changed."""


class ForwardModeError(Fp8Error, NotImplementedError):
    """A compiled graph was called with tangents of forward-mode differentiation, which FP8 operations do not have."""


class ReleasedWeightError(Fp8Error, RuntimeError):
    """A Parameter was read whose values `release_frozen=True` has freed."""


class StaleWeightError(Fp8Error, RuntimeError):
    """Calls have used FP8 copies of a Parameter's old values: with `weight_copies="cache"` it was written to in a way that
    cannot be detected at once. The copies were discarded; the next call makes new ones."""


class Fp8Warning(UserWarning):
    """Something does not run as requested, for example: a rule matches nothing, no GEMM runs in FP8, a GEMM that looks like a
    head does, or `model.compile()` replaced `fp8_compile(in_place=True)`. Each is given once per compiled model."""


class Fp8FallbackWarning(Fp8Warning):
    """torch.compile ran the model, or modules of it, eagerly, so in high precision."""


class InvariantError(Fp8Error, AssertionError):
    """The rewritten graph violates an invariant. This is a bug in fp8pass: please report it, with the node named."""


def tell(text: str, category: type[Fp8Warning], *, strict: bool) -> None:
    """Warn at the line of the user's code that is running, or raise StrictError."""
    if strict:
        raise StrictError(f"{text} (an error because of strict=True)")
    warnings.warn(text, category, stacklevel=_stacklevel_of_caller())


def _stacklevel_of_caller() -> int:
    """The level that makes a warning of the calling function point at the first frame that is neither torch's nor ours."""
    own = tuple(f"{os.path.dirname(str(package))}{os.sep}" for package in (torch.__file__, __file__))
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
        level += 1
    return level


def nearest(name: str, known: Iterable[str], words: Mapping[str, str] = MappingProxyType({})) -> str:
    """' Did you mean ...?' for a misspelt name, or for another project's word for one of `known`, or ''. words: such words, in
    lower case with underscores -> the name that is meant."""
    meant = words.get(name.lower().replace("-", "_").replace(" ", "_"))
    if meant is not None:
        return f" Did you mean {meant!r}?"
    by_lower = {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean {by_lower[matches[0]]!r}?" if matches else ""


def preview(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# -- reasons


class ReasonKind(enum.Enum):
    """The kind of an obstacle: the first word of the reason's text."""

    RULE = "rule"
    RECIPE = "recipe"
    """An option of the recipe."""
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    HARDWARE = "hardware"
    """The device has no GEMM of this kind."""
    OPERAND_FORMATS = "operand formats"
    UNSUPPORTED_OP = "unsupported op"
    ROUTING = "routing"
    """The GEMM's result selects rows."""
    HEAD = "head"
    """The output embedding."""
    THIN = "thin"
    """Too few columns, or too short a K."""
    NO_DATA = "no data"
    """A weight, or a penalty on one, is made by multiplying Parameters and buffers."""
    LINEAR_ALGEBRA = "linear algebra"
    """An inverse, a decomposition or a solution is computed of the result."""
    GRADIENT_FORMULA = "gradient formula"
    """A product in the gradient of an operation that is no GEMM, such as an inverse."""
    EAGER = "ran eagerly"
    """torch.compile left its module out of the compiled graphs."""
    SLOW = "slow"
    """Expected to be slower in FP8."""
    READERS = "readers"
    """Something else reads a gathered tensor in high precision."""
    SCALES = "scales"
    """The ranks of a gather do not have equal scales."""
    BYTES = "bytes"
    """FP8 would not make the message smaller."""
    DERIVED = "derived"
    """A weight that is computed in each call."""
    SHARDED = "sharded"
    """A weight whose content is spread over ranks, and goes away between calls."""
    UNTRACKED = "untracked"
    """A weight that does not count its changes."""
    SMALL = "small"
    """A saved value of few elements."""
    SENSITIVE = "sensitive"
    """A saved value whose rounding errors the backward would magnify."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """A typed reason with its particulars."""

    kind: ReasonKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}"
