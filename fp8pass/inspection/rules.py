"""Rules that have decided no GEMM, and why."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence

from fp8pass.errors import nearest, preview
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rules import ROLE_WORDS, ROLES, Rule

#: A subscript as Python writes it: `layers[0]`. Behind a dot it would be a set of digits.
_INDEX = re.compile(r"(?<=[\w\]])\[(\d+)\]")


def deciding(rules: Iterable[Rule], gemm: GemmRecord) -> Rule | None:
    """The rule that decides about a GEMM: the first that matches."""
    return next((rule for rule in rules if rule.matches(gemm.module, gemm.role)), None)


def unmatched(rules: Sequence[Rule], gemms: Iterable[GemmRecord]) -> list[Rule]:
    """The rules that decide about none of these GEMMs, in order."""
    matched = {rule.pattern for g in gemms if (rule := deciding(rules, g)) is not None}
    return [rule for rule in rules if rule.pattern not in matched]


def remark_on(rule: Rule, rules: Sequence[Rule], gemms: Sequence[GemmRecord]) -> str:
    """Why a rule has decided no GEMM, and what to write instead."""
    same = [g for g in gemms if rule.matches(g.module, g.role)]
    if same:
        earlier = dict.fromkeys(found.pattern for g in same if (found := deciding(rules, g)) is not None)
        return f"The rule {rule.pattern!r} decides nothing: its GEMMs match {preview(map(repr, earlier))} first."
    said = f"The rule {rule.pattern!r} has matched no GEMM."
    role = f":{rule.role}" if rule.role else ""
    modules = sorted({g.module for g in gemms})
    if any(dataclasses.replace(rule, role=None).matches(module, "") for module in modules):
        return f"{said} The module has none with the role {rule.role}."
    if rule.role is None and (rule.module in ROLES or rule.module in ROLE_WORDS):
        meant = ROLE_WORDS.get(rule.module, rule.module)
        return f"{said} A role stands behind a colon; did you mean {'*:' + meant!r}?"
    dotted = _INDEX.sub(r".\1", rule.module)
    if dotted != rule.module:
        for pattern in (dotted, f"{dotted}.*"):
            if fnmatch.filter(modules, pattern):
                return f"{said} In a pattern [...] is a set of characters; did you mean {pattern + role!r}?"
    if fnmatch.filter(modules, below := f"{rule.module}.*"):
        return f"{said} It does not cover the modules inside; did you mean {below + role!r}?"
    return said + nearest(rule.module, modules)
