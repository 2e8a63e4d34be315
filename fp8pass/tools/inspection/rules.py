"""Rules that have decided no GEMM, and why."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import re
from collections.abc import Iterable, Iterator, Sequence

from fp8pass.errors import nearest, preview
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rules import ROLE_WORDS, ROLES, Rule

#: A subscript as Python writes it: `layers[0]`. Behind a dot it would be a set of digits.
_INDEX = re.compile(r"(?<=[\w\]])\[(\d+)\]")
#: Numbers of equal layers as tables fold them: `0-31`, `{0,2}`.
_FOLDED = re.compile(r"(?<=\.)(?:\d+-\d+|\{[\d,-]+\})(?=\.|$)|^(?:\d+-\d+|\{[\d,-]+\})(?=\.|$)")


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
    for why, pattern in _meant(rule.module, modules):
        if fnmatch.filter(modules, pattern.partition(":")[0]):
            return f"{said} {why}; did you mean {pattern + (role if ':' not in pattern else '')!r}?"
    return said + (_numbers(_INDEX.sub(r".\1", rule.module), modules) or nearest(rule.module, map(as_pattern, modules)))


def as_pattern(module: str) -> str:
    """The pattern that matches this module alone; a colon in its name, behind which a role would stand, is written as "?"."""
    return glob.escape(module).replace(":", "?")


def _meant(pattern: str, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What people write for a pattern: why it matches nothing, and what they may mean."""
    if pattern in modules:
        yield "In a pattern [...] is a set of characters", as_pattern(pattern)
    dotted = _INDEX.sub(r".\1", pattern)
    if dotted != pattern:
        yield "In a pattern [...] is a set of characters", dotted
        yield "In a pattern [...] is a set of characters", f"{dotted}.*"
    yield "It does not cover the modules inside", f"{pattern}.*"
    stem, _, last = pattern.rpartition(".")
    if last in ROLES or last in ROLE_WORDS:
        yield "A role stands behind a colon", f"{stem}:{ROLE_WORDS.get(last, last)}"
    if last in ("weight", "bias"):
        yield "Rules name modules, not Parameters", stem
    folded = _FOLDED.sub(lambda found: f"[{found[0]}]" if len(found[0]) == 3 else "*", pattern)
    if folded != pattern:
        yield "Tables fold equal layers", folded
    prefixes = {module[: dot.start()] for module in modules for dot in re.finditer(r"\.", module)}
    for inner in dict.fromkeys((pattern, dotted, f"{dotted}.*")):
        found = [prefix for prefix in prefixes if fnmatch.filter(modules, f"{prefix}.{inner}")]
        if found:
            yield "Paths begin at the compiled model", f"{found[0] if len(found) == 1 else '*'}.{inner}"


def _numbers(pattern: str, modules: Sequence[str]) -> str:
    """Which numbers there are where a pattern has one that no module has."""
    for found in re.finditer(r"(?<=\.)\d+(?=\.|$)|\[-\d+\]", pattern):
        before = pattern[: found.start()].rstrip(".")
        parts = (m.removeprefix(f"{before}.").partition(".")[0] for m in modules if m.startswith(f"{before}."))
        there = sorted({int(part) for part in parts if part.isdecimal()})
        if there and found[0].strip("[]") not in map(str, there):
            last = f"{before}.{there[-1]}{pattern[found.end() :]}"
            return f" {before!r} has {there[0]} to {there[-1]}; did you mean {last!r}?"
    return ""
