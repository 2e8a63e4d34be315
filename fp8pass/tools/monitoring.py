"""Measurements of what FP8 does to the tensors of a model in training: a monitor, and the numbers of a step.

Graphs of a measured step get a buffer per module instance, into which forward and backward write statistics; the monitor reads
them at the step boundary, of all ranks together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from fp8pass.errors import OptionError
from fp8pass.inputs import STATISTICS, BoundInputs, ExtraInput, InputProvider, Measured, MonitorRow, Needed, Placed, Records
from fp8pass.recipes import DelayedScaling
from fp8pass.recipes.recipe import is_int
from fp8pass.rules import SAVED
from fp8pass.runtime.session import Part, Session
from fp8pass.scales.reduction import is_distributed
from fp8pass.tools.tables import as_text, make_table
from lowering import statistics

if TYPE_CHECKING:
    from rich.table import Table

GRADIENT_TO_NOISE_ALARM = math.sqrt(3)
"""Below this, gradients no longer tell where the loss falls. Source: Chmiel et al., "FP4 All the Way", 2025."""
MANY_LOST = 0.01  # A tensor that loses a larger share of its elements is at the top of the table, and is remarked upon.
#: Columns of text, whatever the terminal is.
_TEXT_WIDTH = 160
#: Rows of a graph's buffer, unless it needs more: 140 KB.
_ROWS = 1024
_COLUMNS = ("tensor", "format", "scaling", "SQNR", "underflow", "saturated", "amax", "headroom", "stale", "non-finite")

Log = Callable[[dict[str, float]], object]


# -- the numbers of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNumbers:
    """The losses of quantizing one tensor in one step, over all ranks and all batches of the step."""

    name: str
    """Such as "layers.0.attn.wq:input"."""
    module: str
    """Path of the module that it is named after."""
    kind: str
    """"input", "weight" or "grad_output"; "saved" for a value that the forward saves for the backward."""
    copy: str
    """"tensor" where both FP8 copies hold the same values; else "rowwise" or "columnwise": each has scales of its own."""
    role: str
    """Role of the first GEMM that reads it: "output", "grad_input" or "grad_weight"."""
    recipe: str
    format: str
    """"e4m3" or "e5m2"."""
    scaling: str
    """Elements with a common scale: "tensor-wise", "row-wise", "1x32", "1x128" or "128x128"."""
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
    """Factors of two between the amax of a block and what its scale maps to the largest FP8 value. They are the smallest one,
    the 10 %, 50 % and 90 % quantiles and the largest one of all blocks; the whole tensor is a block where it has one scale.
    Below 0 a block's largest element saturates; inf where there are only zeros. Over several batches or ranks, the inner
    quantiles are means."""
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
        """A gradient's norm over the norm of what quantization changes. Below sqrt(3) is an alarm. None for other tensors."""
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
        """A gradient's norm in high precision over that of the difference. Below sqrt(3) is an alarm. None for outputs."""
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
        for tensor, marks in _marked(self.tensors):
            label = tensor.name.rpartition(":")[2].replace("#", "_").replace("@", "_")
            where = "_".join((f"fp8/{tensor.module}/{label}", *marks))
            values = {n: getattr(tensor, n) for n in ("underflow", "saturated", "num_non_finite", "sqnr", "mse", "amax")}
            values |= {"staleness": tensor.staleness, "gradient_to_noise": tensor.gradient_to_noise}
            values["headroom"] = tensor.headroom[0]
            if tensor.scaling != "tensor-wise":
                for i, quantile in enumerate(statistics.QUANTILES):
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
        if that is more than 1 %, else the one with the lowest SQNR. E5M2 has 6 dB less than E4M3 to begin with."""
        return min(self.tensors, key=_badness)

    def __str__(self) -> str:
        """The table, the worst tensor first."""
        return as_text([self.__rich__(), *self.remarks()], _TEXT_WIDTH)

    def __rich__(self) -> Table:
        rows = [_cells(tensor, marks) for tensor, marks in sorted(_marked(self.tensors), key=lambda held: _badness(held[0]))]
        for gemm in sorted(self.gemms, key=lambda g: g.sqnr):
            name, count = f"{gemm.module}:{gemm.role} (result)", str(gemm.num_non_finite or "")
            rows.append([name, "", "", f"{gemm.sqnr:.1f} dB", "", "", "", "", "", count])
        columns = {name: {"justify": "right" if i > 2 else "left"} for i, name in enumerate(_COLUMNS)}
        return make_table(columns, rows, title=f"step {self.step}")

    def remarks(self) -> list[str]:
        """Remarks on values that need attention, a line each."""
        lines = [] if self.first_non_finite is None else [f"The first tensor that is not finite: {self.first_non_finite}."]
        for what, verb in (("underflow", "underflow to zero"), ("saturated", "saturate")):
            lost = sorted((t for t in self.tensors if getattr(t, what) > MANY_LOST), key=_badness)
            lines += [f"{t.name}: {getattr(t, what):.1%} of the elements {verb}." for t in lost]
        noisy = [t for t in self.tensors if (r := t.gradient_to_noise) is not None and r < GRADIENT_TO_NOISE_ALARM]
        lines += [f"{t.name}: the gradient is {t.gradient_to_noise:.2f} times its noise, below sqrt(3)." for t in noisy]
        return lines


def _marked(tensors: Iterable[TensorNumbers]) -> Iterator[tuple[TensorNumbers, list[str]]]:
    """Each tensor with the words that tell its copies apart: layout, and recipe and role where rules give several."""
    tensors = list(tensors)
    copies: dict[tuple[str, str], list[TensorNumbers]] = {}
    for tensor in tensors:
        copies.setdefault((tensor.name, tensor.copy), []).append(tensor)
    for tensor in tensors:
        same = copies[tensor.name, tensor.copy]
        several = [of for of in ("recipe", "role") if len({getattr(t, of) for t in same}) > 1]
        layout = [] if tensor.copy == "tensor" else [tensor.copy]
        yield tensor, layout + [getattr(tensor, of) for of in several]


def _measurement(step: int, found: Mapping[MonitorRow, torch.Tensor], ages: Mapping[MonitorRow, int | None]) -> Measurement:
    """The records of merged statistics, in the order of `found`. ages: see `TensorNumbers.staleness`."""
    tensors, gemms, first = [], [], None
    for row, vector in found.items():
        v = vector.tolist()
        if v[statistics.NON_FINITE] and first is None:
            first = _in_words(row, int(v[statistics.NON_FINITE]))
        shared: dict[str, Any] = {
            "module": row.name.module,
            "role": row.role,
            "recipe": "" if row.recipe is None else row.recipe.name,
            "num_elements": int(v[statistics.COUNT]),
            "num_non_finite": int(v[statistics.NON_FINITE]),
            "sqnr": _sqnr(v[statistics.SQUARES], v[statistics.ERRORS]),
        }
        if row.copy is None:
            gemms.append(GemmNumbers(**shared))
            continue
        tensors.append(
            TensorNumbers(
                **shared,
                name=str(row.name),
                kind=row.name.kind,
                copy=row.copy,
                format=row.format,
                scaling=row.granularity,
                num_underflow=int(v[statistics.UNDERFLOW]),
                num_saturated=int(v[statistics.SATURATED]),
                mse=v[statistics.ERRORS] / max(1, shared["num_elements"] - shared["num_non_finite"]),
                amax=v[statistics.AMAX],
                headroom=tuple(math.log2(q) if q > 0 else -math.inf for q in _quantiles(v, statistics.HEADROOM)),
                block_sqnr=tuple(10 * math.log10(q) if q > 0 else -math.inf for q in _quantiles(v, statistics.RATIO)),
                staleness=ages.get(row),
            )
        )
    return Measurement(step=step, tensors=tuple(tensors), gemms=tuple(gemms), first_non_finite=first)


def _in_words(row: MonitorRow, count: int) -> str:
    side = "backward" if row.is_backward else "forward"
    reader = "which is saved for the backward" if row.role == SAVED else f"for the GEMM {row.role}"
    what = f"{row.name}, {reader}" if row.copy else f"{row.name.module}, the result of its {row.role}"
    return f"{what}, in the {side} ({count:,} element{'s' * (count != 1)})"


def _quantiles(vector: list[float], first: int) -> list[float]:
    values = vector[first : first + len(statistics.QUANTILES)]
    return [values[0], *(value / vector[statistics.CALLS] for value in values[1:-1]), values[-1]]


def _sqnr(squares: float, errors: float) -> float:
    if not errors:
        return math.inf
    return 10 * math.log10(squares / errors) if squares else -math.inf


def _ratio(sqnr: float) -> float:
    return math.inf if sqnr == math.inf else 10 ** (sqnr / 20)


def _badness(tensor: TensorNumbers) -> tuple[Any, ...]:
    """A key to sort by, the worst first: what is not finite, then what loses many elements at either end, which an outlier's
    part in the SQNR may hide, then by SQNR."""
    lost = max(tensor.underflow, tensor.saturated)
    return (tensor.num_non_finite == 0, -lost if lost > MANY_LOST else 0.0, tensor.sqnr)


def _cells(t: TensorNumbers, marks: Sequence[str]) -> list[str]:
    name = f"{t.name} ({', '.join(marks)})" if marks else t.name
    least, most = (round(t.headroom[i], 1) + 0.0 for i in (0, -1))  # no -0.0
    headroom = f"{least}" if t.scaling == "tensor-wise" else f"{least} to {most}"
    stale = "" if t.staleness is None else str(t.staleness)
    shares = [f"{share:.2%}" if share else "0" for share in (t.underflow, t.saturated)]
    sqnr, amax, count = f"{t.sqnr:.1f} dB", f"{t.amax:.3g}", str(t.num_non_finite or "")
    return [name, t.format, t.scaling, sqnr, *shares, amax, headroom, stale, count]


# -- the monitor


class Monitor:
    """Measures every n-th step of a compiled model, until `stop`. Also a context manager, which stops at its end.

    `str(monitor)` is a table of the last measured step, the worst tensors first.
    """

    def __init__(self, parts: Sequence[Part], every: int, log: Log | None, products: bool):
        self._parts, self._every, self._log = {part.session: part for part in parts}, every, log
        self._scope: Measured = "products" if products else "tensors"
        self._latest: Measurement | None = None
        self._providers: dict[Session, StatisticsProvider] = {}
        for session in self._parts:
            if session.measuring is None:
                session.measuring = StatisticsProvider()
            assert isinstance(session.measuring, StatisticsProvider)
            self._providers[session] = session.measuring
            session.measuring.take()
            session.monitor = self
            session.clock.agrees = is_distributed(None)

    @property
    def latest(self) -> Measurement | None:
        """The numbers of the last measured step; None before there are any.

        A step's numbers are complete when it has ended, where ranks also exchange them: with `step="auto"` that is when the
        next forward begins. In a single process they can be read as soon as they are computed.
        """
        if not is_distributed(None):
            pending = [(session, found) for session, found in self._providers.items() if found.has_written()]
            if pending:
                return _together([self._measured(session, provider.read()) for session, provider in pending])
        return self._latest

    def watch(self, step: int) -> Measured | None:
        """The scope of a step that is measured; None for one that is not."""
        return self._scope if step % self._every == 0 else None

    def after_step(self, session: Session) -> None:
        """Take the numbers of the step that a session ends, of all ranks together."""
        if self.watch(session.num_steps) is None:
            return
        found = self._measured(session, _of_all_ranks(self._providers[session].take()))
        earlier = self._latest
        is_same = earlier is not None and earlier.step == found.step and len(self._parts) > 1
        self._latest = _together([earlier, found]) if is_same and earlier is not None else found
        if self._log is not None:
            self._log(found.to_dict())

    def stop(self) -> None:
        """Measure no more steps; `latest` is kept. Logs the last measured step if it has not ended. Called by every rank."""
        self._stop(True)

    def _stop(self, logs: bool) -> None:
        for session, provider in self._providers.items() if logs else ():
            is_under_way = session.monitor is self and session.clock.is_step_pending  # no boundary has ended it yet
            if is_under_way and (is_distributed(None) or provider.has_written()):
                self.after_step(session)
        self._latest = self.latest
        for session, provider in self._providers.items():
            provider.take()
            if session.monitor is self:
                session.monitor = None
                session.clock.agrees = False

    def _measured(self, session: Session, found: Mapping[MonitorRow, torch.Tensor]) -> Measurement:
        """The records of what was counted, by paths in the whole model."""
        part = self._parts[session]
        outer = {
            dataclasses.replace(row, name=row.name.placed(part.outer(row.name.module))): vector for row, vector in found.items()
        }
        ages = dict(zip(outer, (_age(session, row) for row in found), strict=True))
        return _measurement(session.num_steps, outer, ages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop(error is None or not is_distributed(None))  # the other ranks may have met no error, and go on

    def __str__(self) -> str:
        latest = self.latest
        return "Nothing is measured yet: train a step." if latest is None else str(latest)

    def __repr__(self) -> str:
        latest = self.latest
        return f"Monitor({'nothing measured yet' if latest is None else f'step {latest.step}, {len(latest.tensors)} tensors'})"


def _age(session: Session, row: MonitorRow) -> int | None:
    """The steps since the largest amax in a tensor's history was recorded; None where no such amax makes the scale."""
    recipe = row.recipe
    if not isinstance(recipe, DelayedScaling) or row.copy is None or recipe.amax_compute_algo != "max":
        return None
    stores, name = session.stores, str(session.stores.name_under(recipe, row.name))
    store = next((store for store in stores if store.recipe == recipe and name in store), None)
    if store is None:
        return None
    # The oldest first; staged amaxes are no history.
    history = store.amax_history[1:, store.columns(name)].amax(dim=1).tolist()
    if not any(history):
        return None
    return len(history) - max(i for i, amax in enumerate(history) if amax == max(history))


def start(parts: Sequence[Part], every: object, log: object, products: object) -> Monitor:
    """A monitor of these parts of a model. Raises OptionError."""
    if not is_int(every) or every < 1:
        raise OptionError(f"every is {every!r}; use a positive int: 1 measures every step, 100 every hundredth")
    if log is not None and not callable(log):
        raise OptionError(f"log is {log!r}, a {type(log).__name__}; pass a function of a dict, such as wandb.log, or None")
    if not isinstance(products, bool):
        raise OptionError(f"results is {products!r}; use True or False")
    if any(part.session.monitor is not None for part in parts):
        raise OptionError("the model has a monitor already; call its stop() first")
    chosen: Any = log
    return Monitor(parts, every, chosen, products)


def _of_all_ranks(own: dict[MonitorRow, torch.Tensor]) -> dict[MonitorRow, torch.Tensor]:
    """The statistics of all ranks, merged row by row, in the order of the first rank that has them."""
    if not is_distributed(None):
        return own
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    merged: dict[MonitorRow, torch.Tensor] = {}
    for of_rank in every:
        _merge(merged, of_rank.items())
    return merged


def _merge(into: dict[MonitorRow, torch.Tensor], rows: Iterable[tuple[MonitorRow, torch.Tensor]]) -> None:
    for row, vector in rows:
        into[row] = statistics.merged_statistics(into[row], vector) if row in into else vector


def _together(measurements: Sequence[Measurement]) -> Measurement:
    """The numbers of several parts of a model."""
    return Measurement(
        step=max(m.step for m in measurements),
        tensors=tuple(t for m in measurements for t in m.tensors),
        gemms=tuple(g for m in measurements for g in m.gemms),
        first_non_finite=next((m.first_non_finite for m in measurements if m.first_non_finite is not None), None),
    )


# -- inputs of measured graphs


class StatisticsProvider(InputProvider):
    """Gives measured graphs their buffers, and holds what they wrote until it is taken."""

    def __init__(self) -> None:
        self._bound: list[StatisticsBuffer] = []
        self._calls = 0

    def inputs(self, device: torch.device, needed: Needed) -> list[ExtraInput]:
        """The buffer twice: for the forward and for the backward."""
        rows = _ROWS if needed.entries <= _ROWS else 1 << (needed.entries - 1).bit_length()
        return [ExtraInput(name, name, (rows, statistics.WIDTH), torch.float64) for name in STATISTICS]

    def bind(self, placed: Placed) -> StatisticsBuffer:
        """A buffer for one module instance."""
        self._bound.append(StatisticsBuffer(self, placed))
        return self._bound[-1]

    def next_call(self) -> int:
        """The position of a call among those of the process."""
        self._calls += 1
        return self._calls

    def has_written(self) -> bool:
        """Say whether a graph was measured since `take`."""
        return any(bound.call is not None for bound in self._bound)

    def read(self) -> dict[MonitorRow, torch.Tensor]:
        """The statistics since `take`, float64 [WIDTH] on the CPU each, in the order in which they were computed."""
        written = sorted((b for b in self._bound if b.call is not None), key=lambda b: b.call or 0)
        found: dict[MonitorRow, torch.Tensor] = {}
        for is_backward in (False, True):
            for bound in written[::-1] if is_backward else written:
                _merge(found, bound.rows(is_backward))
        return found

    def take(self) -> dict[MonitorRow, torch.Tensor]:
        """`read`, after which nothing is left."""
        found = self.read()
        for bound in self._bound:
            bound.clear()
        return found


class StatisticsBuffer(BoundInputs):
    """The buffer of one module instance of one graph."""

    def __init__(self, provider: StatisticsProvider, placed: Placed):
        self._provider = provider
        self._rows = [dataclasses.replace(w, name=placed.name_tensor(w.name)) for w in placed.watched]
        self.is_read = bool(self._rows)
        self._empty = statistics.empty_statistics(placed.inputs[0].shape[0], placed.device)
        self._buffer, self._scratch = self._empty.clone(), self._empty.clone()
        self.call: int | None = None  # The last forward since what was written was taken.

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Any
    ) -> Sequence[torch.Tensor]:
        """The buffer, or a scratch buffer for what does not count."""
        if records == "all":
            self.call = self._provider.next_call()
        forward = self._buffer if records == "all" else self._scratch
        backward = self._scratch if records == "nothing" else self._buffer
        return [forward.data, backward.data]

    def rows(self, is_backward: bool) -> list[tuple[MonitorRow, torch.Tensor]]:
        """The statistics that one side has written."""
        values = self._buffer.cpu()
        rows = [(row, values[i]) for i, row in enumerate(self._rows) if row.is_backward == is_backward]
        return [(row, vector.clone()) for row, vector in rows if vector[statistics.CALLS] > 0]

    def clear(self) -> None:
        """Forget what was written."""
        if self.call is not None:
            self._buffer.copy_(self._empty)
            self.call = None
