"""Gathers of Parameters beside those in FP8 send bytes, too.

Passes that bucket FSDP's gathers put together what follows each other in one dtype. FP8 travels as uint8: a bias in bfloat16
between two weights would end a bucket. So the other Parameters of these ranks are gathered as their bytes, by two views.

The node that held a gathered tensor holds it afterwards, as a view of the bytes: what the plan says of it stays true.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather, starts_at_input
from fp8pass.graph.values import value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def send_bytes(graph: fx.Graph, groups: Collection[Any]) -> tuple[Gather, ...]:
    """In place: all-gathers over these groups whose shards come from an input alone send uint8. Returns them as they were;
    their `wait` nodes are in the graph still, the collectives are not."""
    found = []
    for collective in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        source: Any = collective.args[0]
        waits = [n for n in collective.users if n.target is c10d.wait_tensor.default]
        is_typed = value_of(source).dtype != torch.uint8 and value_of(source).dim() > 0
        is_read = len(waits) == len(collective.users) == 1 and bool(waits[0].users)
        if collective.args[2] in groups and is_read and is_typed and starts_at_input(source):
            gather = Gather.read(waits[0], lambda group: False)
            _send_bytes(graph, gather)
            found.append(gather)
    return tuple(found)


def _send_bytes(graph: fx.Graph, gather: Gather) -> None:
    collective, wait = gather.collective, gather.wait
    cursor = Cursor.start(graph).at(collective, "backward" in str(collective.meta.get("partitioner_tag")))
    sent = cursor.call(aten.view.dtype, gather.source, torch.uint8)
    gathered = cursor.call(c10d.all_gather_into_tensor.default, sent, *collective.args[1:])
    waited = cursor.at(wait, cursor.backward).call(c10d.wait_tensor.default, gathered)
    for new, old in ((gathered, collective), (waited, wait)):
        new.meta = {key: value for key, value in old.meta.items() if key != "tensor_meta"} | {"val": new.meta["val"]}
    wait.target, wait.args = aten.view.dtype, (waited, value_of(wait).dtype)
    min(wait.users).prepend(wait)  # the gather of a bucket may come behind all waits
    graph.erase_node(collective)
