"""Gathers of Parameters beside those in FP8 send bytes, too.

Passes that bucket FSDP's gathers put together what follows each other in one dtype. FP8 travels as uint8: a bias in bfloat16
between two weights would end a bucket. So the other Parameters of these ranks are gathered as their bytes, by two views.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import starts_at_input
from fp8pass.graph.values import value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def send_bytes(graph: fx.Graph, groups: Collection[Any]) -> None:
    """In place: all-gathers over these groups whose shards come from an input alone send uint8."""
    for gather in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        source: Any = gather.args[0]
        waits = [n for n in gather.users if n.target is c10d.wait_tensor.default]
        is_typed = value_of(source).dtype != torch.uint8 and value_of(source).dim() > 0
        is_read = len(waits) == len(gather.users) == 1 and bool(waits[0].users)
        if gather.args[2] in groups and is_read and is_typed and starts_at_input(source):
            _send_bytes(graph, gather, source, waits[0])


def _send_bytes(graph: fx.Graph, gather: fx.Node, source: fx.Node, wait: fx.Node) -> None:
    dtype, readers = value_of(wait).dtype, list(wait.users)
    cursor = Cursor.start(graph).at(gather, "backward" in str(gather.meta.get("partitioner_tag")))
    gather.update_arg(0, cursor.call(aten.view.dtype, source, torch.uint8))
    for node in (gather, wait):
        with cursor.fake_mode:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))  # type: ignore[operator]
        node.meta.pop("tensor_meta", None)
    # Before its first reader: the gather of a bucket may come behind all waits.
    values = cursor.at(min(readers), cursor.backward).call(aten.view.dtype, wait, dtype)
    values.meta = {key: value for key, value in wait.meta.items() if key != "val"} | {"val": values.meta["val"]}
    for reader in readers:
        reader.replace_input_with(wait, values)
