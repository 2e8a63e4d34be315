"""What a GEMM is: the operations that multiply matrices, and where their operands are."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fp8pass.graph.values import same_size, value_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class GemmKind:
    """An operation of ATen's that multiplies matrices."""

    a: int
    """Position of the first operand among the arguments."""
    b: int
    """Position of the second operand."""
    addend: int | None = None
    """Position of what is added to the product."""
    is_batched: bool = False
    """Whether it multiplies batches of matrices."""


_KINDS = {
    aten.mm.default: GemmKind(0, 1),
    aten.addmm.default: GemmKind(1, 2, addend=0),
    aten.bmm.default: GemmKind(0, 1, is_batched=True),
    aten.baddbmm.default: GemmKind(1, 2, addend=0, is_batched=True),
}
#: Words in the names of operations that multiply matrices: a custom operation that has one gets a row, too.
_WORDS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "gemm", "linear"})


def kind_of(node: fx.Node) -> GemmKind | None:
    """The kind of an ATen GEMM; None for every other node."""
    return _KINDS.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


def is_matmul(node: fx.Node) -> bool:
    """Whether a node multiplies matrices in high precision. Matrix-vector products do not count: FP8 gains nothing there."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace != "lowering" and not _WORDS.isdisjoint(name.split("_"))


def is_scaled_gemm(node: fx.Node) -> bool:
    """Whether a node multiplies matrices in FP8: our own operations that do are called scaled_..."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace == "lowering" and name.startswith("scaled_") and not _WORDS.isdisjoint(name.split("_"))


def is_batch_of_one(node: fx.Node) -> bool:
    """Whether a node is a batched GEMM of a single pair of matrices, into which einsum turns a projection."""
    return node.target is aten.bmm.default and bool(same_size(value_of(node).shape[0], 1))


def has_fp8_counterpart(node: fx.Node) -> bool:
    """Whether an FP8 GEMM can take the node's place."""
    kind = kind_of(node)
    return kind is not None and (not kind.is_batched or is_batch_of_one(node))


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two operands of a matmul, or () where a custom operation's are not clear."""
    kind = kind_of(node)
    tensors = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)]
    operands = tuple(tensors[:2]) if kind is None else (tensors[kind.a], tensors[kind.b])
    return operands if len(operands) == 2 and all(value_of(o).dim() >= 2 for o in operands) else ()


def operand_positions(node: fx.Node) -> tuple[int, int]:
    """Where the two operands of one of ATen's GEMMs are among its arguments."""
    kind = kind_of(node)
    assert kind is not None
    return kind.a, kind.b


def addend_of(node: fx.Node) -> fx.Node | None:
    """What a GEMM adds to the product, or None."""
    kind = kind_of(node)
    addend = None if kind is None or kind.addend is None else node.args[kind.addend]
    return addend if isinstance(addend, fx.Node) else None
