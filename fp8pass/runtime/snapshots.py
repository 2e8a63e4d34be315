"""Snapshots of a compiled graph, for inspection, and the summary of them that outlives them in a cache."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from fp8pass.errors import NotTracedError
from fp8pass.graph.origin import input_index, is_gradient
from fp8pass.graph.traces import Snapshot
from fp8pass.graph.values import size_hint
from fp8pass.rewrite.saved import saved_memory
from fp8pass.runtime.session import CompiledGraph, Summary

Modes = tuple[bool, bool, tuple[tuple[str, torch.dtype], ...]]
"""Torch's modes that decide what AOTAutograd makes of a graph, besides the graph: gradients, inference mode, and the types of
devices where autocast is on, each with its dtype."""


def modes_now() -> Modes:
    """The modes of this thread."""
    devices = torch._C._autocast_supported_devices()
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


@contextlib.contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """These modes in this thread."""
    has_gradients, is_inference, autocast = modes
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.set_grad_enabled(has_gradients))
        on = dict(autocast)
        for device in {*on, *(d for d, _ in modes_now()[2])}:
            stack.enter_context(torch.autocast(device, on.get(device), device in on))
        yield


def snapshot_of(graph: CompiledGraph, side: Literal["before", "after", "forward", "backward"]) -> Snapshot | None:
    """A snapshot of a graph, which is traced again where it came from a cache; None where the graph has no such side, none was
    taken, or it was not rewritten. Raises NotTracedError where it cannot be traced any more."""
    if graph.rewrite is None:
        return None
    if not graph.rewrite.after.nodes and (graph.trace_again is None or not graph.trace_again()):
        raise NotTracedError(
            f"{graph.name} came from torch's cache, untraced; torch._dynamo.reset() has dropped its source. Read"
            f" inspect(compiled).graphs before a reset, or compile without the cache:"
            f" torch._functorch.config.enable_autograd_cache = False, or TORCHINDUCTOR_AUTOGRAD_CACHE=0"
        )
    found: Snapshot | None = getattr(graph.rewrite if side in ("before", "after") else graph, side)
    return found


def summary_of(graph: CompiledGraph) -> Summary:
    """The summary of a graph that was traced in this process, or the one that came with it."""
    if graph.summary is None:
        nodes = () if graph.rewrite is None else graph.rewrite.after.nodes
        graph.summary = tuple(name for _, name in extra_placeholders(nodes, graph)), _saved(graph)
    return graph.summary


def _saved(graph: CompiledGraph) -> dict[str, int]:
    rewritten, forward = graph.rewrite, graph.forward
    if rewritten is None or forward is None:
        return {}
    num_outputs = sum(not is_gradient(d) for d in rewritten.after.nodes[-1].meta["desc"])
    found: Counter[str] = Counter()
    placeholders = [n for n in forward.nodes if n.op == "placeholder"]
    for node, size in saved_memory(forward.results(), placeholders, num_outputs):
        found[str(node.meta["val"].dtype).removeprefix("torch.")] += size_hint(size)
    return dict(found.most_common())


def extra_placeholders(nodes: Iterable[Any], graph: CompiledGraph) -> list[tuple[Any, str]]:
    """The placeholders of a graph's extra inputs among nodes, a graph's or a snapshot's, with the names of the inputs."""
    names = {graph.extra_start + i: given.name for i, given in enumerate(graph.extra_inputs)}
    found = ((node, input_index(node)) for node in nodes if node.op == "placeholder")
    return [(node, names[index]) for node, index in found if index in names]
