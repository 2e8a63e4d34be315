"""What the server of `support.py` does once, before it forks ranks. It starts no threads, which do not survive a fork."""

import contextlib
import gc

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.export._trace

import fp8pass
import fp8pass.rewrite.runner
import fp8pass.runtime.backend
import fp8pass.scales.view
import fp8pass.tools.inspection
import fp8pass.tools.monitoring
import fp8pass.weights.fsdp
from tests.support import tracing

__all__ = ["fp8pass", "torch"]

tracing.collect_seldom()
tracing.measure_no_guards()
torch._dynamo.list_backends()  # imports them all, as the first compilation of a process does
with contextlib.suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread for the progress bars of FX
if torch.version.cuda is None:  # else autograd starts threads, also on machines without a GPU
    with torch.random.fork_rng(devices=[]):
        model = fp8pass.fp8_compile(torch.nn.Linear(32, 32), "current", backend="aot_eager", select="all")
    model(torch.ones(32, 32)).sum().backward()  # what the first compilation of a process imports and remembers
    del model
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
gc.collect()
gc.freeze()  # ranks collect their own objects alone
