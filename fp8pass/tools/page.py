"""`inspect(compiled).to_html(path)`: the inspection as one self-contained page. `page.html.jinja` is its template."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8pass.graph.origin import KINDS, NUMBER, TensorName, family
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rules import ROLES
from fp8pass.scales.view import Fp8State
from fp8pass.tools.inspection import COLUMNS, rows_of
from fp8pass.tools.monitoring import Measurement, TensorNumbers
from fp8pass.tools.picture import pictures
from fp8pass.tools.tables import counted, folded_path

if TYPE_CHECKING:
    from fp8pass.tools.inspection import Inspection

#: More plots than this are drawn one per family of equal layers.
MAX_PLOTS = 60
#: Points of a plot; longer histories are drawn by the largest amax of neighbours.
POINTS = 32
#: Colours of a heat map of numbers.
SHADES = 8


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A value per layer and column: which of few colours, and what the cell says."""

    name: str
    rows: list[str]
    columns: list[str]
    cells: list[tuple[int, int, str, str]]  # Row, column, class of the colour, text.
    legend: list[tuple[str, str]]  # Class and meaning.

    @property
    def cell_height(self) -> int:
        """In pixels: a model of many layers has low cells."""
        return max(4, min(16, 900 // len(self.rows)))

    @property
    def label_every(self) -> int:
        """Rows from one label to the next."""
        return math.ceil(12 / self.cell_height)


Plot = tuple[str, str, str, list[str]]
"""A small plot of amaxes over steps, of one tensor, or of the range over those of equal layers: its name, line, band, and a
caption of amaxes, scales, and what a monitor has measured."""


def page(inspection: Inspection, state: Fp8State | None, measured: Measurement | None = None) -> str:
    """The page as text."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("to_html needs Jinja2: pip install 'fp8pass[html]'") from error

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
    )
    template = environment.from_string(pathlib.Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    amaxes, scales = _state_of(state)
    # The copy of each tensor with the lowest SQNR.
    numbers: dict[str, TensorNumbers] = {}
    for tensor in () if measured is None else measured.tensors:
        if tensor.name not in numbers or tensor.sqnr < numbers[tensor.name].sqnr:
            numbers[tensor.name] = tensor
    heat_maps = _heat_maps(inspection.gemms, amaxes, scales, numbers)
    values = [value for graph in inspection.graphs for value in graph.saved if value.bytes_before]
    largest = max(inspection.graphs, key=lambda graph: (graph.trains, len(graph.gemms)), default=None)
    uses_of_cache: dict[str, list[str]] = {}
    for graph, use in inspection.cache.items():
        uses_of_cache.setdefault(use, []).append(graph)
    return template.render(
        facts=_facts(inspection),
        cache=uses_of_cache,
        remarks=inspection.remarks(),
        saved=_saved(inspection),
        saved_values=sorted(values, key=lambda v: -v.bytes_before if isinstance(v.bytes_before, int) else 0),
        gathers=[g for graph in inspection.graphs for g in graph.gathers],
        columns=COLUMNS,
        folded=rows_of(inspection.gemms),
        gemms=[(g, _source(g)) for g in inspection.gemms],
        roles=ROLES,
        heat_maps=heat_maps,
        heat_texts=[_texts(heat) for heat in heat_maps],
        pictures=("", []) if largest is None else pictures(largest.compiled),
        plots=_plots(amaxes, scales, numbers),
        step=None if measured is None else measured.step,
        rules=inspection.rules,
        options=inspection.options,
        versions=inspection.versions,
    )


def _facts(inspection: Inspection) -> list[tuple[str, str, str]]:
    """The facts at the top of the page: a number, its name, a remark."""
    gemms = inspection.gemms
    quantized = [g for g in gemms if g.quantized]
    known = [g for g in gemms if g.flops is not None]
    total, in_fp8 = sum(g.flops or 0 for g in known), sum(g.flops or 0 for g in known if g.quantized)
    unknown = f"; {len(gemms) - len(known)} GEMMs have dynamic sizes" if len(known) < len(gemms) else ""
    saved = sum(graph.saved_bytes for graph in inspection.graphs)
    speedup = inspection.speedup
    return [
        (f"{len(quantized)} of {len(gemms)}", "GEMMs in FP8", counted(len(inspection.graphs), "graph", "graphs")),
        (f"{in_fp8 / total:.1%}" if total else "-", "of FLOPs in FP8", f"{total:.3g} FLOPs in all GEMMs{unknown}"),
        (
            "-" if speedup is None else f"{speedup:.2f} x",
            "expected speed-up",
            f"of all GEMMs with their casts over bfloat16, an estimate; {inspection.options.get('device') or 'no device'}",
        ),
        (_bytes(saved), "saved for backward", _instead(saved, inspection)),
    ]


def _instead(saved: int, inspection: Inspection) -> str:
    before = sum(graph.saved_bytes_before for graph in inspection.graphs)
    return "by the forward graphs" if before == saved else f"by the forward graphs, instead of {_bytes(before)}"


def _bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    power = min(int(math.log10(count) / 3), 4)
    return f"{count / 1000**power:.1f} {' kMGT'[power]}B"


def _saved(inspection: Inspection) -> list[tuple[str, str, float]]:
    """dtype, bytes and share of what is saved for the backward."""
    found: dict[str, int] = {}
    for graph in inspection.graphs:
        for dtype, size in graph.saved_dtypes.items():
            found[dtype] = found.get(dtype, 0) + size
    total = sum(found.values())
    largest = sorted(found.items(), key=lambda item: -item[1])
    return [(dtype, _bytes(size), size / total) for dtype, size in largest if size]


def _source(gemm: GemmRecord) -> str:
    """Folder, file and line: a whole path is in `inspect(compiled).gemms`."""
    return "/".join(pathlib.PurePath(gemm.source).parts[-2:])


# -- heat maps


def _layer_and_rest(module: str) -> tuple[str, str]:
    """A path in two: the layer, up to its first number, and the module in it."""
    number = NUMBER.search(module)
    return (module, "") if number is None else (module[: number.end()], module[number.end() :].lstrip("."))


def _heat_maps(
    gemms: Sequence[GemmRecord],
    amaxes: Mapping[str, Sequence[float]],
    scales: Mapping[str, Sequence[float]],
    numbers: Mapping[str, TensorNumbers],
) -> list[HeatMap]:
    if not gemms:
        return []
    maps = [_coverage(gemms)]
    last = {name: max(values[-1:], default=0.0) for name, values in amaxes.items()}
    last |= {name: t.amax for name, t in numbers.items() if name not in last}
    least = {name: min(values) for name, values in scales.items() if values}
    found = [_numbers("amax", last), _numbers("scale", least)]
    found.append(_numbers("SQNR", {name: t.sqnr for name, t in numbers.items()}, " dB", is_linear=True))
    found.append(_numbers("underflow", {name: 100 * t.underflow for name, t in numbers.items()}, " %", is_linear=True))
    return maps + [m for m in found if m is not None]


def _texts(heat: HeatMap) -> dict[str, Any]:
    """The texts that pointing at a cell shows."""
    texts = {text: i for i, text in enumerate(dict.fromkeys(text for *_, text in heat.cells))}
    cells = [(row, column, texts[text]) for row, column, _, text in heat.cells]
    return {"rows": heat.rows, "columns": heat.columns, "cells": cells, "texts": list(texts)}


def _grid(places: Iterable[tuple[str, str]], kinds: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Position of each row, in the order in which they come, and of each column, "module:kind", by module and kind."""
    places = list(places)
    columns = {column: column.rpartition(":") for _, column in places}
    modules = list(dict.fromkeys(module for module, _, _ in columns.values()))
    ordered = sorted(columns, key=lambda c: (modules.index(columns[c][0]), kinds.index(columns[c][2])))
    rows = dict.fromkeys(row for row, _ in places)
    return {row: i for i, row in enumerate(rows)}, {column: i for i, column in enumerate(ordered)}


def _coverage(gemms: Sequence[GemmRecord]) -> HeatMap:
    held: dict[tuple[str, str], list[GemmRecord]] = {}
    for g in gemms:
        layer, rest = _layer_and_rest(g.module)
        held.setdefault((layer, f"{rest}:{g.role}"), []).append(g)
    rows, columns = _grid(held, ROLES)
    cells = []
    for (layer, column), same in held.items():
        count = sum(g.quantized for g in same)
        shade = "fp8" if count == len(same) else "part" if count else "high"
        text = same[0].recipe or "" if count == len(same) else next((g.reason or "" for g in same if not g.quantized), "")
        cells.append((rows[layer], columns[column], shade, text))
    legend = [("fp8", "FP8"), ("high", "high precision")]
    if any(shade == "part" for _, _, shade, _ in cells):
        legend.insert(1, ("part", "FP8 in some shapes"))
    return HeatMap("coverage", list(rows), list(columns), cells, legend)


def _numbers(name: str, values: Mapping[str, float], unit: str = "", is_linear: bool = False) -> HeatMap | None:
    """A heat map of one number per tensor, in equal steps of its logarithm, or of itself."""
    held = {}
    for text, value in values.items():
        tensor = TensorName.parse(text)
        layer, rest = _layer_and_rest(tensor.module)
        if (value > 0 or is_linear) and math.isfinite(value):
            held[layer, f"{rest}:{tensor.kind}"] = value
    if not held:
        return None
    rows, columns = _grid(held, KINDS)
    place: Callable[[float], float] = float if is_linear else math.log2
    least, most = min(held.values()), max(held.values())
    low, step = place(least), (place(most) - place(least)) / SHADES or 1.0
    cells = []
    for (layer, column), value in held.items():
        shade = min(int((place(value) - low) / step), SHADES - 1)
        cells.append((rows[layer], columns[column], f"s{shade}", f"{value:.3g}{unit}"))
    legend = [("s0", f"{least:.3g}{unit}"), (f"s{SHADES - 1}", f"{most:.3g}{unit}")]
    return HeatMap(name, list(rows), list(columns), cells, legend)


# -- scales and histories


def _state_of(state: Fp8State | None) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per tensor of delayed scaling its amaxes, the oldest first, and scales: of a batch those of its matrices."""
    amaxes: dict[str, list[float]] = {}
    scales: dict[str, list[float]] = {}
    for name in state.tensors if state is not None else ():
        assert state is not None
        history = state.amax_history(name)[1:].float()
        history = history.amax(dim=1) if history.dim() > 1 and history.numel() else history.flatten()
        amaxes[name] = [value for value in history.tolist() if value > 0]
        scales[name] = state.scale(name).flatten().tolist()
    return amaxes, scales


def _plots(
    amaxes: Mapping[str, Sequence[float]], scales: Mapping[str, Sequence[float]], numbers: Mapping[str, TensorNumbers]
) -> list[Plot]:
    groups: dict[str, list[str]] = {}
    every = dict.fromkeys([*amaxes, *numbers])
    for name in every:
        module, _, kind = name.rpartition(":")
        key = name if len(every) <= MAX_PLOTS else f"{family(module)}:{kind}"
        groups.setdefault(key, []).append(name)
    return [_plot(names, amaxes, scales, [numbers[name] for name in names if name in numbers]) for names in groups.values()]


def _range(values: Iterable[float], unit: str = "") -> str:
    found = sorted(values)
    return f"{found[0]:.3g}{unit}" if found[0] == found[-1] else f"{found[0]:.3g} to {found[-1]:.3g}{unit}"


def _plot(
    names: Sequence[str],
    amaxes: Mapping[str, Sequence[float]],
    scales: Mapping[str, Sequence[float]],
    measured: Sequence[TensorNumbers],
) -> Plot:
    kind = names[0].rpartition(":")[2]
    title = f"{folded_path([name.rpartition(':')[0] for name in names])}:{kind}"
    caption = [f"scale {_range(v for n in names for v in scales.get(n, ()))}"] if any(map(scales.get, names)) else []
    series = [_thinned(amaxes[name]) for name in names if amaxes.get(name)]
    if series:
        caption.insert(0, f"amax {_range(s[-1] for s in series)}")
    elif measured:
        caption.insert(0, f"amax {_range(t.amax for t in measured)}")
    else:
        caption.insert(0, "no amax so far")
    if measured:
        caption.append(f"SQNR {_range((t.sqnr for t in measured), ' dB')}")
        caption.append(f"underflow {_range((100 * t.underflow for t in measured), ' %')}")
    if not series:
        return title, "", "", caption
    length = max(map(len, series))
    columns = [[s[i - length] for s in series if length - i <= len(s)] for i in range(length)]
    values = [math.log2(v) for column in columns for v in column]
    low, span = min(values), max(values) - min(values)

    def at(i: int, value: float) -> str:
        x = 0 if length == 1 else round(100 * i / (length - 1), 1)
        y = 15 if span < 1e-6 else round(28 - 26 * (math.log2(value) - low) / span, 1)
        return f"{x:g} {y:g}"

    middle = [at(i, sorted(column)[len(column) // 2]) for i, column in enumerate(columns)]
    if length == 1:
        middle.append("100" + middle[0][1:])
    outline = [at(i, max(c)) for i, c in enumerate(columns)] + [at(i, min(columns[i])) for i in reversed(range(length))]
    band = "M" + "L".join(outline) + "z" if len(series) > 1 else ""
    return title, "M" + "L".join(middle), band, caption


def _thinned(values: Sequence[float]) -> list[float]:
    """Not more than about POINTS values: the largest of neighbours, counted from the newest."""
    step = math.ceil(len(values) / POINTS) or 1
    return [max(values[max(end - step, 0) : end]) for end in range(len(values), 0, -step)][::-1]
