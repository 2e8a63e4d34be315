"""The difference of two inspections, and its causes: `diff(inspect(a), inspect(b))`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8pass.errors import OptionError, preview
from fp8pass.graph.origin import family
from fp8pass.graph.values import by_key
from fp8pass.tools.inspection import Inspection
from fp8pass.tools.tables import as_html, as_text, folded_path, make_table, shape_text

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("module", "role", "before", "after", "why")
#: The parts of a decision: its format, or the kind of obstacle. Sizes and estimates in a reason's text do not.
_DECISION = ("quantized", "recipe", "a_format", "b_format", "a_scaling", "b_scaling")
_SHAPE = ("m", "n", "k", "groups")
#: The result of `Inspection.decisions`.
Decisions = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A GEMM that two inspections decided differently."""

    module: str
    role: str
    before: Mapping[str, Any]
    """Its record in the first inspection: the fields of GemmRecord, and `rule`, the pattern of the rule that decided it."""
    after: Mapping[str, Any]
    """Its record in the second."""
    causes: tuple[str, ...]
    """The differences between the two that decide about this GEMM, such as "rule: none -> 'head'" or "shape: ...". Versions are
    named where nothing nearer differs."""


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """The difference of two inspections. False as a bool if there is none."""

    changes: list[Change]
    """GEMMs of both whose decision differs."""
    only_before: list[str]
    """GEMMs only in the first, as "module:role"."""
    only_after: list[str]
    """GEMMs only in the second."""
    num_equal: int
    """GEMMs of both with the same decision."""
    num_resized: int
    """GEMMs with the same decision and another shape."""
    settings: list[str]
    """Rules, options and versions that differ, whether or not they changed a decision."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.only_before or self.only_after)

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain lists, dicts, strings and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return as_text([*([self.__rich__()] if self.changes else ()), *self._remarks()])

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def __rich__(self) -> Table:
        return make_table(COLUMNS, _rows(self.changes))

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return as_html(COLUMNS, _rows(self.changes), self._remarks())

    def _remarks(self) -> list[str]:
        resized = f", {self.num_resized} of them with another shape" if self.num_resized else ""
        lines = [f"{len(self.changes)} GEMMs changed their decision; {self.num_equal} kept it{resized}."]
        lines += [
            f"{len(names)} are only in the {side}: {preview(names)}."
            for side, names in (("first", self.only_before), ("second", self.only_after))
            if names
        ]
        return lines + self.settings


def compare(before: Inspection | Mapping[str, Any], after: Inspection | Mapping[str, Any]) -> Difference:
    """See `fp8pass.diff`."""
    a, b = _side(before, "first"), _side(after, "second")
    held_a, held_b = _by_place(a["gemms"]), _by_place(b["gemms"])
    changes, left_a, left_b, same = [], [], [], []
    for place in dict.fromkeys((*held_a, *held_b)):
        pairs, alone_a, alone_b = _paired(held_a.get(place, []), held_b.get(place, []))
        left_a += [":".join(place)] * len(alone_a)
        left_b += [":".join(place)] * len(alone_b)
        for x, y in pairs:
            if _decision(x) == _decision(y):
                same.append(_shape(x) != _shape(y))
            else:
                causes = tuple(_causes(x, y, a, b))
                changes.append(Change(module=place[0], role=place[1], before=x, after=y, causes=causes))
    lines = [f"Rule {p!r} is only in the first." for p in a["rules"] if p not in b["rules"]]
    lines += [f"Rule {p!r} is only in the second." for p in b["rules"] if p not in a["rules"]]
    lines += [
        f"Rule {p!r}: {a['rules'][p]} -> {b['rules'][p]}."
        for p in a["rules"]
        if p in b["rules"] and a["rules"][p] != b["rules"][p]
    ]
    if list(a["rules"]) != list(b["rules"]) and sorted(a["rules"]) == sorted(b["rules"]):
        lines.append("The rules are in another order.")
    for one, other in ((a["options"], b["options"]), (a["versions"], b["versions"])):
        lines += [f"{c}." for name in dict.fromkeys((*one, *other)) if (c := _changed(name, one, other))]
    return Difference(changes, left_a, left_b, len(same), sum(same), lines)


def _side(given: Inspection | Mapping[str, Any], which: str) -> Decisions:
    found = given.decisions() if isinstance(given, Inspection) else given
    try:
        side = {name: found[name] for name in ("gemms", "rules", "options", "versions")}
    except (TypeError, KeyError, IndexError) as error:
        raise OptionError(
            f"the {which} argument of diff is a {type(given).__name__}"
            + (f" without {error}" if isinstance(error, KeyError) else "")
            + "; pass inspect(compiled), or the result of inspect(compiled).to_dict(), also from a file"
        ) from error
    if not side["gemms"]:
        raise OptionError(
            f"the {which} inspection has no GEMM: run the model, forward and backward, before it is inspected; graphs are"
            f" compiled at the first calls"
        )
    return side


def _by_place(gemms: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return by_key(gemms, lambda gemm: (gemm["module"], gemm["role"]))


def _paired(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The GEMMs of one module and role that belong together, the most alike first, and what is left on each side."""
    left, right, pairs = list(before), list(after), []
    likenesses: tuple[Callable[[dict[str, Any]], Any], ...] = (lambda g: (_decision(g), _shape(g)), _decision, _shape, len)
    for likeness in likenesses:
        for x in list(left):
            found = next((i for i, y in enumerate(right) if likeness(x) == likeness(y)), None)
            if found is not None:
                left.remove(x)
                pairs.append((x, right.pop(found)))
    return pairs, left, right


def _decision(gemm: Mapping[str, Any]) -> tuple[Any, ...]:
    if gemm["quantized"]:
        return tuple(gemm[name] for name in _DECISION)
    return (False, _reason_kind(gemm))


def _reason_kind(gemm: Mapping[str, Any]) -> str:
    return str(gemm["reason"] or "").partition(":")[0]


def _shape(gemm: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(gemm[name] for name in _SHAPE)


def _causes(x: Mapping[str, Any], y: Mapping[str, Any], a: Decisions, b: Decisions) -> list[str]:
    """The differences that decide about a GEMM. Another rule is enough."""
    if x["rule"] != y["rule"]:
        return [f"rule: {_quoted(x['rule'])} -> {_quoted(y['rule'])}"]
    if x["rule"] is not None and a["rules"].get(x["rule"]) != b["rules"].get(x["rule"]):
        return [f"rule {x['rule']!r}: {a['rules'].get(x['rule'])} -> {b['rules'].get(x['rule'])}"]
    decides = ("recipe", "select", "min_speedup") if x["rule"] is None else ()
    if "slow" in (_reason_kind(x), _reason_kind(y)):
        decides = (*decides, "device")
    causes = [change for name in decides if (change := _changed(name, a["options"], b["options"]))]
    if _shape(x) != _shape(y):
        causes.append(f"shape: {shape_text(*_shape(x))} -> {shape_text(*_shape(y))}")
    if x["op"] != y["op"]:
        causes.append(f"operation: {x['op']} -> {y['op']}")
    if not causes:
        causes = [f"version of {change}" for name in b["versions"] if (change := _changed(name, a["versions"], b["versions"]))]
    if not causes:
        causes = ["the graph around it: rule, recipe, shape and versions are the same"]
    return causes


def _changed(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    was, now = before.get(name), after.get(name)
    return "" if was == now else f"{name}: {was or 'none'} -> {now or 'none'}"


def _quoted(pattern: str | None) -> str:
    return "none" if pattern is None else repr(pattern)


def _rows(changes: Iterable[Change]) -> list[list[str]]:
    """Table rows; equal layers are folded into one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for change in changes:
        key = (
            family(change.module),
            change.role,
            _decision_text(change.before),
            _decision_text(change.after),
            "\n".join(change.causes),
        )
        rows.setdefault(key, []).append(change.module)
    return [[folded_path(modules), *key[1:]] for key, modules in rows.items()]


def _decision_text(gemm: Mapping[str, Any]) -> str:
    if gemm["quantized"]:
        return f"{gemm['recipe']}, {gemm['a_format']} x {gemm['b_format']}"
    return f"high precision, {gemm['reason']}"
