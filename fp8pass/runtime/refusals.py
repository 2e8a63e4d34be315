"""Features of torch that graphs with FP8 operations cannot have, each refused in one sentence instead of by an inner error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.errors import UnsupportedError
from lowering.formats import FP8_MAX


def refusing_batches(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled backward that raises UnsupportedError under vmap. run: takes its arguments as a list, which it may empty."""

    functorch = torch._C._functorch
    is_batch = getattr(functorch, "is_legacy_batchedtensor", functorch.is_batchedtensor)

    @functools.wraps(run)
    def checked(args: list[Any]) -> Any:
        if any(type(a) is torch.Tensor and is_batch(a) for a in args):
            raise UnsupportedError(
                "a compiled backward cannot run for a batch of gradients at once, as torch.autograd.grad(is_grads_batched=True)"
                " and torch.autograd.functional.jacobian(vectorize=True) ask for it: call the compiled model and"
                " torch.autograd.grad once per gradient, or use the model that was given to fp8_compile"
            )
        return run(args)

    checked._boxed_call = True  # type: ignore[attr-defined]
    return checked


def refuse_nan_asserts(graph: fx.Graph, patches: dict[str, Any]) -> None:
    """Raise UnsupportedError for a graph with FP8 values where Inductor is to assert that nothing is NaN or inf. patches: the
    options that it is compiled with."""
    from torch._inductor import config

    if not patches.get("nan_asserts", config.nan_asserts):
        return
    held = next((n for n in graph.nodes if getattr(n.meta.get("val"), "dtype", None) in FP8_MAX), None)
    if held is not None:
        raise UnsupportedError(
            f"Inductor's option nan_asserts asks every tensor for inf, and torch has no isinf for {held.meta['val'].dtype}:"
            f" leave nan_asserts off; torch.autograd.set_detect_anomaly(True) and fp8pass.monitor(compiled) find NaN and inf"
        )
