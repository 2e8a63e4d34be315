"""The table of GEMMs, as text, for rich and as HTML; equal layers share a row."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8pass.graph.names import NUMBER, family
from fp8pass.rewrite.report import GemmRecord

COLUMNS = ("module", "role", "m x n x k", "recipe", "formats", "speed-up", "why not FP8")


def as_text(gemms: Iterable[GemmRecord], remarks: Iterable[str]) -> str:
    """The table and the remarks below it, 160 columns wide."""
    written = io.StringIO()
    console = Console(file=written, width=160, color_system=None)
    console.print(as_rich(gemms))
    for line in remarks:
        console.print(line)
    return written.getvalue()


def as_rich(gemms: Iterable[GemmRecord]) -> Table:
    """The table for rich, which fits it to the terminal."""
    table = Table(title=None)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows_of(gemms):
        table.add_row(*row)
    return table


def as_html(gemms: Iterable[GemmRecord], remarks: Iterable[str]) -> str:
    """The table for a notebook."""
    cells = "".join(f"<th>{escape(c)}</th>" for c in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows_of(gemms))
    below = "".join(f"<p>{escape(line)}</p>" for line in remarks)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{below}"


def rows_of(gemms: Iterable[GemmRecord]) -> list[list[str]]:
    """Table rows. Layers that are equal in all columns and differ in numbers of their paths are folded into one."""
    folded: dict[tuple[Any, ...], list[GemmRecord]] = {}
    for g in gemms:
        formats = f"{g.a_format} x {g.b_format}" if g.quantized else "high precision"
        shape = f"{g.m} x {g.n} x {g.k}" + ("" if g.groups == 1 else f", {g.groups} groups")
        key = (family(g.module), g.role, shape, g.recipe, formats, g.reason)
        folded.setdefault(key, []).append(g)
    return [
        [folded_path([g.module for g in same]), role, shape, recipe or "-", formats, _speedups(same), reason or ""]
        for (_, role, shape, recipe, formats, reason), same in folded.items()
    ]


def _speedups(gemms: list[GemmRecord]) -> str:
    """Their expected speed-up, or from which to which: equal layers may share their casts with different GEMMs."""
    known = sorted({f"{g.speedup:.2f}" for g in gemms if g.speedup is not None})
    return "-" if not known else known[0] if len(known) == 1 else f"{known[0]}-{known[-1]}"


def folded_path(modules: list[str]) -> str:
    """One text for paths that differ only in their numbers.

    "layers.0-3.up (x4)" where all combinations of the numbers are there; where some are missing, those that are there:
    "experts.*.*.up {0.1, 0.3, 1.0} (x3)".
    """
    if len(modules) == 1:
        return modules[0]
    indices = sorted({tuple(int(n) for n in NUMBER.findall(m)) for m in modules})
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    is_grid = indices == list(itertools.product(*columns))
    texts = iter([_span(values) if is_grid or len(values) == 1 else "*" for values in columns])
    path = NUMBER.sub(lambda _: next(texts), modules[0])
    if not is_grid:
        varying = [i for i, values in enumerate(columns) if len(values) > 1]
        path += " {" + ", ".join(".".join(str(index[i]) for i in varying) for index in indices) + "}"
    return f"{path} (x{len(modules)})"


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    is_consecutive = values == list(range(values[0], values[-1] + 1))
    return f"{values[0]}-{values[-1]}" if is_consecutive else "{" + ",".join(map(str, values)) + "}"
