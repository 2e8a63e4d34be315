"""Extra inputs in a graph: a copy of Dynamo's graph with placeholders for them behind its own.

Dynamo's graph must stay as it is: its guards are built from it later. What such inputs are: NOTE [extra inputs] in
`fp8pass.inputs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from fp8pass.inputs import ExtraInput


def with_extra_inputs(
    gm: fx.GraphModule, example_inputs: list[Any], extra: Sequence[ExtraInput], device: torch.device
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of `gm` with one more placeholder per extra input, and its example inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    value, old_output = copied
    for old in gm.graph.find_nodes(op="placeholder"):
        copies[old]._dynamo_source = getattr(old, "_dynamo_source", None)
        copies[old].meta.pop("grapharg", None)  # it refers to the tensor that Dynamo traced with
    fake_mode = detect_fake_mode(example_inputs)
    examples = list(example_inputs)
    last = _last_placeholder(graph)
    for given in extra:
        with contextlib.nullcontext() if fake_mode is None else fake_mode:
            example = given.empty(device)
        last = _add_placeholder(graph, last, given, example)
        examples.append(example)
    graph.output(value).meta.update(old_output.meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy, examples


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with its extra inputs, which compiling the graph does not change."""
    return with_extra_inputs(gm, [], (), torch.device("cpu"))[0]


def _last_placeholder(graph: fx.Graph) -> fx.Node | None:
    placeholders = graph.find_nodes(op="placeholder")
    return placeholders[-1] if placeholders else None


def _add_placeholder(graph: fx.Graph, after: fx.Node | None, given: ExtraInput, example: torch.Tensor) -> fx.Node:
    where = graph.inserting_after(after) if after is not None else graph.inserting_before(next(iter(graph.nodes), None))
    with where:
        node = graph.placeholder(given.name)
    node._dynamo_source = None
    node.meta["example_value"] = node.meta["val"] = example
    if given.is_static:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def find_extra_inputs(
    graph: fx.Graph, start: int, extra: Sequence[ExtraInput], index_of: Callable[[fx.Node], int | None]
) -> dict[Hashable, fx.Node]:
    """The placeholders of a joint or inference graph by the keys of its extra inputs, the first of which is input `start` of
    Dynamo's graph; `index_of` gives a placeholder's position there. Empty where the graph lost one of them."""
    by_position = {index_of(n): n for n in graph.find_nodes(op="placeholder")}
    found = {given.key: by_position[start + i] for i, given in enumerate(extra) if start + i in by_position}
    return found if len(found) == len(extra) else {}
