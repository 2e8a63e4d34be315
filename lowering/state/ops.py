"""The operations on the state of delayed scaling as registered: checks, fakes and providers of each.

Triton kernels run on CUDA devices with FP8 instructions. They are imported when such a device's tensor arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.state import reference
from lowering.state.reference import check_algo, check_history


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


load_scales = operation(reference.load_scales)
load_scales.lazy_provider(runs_kernels, "lowering.state.kernels")


@load_scales.fake
def _(scale: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return scale.new_empty((count,)), scale.new_empty((count,))


take = operation(reference.take)


@take.fake
def _(x: Tensor, index: list[int]) -> Tensor:
    return x.new_empty((len(index),))


record_amax = operation(reference.record_amax, mutates=["amax"], indexed=["observed"])
record_amax.lazy_provider(runs_kernels, "lowering.state.kernels")

update_scales = operation(
    reference.update_scales, mutates=["amax_history", "scale", "num_non_finite"], checks=[check_algo, check_history]
)
update_scales.provider(_is_cpu)(reference.update_scales_on_cpu)
update_scales.lazy_provider(runs_kernels, "lowering.state.kernels")
