"""GEMM sites: what discovery finds in a graph, and the names of the tensors they read. Data only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.graph.names import Kind, TensorName
from fp8pass.graph.origin import Path
from fp8pass.graph.values import MatrixValue, Operand, same_size

aten = torch.ops.aten

_MATRIX_GEMMS = (aten.mm.default, aten.addmm.default)
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
#: Words in the names of operations that multiply matrices: a custom operation that has one gets a row, too.
_WORDS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "gemm", "linear"})

GRAD_OUTPUT: Kind = "grad_output"


def is_matrix_gemm(node: fx.Node) -> bool:
    """Whether a node is a GEMM of two matrices."""
    return node.target in _MATRIX_GEMMS


def is_batch_of_one(node: fx.Node) -> bool:
    """Whether a node is a batched GEMM of a single pair of matrices, into which einsum turns a projection."""
    return node.target is aten.bmm.default and same_size(node.meta["val"].shape[0], 1)


def is_matmul(node: fx.Node) -> bool:
    """Whether a node multiplies matrices in high precision. Matrix-vector products are none: FP8 has nothing to gain there."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace != "lowering" and not _WORDS.isdisjoint(name.split("_"))


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two operands of a matmul, or () where a custom operation's are not clear."""
    tensors = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)]
    start = 1 if node.target in (aten.addmm.default, aten.baddbmm.default) else 0
    operands = tuple(tensors[start : start + 2])
    return operands if len(operands) == 2 and all(o.meta["val"].dim() >= 2 for o in operands) else ()


@dataclasses.dataclass(frozen=True)
class GemmSite:
    """One matmul of the graph: [m, k] @ [k, n] for a role of a module."""

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
    within: str = ""
    """The control-flow operation in one of whose subgraphs the matmul stands."""

    @property
    def is_batched(self) -> bool:
        """Whether it is one of ATen's batched GEMMs."""
        return self.node.target in _BATCHED

    @property
    def op(self) -> str:
        """Name of the operation, such as "addmm"; one that is not ATen's with its namespace."""
        return str(self.node.target).removeprefix("aten.").rpartition(".")[0]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Both operands, or none where the matmul cannot be rewritten."""
        return () if self.a is None or self.b is None else (self.a, self.b)


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """What is known of one input of Dynamo's graph."""

    path: Path | None
    """Where the input was found, such as `self` -> `layers.0.attn.wq.weight`."""
    owner: Path | None
    """The module that owns it; the input itself where it is an argument of a function, alone or in a dict or list."""
    is_parameter: bool
    """Whether it is a Parameter or a buffer of a module: its content outlives the call."""


@dataclasses.dataclass(frozen=True)
class GraphContext:
    """What the passes may know besides the graph itself."""

    inputs: tuple[GraphInput, ...]
    name_module: Callable[[Path], str]
    """From a path below a variable of the frame to the path in the user's model."""
    shares_scales: Callable[[Any], bool] = lambda group: True
    """Whether delayed scaling has equal scales on all ranks of a collective's group."""


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
    aliases: dict[TensorName, TensorName] = {}
    counts: Counter[TensorName] = Counter()
    for site in sites:
        for operand in site.operands:
            first = TensorName(site.module, operand.kind, path=site.path)
            name = of_value.get(operand.value)
            if name is None:
                counts[first] += 1
                of_value[operand.value] = dataclasses.replace(first, index=counts[first])
            elif (name.module, name.kind) != (first.module, first.kind):
                aliases.setdefault(first, name)
    return TensorNames(of_value, tuple((alias, name) for alias, name in aliases.items() if not counts[alias]))
