"""Inserting nodes into a traced graph: with a fake value, and with the metadata that later passes need."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

# Copied by allow-list: a mutating node must never inherit `recompute`, nor any node a tag whose meaning it does not share.
_ORIGIN_KEYS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "source_fn_stack", "fwd_source_fn_stack")
_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class Inserter:
    """Inserts calls before a given node. Every inserted node carries a fake value, its origin and a partitioner tag."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder" and "val" in n.meta]
        self._fake_mode = detect_fake_mode(values) or contextlib.nullcontext()
        self._is_joint = any("tangents" in str(n.target) for n in graph.find_nodes(op="placeholder"))

    def call(self, before: fx.Node, target: Any, *args: Any, backward: bool, **kwargs: Any) -> fx.Node:
        """A call of `target` before a node; `before` also gives its origin."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        with self._fake_mode:
            fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        for key in _ORIGIN_KEYS:
            if key in before.meta:
                node.meta[key] = before.meta[key]
        if self._is_joint:
            node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        return node

    def item(self, before: fx.Node, node: fx.Node, index: int, backward: bool) -> fx.Node:
        """Element `index` of a node that returns a tuple; shares its recomputation."""
        item = self.call(before, operator.getitem, node, index, backward=backward)
        inherit_recomputation(item, node)
        return item

    def size(self, before: fx.Node, node: fx.Node, dim: int, backward: bool) -> Any:
        """A size as an int, or as a node where it is symbolic."""
        shape = node.meta["val"].shape
        if isinstance(shape[dim], int):
            return shape[dim]
        return self.call(before, aten.sym_size.int, node, dim % len(shape), backward=backward)


def is_recomputed(node: fx.Node) -> bool:
    """Whether activation checkpointing recomputes the node in backward."""
    return node.meta.get("recompute") in _RECOMPUTED


def inherit_recomputation(node: fx.Node, other: fx.Node) -> None:
    """Let checkpointing treat `node` as it treats `other`."""
    for key in _RECOMPUTE_KEYS:
        if key in other.meta:
            node.meta[key] = other.meta[key]


def never_recompute(node: fx.Node) -> None:
    """Save the node's value for backward if backward needs it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def always_recompute(node: fx.Node) -> None:
    """Compute the node again in backward instead of saving its value."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def pin(node: fx.Node, backward: bool) -> None:
    """Keep a mutating node on its side of the partition."""
    if "partitioner_tag" in node.meta:
        node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"
