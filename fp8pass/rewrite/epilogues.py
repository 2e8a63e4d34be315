"""Plan what becomes of a product: what the GEMM adds, and where padding is cut off. Reads only.

The copies of a GEMM are larger than its operands where their outer dimension is padded to a multiple of 16: that of b always,
that of a where the copy is the b of another GEMM or was moved out of a rowwise one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import fx

from fp8pass.graph.casts import Layout
from fp8pass.graph.kinds import addend_of
from fp8pass.graph.values import same_size, value_of
from fp8pass.rewrite.plan import Decision, Epilogue
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Copy
from lowering.formats import pad_to_alignment


def epilogue_of(decision: Decision, layouts: Mapping[Copy, Layout]) -> Epilogue:
    """The epilogue of a GEMM that is rewritten."""
    a, b, site, recipe = decision.a, decision.b, decision.site, decision.recipe
    assert a is not None
    assert b is not None
    assert recipe is not None
    has_spare_rows = _pads_outer(a, layouts[a]) and not same_size(pad_to_alignment(site.m), site.m)
    cuts_columns = _pads_outer(b, layouts[b]) and not same_size(pad_to_alignment(site.n), site.n)
    cuts_rows: Literal["operand", "result", "none"] = "none"
    if has_spare_rows:
        cuts_rows = "operand" if site.form is None and scheme_of(a.quantization).has_one_scale else "result"
    addend = addend_of(site.node)
    is_bias = addend is not None and site.form is None and _is_bias(addend, value_of(site.node).shape[-1], cuts_columns)
    fast_accum = recipe.fast_accum(site.role)
    return Epilogue(value_of(site.node).dtype, fast_accum, addend, is_bias, cuts_rows, cuts_columns)


def _pads_outer(copy: Copy, layout: Layout) -> bool:
    """Whether the outer dimension of a copy is padded. Columns that are moved out of a rowwise copy of rows in groups are as
    many as that has, where they are the inner dimension, which is always padded."""
    is_moved = copy.columnwise and copy.value.groups is not None and scheme_of(copy.quantization).has_one_scale
    return layout.pads_outer or is_moved


def _is_bias(addend: fx.Node, columns: Any, cuts_columns: bool) -> bool:
    """A vector [N] fits the epilogue of an FP8 GEMM of two matrices, padded as N is, if that is a number."""
    is_vector = value_of(addend).dim() == 1 and same_size(value_of(addend).shape[0], columns)
    return is_vector and (not cuts_columns or isinstance(columns, int))
