"""What the server of `support.py` imports once, before it forks ranks. Imports only: threads do not survive a fork."""

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import fp8pass

__all__ = ["fp8pass", "torch"]
