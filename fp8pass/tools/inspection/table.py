"""The table of GEMMs, as text, for rich and as HTML. Equal layers share a row, as do roles that stay alike."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from fp8pass.graph.names import NUMBER, family
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rules import ROLES

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("module", "role", "m x n x k", "recipe", "formats", "speed-up", "why not FP8")
#: Columns of text where there is no terminal.
WIDTH = 160
#: In a narrower terminal, reasons are numbered and stand below the table.
NARROW = 130


def as_text(gemms: Iterable[GemmRecord], remarks: Iterable[str]) -> str:
    """The table and the remarks below it, as wide as the terminal, or 160 columns where there is none."""
    from rich.console import Console

    written = io.StringIO()
    console = Console(file=written, width=terminal_width(), color_system=None)
    rows = rows_of(gemms)
    notes: list[str] = []
    if console.width < NARROW:
        rows, notes = _with_notes(rows)
        console.print(_narrow(rows))
    else:
        console.print(_wide(rows))
    for line in (*notes, *remarks):
        console.print(line, markup=False, highlight=False)
    return written.getvalue()


def printed(table: Table | None, remarks: Iterable[str]) -> str:
    """A table, if there is one, and the remarks below it, as wide as the terminal, or 160 columns where there is none."""
    from rich.console import Console

    written = io.StringIO()
    console = Console(file=written, width=terminal_width(), color_system=None)
    if table is not None:
        console.print(table)
    for line in remarks:
        console.print(line, markup=False, highlight=False)
    return written.getvalue()


def terminal_width() -> int:
    """That of the terminal that is printed to, or what COLUMNS says; WIDTH where the output is a file or a pipe."""
    if "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty()):
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def as_rich(gemms: Iterable[GemmRecord]) -> Table:
    """The table for rich, which fits it to the terminal."""
    return _wide(rows_of(gemms))


def _wide(rows: Iterable[list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _narrow(rows: Iterable[list[str]]) -> Table:
    """Without a frame and with short cells, of which only paths, roles and formats are folded; a note says enough of high
    precision."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in COLUMNS[:-1]:
        table.add_column(column.replace(" x ", "x"), overflow="fold", no_wrap=column not in ("module", "role", "formats"))
    table.add_column("why", no_wrap=True)
    for module, role, shape, recipe, formats, speedup, note in rows:
        cells = module, role, shape.replace(" x ", "x"), recipe, "-" if note else formats.replace(" x ", "x"), speedup, note
        table.add_row(*map(Text, cells))
    return table


def _with_notes(rows: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """The rows with numbers in place of reasons, and the reasons."""
    numbers = {reason: f"({i})" for i, reason in enumerate(dict.fromkeys(row[-1] for row in rows if row[-1]), 1)}
    return [[*row[:-1], numbers.get(row[-1], "")] for row in rows], [f"{n} {reason}" for reason, n in numbers.items()]


def as_html(gemms: Iterable[GemmRecord], remarks: Iterable[str]) -> str:
    """The table for a notebook."""
    cells = "".join(f"<th>{escape(c)}</th>" for c in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows_of(gemms))
    below = "".join(f"<p>{escape(line)}</p>" for line in remarks)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{below}"


def rows_of(gemms: Iterable[GemmRecord]) -> list[list[str]]:
    """Table rows. Layers that are equal in all columns and differ in numbers of their paths are folded into one, and so are the
    roles of a module that stay in high precision for one reason: their sizes are those of its first role."""
    rows: dict[tuple[Any, ...], list[GemmRecord]] = {}
    for g in gemms:
        formats = f"{g.a_format} x {g.b_format}" if g.quantized else "high precision"
        shape = f"{g.m} x {g.n} x {g.k}" + ("" if g.groups == 1 else f", {g.groups} groups")
        key = (family(g.module), g.role, shape, g.recipe if g.quantized else None, formats, g.reason)
        rows.setdefault(key, []).append(g)
    folded: dict[tuple[Any, ...], tuple[list[str], str, list[GemmRecord]]] = {}
    for (name, role, shape, recipe, formats, reason), same in rows.items():
        modules = tuple(g.module for g in same)
        alike = (modules, reason) if reason else (name, role, shape, recipe, formats)
        folded.setdefault((alike, recipe, formats), ([], shape, same))[0].append(role)
    return [
        [
            folded_path([g.module for g in same]),
            _roles(roles),
            shape,
            recipe or "-",
            formats,
            _speedups(same),
            same[0].reason or "",
        ]
        for (_, recipe, formats), (roles, shape, same) in folded.items()
    ]


def _roles(roles: list[str]) -> str:
    return "all" if set(roles) == set(ROLES) else ", ".join(dict.fromkeys(roles))


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
