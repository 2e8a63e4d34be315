"""Which forward GEMM a gradient GEMM belongs to, and its role. Pure functions on sites.

A gradient GEMM multiplies an output gradient with a tensor that its forward GEMM read: its *known* operand.
1. The forward GEMMs with the same `seq_nr` that read the known operand come first, then all others that read it.
2. The gradient of the operand beside the known one is computed: next to the weight that is the input, and vice versa.
3. Of two operands of the same kind, the gradient of the first is grad_input, that of the second grad_weight.
4. A role of a forward GEMM is taken once.
5. If no forward GEMM read the tensor: `gradient @ ...` is grad_input, `... @ gradient` is grad_weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import MatrixValue

Taken = set[tuple[fx.Node, str]]
"""Gradients already found: (forward GEMM, role)."""


def mate_and_role(
    known: MatrixValue | None, is_gradient: Sequence[bool], mates: Sequence[GemmSite], forward: Sequence[GemmSite], taken: Taken
) -> tuple[GemmSite | None, str]:
    """The forward GEMM (None if none is found) and the role of a gradient GEMM.

    known: the value of the operand that is not a gradient; None where it is not clear. is_gradient: for each operand whether it
    depends on an output gradient. mates: the forward GEMMs with the same `seq_nr`. forward: all of them. The result is not
    added to `taken`.
    """
    if known is not None:
        candidates = mates if all(is_gradient) else (*mates, *forward)
        for site, role in _readers(known, candidates):
            if (site.node, role) not in taken:
                return site, role
    role = "grad_weight" if is_gradient and not is_gradient[0] else "grad_input"
    return (mates[0] if mates else None), role


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
