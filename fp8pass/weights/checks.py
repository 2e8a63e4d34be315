"""Whether kept copies are still those of their Parameters, by content: a checksum of all bytes.

NOTE [writes without a trace] Version counters, storages and optimizers tell of most changes of a Parameter; nothing tells of a
write through `.data`, by a fused operation called by hand, through a NumPy or DLPack view, or by another process. So what shows
no change is compared by content: at every step boundary, and in calls 2, 4, 8, 16 and every 16th from there. That is one launch
for all weights, which reads each once, and writes to nothing of the user's. On a GPU the host does not wait for the result: it
looks at it when a call comes later, and waits only where the next comparison is due by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from fp8pass.errors import StaleWeightError, preview
from fp8pass.weights.kept import KeptWeight, QuantizedWeight

#: A graph compares its weights at least once in so many calls.
CHECKED_CALLS = 16


def is_checked(num_calls: int) -> bool:
    """Whether the call with this number, counted from 1, compares the content of its weights: mistakes show early."""
    return num_calls % CHECKED_CALLS == 0 or (1 < num_calls < CHECKED_CALLS and num_calls & (num_calls - 1) == 0)


def note_content(made: Mapping[KeptWeight, torch.Tensor]) -> None:
    """Copies were made of these Parameters, as they are now."""
    for weights, checksums in _checksums(made):
        for weight, checksum in zip(weights, checksums.split(1), strict=True):
            assert weight.made is not None
            weight.made = dataclasses.replace(weight.made, checksum=checksum)


def has_same_content(made: QuantizedWeight, parameter: torch.Tensor) -> bool:
    """Whether a Parameter has the content that copies were made of. Waits for the device. False where that is not known."""
    return made.checksum is not None and torch.equal(checksums_of([parameter]), made.checksum)


def checksums_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of their bytes, by one launch: int32 [n]."""
    with torch.inference_mode(False), torch.no_grad():
        found: torch.Tensor = torch.ops.lowering.checksums([p.detach() for p in parameters])
    return found


def _checksums(given: Mapping[KeptWeight, torch.Tensor]) -> Iterable[tuple[list[KeptWeight], torch.Tensor]]:
    """Those of Parameters, one launch per device."""
    by_device: dict[torch.device, list[KeptWeight]] = {}
    for weight in given:
        by_device.setdefault(weight.device, []).append(weight)
    for weights in by_device.values():
        yield weights, checksums_of([given[w] for w in weights])


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """One that is under way, or done."""

    compared: list[tuple[KeptWeight, QuantizedWeight]]
    differs: torch.Tensor
    """bool [n], on the host."""
    done: torch.cuda.Event | None
    """None: it is."""


class ContentChecks:
    """The comparisons of one compiled model."""

    def __init__(self) -> None:
        self.are_due = False
        """Whether a step boundary has come since the last one."""
        self._under_way: list[_Comparison] = []

    def compare(self, given: Mapping[KeptWeight, torch.Tensor]) -> None:
        """Compare the content of Parameters with what their copies were made of. Raises StaleWeightError at once on the CPU."""
        if not given or _is_capturing(given):
            return
        for weights, now in _checksums(given):
            compared = [(w, made) for w in weights if (made := w.made) is not None]
            for weight in weights:
                weight.was_compared = True
            held = [made.checksum for _, made in compared if made.checksum is not None]
            with torch.inference_mode(False), torch.no_grad():
                differs = now != torch.cat(held)
                done = None
                if differs.is_cuda:
                    on_host = torch.empty(differs.shape, dtype=torch.bool, pin_memory=True)
                    on_host.copy_(differs, non_blocking=True)
                    done, differs = torch.cuda.Event(), on_host
                    done.record(torch.cuda.current_stream(now.device))
            self._under_way.append(_Comparison(compared, differs, done))
        self.settle(wait=False)

    def settle(self, wait: bool) -> None:
        """Look at the comparisons that are done, and with `wait` at all. Raises StaleWeightError; what is out of date is given
        up, so that the next call makes it again."""
        stale: list[str] = []
        while self._under_way and not _is_capturing(w for w, _ in self._under_way[0].compared):
            if not wait and not _is_done(self._under_way[0]):
                break
            comparison = self._under_way.pop(0)
            if comparison.done is not None:
                comparison.done.synchronize()
            for (weight, made), differs in zip(comparison.compared, comparison.differs.tolist(), strict=True):
                if differs:
                    stale.append(weight.path)
                    if weight.made is made:
                        weight.made = None
        if stale:
            raise StaleWeightError(_text(list(dict.fromkeys(stale))))

    def clear(self) -> None:
        """The user has said that Parameters were written to."""
        self._under_way.clear()


def _is_done(comparison: _Comparison) -> bool:
    return comparison.done is None or comparison.done.query()


def _is_capturing(given: Iterable[KeptWeight]) -> bool:
    """Whether the work of a call is recorded into a CUDA graph of the user's, which would repeat it."""
    return any(w.device.type == "cuda" for w in given) and torch.cuda.is_current_stream_capturing()


def _text(paths: list[str]) -> str:
    which = f"Parameter {paths[0]} has" if len(paths) == 1 else f"{len(paths)} Parameters have"
    names = "" if len(paths) == 1 else f" ({preview(paths)})"
    return (
        f"{which} other content than the FP8 copies that calls have read since, and nothing told of the change{names}."
        f" weight_copies='cache' keeps copies until a change is seen. Not seen are writes through .data, by a fused operation"
        f" that is called by hand (torch._fused_adamw_), through a NumPy or DLPack view, or by another process. Call"
        f" fp8pass.state(compiled).refresh_weights() after each such write, or compile with weight_copies='auto', which keeps"
        f" nothing that anybody can write to. The copies were given up: the next call makes them again"
    )
