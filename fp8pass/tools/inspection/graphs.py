"""One compiled graph, to look at: its GEMMs, and the graph before and after the pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.cost import Estimate, graph_speedup
from fp8pass.graph.origin import input_index, is_gradient
from fp8pass.graph.snapshot import Snapshot
from fp8pass.rewrite.report import GatherRecord, GemmRecord, KeptRecord
from fp8pass.runtime.parts import Part
from fp8pass.runtime.records import gathers_of, gemms_of, kept_of
from fp8pass.runtime.session import CompiledGraph, GraphUse


class GraphRecord:
    """One compiled graph. The fx graphs are copies for reading, for example with `print_readable()`, not what runs."""

    def __init__(self, uses: Sequence[tuple[Part, GraphUse]], name: str):
        """uses: the parts of the model that run the graph, one at least, and how each does."""
        self.compiled: CompiledGraph = uses[0][1].compiled
        compiled = self.compiled
        self.name: str = name
        self.gemms: list[GemmRecord] = [g for part, use in uses for g in gemms_of(use, part)]
        """Its matmuls, for every module instance that the graph serves."""
        self.gathers: list[GatherRecord] = gathers_of(uses)
        """The all-gathers that feed FP8 GEMMs: what they send, and the reason if it is not FP8. With `fsdp_gather`, those of
        FSDP2's too, for every module instance that the graph serves."""
        rewritten = compiled.rewrite
        self.kept: list[KeptRecord] = [w for part, use in uses for w in kept_of(use, part)]
        """The weights that the graph does not train (with weight_copies="cache", all), for every module instance that it
        serves: whether their FP8 copies are kept between calls, and the reason if not."""
        self.estimates: list[Estimate | None] = (
            [] if rewritten is None else rewritten.estimates * sum(len(use.placements) for _, use in uses)
        )
        """Expected seconds of each of `gemms`, in bfloat16 and as they run; None where a size is dynamic."""
        self.estimated_for: str = "" if rewritten is None else rewritten.estimated_for
        """The device that the estimates are for."""
        self.trains: bool = compiled.backward is not None
        """Whether the graph has a backward."""

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of its GEMMs together, with their casts: an estimate. None if there is none."""
        return graph_speedup(self.estimates)

    @functools.cached_property
    def before(self) -> fx.GraphModule | None:
        """The joint graph (in inference: the forward graph) as captured."""
        return self._module(None if self.compiled.rewrite is None else self.compiled.rewrite.before)

    @functools.cached_property
    def after(self) -> fx.GraphModule | None:
        """The same graph rewritten."""
        return self._module(None if self.compiled.rewrite is None else self.compiled.rewrite.after)

    @functools.cached_property
    def forward(self) -> fx.GraphModule | None:
        """The forward graph that the partitioner produced."""
        return self._module(self.compiled.forward)

    @property
    def backward(self) -> fx.GraphModule | None:
        """The backward graph that the partitioner produced; None in inference."""
        return self._module(self.compiled.backward)

    @functools.cached_property
    def state_inputs(self) -> list[str]:
        """Names of the placeholders of the extra inputs in `before` and `after`, such as the state of delayed scaling."""
        if self.after is None:
            return []
        return [node.name for node, _ in _state_nodes(self.after.graph, self.compiled)]

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for the backward: the memory of those results of the forward graph that are neither
        outputs of the model nor inputs of the graph. 0 in inference."""
        return sum(self.saved_dtypes.values())

    @functools.cached_property
    def saved_dtypes(self) -> dict[str, int]:
        """The same by dtype, such as {"float8_e4m3fn": 65536, "bfloat16": 32768}, the largest first."""
        rewritten, forward = self.compiled.rewrite, self.compiled.forward
        if rewritten is None or forward is None:
            return {}
        num_outputs = sum(not is_gradient(d) for d in rewritten.after.nodes[-1].meta["desc"])
        found: Counter[str] = Counter()
        placeholders = [n for n in forward.nodes if n.op == "placeholder"]
        for node, size in saved_memory(forward.results(), placeholders, num_outputs):
            found[str(node.meta["val"].dtype).removeprefix("torch.")] += size
        return dict(found.most_common())

    def _module(self, snapshot: Snapshot | None) -> fx.GraphModule | None:
        if snapshot is None:
            return None
        graph = snapshot.restore()
        for node, name in _state_nodes(graph, self.compiled):
            node._rename(name)
            node.target = name
        return fx.GraphModule(torch.nn.Module() if not _attributes(graph) else _constants(graph), graph, self.name)


def saved_memory(results: Sequence[Any], inputs: Iterable[Any], num_outputs: int) -> list[tuple[Any, int]]:
    """What a forward graph with so many outputs of the model saves for the backward: its results that hold memory which
    is neither an output's nor an input's, and its bytes. Nodes are a graph's or a snapshot's."""
    others = {*_memory(results[:num_outputs]), *_memory(inputs)}
    return [held for storage, held in _memory(results[num_outputs:]).items() if storage not in others]


def _memory(nodes: Iterable[Any]) -> dict[StorageWeakRef, tuple[Any, int]]:
    """The storages behind the values of nodes, and the node that holds most of each, with its bytes; views of one tensor share
    one."""
    found: dict[StorageWeakRef, tuple[Any, int]] = {}
    for node in nodes:
        value = None if node is None else node.meta.get("val")
        if isinstance(value, torch.Tensor):
            storage = StorageWeakRef(value.untyped_storage())
            size = int(value.numel()) * value.element_size()
            if storage not in found or size > found[storage][1]:
                found[storage] = (node, size)
    return found


def _attributes(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "get_attr"]


def _constants(graph: fx.Graph) -> torch.nn.Module:
    """A module with an empty attribute for each constant that the graph reads, so that the copy can be built and printed."""
    holder = torch.nn.Module()
    for name in _attributes(graph):
        setattr(holder, name, None)
    return holder


def _state_nodes(graph: fx.Graph, compiled: CompiledGraph) -> list[tuple[fx.Node, str]]:
    names = {compiled.extra_start + i: given.name for i, given in enumerate(compiled.extra_inputs)}
    nodes = ((node, input_index(node)) for node in graph.find_nodes(op="placeholder"))
    return [(node, names[index]) for node, index in nodes if index in names]
