"""Which constants describe which device."""

from __future__ import annotations

import dataclasses
import re

import torch

from fp8pass.cost.ada import L40S, RTX_4090
from fp8pass.cost.b200 import B200
from fp8pass.cost.device import Device
from fp8pass.cost.h100 import H100
from fp8pass.cost.h200 import H200

DEFAULT = H200
"""The device that fp8pass is designed for: the estimate where no GPU says otherwise."""

_BY_NAME = (
    (r"\bG?H200\b", H200),
    (r"\b(H100|H800)\b", H100),
    (r"\bG?B200\b", B200),
    (r"\bL40S\b", L40S),
    (r"\bRTX 4090\b", RTX_4090),
)
_BY_CAPABILITY = {(9, 0): H100, (8, 9): L40S, (10, 0): B200, (10, 3): B200}


def device_for(device: torch.device | None) -> Device:
    """The constants for a torch device.

    A CUDA device without constants of its own gets those of its compute capability, and any other device an H200's; `note`
    then says so.
    """
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        what = "no device is known" if device is None else f"device '{device}' has no constants"
        return dataclasses.replace(DEFAULT, note=f"{what}: estimated for an {DEFAULT.name}")
    return device_named(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def device_named(name: str, capability: tuple[int, int]) -> Device:
    """The constants for a CUDA device by its name and compute capability; `note` is set where they are another's."""
    for pattern, device in _BY_NAME:
        if re.search(pattern, name):
            return device
    device = _BY_CAPABILITY.get(capability, DEFAULT)
    return dataclasses.replace(device, note=f"{name} has no constants: estimated for an {device.name}")
