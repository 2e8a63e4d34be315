"""The logistic function of float32, which Inductor's code on GPUs computes in 5 instructions: `inductor.elementwise.sigmoid`.

It takes the place of aten's in compiled graphs alone, of SiLU and its gradient above all, that casts join; whoever looks at
a rewritten graph sees aten's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.operation import operation


@operation
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise."""
    return torch.sigmoid(x)


@sigmoid.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
