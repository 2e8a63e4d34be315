"""The cost model: the speed-up of each GEMM over bfloat16 that is expected on a device.

`device.py`    what it has to know of a GPU, the table of the GPUs, and which of them describes a torch.device
`model.py`     seconds of GEMMs and casts, and the speed-up
"""

from fp8pass.cost.device import (
    B200,
    DEVICES,
    H100,
    H200,
    L40S,
    RTX_4090,
    RTX_5090,
    Device,
    device_called,
    device_for,
    device_named,
)
from fp8pass.cost.model import (
    Cast,
    Estimate,
    Gemm,
    cast_seconds,
    estimate_gemm,
    gemm_seconds,
    graph_speedup,
    shared_cast_seconds,
)

__all__ = [
    "B200",
    "DEVICES",
    "H100",
    "H200",
    "L40S",
    "RTX_4090",
    "RTX_5090",
    "Cast",
    "Device",
    "Estimate",
    "Gemm",
    "cast_seconds",
    "device_called",
    "device_for",
    "device_named",
    "estimate_gemm",
    "gemm_seconds",
    "graph_speedup",
    "shared_cast_seconds",
]
