"""The monitor: which steps are measured, and where their numbers go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from fp8pass.errors import OptionError
from fp8pass.inputs import Watch, Watched
from fp8pass.recipes import DelayedScaling
from fp8pass.runtime.parts import Part
from fp8pass.scales.reduction import is_distributed
from fp8pass.tools.monitoring.measurement import Measurement, make_measurement
from fp8pass.tools.monitoring.provider import MeasureProvider
from lowering.statistics import merged_statistics

Log = Callable[[dict[str, float]], object]


class Monitor:
    """Measures every n-th step of a compiled model, until `stop`. Also a context manager, which stops at its end.

    `str(monitor)` is a table of the last measured step, the worst tensors first.
    """

    def __init__(self, parts: Sequence[Part], every: int, log: Log | None, products: bool):
        self._watchers = [_Watcher(self, part, every, Watch(products)) for part in parts]
        self._log = log
        self._latest: Measurement | None = None

    @property
    def latest(self) -> Measurement | None:
        """The numbers of the last measured step; None before there are any.

        A step's numbers are complete when it has ended, where ranks also exchange them: with `step="auto"` that is when the
        next forward begins. In a single process they can be read as soon as they are computed.
        """
        if not is_distributed(None):
            pending = [watcher for watcher in self._watchers if watcher.provider.has_written()]
            if pending:
                return _together([watcher.measured(watcher.session.num_steps, watcher.provider.read()) for watcher in pending])
        return self._latest

    def stop(self) -> None:
        """Measure no more steps; `latest` stays. Logs the last measured step, if its end has not come. Called by every rank."""
        self._stop(True)

    def _stop(self, logs: bool) -> None:
        if logs:
            for watcher in self._watchers:
                watcher.finish_step()
        self._latest = self.latest
        for watcher in self._watchers:
            watcher.stop()

    def finish(self, part: Part, measurement: Measurement) -> None:
        """A measured step of one part of the model has ended."""
        earlier = self._latest
        is_same = earlier is not None and earlier.step == measurement.step and len(self._watchers) > 1
        self._latest = _together([earlier, measurement]) if is_same and earlier is not None else measurement
        if self._log is not None:
            self._log(measurement.to_dict())

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


class _Watcher:
    """The monitor of one session: see `StepMonitor`."""

    def __init__(self, monitor: Monitor, part: Part, every: int, watch: Watch):
        self.session = session = part.session
        if session.measuring is None:
            session.measuring = MeasureProvider()
        assert isinstance(session.measuring, MeasureProvider)
        self.provider = session.measuring
        self.provider.take()
        self._monitor, self._part, self._every, self._watch = monitor, part, every, watch
        session.monitor = self
        session.clock.agrees = is_distributed(None)

    @property
    def latest(self) -> Measurement | None:
        """Of the whole monitor."""
        return self._monitor.latest

    def watch(self, step: int) -> Watch | None:
        """What is measured in a step."""
        return self._watch if step % self._every == 0 else None

    def after_step(self, step: int) -> None:
        """Take the numbers of a step, of all ranks together."""
        if self.watch(step) is None:
            return
        self._monitor.finish(self._part, self.measured(step, _of_all_ranks(self.provider.take())))

    def finish_step(self) -> None:
        """Take the numbers of the step that is under way, which no boundary has ended yet."""
        is_under_way = self.session.monitor is self and self.session.clock.is_step_pending
        if is_under_way and (is_distributed(None) or self.provider.has_written()):
            self.after_step(self.session.num_steps)

    def measured(self, step: int, found: Mapping[Watched, torch.Tensor]) -> Measurement:
        """The records of what was counted, by paths in the whole model."""
        outer = {
            dataclasses.replace(watched, name=watched.name.placed(self._part.outer(watched.name.module))): vector
            for watched, vector in found.items()
        }
        ages = dict(zip(outer, (self._age(watched) for watched in found), strict=True))
        return make_measurement(step, outer, ages)

    def _age(self, watched: Watched) -> int | None:
        recipe = watched.recipe
        if not isinstance(recipe, DelayedScaling) or watched.copy is None or recipe.amax_compute_algo != "max":
            return None
        stores, name = self.session.stores, str(self.session.stores.name_under(recipe, watched.name))
        store = next((store for store in stores if store.recipe == recipe and name in store), None)
        if store is None:
            return None
        history = (
            store.amax_history[1:, store.columns(name)].amax(dim=1).tolist()
        )  # the oldest first; staged ones are no history
        if not any(history):
            return None
        return len(history) - max(i for i, amax in enumerate(history) if amax == max(history))

    def stop(self) -> None:
        """Stop watching."""
        self.provider.take()
        if self.session.monitor is self:
            self.session.monitor = None
            self.session.clock.agrees = False


def start(parts: Sequence[Part], every: object, log: object, products: object) -> Monitor:
    """A monitor of these parts of a model. Raises OptionError."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(f"every is {every!r}; use a positive int: 1 measures every step, 100 every hundredth")
    if log is not None and not callable(log):
        raise OptionError(f"log is {log!r}, a {type(log).__name__}; pass a function of a dict, such as wandb.log, or None")
    if not isinstance(products, bool):
        raise OptionError(f"results is {products!r}; use True or False")
    if any(part.session.monitor is not None for part in parts):
        raise OptionError("the model has a monitor already; call its stop() first")
    chosen: Any = log
    return Monitor(parts, every, chosen, products)


def _of_all_ranks(own: dict[Watched, torch.Tensor]) -> dict[Watched, torch.Tensor]:
    """The statistics of all ranks, merged by what they are of, in the order of the first rank that has them."""
    if not is_distributed(None):
        return own
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    merged: dict[Watched, torch.Tensor] = {}
    for of_rank in every:
        for watched, vector in of_rank.items():
            merged[watched] = merged_statistics(merged[watched], vector) if watched in merged else vector
    return merged


def _together(measurements: Sequence[Measurement]) -> Measurement:
    """The numbers of several parts of a model."""
    return Measurement(
        step=max(m.step for m in measurements),
        tensors=tuple(t for m in measurements for t in m.tensors),
        gemms=tuple(g for m in measurements for g in m.gemms),
        first_non_finite=next((m.first_non_finite for m in measurements if m.first_non_finite is not None), None),
    )
