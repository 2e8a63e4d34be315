"""GEMMs: the operations that multiply matrices, where their operands are, and the sites of a graph with the names of their
tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from fp8pass.errors import Reason
from fp8pass.graph.origin import Path, TensorName, input_index, is_tangent
from fp8pass.graph.values import MatrixValue, Operand, depends_on, holds_tensor, same_size, value_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class GemmKind:
    """An operation that multiplies matrices, or one of the two products of an operation that computes both gradients."""

    a: int  # Position of the first operand among the arguments.
    b: int  # Position of the second operand.
    addend: int | None = None  # Position of what is added to the product.
    is_batched: bool = False  # It multiplies batches of matrices.
    is_grouped: bool = False  # It multiplies groups of rows, or batches of matrices, with one matrix each.
    offs: int | None = None  # Position of the groups' ends.
    transposes: tuple[bool, bool] = (False, False)  # For each operand whether the operation reads its transpose.


Form = Literal["rows", "sums", "batched"]
"""The forms of a grouped GEMM. E: groups, S: slots.

- "rows": [S, K] x [E, K, N] -> [S, N], the rows of each group times a matrix of their own.
- "sums": [M, S] x [S, N] -> [E, M, N], each group's part of the sum over slots.
- "batched": [E, M, K] x [E, K, N] -> [E, M, N].
"""


_KINDS = {
    "aten::mm": GemmKind(0, 1),
    "aten::addmm": GemmKind(1, 2, addend=0),
    "aten::bmm": GemmKind(0, 1, is_batched=True),
    "aten::baddbmm": GemmKind(1, 2, addend=0, is_batched=True),
    "aten::_grouped_mm": GemmKind(0, 1, is_grouped=True, offs=2),
    # transformers' experts in other dtypes than bfloat16: input [S, K], weight [E, K, N], offs
    "transformers::grouped_mm_fallback": GemmKind(0, 1, is_grouped=True, offs=2),
}
#: Operations that compute two gradients -> for each output, what it multiplies. Each output is a GEMM of its own.
_GRADIENT_PAIRS = {
    # input, weight, offs, grad_output -> gradients of input and weight
    "transformers::grouped_mm_fallback_backward": (
        GemmKind(3, 1, is_grouped=True, offs=2, transposes=(False, True)),
        GemmKind(0, 3, is_grouped=True, offs=2, transposes=(True, False)),
    )
}
#: torch's fast path for inference: operations that compute several GEMMs, and attention between them.
FAST_PATH = frozenset({"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"})
#: How a model leaves torch's fast path.
NO_FAST_PATH = "torch.backends.mha.set_fastpath_enabled(False) before the first call"
#: Words in the names of operations that multiply matrices: a custom operation that has one gets a row, too.
_WORDS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "gemm", "linear", "trilinear"})


_FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)


def _name_of(node: fx.Node) -> str:
    """Name of an operation with its namespace; "" for what is no operation."""
    target = target_of(node)
    return str(target._schema.name) if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else ""


def target_of(node: fx.Node) -> Any:
    """What a node calls: of an operation that writes into its arguments, for which a graph has a wrapper, that operation."""
    return node.args[0] if node.target in _FUNCTIONALIZED else node.target


def operation_of(node: fx.Node) -> fx.Node:
    """The operation that computes a GEMM: the node itself, or what computes it together with another one."""
    if node.target is operator.getitem and any(_name_of(n) in _GRADIENT_PAIRS for n in node.all_input_nodes):
        return node.all_input_nodes[0]
    return node


def kind_of(node: fx.Node) -> GemmKind | None:
    """The kind of a GEMM whose operands are known; None for every other node."""
    operation = operation_of(node)
    if operation is node:
        return _KINDS.get(_name_of(node)) if str(node.target).endswith(".default") else None
    position: Any = node.args[1]
    return _GRADIENT_PAIRS[_name_of(operation)][position]


def is_attention(node: fx.Node) -> bool:
    """Tell by its name whether a node computes attention or its gradient: there are a dozen such operations, and more."""
    return node.op == "call_function" and "attention" in str(node.target)


def is_matmul(node: fx.Node) -> bool:
    """Tell whether a node multiplies matrices in high precision, no vectors: FP8 gains nothing there."""
    if operation_of(node) is not node:
        return True
    full_name = _name_of(node)
    namespace, _, name = full_name.partition("::")
    if namespace == "lowering" or full_name in _GRADIENT_PAIRS:  # of a pair the outputs are the GEMMs
        return False
    return full_name in FAST_PATH or not _WORDS.isdisjoint(name.split("_"))


def is_fast_path(node: fx.Node) -> bool:
    """Tell whether a node is an operation of torch's fast path for transformer layers in inference: several GEMMs in one."""
    return _name_of(node) in FAST_PATH


def is_scaled_gemm(node: fx.Node) -> bool:
    """Tell whether a node multiplies matrices in FP8: our own operations that do are called scaled_..."""
    namespace, _, name = _name_of(node).partition("::")
    return namespace == "lowering" and name.startswith("scaled_") and not _WORDS.isdisjoint(name.split("_"))


def is_batch_of_one(node: fx.Node) -> bool:
    """Tell whether a node is a batched GEMM of a single pair of matrices, into which einsum turns a projection."""
    return node.target is aten.bmm.default and bool(same_size(value_of(node).shape[0], 1))


def is_batched(node: fx.Node) -> bool:
    """Tell whether a node is one of ATen's batched GEMMs: most have two activations and are left alone."""
    kind = kind_of(node)
    return kind is not None and kind.is_batched


def offs_of(node: fx.Node) -> fx.Node | None:
    """The groups' ends of a grouped GEMM; None where it has none."""
    kind = kind_of(node)
    offs = None if kind is None or kind.offs is None else argument_of(operation_of(node), kind.offs, "offs")
    return offs if isinstance(offs, fx.Node) else None


def has_group_bias(node: fx.Node) -> bool:
    """Tell whether `_grouped_mm` is given a bias, which torch declares and does not support so far."""
    return node.target is aten._grouped_mm.default and argument_of(node, 3, "bias") is not None


def argument_of(node: fx.Node, position: int, name: str) -> Any:
    """An argument that may be given by position or by name; None where it is left out."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def form_of(node: fx.Node) -> Form | None:
    """The form of a GEMM with groups; None for other GEMMs, and where FP8 has no such form."""
    kind = kind_of(node)
    operands = operands_of(node)
    if kind is None or not operands or not (kind.is_grouped or kind.is_batched) or is_batch_of_one(node):
        return None
    dims = tuple(value_of(o).dim() for o in operands)
    has_offs = offs_of(node) is not None
    if dims == (3, 3):
        return None if has_offs else "batched"
    forms: dict[tuple[int, ...], Form] = {(2, 3): "rows", (2, 2): "sums"}
    return forms.get(dims) if has_offs and kind.is_grouped else None


def is_of_one_pair(node: fx.Node) -> bool:
    """Tell whether a GEMM multiplies one pair of matrices, a batch of one included."""
    kind = kind_of(node)
    return kind is not None and not kind.is_grouped and (not kind.is_batched or is_batch_of_one(node))


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two operands of a matmul, or () where an operation's are not clear, or it is several GEMMs or has three."""
    if is_fast_path(node) or node.target is aten._trilinear.default:
        return ()
    kind = kind_of(node)
    operation = operation_of(node)
    tensors = [a for a in operation.args if isinstance(a, fx.Node) and holds_tensor(a)]
    operands = tuple(tensors[:2]) if kind is None else (tensors[kind.a], tensors[kind.b])
    return operands if len(operands) == 2 and all(value_of(o).dim() >= 2 for o in operands) else ()


def sizes_of(node: fx.Node) -> tuple[Any, Any, Any]:
    """M, N and K of a matmul: of each matrix where it multiplies several; "?" where operands are not clear."""
    operands = operands_of(node)
    if not operands:
        return "?", "?", "?"
    (m, k), (_, n) = (shape_of_operand(node, i) for i in (0, 1))
    return m, n, k


def shape_of_operand(node: fx.Node, position: int) -> tuple[Any, Any]:
    """The last two sizes of an operand as the product reads it."""
    kind = kind_of(node)
    rows, cols = value_of(operands_of(node)[position]).shape[-2:]
    return (cols, rows) if kind is not None and kind.transposes[position] else (rows, cols)


def num_groups(node: fx.Node) -> Any:
    """The number of products that a GEMM computes: 1 for one of two matrices."""
    form = form_of(node)
    if form is None:
        return 1
    operands = operands_of(node)
    return value_of(node if form == "sums" else operands[1]).shape[0]


def operand_positions(node: fx.Node) -> tuple[int, int]:
    """The positions of the two operands of one of ATen's GEMMs among its arguments."""
    kind = kind_of(node)
    assert kind is not None
    return kind.a, kind.b


def addend_of(node: fx.Node) -> fx.Node | None:
    """The node that a GEMM adds to the product, or None."""
    kind = kind_of(node)
    addend = None if kind is None or kind.addend is None else node.args[kind.addend]
    return addend if isinstance(addend, fx.Node) else None


# -- GEMM sites: what discovery finds in a graph, and the names of the tensors they read. Data only.


@dataclasses.dataclass(frozen=True, eq=False)
class GemmSite:
    """One matmul of the graph: [m, k] @ [k, n] for a role of a module. Of a grouped GEMM m, n and k are those of a single
    product, but for the slots, which all groups share."""

    node: fx.Node
    module: str
    path: Path | None  # The module as the compiled frame names it; None where the GEMM ran outside of any module.
    role: str
    m: Any
    n: Any
    k: Any
    source: str
    operands: tuple[Operand, ...]  # Both operands, or none where the matmul cannot be rewritten.
    is_backward: bool
    forward: fx.Node | None = None  # The forward GEMM that a gradient belongs to, if there is one.
    within: str = ""  # The control-flow operation in one of whose subgraphs the matmul stands.
    form: Form | None = None  # The form of a grouped GEMM, batched ones included; None for others.
    groups: Any = 1  # Number of products: 1 for a GEMM of two matrices.
    offs: fx.Node | None = None  # The ends of the groups of a grouped GEMM; None where each product has a matrix of its own.
    target: Any = None  # The operation, where the node is one of its outputs.

    @property
    def is_batched(self) -> bool:
        """Tell whether it is one of ATen's batched GEMMs."""
        return is_batched(self.node)

    @property
    def op(self) -> str:
        """Name of the operation, such as "addmm"; one that is not ATen's with its namespace."""
        return str(self.target or self.node.target).removeprefix("aten.").rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The gather of a Parameter by FSDP2, in its hooks, before each graph that reads it."""

    num_ranks: int
    rows: int  # Rows of each rank's part, with its padding.
    elements: int  # Elements of each rank's part.
    ranks: Any  # The process group.
    obstacle: Reason | None  # Why it is gathered as it is, whatever the graph does with it.


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """Knowledge of one input of Dynamo's graph."""

    path: Path | None  # The path by which the input was found, such as `self` -> `layers.0.attn.wq.weight`.
    owner: Path | None  # The module that owns it; the input itself where it is an argument of a function, or within one.
    is_parameter: bool  # It is a Parameter or a buffer of a module: its content outlives the call.
    is_embedding: bool = False  # It is the weight of an nn.Embedding of the model, or of its output embedding.
    is_buffer: bool = False  # It is a buffer of a module, which is not trained.
    requires_grad: bool = False
    not_kept: Reason | None = None  # The reason why no copies of a Parameter or buffer can be cached.
    sharded: Sharded | None = None  # The gather of a Parameter by FSDP2, where graphs read FP8 copies that it gathers.
    stands_in: bool = False  # It is a plain tensor in a Parameter's place, where functional_call and FSDP1 put it for a call.

    @property
    def is_weight(self) -> bool:
        """True if a module has it as a Parameter or buffer during the call."""
        return self.is_parameter or self.stands_in


def gradients_in_joint(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that depend on a tangent."""
    return depends_on(graph, {n for n in graph.find_nodes(op="placeholder") if is_tangent(n)})


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Knowledge of the model around one of Dynamo's graphs, which may be a part of it."""

    embeddings: tuple[int, ...] = ()  # The numbers of rows of embeddings that are not among the graph's inputs.
    returned: frozenset[int] | None = None  # Positions of the graph's results that are results of the model; None: all.
    read_widths: frozenset[int] | None = None  # The numbers of features that modules read; None where they are not known.


@dataclasses.dataclass(frozen=True)
class GraphContext:
    """Knowledge that passes have besides the graph itself."""

    inputs: tuple[GraphInput, ...]
    name_module: Callable[[Path | None], str]  # From a path below a variable of the frame to the path in the user's model.
    surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
    shares_scales: Callable[[Any], bool] = lambda group: True  # Delayed scaling has equal scales on all ranks of the group.
    index_of: Callable[[fx.Node], int | None] = input_index  # A placeholder's position among `inputs`; None if not there.

    gradients_of: Callable[[fx.Graph], set[fx.Node]] = gradients_in_joint  # The nodes that depend on an output's gradient.

    def given(self, graph: fx.Graph) -> dict[fx.Node, GraphInput]:
        """The described inputs among the placeholders of a graph."""
        found = ((n, self.index_of(n)) for n in graph.find_nodes(op="placeholder"))
        return {n: self.inputs[i] for n, i in found if i is not None and i < len(self.inputs)}


def name_tensors(sites: list[GemmSite]) -> tuple[dict[MatrixValue, TensorName], tuple[tuple[TensorName, TensorName], ...]]:
    """Name each value after the first GEMM that reads it, whether that GEMM is rewritten or not. A second, different tensor of
    the same module and kind gets `#2`, and so on: a module that is called twice. Returns the names, and (another name, the
    name) of shared tensors: `wk:input`, `wq:input`."""
    names: dict[MatrixValue, TensorName] = {}
    aliases: dict[tuple[str, str], tuple[TensorName, TensorName]] = {}
    counts: dict[tuple[str, str], int] = {}
    for site in sites:
        for operand in site.operands:
            base = (site.module, operand.kind)
            name = names.get(operand.value)
            if name is None:
                counts[base] = counts.get(base, 0) + 1
                names[operand.value] = TensorName(site.module, operand.kind, counts[base], path=site.path)
            elif (name.module, name.kind) != base:
                aliases.setdefault(base, (TensorName(site.module, operand.kind, path=site.path), name))
    return names, tuple(pair for base, pair in aliases.items() if base not in counts)
