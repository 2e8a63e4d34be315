"""What `suggest_rules` gives: rules, and the table that they come from."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8pass.tools.tables import as_text, make_table

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("rank", "module", "role", "expected", "spread", "measured", "FLOPs", "rule")
_GLOB = re.compile(r"[*?[]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What quantizing one GEMM does to the loss of the step. `suggest_rules` has the formulas."""

    module: str
    role: str
    expected: float | None
    """First-order effect on the loss; above 0 where quantization raises it. None where no gradient reaches the GEMM."""
    spread: float
    """Standard deviation of the effect over batches, as the rows of this one tell it."""
    measured: float | None
    """Effect that was measured by running the step with this GEMM alone in FP8; None if it was not."""
    flops: int | None
    """Of all its calls in the step; None where a size is dynamic."""
    kept: bool
    """Whether the rules keep it in high precision."""

    @property
    def risk(self) -> float:
        """What GEMMs are ranked by: the size of `expected`, which may be small by accident, or a quarter of `spread` if that is
        larger."""
        return 0.0 if self.expected is None else max(abs(self.expected), self.spread / 4)


class Suggestion(dict[str, None]):
    """Rules, to be passed as `rules=`; and what they come from. It prints as a table."""

    def __init__(self, gemms: Sequence[Sensitivity], loss: float):
        super().__init__(patterns(gemms))
        self.gemms: list[Sensitivity] = list(gemms)
        """Every GEMM that would run in FP8, the one that quantization hurts most first."""
        self.loss: float = loss
        """Of the step in high precision."""

    @property
    def rules(self) -> dict[str, None]:
        """The rules as a plain dict."""
        return dict(self)

    @property
    def fp8_share(self) -> float:
        """Share of the FLOPs, of GEMMs that would run in FP8 without the rules, that still do."""
        total = sum(g.flops or 0 for g in self.gemms)
        return sum(g.flops or 0 for g in self.gemms if not g.kept) / total if total else 1.0

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of expected and measured effects, of the GEMMs that were measured; None for fewer than
        three."""
        pairs = [(g.expected, g.measured) for g in self.gemms if g.expected is not None and g.measured is not None]
        return spearman([e for e, _ in pairs], [m for _, m in pairs]) if len(pairs) > 2 else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, dicts, strings and numbers."""
        return {
            "rules": dict(self),
            "loss": self.loss,
            "fp8_share": self.fp8_share,
            "rank_correlation": self.rank_correlation,
            "gemms": [dataclasses.asdict(g) for g in self.gemms],
        }

    def __str__(self) -> str:
        agreement = self.rank_correlation
        share = f"With these rules, {self.fp8_share:.1%} of the FLOPs stay in FP8."
        lines = [f"Loss of the step in high precision: {self.loss:.6g}. {share}"]
        if agreement is not None:
            lines.append(f"Rank correlation of expected and measured effects: {agreement:.2f}.")
        return as_text([self.__rich__(), *lines])

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def __rich__(self) -> Table:
        columns = {c: {"justify": "right" if c in COLUMNS[3:7] else "left"} for c in COLUMNS}
        return make_table(columns, [[str(i), *_cells(g)] for i, g in enumerate(self.gemms, 1)])


def _cells(g: Sensitivity) -> list[str]:
    effects = ["-" if effect is None else f"{effect:+.2e}" for effect in (g.expected, g.spread, g.measured)]
    return [g.module, g.role, *effects, "-" if g.flops is None else f"{g.flops:.3g}", "high precision" if g.kept else ""]


def patterns(gemms: Sequence[Sensitivity]) -> dict[str, None]:
    """Rules for those that are kept: one for a module all of whose GEMMs are, else one per role."""
    of_module: dict[str, list[Sensitivity]] = {}
    for g in gemms:
        of_module.setdefault(g.module, []).append(g)
    found: dict[str, None] = {}
    for g in gemms:
        if g.kept:
            path = _GLOB.sub(r"[\g<0>]", g.module)
            found[path if all(other.kept for other in of_module[g.module]) else f"{path}:{g.role}"] = None
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    x, y = _ranks(left), _ranks(right)
    mean = (len(x) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    variances = sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y)
    return covariance / math.sqrt(variances) if variances else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]
