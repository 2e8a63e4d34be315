"""The result of an estimate: every recipe's speed-up and memory, the layers one by one, and the call to write."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import json
from html import escape
from typing import Any

from fp8pass.cost import Device, Estimate, graph_speedup
from fp8pass.graph.origin import family
from fp8pass.graph.values import by_key
from fp8pass.rewrite.report import GemmRecord
from fp8pass.tools.tables import as_html, as_text, folded_path, make_table, shape_text, terminal_width

#: Share of the bfloat16 rate that attention reaches in the forward (False) and in the backward (True), an assumption: about
#: what the plots of FlashAttention-3 (Shah et al., 2024) show for Hopper, causal, heads of 128, 8192 tokens.
ATTENTION_SHARE = {False: 0.75, True: 0.6}


@dataclasses.dataclass(frozen=True)
class GemmEstimate:
    """One GEMM of the model under one recipe."""

    record: GemmRecord
    """The decision about it."""
    expected: Estimate | None
    """Its expected seconds; None where a size is dynamic, or the device has no such GEMM."""


@dataclasses.dataclass
class RecipeEstimate:
    """The expected gain of one recipe. Times are those of the GPU, in seconds."""

    recipe: str
    """Its name."""
    gemms: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """Every GEMM of a training step, in the order of the graph."""
    chosen: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """`gemms` with `min_speedup=1.0`: those that are expected to be slower in FP8 are in high precision."""
    saved_bytes: int = 0
    """Bytes of the tensors that the forward saves for the backward, Parameters not included."""
    saved_bytes_in_fp8: int = 0
    """`saved_bytes` with `saved_activations="fp8"`."""
    attention_seconds: float = 0.0
    """Expected seconds of attention, the same in every recipe."""

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of all GEMMs together, with their casts."""
        return graph_speedup([gemm.expected for gemm in self.gemms])

    @property
    def chosen_speedup(self) -> float | None:
        """`speedup` with `min_speedup=1.0`. It can be lower: a cast is paid for by the GEMMs that still read it."""
        return graph_speedup([gemm.expected for gemm in self.chosen])

    @property
    def chooses(self) -> bool:
        """True if `min_speedup=1.0` gains anything."""
        return (self.chosen_speedup or 0.0) > (self.speedup or 0.0)

    @property
    def best_speedup(self) -> float | None:
        """The higher of the two."""
        return self.chosen_speedup if self.chooses else self.speedup

    @property
    def speedup_with_attention(self) -> float | None:
        """`best_speedup` of GEMMs and attention together. Norms, the optimizer and communication would lower it further."""
        gemms = self.chosen if self.chooses else self.gemms
        known = [gemm.expected for gemm in gemms if gemm.expected is not None]
        if not known:
            return None
        bf16, fp8 = sum(e.bf16_seconds for e in known), sum(e.fp8_seconds for e in known)
        return (bf16 + self.attention_seconds) / (fp8 + self.attention_seconds)

    @property
    def rules(self) -> dict[str, None]:
        """The rules that keep the same GEMMs in high precision as `min_speedup=1.0` does, and that no estimate decides. A GEMM
        outside of all modules has none: no pattern matches it alone."""
        left = {(g.record.module, g.record.role): _is_slow(g) for g in self.chosen}
        found: dict[str, None] = {}
        for module, role in (key for key, slow in left.items() if slow and key[0]):
            name = glob.escape(module)
            alike = {m for m, r in left if r == role and family(m) == family(module)}
            matched = {m for m, r in left if r == role and fnmatch.fnmatchcase(m, family(name))}  # `*` matches dots, too
            is_exact = matched == alike and all(left[m, role] for m in alike)
            found[f"{family(name) if is_exact else name}:{role}"] = None
        return found


def _is_slow(gemm: GemmEstimate) -> bool:
    return (gemm.record.reason or "").startswith("slow")


@dataclasses.dataclass(frozen=True)
class Estimation:
    """The expected gain of FP8 in a training step of a model: an estimate, of nothing that has run."""

    device: Device
    """The device whose constants were used."""
    recipes: dict[str, RecipeEstimate]
    """By name."""
    refused: dict[str, str]
    """Recipes that the device has no GEMMs for, with the reason."""
    bf16_seconds: float
    """Expected seconds of all GEMMs in bfloat16."""
    attention_seconds: float
    """Expected seconds of attention. An assumption about the rate: see `ATTENTION_SHARE`."""
    bf16_saved_bytes: int
    """Bytes that the forward saves for the backward without FP8."""
    has_masks: bool = False
    """An attention has a mask: then the whole square of its scores counts."""

    @property
    def best(self) -> RecipeEstimate | None:
        """The recipe with the highest speed-up; None where none gains anything, or none is known."""
        known = [r for r in self.recipes.values() if r.best_speedup is not None and r.best_speedup > 1]
        return max(known, key=lambda r: r.best_speedup or 0.0, default=None)

    @property
    def call(self) -> str:
        """The call to write; "" where FP8 gains nothing."""
        best = self.best
        if best is None:
            return ""
        return f'fp8_compile(model, "{best.recipe}"{", min_speedup=1.0" if best.chooses else ""})'

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain lists, dicts, strings and numbers."""
        return {
            "device": self.device.name,
            **{name: getattr(self, name) for name in ("bf16_seconds", "attention_seconds", "bf16_saved_bytes")},
            "best": None if self.best is None else self.best.recipe,
            "call": self.call,
            "refused": self.refused,
            "recipes": {
                name: {
                    **{n: getattr(r, n) for n in ("speedup", "chosen_speedup", "speedup_with_attention")},
                    **{n: getattr(r, n) for n in ("saved_bytes", "saved_bytes_in_fp8")},
                    "rules": list(r.rules),
                    "gemms": [_gemm(g) for g in r.gemms],
                }
                for name, r in self.recipes.items()
            },
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        shown: list[Any] = []
        for heading, names, rows in (self._by_recipe(), self._by_layer()):
            titles = (name.replace("_with_", "\nwith_") for name in names)
            columns = {t: {"no_wrap": i > 0, "justify": "right" if i else "left"} for i, t in enumerate(titles)}
            shown += [heading, make_table(columns, rows, is_plain=True), ""]
        text = as_text([*shown, *self._remarks()], min(terminal_width(), 120))
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def to_html(self) -> str:
        """The tables as a page of HTML."""
        parts = [
            f"<h2>{escape(heading)}</h2>{as_html(columns, rows)}"
            for heading, columns, rows in (self._by_recipe(), self._by_layer())
        ]
        parts += [f"<p>{escape(line)}</p>" for line in self._remarks()]
        return _PAGE.format(title=escape(f"fp8pass: an estimate for {self.device.name}"), body="\n".join(parts))

    def _repr_html_(self) -> str:
        """The tables in a notebook."""
        return self.to_html()

    def _by_recipe(self) -> tuple[str, list[str], list[list[str]]]:
        columns = ["recipe", "GEMMs", "min_speedup=1.0", "with attention", "saved for backward", "saved_activations"]
        rows = [["bfloat16", "1.00", "1.00", "1.00", _gigabytes(self.bf16_saved_bytes, self.bf16_saved_bytes), ""]]
        rows += [
            [
                recipe.recipe,
                _number(recipe.speedup),
                _number(recipe.chosen_speedup),
                _number(recipe.speedup_with_attention),
                _gigabytes(recipe.saved_bytes, self.bf16_saved_bytes),
                _gigabytes(recipe.saved_bytes_in_fp8, self.bf16_saved_bytes),
            ]
            for recipe in self.recipes.values()
        ]
        return f"Expected speed-up over bfloat16 on {self.device.name} (an estimate; nothing was run)", columns, rows

    def _by_layer(self) -> tuple[str, list[str], list[list[str]]]:
        """Equal layers in one row; the three GEMMs of a module together, by the sizes of the first."""
        columns = ["layer, m x n x k of its output", *self.recipes]
        layers: dict[tuple[str, str], dict[str, list[GemmEstimate]]] = {}
        for name, recipe in self.recipes.items():
            for module, gemms in by_key(recipe.gemms, lambda gemm: gemm.record.module).items():
                first = gemms[0].record
                shape = shape_text(first.m, first.n, first.k, first.groups)
                layers.setdefault((family(module), shape), {}).setdefault(name, []).extend(gemms)
        rows = []
        for (_, shape), by_recipe in layers.items():
            modules = list(dict.fromkeys(g.record.module for gemms in by_recipe.values() for g in gemms))
            shown = [_layer_speedup(by_recipe.get(name, [])) for name in self.recipes]
            rows.append([f"{folded_path(modules)}\n  {shape}", *shown])
        return "Expected speed-up of each layer, forward and backward together", columns, rows

    def _remarks(self) -> list[str]:
        milliseconds = f"GEMMs {_milliseconds(self.bf16_seconds)}, attention {_milliseconds(self.attention_seconds)}"
        lines = [f"In bfloat16: {milliseconds} a step (estimates)."]
        if self.has_masks:
            lines.append(
                "The model gives its attention a mask, so all scores count. A kernel that leaves out those of causal"
                " attention takes half, and FP8 gains more."
            )
        best = self.best
        if best is None:
            lines.append("FP8 is not expected to pay on this device at these sizes.")
        else:
            count = sum(_is_slow(g) for g in best.chosen) if best.chooses else 0
            lines.append(
                f"Best: {self.call}" + (f", which leaves {count} of {len(best.chosen)} GEMMs in bfloat16:" if count else "")
            )
            if count:
                lines.append("  as rules: {" + ", ".join(f"{pattern!r}: None" for pattern in best.rules) + "}")
        lines += [f"{name}: not on this device, because {reason}." for name, reason in self.refused.items()]
        lines.append("Not included: norms, the optimizer and communication, which take as long as before.")
        return lines


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
body{{font:15px sans-serif;margin:2em;max-width:70em}}
table{{border-collapse:collapse;display:block;overflow-x:auto}}
td,th{{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}}
td:first-child,th:first-child{{text-align:left}}
</style></head>
<body>
{body}
</body></html>
"""


def _layer_speedup(gemms: list[GemmEstimate]) -> str:
    """The speed-up of a layer, or why it is in high precision, in a word."""
    kept = next((g.record.reason.partition(":")[0] for g in gemms if g.record.reason), "-")
    return _number(graph_speedup([g.expected for g in gemms]), kept) if any(g.record.quantized for g in gemms) else kept


def _number(value: float | None, instead: str = "-") -> str:
    return instead if value is None else f"{value:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def _gigabytes(value: int, base: int) -> str:
    return f"{value / 1e9:.2f} GB" + (f" ({value / base:.2f})" if base and value != base else "")


def _gemm(gemm: GemmEstimate) -> dict[str, Any]:
    names = ("module", "role", "m", "n", "k", "groups", "quantized", "reason", "speedup")
    seconds = gemm.expected
    return {
        **{name: getattr(gemm.record, name) for name in names},
        "bf16_seconds": None if seconds is None else seconds.bf16_seconds,
        "seconds": None if seconds is None else seconds.fp8_seconds,
    }
