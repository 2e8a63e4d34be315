"""The numbers of one measured step: records of tensors and of GEMMs, a flat dict for loggers, a table."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fp8pass.inputs import Watched
from lowering.statistics import (
    AMAX,
    CALLS,
    COUNT,
    ERRORS,
    HEADROOM,
    NON_FINITE,
    QUANTILES,
    RATIO,
    SATURATED,
    SQUARES,
    UNDERFLOW,
)

if TYPE_CHECKING:
    from rich.table import Table

GRADIENT_TO_NOISE_ALARM = math.sqrt(3)
"""Below this, gradients no longer tell where the loss falls. Source: Chmiel et al., "FP4 All the Way", 2025."""
MANY_LOST = 0.01
"""A tensor that loses a larger share of its elements stands at the top of the table, and is remarked upon."""
_WIDTH = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNumbers:
    """What quantization did to one tensor in one step, over all ranks and all batches of the step."""

    name: str
    """Such as "layers.0.attn.wq:input"."""
    module: str
    """Path of the module that it is named after."""
    kind: str
    """"input", "weight" or "grad_output"."""
    copy: str
    """"tensor" where both FP8 copies hold the same values; else "rowwise" or "columnwise": each has scales of its own."""
    role: str
    """Of the first GEMM that reads it: "output", "grad_input" or "grad_weight"."""
    recipe: str
    format: str
    """"e4m3" or "e5m2"."""
    scaling: str
    """What shares a scale: "tensor-wise", "row-wise", "1x32", "1x128" or "128x128"."""
    num_elements: int
    num_underflow: int
    """Finite elements that are not zero and whose FP8 value is zero."""
    num_saturated: int
    """Finite elements whose product with their scale is beyond the format's largest value."""
    num_non_finite: int
    """NaN and infinities; they are left out of all other numbers but `num_elements`."""
    sqnr: float
    """Signal to quantization noise, in dB: 10 log10 of the sum of x**2 over the sum of (x - its FP8 value)**2. inf where
    nothing is lost."""
    mse: float
    """Mean squared error of the finite elements."""
    amax: float
    """Largest magnitude of the finite elements."""
    headroom: tuple[float, ...]
    """Factors of two between the amax of a block and what its scale maps to the largest FP8 value: the smallest one, the 10 %,
    50 % and 90 % quantiles and the largest one of all blocks; the whole tensor is a block where it has one scale. Below 0 a
    block's largest element saturates; inf where there are only zeros. Over several batches or ranks, the inner quantiles are
    means."""
    block_sqnr: tuple[float, ...]
    """`sqnr` of the same quantiles of the blocks."""
    staleness: int | None
    """Under delayed scaling with amax_compute_algo="max": how many steps ago the amax was seen that decides the scale, 1 for
    the step before. None where no history decides, and for a tensor whose history is empty."""

    @property
    def underflow(self) -> float:
        """`num_underflow` as a share of all elements."""
        return self.num_underflow / max(1, self.num_elements)

    @property
    def saturated(self) -> float:
        """`num_saturated` as a share of all elements."""
        return self.num_saturated / max(1, self.num_elements)

    @property
    def gradient_to_noise(self) -> float | None:
        """Of a gradient: its norm over the norm of what quantization changes. Below sqrt(3) is an alarm. None for others."""
        return _ratio(self.sqnr) if self.kind == "grad_output" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmNumbers:
    """The result of one FP8 GEMM against that of the same operands in high precision."""

    module: str
    role: str
    """"output", "grad_input" or "grad_weight"."""
    recipe: str
    num_elements: int
    num_non_finite: int
    sqnr: float
    """In dB."""

    @property
    def gradient_to_noise(self) -> float | None:
        """Of a gradient: the norm of the one in high precision over that of the difference. Below sqrt(3) is an alarm."""
        return None if self.role == "output" else _ratio(self.sqnr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The numbers of one step."""

    step: int
    """Steps of training that had ended before it."""
    tensors: tuple[TensorNumbers, ...]
    """In the order in which they were quantized: forward, then backward."""
    gemms: tuple[GemmNumbers, ...]
    """Empty unless the monitor measures results."""
    first_non_finite: str | None
    """The first tensor that had a NaN or an infinity, in words with module, kind and role; None where all were finite."""

    def to_dict(self) -> dict[str, float]:
        """Flat names for loggers, such as "fp8/layers.0.mlp.up/input/underflow"; numbers that do not exist are left out."""
        found: dict[str, float] = {"fp8/step": self.step}
        for tensor in self.tensors:
            label = tensor.name.rpartition(":")[2].replace("#", "_").replace("@", "_")
            where = f"fp8/{tensor.module}/{label}" + ("" if tensor.copy == "tensor" else f"_{tensor.copy}")
            values = {n: getattr(tensor, n) for n in ("underflow", "saturated", "num_non_finite", "sqnr", "mse", "amax")}
            values |= {"staleness": tensor.staleness, "gradient_to_noise": tensor.gradient_to_noise}
            values["headroom"] = tensor.headroom[0]
            if tensor.scaling != "tensor-wise":
                for i, quantile in enumerate(QUANTILES):
                    values[f"headroom_q{round(100 * quantile)}"] = tensor.headroom[i]
                    values[f"block_sqnr_q{round(100 * quantile)}"] = tensor.block_sqnr[i]
            found |= {f"{where}/{name}": float(value) for name, value in values.items() if value is not None}
        for gemm in self.gemms:
            found[f"fp8/{gemm.module}/{gemm.role}/sqnr"] = gemm.sqnr
            if gemm.gradient_to_noise is not None:
                found[f"fp8/{gemm.module}/{gemm.role}/gradient_to_noise"] = gemm.gradient_to_noise
        return found

    @property
    def worst(self) -> TensorNumbers:
        """The tensor at the top of the table: one that is not finite, else the one that loses the largest share of its elements
        if that is more than 1 %, else the one with the lowest SQNR, where E5M2 has 6 dB less than E4M3 to begin with."""
        return min(self.tensors, key=_badness)

    def __str__(self) -> str:
        """A table, the worst first."""
        from rich.console import Console

        written = io.StringIO()
        console = Console(file=written, width=_WIDTH, color_system=None)
        console.print(self.__rich__())
        for line in self.remarks():
            console.print(line, markup=False, highlight=False)
        return written.getvalue()

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"step {self.step}")
        for column in (
            "tensor",
            "format",
            "scaling",
            "SQNR",
            "underflow",
            "saturated",
            "amax",
            "headroom",
            "stale",
            "non-finite",
        ):
            table.add_column(column, overflow="fold", justify="left" if column in ("tensor", "format", "scaling") else "right")
        for tensor in sorted(self.tensors, key=_badness):
            table.add_row(*map(Text, _cells(tensor)))
        for gemm in sorted(self.gemms, key=lambda g: g.sqnr):
            name = f"{gemm.module}:{gemm.role} (result)"
            table.add_row(Text(name), "", "", f"{gemm.sqnr:.1f} dB", "", "", "", "", "", str(gemm.num_non_finite or ""))
        return table

    def remarks(self) -> list[str]:
        """What asks for attention, in words."""
        lines = [] if self.first_non_finite is None else [f"The first tensor that is not finite: {self.first_non_finite}."]
        for what in ("underflow", "saturated"):
            lost = sorted((t for t in self.tensors if getattr(t, what) > MANY_LOST), key=_badness)
            verb = "underflow to zero" if what == "underflow" else "saturate"
            lines += [f"{t.name}: {getattr(t, what):.1%} of the elements {verb}." for t in lost]
        noisy = [t for t in self.tensors if (r := t.gradient_to_noise) is not None and r < GRADIENT_TO_NOISE_ALARM]
        lines += [f"{t.name}: the gradient is {t.gradient_to_noise:.2f} times its noise, below sqrt(3)." for t in noisy]
        return lines


def make_measurement(step: int, found: Mapping[Watched, torch.Tensor], ages: Mapping[Watched, int | None]) -> Measurement:
    """The records of merged statistics, in the order of `found`. ages: see `TensorNumbers.staleness`."""
    tensors, gemms, first = [], [], None
    for watched, vector in found.items():
        v = vector.tolist()
        if v[NON_FINITE] and first is None:
            first = _in_words(watched, int(v[NON_FINITE]))
        recipe = "" if watched.recipe is None else watched.recipe.name
        counts = {"num_elements": int(v[COUNT]), "num_non_finite": int(v[NON_FINITE])}
        if watched.copy is None:
            gemms.append(
                GemmNumbers(
                    module=watched.name.module, role=watched.role, recipe=recipe, **counts, sqnr=_sqnr(v[SQUARES], v[ERRORS])
                )
            )
            continue
        num_finite = max(1, counts["num_elements"] - counts["num_non_finite"])
        tensors.append(
            TensorNumbers(
                name=str(watched.name),
                module=watched.name.module,
                kind=watched.name.kind,
                copy=watched.copy,
                role=watched.role,
                recipe=recipe,
                format=watched.format,
                scaling=watched.granularity,
                **counts,
                num_underflow=int(v[UNDERFLOW]),
                num_saturated=int(v[SATURATED]),
                sqnr=_sqnr(v[SQUARES], v[ERRORS]),
                mse=v[ERRORS] / num_finite,
                amax=v[AMAX],
                headroom=tuple(math.log2(q) if q > 0 else -math.inf for q in _quantiles(v, HEADROOM)),
                block_sqnr=tuple(10 * math.log10(q) if q > 0 else -math.inf for q in _quantiles(v, RATIO)),
                staleness=ages.get(watched),
            )
        )
    return Measurement(step=step, tensors=tuple(tensors), gemms=tuple(gemms), first_non_finite=first)


def _in_words(watched: Watched, count: int) -> str:
    side = "backward" if watched.is_backward else "forward"
    what = (
        f"{watched.name}, for the GEMM {watched.role}"
        if watched.copy
        else f"{watched.name.module}, the result of its {watched.role}"
    )
    return f"{what}, in the {side} ({count:,} elements)"


def _quantiles(vector: list[float], first: int) -> list[float]:
    values = vector[first : first + len(QUANTILES)]
    return [values[0], *(value / vector[CALLS] for value in values[1:-1]), values[-1]]


def _sqnr(squares: float, errors: float) -> float:
    if not errors:
        return math.inf
    return 10 * math.log10(squares / errors) if squares else -math.inf


def _ratio(sqnr: float) -> float:
    return math.inf if sqnr == math.inf else 10 ** (sqnr / 20)


def _badness(tensor: TensorNumbers) -> tuple[Any, ...]:
    """Smaller is worse: what is not finite first, then what loses many elements at either end, which an outlier's part in the
    SQNR may hide, then by SQNR."""
    lost = max(tensor.underflow, tensor.saturated)
    return (tensor.num_non_finite == 0, -lost if lost > MANY_LOST else 0.0, tensor.sqnr)


def _cells(t: TensorNumbers) -> list[str]:
    name = t.name if t.copy == "tensor" else f"{t.name} ({t.copy})"
    least, most = (round(t.headroom[i], 1) + 0.0 for i in (0, -1))  # no -0.0
    headroom = f"{least}" if t.scaling == "tensor-wise" else f"{least} to {most}"
    stale = "" if t.staleness is None else str(t.staleness)
    shares = [f"{share:.2%}" if share else "0" for share in (t.underflow, t.saturated)]
    return [
        name,
        t.format,
        t.scaling,
        f"{t.sqnr:.1f} dB",
        *shares,
        f"{t.amax:.3g}",
        headroom,
        stale,
        str(t.num_non_finite or ""),
    ]
