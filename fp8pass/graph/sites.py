"""GEMM sites: what discovery finds in a graph, and the names of the tensors they read. Data only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from fp8pass.errors import Reason
from fp8pass.graph.kinds import Form, is_batched
from fp8pass.graph.names import TensorName
from fp8pass.graph.origin import Path, input_index, is_tangent
from fp8pass.graph.values import MatrixValue, Operand, depends_on


@dataclasses.dataclass(frozen=True, eq=False)
class GemmSite:
    """One matmul of the graph: [m, k] @ [k, n] for a role of a module.

    Of a grouped GEMM m, n and k are those of a single product, but for the slots, which all groups share.
    """

    node: fx.Node
    module: str
    path: Path | None
    """The module as the compiled frame names it; None where the GEMM ran outside of any module."""
    role: str
    m: Any
    n: Any
    k: Any
    source: str
    a: Operand | None
    """None, like b, for matmuls that cannot be rewritten."""
    b: Operand | None
    is_backward: bool
    forward: fx.Node | None = None
    """Of a gradient: the forward GEMM that it belongs to, if there is one."""
    within: str = ""
    """The control-flow operation in one of whose subgraphs the matmul stands."""
    form: Form | None = None
    """The form of a grouped GEMM, batched ones included; None for others."""
    groups: Any = 1
    """Number of products: 1 for a GEMM of two matrices."""
    offs: fx.Node | None = None
    """Where the groups of a grouped GEMM end; None where each product has a matrix of its own."""
    target: Any = None
    """The operation, where the node is one of its outputs."""

    @property
    def is_batched(self) -> bool:
        """Whether it is one of ATen's batched GEMMs."""
        return is_batched(self.node)

    @property
    def op(self) -> str:
        """Name of the operation, such as "addmm"; one that is not ATen's with its namespace."""
        return str(self.target or self.node.target).removeprefix("aten.").rpartition(".")[0]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Both operands, or none where the matmul cannot be rewritten."""
        return () if self.a is None or self.b is None else (self.a, self.b)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """How FSDP2 gathers a Parameter, in its hooks, before each graph that reads it."""

    num_ranks: int
    rows: int
    """Of each rank's part, with its padding."""
    elements: int
    """Of each rank's part."""
    ranks: Any
    """The process group."""
    obstacle: Reason | None
    """Why it is gathered as it is, whatever the graph does with it."""


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """What is known of one input of Dynamo's graph."""

    path: Path | None
    """Where the input was found, such as `self` -> `layers.0.attn.wq.weight`."""
    owner: Path | None
    """The module that owns it; the input itself where it is an argument of a function, alone or in a dict or list."""
    is_parameter: bool
    """Whether it is a Parameter or a buffer of a module: its content outlives the call."""
    is_embedding: bool = False
    """Whether it is the weight of an nn.Embedding of the model, or of its output embedding."""
    is_buffer: bool = False
    """Whether it is a buffer of a module, which is not trained."""
    requires_grad: bool = False
    not_kept: Reason | None = None
    """Of a Parameter or buffer: why no copies of it can be kept between calls."""
    sharded: Sharded | None = None
    """Of a Parameter that FSDP2 gathers, where graphs are to take FP8 copies that it gathers."""


def gradients_in_joint(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that depend on a tangent."""
    return depends_on(graph, {n for n in graph.find_nodes(op="placeholder") if is_tangent(n)})


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What is known of the model around one of Dynamo's graphs, which may be a part of it."""

    embeddings: tuple[int, ...] = ()
    """The numbers of rows of embeddings that are not among the graph's inputs."""
    returned: frozenset[int] | None = None
    """Positions of the graph's results that are results of the model; None: all."""
    read_widths: frozenset[int] | None = None
    """The numbers of features that modules read; None where they are not known."""


@dataclasses.dataclass(frozen=True)
class GraphContext:
    """What the passes may know besides the graph itself."""

    inputs: tuple[GraphInput, ...]
    name_module: Callable[[Path], str]
    """From a path below a variable of the frame to the path in the user's model."""
    surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
    shares_scales: Callable[[Any], bool] = lambda group: True
    """Whether delayed scaling has equal scales on all ranks of a collective's group."""
    index_of: Callable[[fx.Node], int | None] = input_index
    """A placeholder's position among `inputs`; None for one that is not described there."""

    gradients_of: Callable[[fx.Graph], set[fx.Node]] = gradients_in_joint
    """The nodes of a graph that depend on the gradient of an output."""

    def given(self, graph: fx.Graph) -> dict[fx.Node, GraphInput]:
        """What is known of the placeholders of a graph."""
        found = ((n, self.index_of(n)) for n in graph.find_nodes(op="placeholder"))
        return {n: self.inputs[i] for n, i in found if i is not None and i < len(self.inputs)}


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Readable, stable names of the quantized tensors of a graph."""

    of_value: dict[MatrixValue, TensorName]
    aliases: tuple[tuple[TensorName, TensorName], ...]
    """(another name, the name) of shared tensors: `attn.wk:input`, `attn.wq:input`."""


def name_tensors(sites: list[GemmSite]) -> TensorNames:
    """Name each value after the first GEMM that reads it, whether that GEMM is rewritten or not.

    A second, different tensor of the same module and kind gets `#2`, and so on: a module that is called twice.
    """
    of_value: dict[MatrixValue, TensorName] = {}
    aliases: dict[tuple[str, str], tuple[TensorName, TensorName]] = {}
    counts: dict[tuple[str, str], int] = {}
    for site in sites:
        for operand in site.operands:
            base = (site.module, operand.kind)
            name = of_value.get(operand.value)
            if name is None:
                counts[base] = counts.get(base, 0) + 1
                of_value[operand.value] = TensorName(site.module, operand.kind, counts[base], path=site.path)
            elif (name.module, name.kind) != base:
                aliases.setdefault(base, (TensorName(site.module, operand.kind, path=site.path), name))
    return TensorNames(of_value, tuple(pair for base, pair in aliases.items() if base not in counts))
