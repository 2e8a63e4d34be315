"""Tables of every tool: for rich, as text, and as HTML for notebooks and pages. Equal layers share a row."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fp8pass.graph.origin import NUMBER

if TYPE_CHECKING:
    from rich.table import Table

#: Columns of text where there is no terminal.
WIDTH = 160
#: The style of a table without a frame.
PLAIN: dict[str, Any] = {"padding": (0, 1, 0, 0), "show_edge": False}


def make_table(
    columns: Sequence[str] | Mapping[str, Mapping[str, Any]],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    is_plain: bool = False,
) -> Table:
    """A table of rich. columns: headings, perhaps with options for `add_column`, which else folds what is too long."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, **PLAIN) if is_plain else Table(title=title)
    for column in columns:
        options = columns[column] if isinstance(columns, Mapping) else {}
        table.add_column(column, **{"overflow": "fold", **options})
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def as_text(shown: Iterable[Table | str], width: int | None = None) -> str:
    """Tables, and lines as they are, as wide as the terminal or, where there is none, as WIDTH."""
    from rich.console import Console

    written = io.StringIO()
    console = Console(file=written, width=terminal_width() if width is None else width, color_system=None)
    for each in shown:
        console.print(each, markup=False, highlight=False)
    return written.getvalue()


def terminal_width() -> int:
    """The width of the terminal that is printed to, or what COLUMNS says; WIDTH where the output is a file or a pipe."""
    if "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty()):
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def as_html(columns: Iterable[str], rows: Iterable[Sequence[str]], remarks: Iterable[str] = ()) -> str:
    """A table of HTML, and a paragraph for each remark below it."""
    heads = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    below = "".join(f"<p>{escape(line)}</p>" for line in remarks)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"


def shape_text(m: object, n: object, k: object, groups: object) -> str:
    """The sizes of a GEMM as tables show them."""
    return f"{m} x {n} x {k}" + ("" if groups == 1 else f", {groups} groups")


def folded_path(modules: list[str]) -> str:
    """One text for paths that differ only in their numbers. "layers.0-3.up (x4)" where all combinations of the numbers are
    there; where some are missing, those that are there: "experts.*.*.up {0.1, 0.3, 1.0} (x3)"."""
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


def counted(count: int, one: str, several: str) -> str:
    """A number with its noun: "1 graph", "2 graphs"."""
    return f"{count} {one if count == 1 else several}"
