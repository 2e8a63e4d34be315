"""The options of a compiled model: one frozen object, checked when it is made and handed on as it is.

They are the arguments of `fp8_compile`. torch.compile's `options` for the backend "fp8pass", and the options of callbacks, are
the same arguments by the same names. A new option is a field of `CompileOptions` with its check, an argument of `fp8_compile`,
and the place that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from fp8pass.errors import OptionError, RuleError, nearest
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.recipes.engines import Engine, matching
from fp8pass.rules import SAVED, Rules, Schedule, Select, interned, parse_rules, parse_schedule

#: The compiler of rewritten graphs.
BackendName = Literal["inductor", "aot_eager"]
#: The end of a step of delayed scaling: the beginning of the next forward, or `state(model).step()`.
StepMode = Literal["auto", "manual"]
WeightCopies = Literal["auto", "save", "recompute", "cache"]
"""A choice for FP8 copies of weights that only the backward reads: saved, recomputed there, or, with "auto", recomputed from
4096 rows on. With "cache" the copies of all weights are cached between calls instead."""
#: The form in which FSDP2 gathers weights whose GEMMs run in FP8.
FsdpGather = Literal["fp8"]

#: The form in which the forward saves values for the backward that only pointwise code and norms read there.
SavedActivations = Literal["fp8"]

#: Why Inductor's C++ wrapper is refused.
NO_CPP_WRAPPER = (
    "torch's C++ wrapper (cpp_wrapper) crashes at operations that take a list of one tensor, as the casts of fp8pass do"
    " (pytorch/pytorch#190551)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The arguments of `fp8_compile`, whose docstring describes them, but `fullgraph` and `in_place`.

    Equal ones compile equal graphs: Dynamo then compiles a block once for all layers that are compiled one by one. Not compared
    are options that decide about no graph by themselves. The `repr` names what decides about a graph besides the rules, in
    words that are the same in every process: it is a part of the key of Inductor's cache.

    Raises RecipeError, RuleError or OptionError.
    """

    recipe: Recipe | RecipeName | None = field(default="delayed", compare=False, repr=False)
    rules: Mapping[str, Recipe | RecipeName | None] | None = field(default=None, compare=False, repr=False)
    backend: BackendName = "inductor"
    step: StepMode = field(default="auto", compare=False, repr=False)
    amax_reduction_group: dist.ProcessGroup | None = field(default=None, repr=False)
    dynamic: bool | None = field(default=None, compare=False, repr=False)
    mode: str | None = field(default=None, compare=False, repr=False)
    options: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    select: Select = field(default="auto", compare=False, repr=False)
    min_speedup: float | None = field(default=None, compare=False, repr=False)
    weight_copies: WeightCopies = "auto"
    saved_activations: SavedActivations | None = None
    strict: bool = field(default=False, compare=False, repr=False)
    match: Engine | None = field(default=None, compare=False, repr=False)
    schedule: Mapping[int, Mapping[str, Recipe | RecipeName | None]] | None = field(default=None, compare=False, repr=False)
    fsdp_gather: FsdpGather | None = None
    release_frozen: bool = False
    first_rules: Rules = field(init=False, repr=False)
    """`recipe`, `rules`, `select`, `min_speedup` and `match`, parsed: the rules of the first step."""
    later_rules: Schedule = field(init=False, repr=False, compare=False)
    """The schedule, parsed."""
    patches: dict[str, Any] = field(init=False, repr=False, hash=False)
    """Inductor's settings, from `mode` and `options`."""

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BackendName)
        check_choice("step", self.step, StepMode)
        check_choice("weight_copies", self.weight_copies, WeightCopies)
        check_choice("select", self.select, Select)
        _check_number("min_speedup", self.min_speedup)
        check_bool("strict", self.strict)
        check_bool("release_frozen", self.release_frozen)
        check_bool("dynamic", self.dynamic, or_none=True)
        given: object = self.options
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options is {given!r}, a {type(given).__name__}; use a dict such as {{'max_autotune': True}}")
        _check_group(self.amax_reduction_group)
        object.__setattr__(self, "patches", self._inductor_patches())
        if (self.options or {}).get("use_aoti"):
            raise OptionError("options={'use_aoti': True} replaces the backend, and so fp8pass; leave it out")
        if self.saved_activations is not None:
            check_choice("saved_activations", self.saved_activations, SavedActivations)
        rules = parse_rules(self.recipe, self.rules, self.select, self.min_speedup)
        later = parse_schedule(self.schedule, rules)
        self._check_saved((rules, *(each for _, each in later)))
        if self.match is not None:
            later = tuple((step, matching_rules(each, self.match)) for step, each in later)
            rules = matching_rules(rules, self.match)
        if self.fsdp_gather is not None:
            check_choice("fsdp_gather", self.fsdp_gather, FsdpGather)
        self._check_withheld()
        object.__setattr__(self, "first_rules", rules)
        object.__setattr__(self, "later_rules", later)

    @classmethod
    def named(cls, mode: object, options: object, dynamic: bool | None) -> CompileOptions:
        """The options of torch.compile(backend="fp8pass"), from torch.compile's arguments."""
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            raise OptionError(f"options is {options!r}, a {type(options).__name__}; use a dict such as {{'recipe': 'delayed'}}")
        for name in options:
            if name not in NAMES:
                raise OptionError(f"the option {name!r}={options[name]!r} {_advice(name)}")
        if options.get("release_frozen"):
            raise OptionError("release_frozen=True is an option of fp8_compile only; use fp8_compile(..., in_place=True)")
        given: dict[str, Any] = {"mode": mode, **options} if mode is not None else dict(options)
        return cls(**given, dynamic=dynamic)

    @property
    def torch_options(self) -> dict[str, Any]:
        """The part of `options` that torch.compile itself reads, whatever the backend is, as its arguments."""
        taken = {name: value for name, value in (self.options or {}).items() if name == "guard_filter_fn"}
        return {"options": taken} if taken else {}

    def in_words(self) -> dict[str, str]:
        """The options that decide about graphs besides the rules, by name, in words that are the same in every process."""
        return {field.name: repr(getattr(self, field.name)) for field in dataclasses.fields(self) if field.repr}

    def _inductor_patches(self) -> dict[str, Any]:
        """Inductor's settings for `mode` and `options`, checked by torch.compile's own rules."""
        mode, options = self.mode, {n: value for n, value in (self.options or {}).items() if n not in TORCH_OPTIONS}
        if mode is None and not options:
            return {}
        misplaced = next((name for name in options if name in ARGUMENTS), None)
        if self.backend != "inductor" and misplaced is None:
            given = f"mode={mode!r}" if mode is not None else f"options={options!r}"
            raise OptionError(f"{given} is for backend='inductor'; backend={self.backend!r} generates no code. Leave it out")
        if mode is not None and options:
            raise OptionError(f"mode={mode!r} and options={options!r}: torch.compile takes one of the two")
        if misplaced is not None:
            value = options[misplaced]
            raise OptionError(
                f"options={{{misplaced!r}: {value!r}}}: {misplaced} is an argument of fp8_compile itself; write"
                f" fp8_compile(model, ..., {misplaced}={value!r}). options takes Inductor's options, such as 'max_autotune'"
            )
        if options.get("cpp_wrapper"):
            raise OptionError(f"options={{'cpp_wrapper': True}}: {NO_CPP_WRAPPER}; leave it out")
        try:
            return dict(torch._TorchCompileInductorWrapper(mode, options, self.dynamic).config)
        except RuntimeError as error:
            raise OptionError(str(error)) from error

    def _check_saved(self, every: Sequence[Rules]) -> None:
        """Refuse what has no effect without `saved_activations`, and what cannot be together with it."""
        if self.saved_activations is None:
            if not every[0].has_gemms:
                raise OptionError("recipe=None leaves nothing to do; name a recipe, or add saved_activations='fp8'")
            named = next((rule.pattern for rules in every for rule in rules.rules if rule.role == SAVED), None)
            if named is not None:
                raise RuleError(
                    f"the rule {named!r} is for saved values, and none is saved in FP8: add saved_activations='fp8'"
                )
        else:
            refuse_torch_pass(self.patches)
        if self.match is not None and self.recipe is None:
            raise OptionError(f"match={self.match!r} and recipe=None, under which no GEMM runs in FP8; leave one out")

    def _check_withheld(self) -> None:
        """Refuse what cannot be together with Parameters that have no values, or are gathered in FP8."""
        if self.release_frozen and self.weight_copies not in ("auto", "cache"):
            raise OptionError(
                f"release_frozen=True and weight_copies={self.weight_copies!r}, which casts frozen weights at each call; use"
                f" 'auto' or 'cache'"
            )
        option = "release_frozen=True" if self.release_frozen else "fsdp_gather='fp8'" if self.fsdp_gather else ""
        if not option or self.backend != "inductor":
            return
        from torch._inductor import config

        if self.patches.get("triton.cudagraphs", config.triton.cudagraphs):
            raise OptionError(
                f"{option} with CUDA graphs, which ask for the addresses of all Parameters; leave out the mode"
                " 'reduce-overhead' and triton.cudagraphs, or use mode='max-autotune-no-cudagraphs'"
            )


#: The keys that torch.compile takes out of `options` before its backend sees them.
TORCH_OPTIONS = frozenset({"guard_filter_fn", "use_aoti"})
#: The keys of `options` of torch.compile(backend="fp8pass"); `dynamic` and `fullgraph` are torch.compile's own.
NAMES = tuple(f.name for f in dataclasses.fields(CompileOptions) if f.init and f.name != "dynamic")
#: The keyword arguments of `fp8_compile`.
ARGUMENTS = frozenset((*NAMES, "dynamic", "fullgraph", "in_place"))


def _advice(name: object) -> str:
    from torch._inductor import config

    text = str(name)
    if text in ("dynamic", "fullgraph"):
        return f"is an argument of torch.compile itself; write torch.compile(model, backend='fp8pass', {text}=...)"
    if text == "in_place":
        return (
            "is an argument of fp8_compile, which torch.compile(backend='fp8pass') does not have: write"
            " fp8_compile(model, ..., in_place=True), or model.compile(backend='fp8pass', options=...)"
        )
    if text.replace("-", "_") in config.get_config_copy():
        return f"is an option of Inductor; write options={{'options': {{{text!r}: ...}}}}"
    return f"is unknown.{nearest(text, NAMES)} Use {', '.join(NAMES)}"


def refuse_torch_pass(patches: Mapping[str, Any]) -> None:
    """Raise OptionError where torch's own pass quantizes what is saved, a second time. patches: the compilation's settings."""
    from torch._inductor import config

    given = patches.get("post_grad_fusion_options", config.post_grad_fusion_options)
    if given.get(_TORCH_PASS) is not None:
        raise OptionError(
            f"torch._inductor.config.post_grad_fusion_options[{_TORCH_PASS!r}] and saved_activations='fp8' both quantize values"
            f" the backward reads: delete the key, or leave saved_activations out"
        )


_TORCH_PASS = "activation_quantization_aten_pass"


def matching_rules(rules: Rules, engine: Engine) -> Rules:
    """Make the recipes of rules quantize forward operands as the engine does."""
    check_choice("match", engine, Engine)
    if rules.min_speedup is not None:
        raise OptionError(
            f"min_speedup={rules.min_speedup!r} and match={engine!r}: an engine makes no choice by an estimate; leave one out"
        )
    changed = [dataclasses.replace(r, recipe=None if r.recipe is None else matching(r.recipe, engine)) for r in rules.rules]
    return interned(dataclasses.replace(rules, default=matching(rules.default, engine), rules=tuple(changed)))


def check_bool(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise OptionError unless an argument is True or False."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise OptionError(f"{name} is {value!r}; use True{', False or None' if or_none else ' or False'}")


def _check_number(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < float("inf")):  # type: ignore[operator]
        raise OptionError(f"{name} is {value!r}; use a positive number such as 1.0, or None")


def _check_group(group: object) -> None:
    not_a_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not_a_member:
        raise OptionError(
            "amax_reduction_group is a group that this rank is not a member of; pass each rank the group that it belongs to"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"amax_reduction_group is {group!r}, a {type(group).__name__}; pass a ProcessGroup,"
            f" such as torch.distributed.new_group(ranks) or mesh.get_group(), or None for all ranks"
        )


def check_choice(name: str, value: object, literal: Any) -> None:
    choices = get_args(literal)
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise OptionError(f"{name} is {value!r}.{hint} Use one of {', '.join(map(repr, choices))}")
