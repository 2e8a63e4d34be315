"""`Device`: what the cost model has to know of a GPU. Every number carries where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Kind = Literal["published", "measured", "estimate"]


class Constant(float):
    """A number with its origin: a float in every formula, and `kind` and `source` say how far it can be trusted."""

    kind: Kind
    """"published" (a vendor's data sheet), "measured" (`source` says by whom and how) or "estimate" (neither)."""
    source: str
    """Where the number was published, or what it is estimated from."""

    def __new__(cls, value: float, kind: Kind, source: str) -> Constant:
        if not value > 0:
            raise ValueError(f"a constant of a device is {value!r}; use a number above 0")
        if kind not in ("published", "measured", "estimate"):
            raise ValueError(f"kind is {kind!r}; use 'published', 'measured' or 'estimate'")
        if not source.strip():
            raise ValueError(f"the constant {value!r} names no source; say where it is published or what it is estimated from")
        constant = super().__new__(cls, value)
        constant.kind = kind
        constant.source = source
        return constant

    def __getnewargs__(self) -> tuple[float, Kind, str]:  # type: ignore[override]  # so that it can be copied and pickled
        return (float(self), self.kind, self.source)


def published(value: float, source: str) -> Constant:
    """A number of a vendor's data sheet."""
    return Constant(value, "published", source)


def measured(value: float, source: str) -> Constant:
    """A number that was measured: `source` says by whom and how."""
    return Constant(value, "measured", source)


def estimate(value: float, source: str) -> Constant:
    """A number that has not been measured: `source` says what it is estimated from."""
    return Constant(value, "estimate", source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the cost model sees it. Rates are what large GEMMs and casts reach, not peaks; times are in seconds."""

    name: str
    """The product's name."""
    compute_capability: tuple[int, int]
    """(major, minor) of CUDA's compute capability."""
    num_sms: Constant
    """Number of streaming multiprocessors."""
    bf16_flops: Constant
    """FLOP/s of large bfloat16 GEMMs (a multiply-add is two operations)."""
    fp8_flops: Constant
    """FLOP/s of large per-tensor FP8 GEMMs with fast accumulation."""
    fp8_accurate_flops: Constant
    """The same without fast accumulation."""
    row_wise_flops: Constant
    """FLOP/s of large FP8 GEMMs with one scale per row."""
    blockwise_flops: Constant
    """FLOP/s of large FP8 GEMMs with a scale per 1x128 or 128x128 values."""
    mx_flops: Constant | None
    """FLOP/s of large MXFP8 GEMMs; None where the tensor cores know no MXFP8."""
    memory_bandwidth: Constant
    """Bytes/s, read and written together, of a large cast whose copies all keep the layout of the source."""
    transpose_bandwidth: Constant
    """The same for a cast that writes a transposed copy."""
    kernel_latency: Constant
    """Seconds that the shortest kernel other than a GEMM takes."""
    bf16_gemm_latency: Constant
    """Seconds that the smallest bfloat16 GEMM takes."""
    fp8_gemm_latency: Constant
    """Seconds that the smallest FP8 GEMM takes."""
    note: str = ""
    """Why this device was taken, where it is not the one that the model runs on; else ''."""

    @property
    def constants(self) -> dict[str, Constant]:
        """Its numbers by field."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Constant)}

    @property
    def estimates(self) -> list[str]:
        """Fields whose numbers are estimates."""
        return [name for name, constant in self.constants.items() if constant.kind == "estimate"]

    def with_measurements(self, values: Mapping[str, float], source: str) -> Device:
        """This device with numbers measured on it; raises ValueError for a name that is no number of a device."""
        known = [field.name for field in dataclasses.fields(self) if field.name not in ("name", "compute_capability", "note")]
        for name in values:
            if name not in known:
                raise ValueError(f"a device has no number {name!r}; its numbers are {', '.join(known)}")
        changes = {name: measured(value, source) for name, value in values.items()}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
