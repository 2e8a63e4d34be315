"""The bounds of all comparisons. One table, with the reason for every bound; none is loosened to pass
(docs/numerics.md)."""

import torch

#: Largest relative error, in the Frobenius norm, of a scaled GEMM against the float64 product of the same FP8 values.
SCALED_MM = {
    # Tensor cores add FP8 products in fewer bits than float32 has: some 13 fraction bits survive a long sum on SM90.
    torch.float32: 3e-3,
    # One rounding to 8 significant bits, at most 2**-8 of each element, on top of the above.
    torch.bfloat16: 1e-2,
    # One rounding to 11 significant bits; the accumulation dominates, so the bound is bfloat16's for want of a
    # tighter rule.
    torch.float16: 1e-2,
}

#: Largest relative error of the eager reference GEMM: float32 sums of exact products, rounded once to `out_dtype`.
REFERENCE_MM = {
    # k float32 additions, each within 2**-24: far below 1e-5 for the k of the tests.
    torch.float32: 1e-5,
    # Rounding to 8 significant bits moves an element by at most 2**-8 of itself, hence the norm too.
    torch.bfloat16: 2**-8 + 1e-5,
    # The same for 11 significant bits; no result of the tests is subnormal.
    torch.float16: 2**-11 + 1e-5,
}

#: dB; one linear whose operands are both E4M3 (3 mantissa bits: about 31 dB for each operand), normal data.
SQNR_LINEAR_E4M3 = 25.0

#: dB; one linear's gradient, with an operand in E5M2 (2 mantissa bits: about 25 dB).
SQNR_LINEAR_E5M2 = 20.0

#: dB; the output of a whole model: each GEMM adds its noise to that of its input.
SQNR_MODEL_OUTPUT = 18.0

#: dB; every gradient of a whole model that is not negligible: all the forward's noise and E5M2 in each backward GEMM.
SQNR_MODEL_GRADIENT = 12.0

#: dB; generated GPU code against the same rewrite run eagerly. The two add in another order and round what they fuse
#: less often: float32 differs by some 130 dB, until a value falls on the other side of an FP8 rounding (an eighth or a
#: quarter of that element), which a backward of several GEMMs spreads. In bfloat16 eager operations round each
#: intermediate to 8 bits, so many values do.
SQNR_EMULATED = {torch.float32: 35.0, torch.bfloat16: 20.0}

#: A parameter's gradient is negligible below this part of the largest norm among the gradients: it is what is left of
#: large terms that cancel (a key's bias has none in exact arithmetic), and their noise does not cancel.
NEGLIGIBLE_GRADIENT = 1e-3

#: Largest relative difference of losses resumed on another number of ranks: gradients are averaged in another order, and some
#: values fall on the other side of an FP8 rounding.
RESHARDED_LOSS = 0.01

#: Largest relative difference of amaxes and scales between generated GPU code and eager execution in float32: an activation
#: that falls on the other side of an FP8 rounding moves what follows, at most by a part of a step.
EMULATED_AMAX = 1e-2

#: Percent; the final loss of a training against that in high precision (docs/numerics.md).
LOSS_PERCENT = 1.0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(actual - expected) / norm(expected), in float64; 0 where both are empty."""
    expected = expected.double()
    difference = (actual.double() - expected).norm().item()
    return difference / expected.norm().item() if difference else 0.0


def sqnr(reference: torch.Tensor, x: torch.Tensor) -> float:
    """Signal to quantization noise of x, in dB, computed in float64."""
    reference, x = reference.detach().double(), x.detach().double()
    noise = (reference - x).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(reference.norm() / noise))
