"""Measures that tests compare with bounds."""

import torch


def sqnr(reference: torch.Tensor, x: torch.Tensor) -> float:
    """Signal to quantization noise of x, in dB, computed in float64."""
    reference, x = reference.detach().double(), x.detach().double()
    noise = (reference - x).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(reference.norm() / noise))
