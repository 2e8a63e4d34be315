"""Heads whose loss is outside of the graph. Reads only.

The result of such a GEMM reaches an output of the graph through views and pointwise code alone, and it has as many columns as
an embedding has rows that the caller's integers index. Tables of positions do not count: what indexes them is computed in the
graph, or they are buffers. A sum with other activations ends the way to the output, so the last GEMM of a residual stream is
not a head even where its width equals the size of the vocabulary, and neither is one whose result another weight multiplies.

Of a graph that is a part of the model, ended by a graph break or by one of DDP's buckets, an output may be any activation: such
a result is logits only if no module reads as many features.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SubclassGetAttrAOTOutput

from fp8pass.graph.kinds import is_matmul, operands_of
from fp8pass.graph.sites import GemmSite, GraphContext, GraphInput
from fp8pass.graph.values import argument, depends_on, made_only_of, same_shape, same_size, value_of
from fp8pass.rewrite.routing import following, keeps_elements, leading_to, name_of

aten = torch.ops.aten

#: A table with fewer rows holds kinds of tokens or classes; a GEMM with fewer columns is thin.
SMALLEST_VOCABULARY = 32
#: Operations that make constants of no tensor, all elements alike. `arange` is none: it makes positions.
_FILLS = frozenset({"full", "scalar_tensor", "zeros", "ones", "full_like", "zeros_like", "ones_like"})


class Logits:
    """Finds GEMMs whose result is what the graph returns as logits. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, gradients: set[fx.Node], context: GraphContext):
        given = context.given(graph)
        parameters = {n for n, known in given.items() if known.is_parameter}
        self._gradients = gradients
        self._vocabularies = [n for n in _vocabularies(graph, gradients, given) if not _is_small(n)]
        self._surroundings = around = context.surroundings
        self._elsewhere = [n for n in around.embeddings if not _is_small(n)]
        has_candidates = bool(self._vocabularies or self._elsewhere)
        self._activations = depends_on(graph, set(given) - parameters) if has_candidates else set()
        self._outputs = outputs = _outputs(graph)
        self._returned = {n for n, position in outputs.items() if around.returned is None or position in around.returned}
        ends = {n for n in outputs if keeps_elements(n)}
        self._leading = leading_to(graph, gradients, lambda n: n in ends, keeps_elements) if has_candidates else set()
        embeddings = made_only_of(graph, {n for n, known in given.items() if known.is_embedding})
        weights = made_only_of(graph, parameters) - embeddings if has_candidates else set()
        reads = {n for n in graph.nodes if is_matmul(n) and not weights.isdisjoint(operands_of(n))} if weights else set()
        self._read = leading_to(graph, gradients, lambda n: n in reads, _is_activation)

    def are_made_by(self, site: GemmSite) -> bool:
        """Whether a forward GEMM's result are logits over an embedding that the caller's integers index."""
        return self._returns_one_of(site, self._vocabularies)

    def resembles(self, site: GemmSite) -> bool:
        """Whether it could be: over an embedding of the model that is not in this graph, after a graph break for example."""
        return self._returns_one_of(site, self._elsewhere)

    def _returns_one_of(self, site: GemmSite, sizes: Sequence[Any]) -> bool:
        if not any(o.kind == "weight" for o in site.operands):
            return False
        columns = columns_of(site)
        if not any(same_size(columns, size) for size in sizes) or not self._read.isdisjoint(site.node.users):
            return False
        widths = self._surroundings.read_widths
        is_end = widths is not None and columns not in widths
        return self._reaches(self._outputs if is_end else self._returned, site.node)

    def _reaches(self, outputs: Container[fx.Node], gemm: fx.Node) -> bool:
        if gemm in outputs:
            return True
        own = following(gemm, self._gradients)
        pending, seen = [gemm], {gemm}
        while pending:
            for user in pending.pop().users:
                if user in seen or user not in self._leading or self._mixes(user, own):
                    continue
                if user in outputs:
                    return True
                seen.add(user)
                pending.append(user)
        return False

    def _mixes(self, node: fx.Node, own: set[fx.Node]) -> bool:
        """Whether a node combines a result with another activation of its own shape, as the sum of a residual stream does."""
        value = value_of(node)
        others = [n for n in node.all_input_nodes if n not in own and n in self._activations]
        return any(_is_float(value_of(n)) and same_shape(value_of(n).shape, value.shape) for n in others)


def columns_of(site: GemmSite) -> Any:
    """How many features a forward GEMM computes for each row of its input, whichever side its weight is on."""
    is_turned = site.a is not None and site.b is not None and site.a.kind == "weight" and site.b.kind != "weight"
    return site.m if is_turned else site.n


def _is_small(size: Any) -> bool:
    """Whether a table is none of a vocabulary, but of a few kinds of tokens."""
    return isinstance(size, int) and size < SMALLEST_VOCABULARY


def _outputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """What the compiled code returns, without gradients, inputs that are written back, and what views are made of -> its
    position among the results of Dynamo's graph."""
    node = graph.output_node()
    results: Any = node.args[0]
    found = zip(results, node.meta["desc"], strict=False) if "desc" in node.meta else ()
    positions = ((result, _position(described)) for result, described in found if isinstance(result, fx.Node))
    return {result: position for result, position in positions if position is not None}


def _position(described: Any) -> int | None:
    while isinstance(described, SubclassGetAttrAOTOutput):
        described = described.base
    return described.idx if isinstance(described, PlainAOTOutput) else None


def _is_activation(node: fx.Node) -> bool:
    """Whether a node computes floating-point values, one tensor or several."""
    value = node.meta.get("val")
    return node.op == "call_function" and (not isinstance(value, torch.Tensor) or value.is_floating_point())


def _vocabularies(graph: fx.Graph, gradients: set[fx.Node], given: dict[fx.Node, GraphInput]) -> list[Any]:
    """The numbers of rows of embeddings that the caller's integers index."""
    weights = made_only_of(graph, {n for n, known in given.items() if known.is_parameter and not known.is_buffer})
    ours = _callers_integers(graph, {n for n, known in given.items() if not known.is_parameter})
    lookups = (n for n in graph.nodes if n.op == "call_function" and n not in gradients)
    pairs = [found for node in lookups if (found := _lookup(node)) is not None]
    return [value_of(table).shape[0] for table, index in pairs if table in weights and index in ours]


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The table [rows, width] and the index of a node that takes rows of a table; None for other nodes."""
    name = name_of(node)
    if name == "embedding":
        table, index = argument(node, 0), argument(node, 1)
    elif name == "index_select" and argument(node, 1) == 0:
        table, index = argument(node, 0), argument(node, 2)
    elif name == "index":
        indices: Sequence[Any] = argument(node, 1)
        table, index = argument(node, 0), indices[0] if len(indices) == 1 else None
    else:
        return None
    is_table = isinstance(index, fx.Node) and value_of(table).dim() == 2 and _is_float(value_of(table))
    return (table, index) if is_table else None


def _callers_integers(graph: fx.Graph, inputs: set[fx.Node]) -> set[fx.Node]:
    """Integer inputs, and what views, casts and pointwise code with constants make of them, such as clamped tokens or ones
    in place of some. Not what counts, compares or rounds."""
    found = {n for n in inputs if _is_integer(n.meta.get("val"))}
    constants = {n for n in graph.nodes if name_of(n) in _FILLS}
    for node in graph.nodes:
        if node in found or node.op != "call_function" or not _is_integer(node.meta.get("val")):
            continue
        sources = [n for n in node.all_input_nodes if not _is_bool(n.meta.get("val"))]
        if keeps_elements(node) and any(n in found for n in sources) and all(n in found or n in constants for n in sources):
            found.add(node)
    return found


def _is_integer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _is_bool(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
