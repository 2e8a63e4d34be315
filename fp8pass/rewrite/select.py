"""Select: the GEMMs that no rule names and that are in high precision by default. Reads only.

`routing`  the result decides a choice of rows: a router of experts
`head`     the output embedding
`thin`     n or k below 32, such as LoRA's adapters
`no data`  Parameters times Parameters, of which a weight is made, such as an orthogonal one, or a Gram matrix
`linear algebra`    an inverse, a decomposition or a solution is computed of the result, which magnifies errors
`gradient formula`  part of the gradient of an operation that is no GEMM
All are found by structure, never by name, on the forward GEMM; its gradients follow it. Heads whose loss is outside of
the graph are told by what is around it (`graph.gemms.Surroundings`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SubclassGetAttrAOTOutput

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gathers import MOVES
from fp8pass.graph.gemms import GemmSite, GraphContext, GraphInput, argument_of, is_matmul, operands_of
from fp8pass.graph.origin import ADAPTER, family
from fp8pass.graph.values import PERMUTES, argument, depends_on, made_only_of, permutation, same_shape, same_size, value_of

aten = torch.ops.aten

#: A forward GEMM with fewer columns, or a shorter K, has too little work for what its casts cost.
THIN = 32

#: Names of decompositions and solutions. Norms of vectors are none.
_SOLVER = re.compile(r"_?linalg_(?!vector_norm|cross)|_?cholesky|lu_|matrix_exp|triangular_solve|ormqr|geqrf|inverse|logdet")

#: Operations that put elements into a matrix, or take some, and those behind which nothing is differentiated.
_PLACES = frozenset({"tril", "triu", "diagonal_scatter", "slice_scatter", "select_scatter", "index_put", "cat", "index"})
_CUTS = (aten.detach.default, aten.alias.default)

_LOG_SOFTMAX = ("_log_softmax", "log_softmax", "logsumexp")
_SOFTMAX = ("_softmax", "softmax")
_PICKS = ("gather", "index", "index_select")


def select(
    graph: fx.Graph, sites: Sequence[GemmSite], context: GraphContext
) -> tuple[dict[fx.Node, Reason], frozenset[fx.Node]]:
    """The GEMMs in high precision by default, each with the reason; and those that are, or look like, a head."""
    finder = _UseFinder(graph, context, [site for site in sites if not site.is_backward])
    chosen: dict[fx.Node, Reason] = {}
    heads: set[fx.Node] = set()
    for site in sites:
        if site.forward is not None:
            reason, is_head = chosen.get(site.forward), site.forward in heads
        elif not site.operands:
            continue
        elif site.is_backward:
            reason, is_head = finder.reason_of_gradient(site), False
        else:
            reason = finder.reason(site)
            is_head = reason.kind is ReasonKind.HEAD if reason is not None else finder.resembles_logits(site)
        if reason is not None:
            chosen[site.node] = reason
        if is_head:
            heads.add(site.node)
    return chosen, frozenset(heads)


class _UseFinder:
    """Follows what becomes of GEMMs' results. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, context: GraphContext, sites: Sequence[GemmSite]):
        """sites: the forward GEMMs."""
        given, self._surroundings = context.given(graph), context.surroundings
        self._graph, self.gradients = graph, context.gradients_of(graph)
        gradients = self.gradients
        placeholders = set(graph.find_nodes(op="placeholder"))
        self.data = depends_on(graph, placeholders)
        parameters = {n for n, known in given.items() if known.is_weight}
        # Depends on inputs that are no Parameters or buffers, or on chance.
        self._varying = depends_on(graph, (placeholders - parameters) | {n for n in graph.nodes if _is_random(n)})
        self.embeddings = made_only_of(graph, {n for n, known in given.items() if known.is_embedding})
        self.leading_to_choices = leading_to_choices(graph, gradients)
        self.leading_to_logarithms = leading_to(graph, gradients, self._is_log_softmax, keeps_elements)
        self._leading_to_solvers = self._find_leading_to_solvers()
        weights = {o.value.root for site in sites if self._has_data(site) for o in site.operands} - self._varying
        self._made_into_weights = leading_to(graph, gradients, weights.__contains__, lambda n: n not in self._varying)
        # For logits: NOTE [heads whose loss is outside of the graph].
        self._vocabularies = [n for n in _vocabularies(graph, gradients, given) if not _is_small(n)]
        self._elsewhere = [n for n in self._surroundings.embeddings if not _is_small(n)]
        has_candidates = bool(self._vocabularies or self._elsewhere)
        self._activations = depends_on(graph, set(given) - parameters) if has_candidates else set()
        self._outputs = outputs = _outputs(graph)
        returned = self._surroundings.returned
        self._returned = {n for n, position in outputs.items() if returned is None or position in returned}
        ends = {n for n in outputs if keeps_elements(n)}
        self._leading = leading_to(graph, gradients, lambda n: n in ends, keeps_elements) if has_candidates else set()
        weights = made_only_of(graph, parameters) - self.embeddings if has_candidates else set()
        reads = {n for n in graph.nodes if is_matmul(n) and not weights.isdisjoint(operands_of(n))} if weights else set()
        self._read = leading_to(graph, gradients, lambda n: n in reads, _is_activation)

    def reason(self, site: GemmSite) -> Reason | None:
        """The reason why a forward GEMM is in high precision, or None."""
        override = self._override(site)
        if any(o.kind == "weight" for o in site.operands):
            choice = choice_of(site.node, self.leading_to_choices, self.gradients, self.data)
            if choice is not None:
                return Reason(ReasonKind.ROUTING, f"the result selects rows ({choice}); {override}")
        # Activations times every row of an embedding, which may also be read as one: as learned queries.
        a, b = site.operands
        left = a.value.root in self.embeddings and not a.transposed and b.kind == "input"
        right = b.value.root in self.embeddings and b.transposed and a.kind == "input"
        if left or right:
            return Reason(ReasonKind.HEAD, f"the weight is the model's output embedding, or tied to an embedding; {override}")
        if not self._leading_to_solvers.isdisjoint(site.node.users):
            return Reason(ReasonKind.LINEAR_ALGEBRA, f"the result is solved, inverted or decomposed; {override}")
        if self._feeds_cross_entropy(site.node):
            return Reason(ReasonKind.HEAD, f"the result feeds a log-softmax over its columns; {override}")
        if self._makes_logits(site, self._vocabularies):
            return Reason(
                ReasonKind.HEAD,
                f"the result is an output of the graph, with a column per row of an embedding that its integer inputs index;"
                f" {override}",
            )
        for name, size in (("n", site.n), ("k", site.k)):
            if isinstance(size, int) and size < THIN:
                return Reason(ReasonKind.THIN, f"{name} is {size}, less than {THIN}; {override}")
        if not self._has_data(site) and (site.node in self._made_into_weights or _is_gram(site)):
            return Reason(
                ReasonKind.NO_DATA, f"Parameters times Parameters, of which a weight or a penalty is made; {override}"
            )
        return None

    def _has_data(self, site: GemmSite) -> bool:
        """Tell whether a GEMM reads what depends on inputs that are no Parameters, or on chance."""
        return any(o.value.root in self._varying for o in site.operands)

    def _find_leading_to_solvers(self) -> set[fx.Node]:
        """The nodes from which one is reached that solves, inverts or decomposes, past one sum with another activation at most:
        not all layers of a residual stream."""

        def mixes(node: fx.Node) -> bool:
            shape = getattr(node.meta.get("val"), "shape", ())
            others = [n for n in node.all_input_nodes if n in self._varying and _is_float(n.meta.get("val"))]
            return len(others) > 1 and sum(same_shape(value_of(n).shape, shape) for n in others) > 1

        def passes(node: fx.Node) -> bool:
            return node.target not in _CUTS and (keeps_elements(node) or name_of(node) in _PLACES) and not mixes(node)

        if not any(map(_is_solver, self._graph.nodes)):
            return set()
        last = leading_to(self._graph, self.gradients, _is_solver, passes)
        return leading_to(
            self._graph, self.gradients, lambda n: n in last or (mixes(n) and not last.isdisjoint(n.users)), passes
        )

    @cached_property
    def _operations(self) -> dict[Any, str]:
        """The forward's operations by their numbers in autograd. What follows one and has no gradient has its number, too."""
        forward = [n for n in self._graph.nodes if n not in self.gradients and name_of(n) and not keeps_elements(n)]
        return {n.meta["seq_nr"]: name_of(n) for n in reversed(forward) if "seq_nr" in n.meta}

    def _override(self, site: GemmSite) -> str:
        # Equal layers get one reason; a pattern of numbers alone, such as `*` for `0`, would match other modules.
        pattern = pattern if (pattern := family(site.module)).strip("*.") else site.module
        if ADAPTER in pattern:
            pattern = f"*{ADAPTER}*"
        return f"to override: rules={{{pattern!r}: recipe}} or select='all'"

    def reason_of_gradient(self, site: GemmSite) -> Reason:
        """The reason why a gradient GEMM that no forward GEMM is known of is in high precision."""
        operation = self._operations.get(site.node.meta.get("seq_nr"), "an operation")
        formula = f"it is part of the gradient of {operation}, and belongs to no forward GEMM"
        return Reason(ReasonKind.GRADIENT_FORMULA, f"{formula}; {self._override(site)}")

    def _feeds_cross_entropy(self, gemm: fx.Node) -> bool:
        """Tell whether a log-softmax over the GEMM's columns follows, decomposed or not."""
        if self.leading_to_logarithms.isdisjoint(gemm.users):
            return False
        columns = {gemm: value_of(gemm).dim() - 1}
        pending = [gemm]
        while pending:
            source = pending.pop()
            dim = columns[source]
            for node in source.users:
                if node in columns or node in self.gradients or node.op != "call_function":
                    continue
                if name_of(node) in (*_LOG_SOFTMAX, *_SOFTMAX):
                    if _is_over(node, dim) and (name_of(node) in _LOG_SOFTMAX or self._leads_to_logarithm([node])):
                        return True
                elif name_of(node) == "exp" and self._is_log_of_sum(node, dim):
                    return True
                elif keeps_elements(node) and (after := _dim_after(node, source, dim)) is not None:
                    columns[node] = after
                    pending.append(node)
        return False

    def _is_log_softmax(self, node: fx.Node) -> bool:
        """Tell whether a node is a log-softmax, over whatever dimension, the exponential in a decomposed one, or a softmax that
        a logarithm follows."""
        name = name_of(node)
        if name == "exp":
            return any(self._is_log_of_sum(node, dim) for dim in range(value_of(node).dim()))
        return name in _LOG_SOFTMAX or (name in _SOFTMAX and self._leads_to_logarithm([node]))

    def _is_log_of_sum(self, exp: fx.Node, dim: int) -> bool:
        """Tell whether the sum of exp(x - max) over a dimension, or a quotient by it, is turned into a logarithm."""
        return self._leads_to_logarithm([n for n in exp.users if name_of(n) == "sum" and len(n.args) > 1 and _is_over(n, dim)])

    def _leads_to_logarithm(self, pending: list[fx.Node]) -> bool:
        """Tell whether the logarithm of one of these is taken, of all elements or of picked ones."""
        seen = set(pending)
        while pending:
            for node in pending.pop().users:
                if name_of(node) == "log":
                    return True
                if node in seen or node in self.gradients or not (keeps_elements(node) or name_of(node) in _PICKS):
                    continue
                others = (n for n in node.all_input_nodes if n in self._varying and n not in seen)
                if name_of(node) == "div" or not any(_is_float(n.meta.get("val")) for n in others):  # by the exponentials' sum
                    seen.add(node)
                    pending.append(node)
        return False

    def resembles_logits(self, site: GemmSite) -> bool:
        """Tell whether a result could be logits over an embedding that is not in this graph, as after a graph break."""
        return self._makes_logits(site, self._elsewhere)

    def _makes_logits(self, site: GemmSite, sizes: Sequence[Any]) -> bool:
        """Tell whether a forward GEMM's result are logits over an embedding with one of these numbers of rows."""
        if not any(o.kind == "weight" for o in site.operands):
            return False
        a, b = site.operands
        columns = site.m if a.kind == "weight" and b.kind != "weight" else site.n
        if not any(same_size(columns, size) for size in sizes) or not self._read.isdisjoint(site.node.users):
            return False
        widths = self._surroundings.read_widths
        is_end = widths is not None and columns not in widths
        return self._reaches(self._outputs if is_end else self._returned, site.node)

    def _reaches(self, outputs: Container[fx.Node], gemm: fx.Node) -> bool:
        if gemm in outputs:
            return True
        own = following(gemm, self.gradients)
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
        """Tell whether a node combines a result with another activation of its shape, as sums of a residual stream do."""
        value = value_of(node)
        others = [n for n in node.all_input_nodes if n not in own and n in self._activations]
        return any(_is_float(value_of(n)) and same_shape(value_of(n).shape, value.shape) for n in others)


def _is_solver(node: fx.Node) -> bool:
    return _SOLVER.match(name_of(node)) is not None


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_gram(site: GemmSite) -> bool:
    """Tell whether a GEMM multiplies a matrix by itself."""
    a, b = site.operands
    return a.value == b.value


def _is_over(node: fx.Node, dim: int) -> bool:
    """Tell whether a reduction, a softmax or a choice runs over one dimension of its input."""
    declared = {a.name: (i, a.default_value) for i, a in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    num_dims = value_of(node.all_input_nodes[0]).dim()
    if "dim" not in declared or not num_dims:
        return False
    position, default = declared["dim"]
    given = argument_of(node, position, "dim")
    dims: Any = next((d for d in (given, default) if d is not None), ())
    return [d % num_dims for d in (dims if isinstance(dims, Iterable) else [dims])] == [dim]


def _dim_after(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """The dimension of a view or pointwise result that has the columns, all or some of them; None where they are mixed up."""
    before, after = value_of(source), value_of(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return dim  # the parts of a split, before and after one is picked
    if node.target in PERMUTES:
        order = permutation(node)
        return None if order is None else order.index(dim)
    if node.target is aten.slice.Tensor:
        return dim
    if node.target is aten.select.int:
        removed = int(argument(node, 1)) % before.dim()
        return None if removed == dim else dim - (removed < dim)
    behind = before.dim() - dim  # dimensions in front come and go: reshapes, broadcasting
    if after.dim() < behind:
        return None
    kept = zip(before.shape[dim:], after.shape[-behind:], strict=True)
    return after.dim() - behind if all(same_size(x, y) for x, y in kept) else None


# -- NOTE [heads whose loss is outside of the graph]
#
# The result of such a GEMM reaches an output of the graph through views and pointwise code alone, and it has as many columns as
# an embedding has rows that the caller's integers index. Tables of positions do not count: what indexes them is computed in the
# graph, or they are buffers. A sum with other activations ends the way to the output, so the last GEMM of a residual stream is
# not a head even where its width equals the size of the vocabulary, and neither is one whose result another weight multiplies.
#
# Of a graph that is a part of the model, ended by a graph break or by one of DDP's buckets, an output may be any activation:
# such a result is logits only if no module reads as many features.


#: A table with fewer rows holds kinds of tokens or classes; a GEMM with fewer columns is thin.
SMALLEST_VOCABULARY = 32
#: Operations that make constants of no tensor, all elements alike. `arange` is none: it makes positions.
_FILLS = frozenset({"full", "scalar_tensor", "zeros", "ones", "full_like", "zeros_like", "ones_like"})


def _is_small(size: Any) -> bool:
    """Tell whether a table is none of a vocabulary, but of a few kinds of tokens."""
    return isinstance(size, int) and size < SMALLEST_VOCABULARY


def _outputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The nodes that the compiled code returns, without gradients, inputs that are written back, and bases of views -> their
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
    """Tell whether a node computes floating-point values, one tensor or several."""
    value = node.meta.get("val")
    return node.op == "call_function" and (not isinstance(value, torch.Tensor) or value.is_floating_point())


def _vocabularies(graph: fx.Graph, gradients: set[fx.Node], given: dict[fx.Node, GraphInput]) -> list[Any]:
    """The numbers of rows of embeddings that the caller's integers index."""
    weights = made_only_of(graph, {n for n, known in given.items() if known.is_weight and not known.is_buffer})
    ours = _callers_integers(graph, {n for n, known in given.items() if not known.is_weight})
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


prims = torch.ops.prims


# -- Routing: whether a GEMM's result decides which rows are taken, as a router of experts does. Reads only.
#
# Two walks. The first goes from the result through what makes scores of logits to an operation that chooses. The second goes
# from what was chosen to an operation that takes rows by it: an index into a matrix, a product with a mask, a mask that
# switches rows on and off. A choice that is only compared with labels, or that takes entries of the scores themselves, takes no
# rows: metrics, predictions and losses.


VIEWS = (MOVES - {aten.cat.default}) | {
    aten.expand.default,
    aten.select.int,
    aten._to_copy.default,
    prims.convert_element_type.default,
}
#: The operations between a router's logits and the choice, besides views and pointwise operations.
# fmt: off
_SCORES = frozenset({
    "_softmax", "_log_softmax", "softmax", "log_softmax", "amax", "max", "mean", "sum", "cumsum", "topk", "sort", "scatter",
    "scatter_", "scatter_add", "masked_fill", "where", "cat", "gather",
})
# fmt: on
#: Operations that choose -> which of their outputs says what was chosen (None: the operation has one output).
# fmt: off
_CHOICES = {
    "topk": 1, "sort": 1, "max": 1, "min": 1, "kthvalue": 1,
    "argmax": None, "argmin": None, "multinomial": None, "nonzero": None,
}
# fmt: on
#: Operations whose largest or smallest values are a threshold for scores.
_EXTREMES = frozenset({"topk", "sort", "max", "min", "kthvalue", "amax", "amin"})
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: Operations that read or write at an index -> positions of the tensor and of the index among their arguments.
_INDEXED = {
    "index": (0, 1),
    "index_select": (0, 2),
    "index_put": (0, 1),
    "index_put_": (0, 1),
    "index_add": (0, 2),
    "index_add_": (0, 2),
    "index_copy": (0, 2),
    "index_reduce": (0, 2),
    "embedding": (0, 1),
    "_embedding_bag": (0, 1),
    "_embedding_bag_forward_only": (0, 1),
    "gather": (0, 2),
    "scatter": (0, 2),
    "scatter_": (0, 2),
    "scatter_add": (0, 2),
    "scatter_reduce": (0, 2),
}
_ELEMENTWISE = frozenset({"gather", "scatter", "scatter_", "scatter_add", "scatter_reduce"})

_Kind = Literal["index", "mask", "other"]


def name_of(node: fx.Node) -> str:
    """Name of an operation without its namespace and overload, "" for what is no operator."""
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def is_pointwise(node: fx.Node) -> bool:
    """Tell whether each element of the result depends on the elements of its own position."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def keeps_elements(node: fx.Node) -> bool:
    """Tell whether a node is a view, a cast or pointwise."""
    return node.target in VIEWS or is_pointwise(node)


def leading_to(
    graph: fx.Graph, gradients: set[fx.Node], is_goal: Callable[[fx.Node], bool], passes: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Goals of the forward, and the nodes from which one is reached through nodes that `passes` accepts: in one sweep, so that
    GEMMs from which none is reached cost nothing more, however long the residual stream behind them is."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in gradients and (is_goal(node) or (passes(node) and any(user in found for user in node.users))):
            found.add(node)
    return found


def leading_to_choices(graph: fx.Graph, gradients: set[fx.Node]) -> set[fx.Node]:
    """The nodes from which scores lead to an operation that chooses."""
    return leading_to(graph, gradients, lambda node: name_of(node) in _CHOICES or bool(_masks(node)), _makes_scores)


def _makes_scores(node: fx.Node) -> bool:
    name = name_of(node)
    return name in _SCORES or name in _CHOICES or keeps_elements(node)


def choice_of(gemm: fx.Node, leading: set[fx.Node], gradients: set[fx.Node], data: set[fx.Node]) -> str | None:
    """The operation that chooses rows by a GEMM's result, or None. leading: what `leading_to_choices` found. gradients: the
    nodes of the backward. data: the nodes that depend on an input of the graph."""
    if leading.isdisjoint(gemm.users):
        return None
    made = _scores_of(gemm, gradients)
    for node in made:
        name = name_of(node)
        if name in _CHOICES and any(_takes_rows(i, "index", name, made, gradients, data) for i in _indices(node)):
            return name
        if any(_takes_rows(m, "mask", name, made, gradients, data) for m in _masks(node)):
            return name
    return None


def _scores_of(gemm: fx.Node, gradients: set[fx.Node]) -> dict[fx.Node, None]:
    """The nodes made of a GEMM's result in forward by views, pointwise operations and those of `_SCORES`."""
    found: dict[fx.Node, None] = {}
    pending = list(gemm.users)
    while pending:
        node = pending.pop()
        if node in found or node in gradients or node.op != "call_function":
            continue
        if _makes_scores(node):
            found[node] = None
            pending += node.users
    return found


def _indices(choice: fx.Node) -> list[fx.Node]:
    """The output in which a choosing operation says what it has chosen; of `max`, the form without a dimension does not."""
    position = _CHOICES[name_of(choice)]
    if isinstance(value_of(choice), torch.Tensor):
        return [choice] if position is None else []
    return [n for n in choice.users if n.target is operator.getitem and argument(n, 1) == position]


def _masks(choice: fx.Node) -> list[fx.Node]:
    """The comparisons of scores [..., n] with the largest or smallest ones of each row, which one of these operations finds."""
    if name_of(choice) not in _EXTREMES:
        return []
    scores = choice.all_input_nodes[0]
    if not _is_over(choice, value_of(scores).dim() - 1):
        return []
    found, pending = [], [choice]
    while pending:
        node = pending.pop()
        for user in node.users:
            if name_of(user) in _COMPARES and scores in user.all_input_nodes:
                found.append(user)
            elif user.target in VIEWS or (user.target is operator.getitem and argument(user, 1) == 0):
                pending.append(user)
    return found


def _takes_rows(
    chosen: fx.Node, kind: _Kind, choice: str, made: dict[fx.Node, None], gradients: set[fx.Node], data: set[fx.Node]
) -> bool:
    """Tell whether rows are taken by a chosen index or mask: in this graph or, where it returns a mask or a top-k, in the next
    one."""
    kinds: dict[fx.Node, _Kind] = {chosen: kind}
    own = {*made, *following(chosen, gradients)}
    pending = [chosen]
    while pending:
        node = pending.pop()
        kind = kinds[node]
        for user in node.users:
            if user.op == "output":  # of a joint graph it is among the gradients, too
                if (kind == "mask" and kinds[chosen] == "index") or (kind == "index" and choice in ("topk", "sort")):
                    return True
                continue
            if user in kinds or user in gradients:
                continue
            if _takes(user, node, kind, made) or _switches_rows(user, node, own):
                return True
            kinds[user] = _kind_of(user, node, kind, own, data)
            pending.append(user)
    return False


def following(node: fx.Node, gradients: set[fx.Node]) -> set[fx.Node]:
    """A node and everything in forward that depends on it."""
    found, pending = {node}, [node]
    while pending:
        new = [n for n in pending.pop().users if n not in found and n not in gradients]
        found.update(new)
        pending += new
    return found


def _takes(user: fx.Node, node: fx.Node, kind: _Kind, made: dict[fx.Node, None]) -> bool:
    """Tell whether an operation takes rows of a matrix, not the scores, by an index, or multiplies it with a mask."""
    if is_matmul(user):
        return True
    name = name_of(user)
    if name not in _INDEXED:
        # An operation that is neither ATen's nor a view takes an index to use it.
        is_foreign = isinstance(user.target, torch._ops.OpOverload) and user.target.namespace not in ("aten", "prims")
        return kind == "index" and is_foreign
    source, position = _INDEXED[name]
    tensor, index = argument(user, source), argument(user, position)
    is_index = node in index if isinstance(index, Sequence) else node is index
    if not is_index or tensor in made or value_of(tensor).dim() < 2:
        return False
    return name not in _ELEMENTWISE or argument(user, 1) not in (-1, value_of(tensor).dim() - 1)


def _switches_rows(user: fx.Node, node: fx.Node, own: set[fx.Node]) -> bool:
    """Tell whether one number per row, [..., 1], multiplies or selects the rows [..., n] of something else."""
    if name_of(user) not in ("mul", "where", "masked_fill") or not _is_column(value_of(node)):
        return False
    others = [n for n in user.all_input_nodes if n not in own]
    return any(value_of(n).dim() >= 2 and not _is_column(value_of(n)) for n in others)


def _is_column(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and same_size(value.shape[-1], 1)


def _kind_of(user: fx.Node, node: fx.Node, kind: _Kind, own: set[fx.Node], data: set[fx.Node]) -> _Kind:
    name = name_of(user)
    if user.target in VIEWS:
        return kind
    if kind == "index":
        if name in ("sort", "cumsum"):
            return "index"
        if name in ("one_hot", "scatter", "scatter_") or _is_one_hot(user, node, data):
            return "mask"
    may_stay = kind == "mask" and (name == "cumsum" or is_pointwise(user))
    if may_stay and all(n in own or _is_column(value_of(n)) for n in user.all_input_nodes):
        return "mask"  # such as one without the tokens beyond an expert's capacity, or without those of padding
    return "other"


def _is_one_hot(user: fx.Node, node: fx.Node, data: set[fx.Node]) -> bool:
    """Tell whether an index is compared with one position, or each with all: with something that depends on no input."""
    if name_of(user) not in ("eq", "ne"):
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    if not others:
        return True
    spreads = _is_column(value_of(node)) and not _is_column(value_of(user))
    return spreads and others[0] not in data
