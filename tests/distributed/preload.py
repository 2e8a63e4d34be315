"""What the server of `support.py` does once, before it forks ranks. It starts no threads, which do not survive a fork."""

import gc

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import fp8pass
from tests.support import tracing

__all__ = ["fp8pass", "torch"]

tracing.collect_seldom()
tracing.measure_no_guards()
gc.freeze()  # ranks collect their own objects alone
