"""State as inputs: a copy of Dynamo's graph with placeholders for the state of delayed scaling behind its own.

NOTE [state placeholders] They are inputs of the graph and not constants, so that one compiled graph serves many instances,
functionalization leaves them alone, and CUDA graphs treat them as static. Dynamo's own graph must stay as it is: its guards are
built from it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from fp8pass.recipes import Recipe
from fp8pass.recipes.recipe import StateNodes

KINDS = ("scale", "amax", "grad_amax", "slots")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.int64)


def with_state_placeholders(
    gm: fx.GraphModule, example_inputs: list[Any], capacities: Sequence[int], device: torch.device
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of `gm` with four more placeholders per recipe that keeps state, and its example inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    value, old_output = copied
    for old in gm.graph.find_nodes(op="placeholder"):
        copies[old]._dynamo_source = getattr(old, "_dynamo_source", None)
    fake_mode = detect_fake_mode(example_inputs)
    examples = list(example_inputs)
    last = _last_placeholder(graph)
    for i, capacity in enumerate(capacities):
        for kind, dtype in zip(KINDS, DTYPES, strict=True):
            example = torch.empty(capacity, dtype=dtype, device=device)
            if fake_mode is not None:
                example = fake_mode.from_tensor(example, static_shapes=True)
            last = _add_placeholder(graph, last, f"fp8_{kind}_{i}", example)
            examples.append(example)
    graph.output(value).meta.update(old_output.meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy, examples


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with its state placeholders, which compiling the graph does not change."""
    return with_state_placeholders(gm, [], (), torch.device("cpu"))[0]


def _last_placeholder(graph: fx.Graph) -> fx.Node | None:
    placeholders = graph.find_nodes(op="placeholder")
    return placeholders[-1] if placeholders else None


def _add_placeholder(graph: fx.Graph, after: fx.Node | None, name: str, example: torch.Tensor) -> fx.Node:
    where = graph.inserting_after(after) if after is not None else graph.inserting_before(next(iter(graph.nodes), None))
    with where:
        node = graph.placeholder(name)
    node._dynamo_source = None
    node.meta["example_value"] = node.meta["val"] = example
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def find_state(graph: fx.Graph, start: int, recipes: Sequence[Recipe], index_of: Any) -> dict[Recipe, StateNodes]:
    """The state placeholders of a joint or inference graph; `index_of` gives a placeholder's position in Dynamo's graph."""
    by_position = {index_of(n): n for n in graph.find_nodes(op="placeholder")}
    found: dict[Recipe, StateNodes] = {}
    for i, recipe in enumerate(recipes):
        positions = range(start + len(KINDS) * i, start + len(KINDS) * (i + 1))
        if all(position in by_position for position in positions):
            found[recipe] = StateNodes(*(by_position[position] for position in positions))
    return found
