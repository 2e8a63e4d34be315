"""Rules: which recipe a GEMM follows, by module path and role. The first match wins."""

from __future__ import annotations

import dataclasses
import fnmatch
import weakref
from collections.abc import Iterable, Mapping
from typing import Literal

from fp8pass.errors import RecipeError, RuleError, nearest
from fp8pass.recipes import NO_RECIPE, Recipe, as_recipe
from fp8pass.recipes.recipe import is_int

#: GEMMs that run in FP8 if no rule matches: all but those that `rewrite.select` finds, or all that can.
Select = Literal["auto", "all"]
ROLES = ("output", "grad_input", "grad_weight")
#: The role of values that the forward saves for the backward, which are no GEMM's.
SAVED = "saved"
#: Other projects' words for roles.
ROLE_WORDS = {
    word: name
    for name, words in {
        "output": "fprop fwd forward y",
        "grad_input": "dgrad dx grad_x bprop input_grad",
        "grad_weight": "wgrad dw grad_w gw weight_grad",
    }.items()
    for word in words.split()
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One pattern: GEMMs and saved values that match it follow `recipe`, or are kept in high precision if it is None."""

    pattern: str
    module: str
    role: str | None
    recipe: Recipe | None

    def matches(self, module: str, role: str) -> bool:
        """True if the GEMM or the saved value `role` of the module at path `module` falls under this rule."""
        return (self.role is None or self.role == role) and fnmatch.fnmatchcase(module, self.module)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The user's rules in order, and the recipe of everything that no rule matches."""

    default: Recipe
    rules: tuple[Rule, ...] = ()
    select: Select = "auto"
    """GEMMs that no rule matches: "auto" leaves those that `rewrite.select` finds in high precision, "all" none."""
    min_speedup: float | None = None
    """GEMMs that no rule matches and that have a smaller expected speed-up are kept in high precision."""

    def find(self, module: str, role: str) -> Rule | None:
        """The first rule that matches, or None where the default recipe holds."""
        return next((rule for rule in self.rules if rule.matches(module, role)), None)

    def recipe_for(self, module: str, role: str) -> Recipe | None:
        """The recipe of a GEMM, or None if it is in high precision."""
        rule = self.find(module, role)
        return self.default if rule is None else rule.recipe

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe that some GEMM may follow, without repetition, the default one first."""
        candidates: Iterable[Recipe | None] = (self.default, *(rule.recipe for rule in self.rules))
        return tuple(dict.fromkeys(r for r in candidates if r is not None))

    @property
    def has_gemms(self) -> bool:
        """True if some GEMM may run in FP8."""
        return any(recipe.has_gemms for recipe in self.recipes)

    @property
    def stateful(self) -> tuple[Recipe, ...]:
        """The recipes that keep state."""
        return tuple(r for r in self.recipes if r.keeps_state)


Schedule = tuple[tuple[int, Rules], ...]
"""(number of steps, the rules from then on), in the order of the steps."""


def parse_rules(
    recipe: object, rules: Mapping[str, object] | None, select: Select = "auto", min_speedup: float | None = None
) -> Rules:
    """Check what the user passed: raises RecipeError for `recipe` and RuleError for `rules`. recipe: None for no FP8 GEMMs."""
    default = NO_RECIPE if recipe is None else as_recipe(recipe)
    if rules is not None and not isinstance(rules, Mapping):
        raise RuleError(f"rules is a {type(rules).__name__}; use a dict of pattern -> recipe or None")
    parsed = tuple(_parse_rule(pattern, value) for pattern, value in (rules or {}).items())
    return interned(Rules(default, parsed, select, min_speedup))


_known: weakref.WeakKeyDictionary[Rules, weakref.ref[Rules]] = weakref.WeakKeyDictionary()


def interned(rules: Rules) -> Rules:
    """The first of all equal rules that are alive: models with equal ones share graphs, and each call finds its graph by the
    identity of its rules."""
    known = _known.get(rules, lambda: None)()
    if known is None:
        _known[rules] = weakref.ref(rules)
    return known or rules


def parse_schedule(schedule: object, start: Rules) -> Schedule:
    """The rules from certain steps on; the default recipe and selection are those of `start`. Raises RuleError."""
    if schedule is None:
        return ()
    if not isinstance(schedule, Mapping):
        raise RuleError(
            f"schedule is a {type(schedule).__name__}; use a dict of step -> rules, such as {{20_000: {{'*': None}}}}"
        )
    for step in schedule:
        if not is_int(step) or step < 1:
            raise RuleError(f"the schedule has the step {step!r}; use a positive int, and `rules` for those from the start")
    return tuple((step, _at(step, schedule[step], start)) for step in sorted(schedule))


def _at(step: int, rules: object, start: Rules) -> Rules:
    try:
        if not isinstance(rules, Mapping):
            raise RuleError(f"the rules are {rules!r}; use a dict of pattern -> recipe or None, {{}} for no rules")
        return with_rules(start, rules)
    except RuleError as error:
        raise RuleError(f"the schedule at step {step}: {error}") from error


def with_rules(start: Rules, rules: Mapping[str, object] | None) -> Rules:
    """Other rules with the same default recipe and selection. Raises RuleError."""
    return parse_rules(start.default, rules, start.select, start.min_speedup)


def _parse_rule(pattern: object, value: object) -> Rule:
    if not isinstance(pattern, str) or not pattern:
        raise RuleError(f"the pattern {pattern!r} is not a module path; use a glob such as 'layers.*.mlp.*'")
    module, colon, role = pattern.rpartition(":")
    if not colon:
        module, role = pattern, ""
    elif role not in (*ROLES, SAVED):
        known = (*ROLES, SAVED)
        raise RuleError(
            f"the rule {pattern!r} names the role {role!r}.{nearest(role, known, ROLE_WORDS)} Roles are {', '.join(known)}."
            f" Where a colon is a part of a module's name, write '?' for it: {pattern.replace(':', '?')!r}"
        )
    try:
        found = None if value is None else as_recipe(value)
    except RecipeError as error:
        raise RuleError(f"the rule {pattern!r}: {error}, or None for high precision") from error
    return Rule(pattern, module or "*", role or None, found)
