"""Schemes: how each kind of scales is computed, applied and sent, as nodes of a graph. No recipe is known by name here."""

from __future__ import annotations

from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.schemes.blocks import BlockScheme
from fp8pass.schemes.rowwise import RowScheme
from fp8pass.schemes.scheme import Scheme
from fp8pass.schemes.tensorwise import TensorScheme
from lowering.formats import Granularity

_BLOCKWISE = BlockScheme(is_mx=False)
#: A new scheme is a line here.
_SCHEMES: dict[tuple[Granularity, ScaleFrom], Scheme] = {
    (Granularity.TENSOR_WISE, ScaleFrom.VALUE): TensorScheme(ScaleFrom.VALUE),
    (Granularity.TENSOR_WISE, ScaleFrom.STATE): TensorScheme(ScaleFrom.STATE),
    (Granularity.ROW_WISE, ScaleFrom.VALUE): RowScheme(),
    (Granularity.ROW_WISE, ScaleFrom.SHARED): TensorScheme(ScaleFrom.SHARED),
    (Granularity.BLOCK_1X32, ScaleFrom.VALUE): BlockScheme(is_mx=True),
    (Granularity.BLOCK_1X128, ScaleFrom.VALUE): _BLOCKWISE,
    (Granularity.BLOCK_128X128, ScaleFrom.VALUE): _BLOCKWISE,
}


def scheme_of(quantization: Quantization) -> Scheme:
    """The scheme that makes copies with this quantization."""
    return _SCHEMES[quantization.granularity, quantization.scale_from]
