"""The cost model: the speed-up of each GEMM over bfloat16 that is expected on a device.

`device.py`   Device, Constant: a GPU's numbers, each with its source
`h100.py`     the numbers of the H100
`h200.py`     the numbers of the H200
`ada.py`      the numbers of the L40S and the RTX 4090
`b200.py`     the numbers of the B200
`devices.py`  which numbers describe which torch.device
`model.py`    seconds of GEMMs and casts, and the speed-up
"""

from fp8pass.cost.device import Constant, Device
from fp8pass.cost.devices import device_for, device_named
from fp8pass.cost.model import (
    Cast,
    Estimate,
    Gemm,
    cast_seconds,
    estimate_gemm,
    gemm_seconds,
    graph_speedup,
    shared_cast_seconds,
    speedup,
)

__all__ = [
    "Cast",
    "Constant",
    "Device",
    "Estimate",
    "Gemm",
    "cast_seconds",
    "device_for",
    "device_named",
    "estimate_gemm",
    "gemm_seconds",
    "graph_speedup",
    "shared_cast_seconds",
    "speedup",
]
