"""Discover: graph -> GEMM sites. Reads only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph import origin
from fp8pass.graph.gemms import (
    GemmSite,
    GraphContext,
    GraphInput,
    form_of,
    is_batched,
    is_matmul,
    is_of_one_pair,
    kind_of,
    num_groups,
    offs_of,
    operands_of,
    operation_of,
    sizes_of,
    target_of,
)
from fp8pass.graph.origin import Kind
from fp8pass.graph.values import (
    MatrixValue,
    Operand,
    behind_aliases,
    by_key,
    made_only_of,
    resolve,
    resolve_rows,
    same_size,
    value_of,
)


def discover(graph: fx.Graph, context: GraphContext) -> list[GemmSite]:
    """Every matmul of a joint or inference graph, in graph order, the forward's first."""
    parameters = context.given(graph)
    gradients = context.gradients_of(graph)
    static = made_only_of(graph, {n for n, given in parameters.items() if given.is_weight})
    finder = _SiteFinder(context, gradients, static, parameters)
    nodes = [n for n in graph.nodes if is_matmul(n)]
    forward = [finder.forward_site(n) for n in nodes if n not in gradients]
    nested = [finder.nested_site(inner, outer) for outer in graph.nodes for inner in _nested_matmuls(outer)]
    return forward + finder.backward_sites([n for n in nodes if n in gradients], forward) + nested


def _nested_matmuls(node: fx.Node) -> list[fx.Node]:
    """The matmuls in the subgraphs of a control-flow operation, such as the branches of `torch.cond`."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    graphs = [n for n in node.all_input_nodes if n.op == "get_attr"]
    modules = [getattr(node.graph.owning_module, str(n.target), None) for n in graphs]
    inner = [n for m in modules if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    return [n for n in inner if is_matmul(n)] + [deep for n in inner for deep in _nested_matmuls(n)]


class _SiteFinder:
    """Makes sites of one graph. Invariant: never changes the graph."""

    def __init__(
        self, context: GraphContext, gradients: set[fx.Node], static: set[fx.Node], parameters: dict[fx.Node, GraphInput]
    ):
        self.context = context
        self.gradients = gradients
        self.static = static
        self.parameters = parameters
        self.values_of = functools.cache(_values_of)  # Asked for up to three times of each GEMM.
        #: The variables whose place in the model an input tells: see `ModuleNames.place`.
        self.placed = {given.path.root for given in context.inputs if given.is_weight and given.path is not None}

    def forward_site(self, node: fx.Node) -> GemmSite:
        operands = self._operands(node, self._forward_kind)
        if is_batched(node) and not any(o.kind == "weight" and not _is_product(o.value.root) for o in operands):
            operands = ()  # two activations, of which one may be learned: queries that are the same for every input
        return self._site(node, "output", operands)

    def backward_sites(self, nodes: list[fx.Node], forward: list[GemmSite]) -> list[GemmSite]:
        by_sequence: dict[int, list[GemmSite]] = by_key(forward, lambda site: site.node.meta.get("seq_nr", -1))
        taken: Taken = set()
        latest = forward[::-1]  # autograd's engine runs backwards
        owners = self._owners_of_gradients(nodes, latest)
        return [self._backward_site(n, by_sequence, latest, owners, taken) for n in nodes]

    def _owners_of_gradients(self, nodes: list[fx.Node], forward: list[GemmSite]) -> dict[MatrixValue, list[GemmSite]]:
        """A gradient -> the forward GEMMs of whose results it is one, as far as a product of it with a value tells that a
        single forward GEMM read: a weight. Linears that read one input are told apart by that alone in traces without
        `seq_nr`."""
        readers: dict[MatrixValue, list[GemmSite]] = {}
        for site in forward:
            for value in {operand.value for operand in site.operands}:
                readers.setdefault(value, []).append(site)
        found: dict[MatrixValue, list[GemmSite]] = {}
        for node in nodes:
            known, gradient = self._known_and_gradient(node)
            if known is not None and gradient is not None and len(sites := readers.get(known, ())) == 1:
                found.setdefault(gradient, []).extend(sites)
        return found

    def _known_and_gradient(self, node: fx.Node) -> tuple[MatrixValue | None, MatrixValue | None]:
        """The operand of a gradient GEMM that is no gradient, or the second of two that are, and the other one."""
        values = [value for value, _ in self.values_of(node)]
        if not values:
            return None, None
        return (values[1], values[0]) if operands_of(node)[0] in self.gradients else (values[0], values[1])

    def _backward_site(
        self,
        node: fx.Node,
        by_sequence: dict[int, list[GemmSite]],
        forward: list[GemmSite],
        owners: dict[MatrixValue, list[GemmSite]],
        taken: Taken,
    ) -> GemmSite:
        grads = [n in self.gradients for n in operands_of(node)]
        known, gradient = self._known_and_gradient(node)
        mates = by_sequence.get(node.meta.get("seq_nr", -2), [])
        candidates = forward if gradient is None else [*owners.get(gradient, ()), *forward]
        pairs = self.values_of(node)
        is_transposed = bool(pairs) and pairs[0 if grads[0] else 1][1]
        mate, role = mate_and_role(known, grads, mates, candidates, taken, is_transposed, sizes_of(node)[2])
        if mate is not None:
            taken.add((mate.node, role))
        kinds = mate.operands if mate is not None else ()
        operands = self._operands(node, lambda n, v: "grad_output" if n in self.gradients else self._kind_in(kinds, n, v))
        if is_batched(node) and not kinds:
            operands = ()  # a gradient of a GEMM that is not rewritten
        return self._site(node, role, operands, mate)

    def nested_site(self, node: fx.Node, outer: fx.Node) -> GemmSite:
        """A matmul in a subgraph: all that is known of its place is the operation that contains it."""
        role = "grad_input" if outer in self.gradients else "output"
        within = str(outer.target)
        return dataclasses.replace(self._site(node, role, ()), is_backward=outer in self.gradients, within=within)

    def _kind_in(self, operands: tuple[Operand, ...], node: fx.Node, value: MatrixValue) -> Kind:
        return next((o.kind for o in operands if o.value == value), self._forward_kind(node, value))

    def _forward_kind(self, node: fx.Node, value: MatrixValue) -> Kind:
        return "weight" if value.root in self.static else "input"

    def _operands(self, node: fx.Node, kind: Callable[[fx.Node, MatrixValue], Kind]) -> tuple[Operand, ...]:
        pairs = zip(operands_of(node), self.values_of(node), strict=False)
        return tuple(Operand(value, transposed, kind(operand, value)) for operand, (value, transposed) in pairs)

    def _site(self, node: fx.Node, role: str, operands: tuple[Operand, ...], mate: GemmSite | None = None) -> GemmSite:
        m, n, k = sizes_of(node)
        path = mate.path if mate is not None else self._path(node, operands)
        module = self.context.name_module(path)
        source = origin.source_line(node) or (mate.source if mate else "")
        forward = None if mate is None else mate.node
        offs = offs_of(node)
        kind = kind_of(node)
        is_grouped = bool(operands) or (kind is not None and kind.is_grouped)  # a batched GEMM of activations is not
        return GemmSite(
            node,
            module,
            path,
            role,
            m,
            n,
            k,
            source,
            operands,
            node in self.gradients,
            forward,
            form=form_of(node) if is_grouped else None,
            groups=num_groups(node) if is_grouped else 1,
            offs=None if offs is None else behind_aliases(offs),
            target=target_of(operation_of(node)),
        )

    def _path(self, node: fx.Node, operands: tuple[Operand, ...]) -> origin.Path | None:
        """The module that ran the GEMM; where a functional call read another module's weight, that module.
        nn.MultiheadAttention runs `F.linear(x, self.out_proj.weight)`: its GEMM belongs to `out_proj`. The weight names the
        GEMM as well where no input places the variable below which the module is. Behind a graph break, a module that was put
        back into an attribute comes from one variable and its path begins with another."""
        path = origin.module_path(node)
        weights = [o.value for o in reversed(operands) if o.kind == "weight"]
        owner = next((o for o in map(self._owner, weights) if o is not None), None)
        if path is None:
            gathered = (self._owner(weight, is_gathered=True) for weight in weights)
            return owner or next((o for o in gathered if o is not None), None)
        if owner is None:
            return path
        is_below = owner.root == path.root and origin.begins(path.below, owner.below)
        return owner if is_below or path.root not in self.placed else path

    def _owner(self, weight: MatrixValue, is_gathered: bool = False) -> origin.Path | None:
        """The module that owns a parameter, or the parameter itself: where it is an argument of a function, or a batch, of
        which a module of experts has several. is_gathered: whether the weight may be gathered from shards of the parameter."""
        root = weight.root
        while is_gathered and root.op == "call_function" and len(root.all_input_nodes) == 1:
            root = root.all_input_nodes[0]
        given = self.parameters.get(root)
        if given is None:
            return None
        return given.owner if weight.batch is None else given.path


def _values_of(node: fx.Node) -> list[tuple[MatrixValue, bool]]:
    """For both operands of a matmul the value and whether the product reads its transpose; none if it cannot be rewritten. A
    product over the rows of groups reads them along the rows of a matrix, a sum over them along the columns of a."""
    kind, form, offs = kind_of(node), form_of(node), offs_of(node)
    if kind is None or not (form is not None or is_of_one_pair(node)):
        return []
    first, second = operands_of(node)
    if form is None or offs is None:
        found = [resolve(n, is_batched=form is not None) for n in (first, second)]
    else:
        offs = behind_aliases(offs)
        found = [
            resolve_rows(first, offs),
            resolve_rows(second, offs) if form == "sums" else resolve(second, is_batched=True),
        ]
    found = [(value, transposed != flip) for (value, transposed), flip in zip(found, kind.transposes, strict=True)]
    is_right = {"rows": not found[0][1], "sums": found[0][1] and not found[1][1]}
    return found if form is None or is_right.get(form, True) else []


# -- Which forward GEMM a gradient GEMM belongs to, and its role. Pure functions on sites.
#
# A gradient GEMM multiplies an output gradient with a tensor that its forward GEMM read: its *known* operand.
# 1. The forward GEMMs with the same `seq_nr` that read the known operand come first; then those whose weight is multiplied with
#    the same gradient; then all others that read it, the last one first, as autograd's engine runs backwards.
# 2. The gradient of the operand beside the known one is computed: next to the weight that is the input, and vice versa.
# 3. Of two operands of the same kind, the gradient of the first is grad_input, that of the second grad_weight.
# 4. A role of a forward GEMM is taken once.
# 5. If no forward GEMM read the tensor, as the backward gathered it once more: what is summed over tells which gradient it is,
#    the columns of the result or its rows; where these are as many, or nothing is known of the forward GEMM, the form does:
#    `gradient @ ...` and `... @ gradient.T` are the gradient of the first operand, the others that of the second.


Taken = set[tuple[fx.Node, str]]  # Gradients already found: (forward GEMM, role).


def mate_and_role(
    known: MatrixValue | None,
    is_gradient: Sequence[bool],
    mates: Sequence[GemmSite],
    forward: Sequence[GemmSite],
    taken: Taken,
    is_transposed: bool = False,
    k: Any = None,
) -> tuple[GemmSite | None, str]:
    """The forward GEMM (None if none is found) and the role of a gradient GEMM. known: the value of the operand that is not a
    gradient; None where it is not clear. is_gradient: for each operand whether it depends on an output gradient. mates: the
    forward GEMMs with the same `seq_nr`. forward: all of them. is_transposed: whether the transposed gradient is multiplied. k:
    the size that is summed over. The result is not added to `taken`."""
    if known is not None:
        candidates = mates if all(is_gradient) else (*mates, *forward)
        for site, role in _readers(known, candidates):
            if (site.node, role) not in taken:
                return site, role
    is_of_first = not is_gradient or all(is_gradient) or is_gradient[0] != is_transposed
    found = [(site, _role_by_sum(site, is_of_first, k)) for site in mates]
    free = [pair for pair in found if (pair[0].node, pair[1]) not in taken]
    return next(iter((*free, *found)), (None, "grad_input" if is_of_first else "grad_weight"))


def _role_by_sum(site: GemmSite, is_of_first: bool, k: Any) -> str:
    """The role, in a forward GEMM, of a gradient GEMM that sums over k values. is_of_first: whether that has the form of a
    gradient of the first operand."""
    over_columns, over_rows = same_size(k, site.n), same_size(k, site.m)
    is_of_first = over_columns if over_columns != over_rows else is_of_first
    if not site.operands or site.operands[0].kind == site.operands[1].kind:
        return "grad_input" if is_of_first else "grad_weight"
    return "grad_weight" if site.operands[0 if is_of_first else 1].kind == "weight" else "grad_input"


def _readers(known: MatrixValue, candidates: Iterable[GemmSite]) -> Iterable[tuple[GemmSite, str]]:
    """The forward GEMMs that read a value, each with the role of the gradient GEMM that reads it again."""
    for site in candidates:
        if not site.operands:
            continue
        first, second = site.operands
        for operand, other, is_second in ((second, first, True), (first, second, False)):
            if operand.value != known:
                continue
            if other.kind == operand.kind:
                yield site, "grad_input" if is_second else "grad_weight"
            else:
                yield site, "grad_weight" if other.kind == "weight" else "grad_input"


def _is_product(node: fx.Node) -> bool:
    """True if a value is what a product of two matrices computed, perhaps with a bias, of which views, copies and operations
    with numbers were made since. A sum with a weight, as of a merged adapter, is not, nor are products of experts' factors."""
    while not is_matmul(node):
        matrices = [n for n in node.all_input_nodes if isinstance(x := value_of(n), torch.Tensor) and x.dim() > 1]
        if len(matrices) != 1:
            return False
        (node,) = matrices
    return not is_batched(node)
