"""The scheme of each quantization: a new one is a line here."""

from __future__ import annotations

from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.schemes.blockwise import BlockwiseScheme
from fp8pass.schemes.delayed import DelayedScheme
from fp8pass.schemes.mxfp8 import MXFP8Scheme
from fp8pass.schemes.rowwise import RowScheme, SharedRowScheme
from fp8pass.schemes.scheme import Scheme
from fp8pass.schemes.tensorwise import TensorScheme
from lowering.formats import Granularity

_BLOCKWISE = BlockwiseScheme()
_SCHEMES: dict[tuple[Granularity, ScaleFrom], Scheme] = {
    (Granularity.TENSOR_WISE, ScaleFrom.VALUE): TensorScheme(),
    (Granularity.TENSOR_WISE, ScaleFrom.STATE): DelayedScheme(),
    (Granularity.ROW_WISE, ScaleFrom.VALUE): RowScheme(),
    (Granularity.ROW_WISE, ScaleFrom.SHARED): SharedRowScheme(TensorScheme()),
    (Granularity.BLOCK_1X32, ScaleFrom.VALUE): MXFP8Scheme(),
    (Granularity.BLOCK_1X128, ScaleFrom.VALUE): _BLOCKWISE,
    (Granularity.BLOCK_128X128, ScaleFrom.VALUE): _BLOCKWISE,
}


def scheme_of(quantization: Quantization) -> Scheme:
    """How copies with this quantization are made."""
    return _SCHEMES[quantization.granularity, quantization.scale_from]
