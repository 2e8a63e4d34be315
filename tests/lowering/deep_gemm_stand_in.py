"""Stands in for the package `deep_gemm`: functions with its signatures that check types, shapes and layouts as its sources do
(54e2261: csrc/apis/gemm.hpp, csrc/apis/layout.hpp, csrc/utils/layout.hpp, deep_gemm/include/deep_gemm/scheduler/gemm.cuh), and
compute by compact scales in float64."""

import math

import torch

from lowering.formats import E4M3

#: Rows of a tile.
ROWS = 128


class Library:
    """spoil: what becomes of the scales of a."""

    def __init__(self, spoil=lambda scale: scale):
        self.spoil, self.call_count, self.copies = spoil, 0, 0

    def get_mk_alignment_for_contiguous_layout(self):
        return ROWS

    def _check(self, a, b, d, scale_a, scale_b, recipe):
        """Shapes [.., M, K] and [.., N, K], K together, rows of whole 16 bytes; d by rows. Scales of a per 1x128: other strides
        than TMA's are copied; those of b per 128x128."""
        assert a.dtype == b.dtype == E4M3
        assert (d.shape, d.dtype, recipe) == ((a.shape[0], b.shape[-2]), torch.bfloat16, (1, 128, 128))
        assert a.shape[-1] == b.shape[-1]
        assert a.stride(-1) == b.stride(-1) == d.stride(-1) == 1
        assert b.dim() == 2 or b.stride(0) == b.shape[1] * b.shape[2]
        assert a.stride(-2) % 16 == b.stride(-2) % 16 == d.stride(-2) * d.itemsize % 16 == 0, "TMA"
        self._check_lines(scale_a, a.shape[0], math.ceil(a.shape[1] / 128))
        assert scale_b.dtype == torch.float32
        assert scale_b.shape == (*b.shape[:-2], math.ceil(b.shape[-2] / 128), math.ceil(b.shape[-1] / 128))
        assert scale_b.is_contiguous() or scale_b.mT.is_contiguous()

    def _check_lines(self, scale, lines, blocks):
        assert (scale.dtype, scale.shape) == (torch.float32, (lines, blocks))
        self.copies += scale.stride() != (1, math.ceil(lines / 4) * 4)

    def _product(self, a, scale_a, b, scale_b):
        (n, k) = b.shape
        of_a = self.spoil(scale_a).repeat_interleave(128, 1)[:, :k]
        of_b = scale_b if scale_b.shape[0] == n else scale_b.repeat_interleave(128, 0)[:n]
        return (a.double() * of_a) @ (b.double() * of_b.repeat_interleave(128, 1)[:, :k]).t()

    def fp8_gemm_nt(self, a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        self.call_count += 1
        assert c is None
        self._check(a[0], b[0], d, a[1], b[1], recipe)
        d.copy_(self._product(*a, *b))

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a, b, d, grouped_layout, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False
    ):
        """The first row of a tile says which matrix the tile meets; halves of a tile without rows become zeros."""
        self.call_count += 1
        (a, scale_a), (b, scale_b) = a, b
        self._check(a, b, d, scale_a, scale_b, recipe)
        assert (grouped_layout.dtype, grouped_layout.shape, grouped_layout.stride()) == (torch.int32, a.shape[:1], (1,))
        for tile in range(0, a.shape[0], ROWS):
            group = grouped_layout[tile].clamp(min=0)
            for first in range(tile, min(tile + ROWS, a.shape[0]), ROWS // 2):
                half = slice(first, first + ROWS // 2)
                product = self._product(a[half], scale_a[half], b[group], scale_b[group]).to(d.dtype)
                d[half] = product if grouped_layout[first] >= 0 else 0

    def k_grouped_fp8_gemm_nt_contiguous(
        self, a, b, d, ks_cpu, grouped_layout, c=None, recipe=(1, 1, 128), compiled_dims="mn", use_psum_layout=False
    ):
        """Operands are flat: of each group [M, K] and [N, K]. Adds to c, which may be d."""
        self.call_count += 1
        (a, scale_a), (b, scale_b) = a, b
        num_groups, m, n = d.shape
        assert (recipe, a.dtype, b.dtype, grouped_layout.dtype) == ((1, 1, 128), E4M3, E4M3, torch.int32)
        assert (grouped_layout.tolist(), len(ks_cpu)) == (ks_cpu, num_groups)
        assert all(isinstance(k, int) and k % 128 == 0 for k in ks_cpu)
        assert (a.numel(), b.numel()) == (sum(ks_cpu) * m, sum(ks_cpu) * n)
        assert all(x.is_contiguous() for x in (a, b, c, d))
        assert d.dtype == c.dtype == torch.float32
        for scale, lines in ((scale_a, m), (scale_b, n)):
            self._check_lines(scale, lines, sum(ks_cpu) // 128)
        if c.data_ptr() != d.data_ptr():
            d.copy_(c)
        start = 0
        for group, k in enumerate(ks_cpu):
            of_a, of_b = (q.view(-1)[start * size : (start + k) * size].view(size, k) for q, size in ((a, m), (b, n)))
            blocks = slice(start // 128, (start + k) // 128)
            d[group] += self._product(of_a, scale_a[:, blocks], of_b, scale_b[:, blocks]).float()
            start += k


def require_trial(trial, given, stand, passes):
    """The first call of a kind tries what stands in for a library, the next does not, and random numbers stay."""
    before, calls = torch.get_rng_state(), stand.call_count
    assert trial.is_passed(given) == passes
    assert stand.call_count > calls, "each kind is tried"
    calls = stand.call_count
    trial.is_passed(given)
    assert stand.call_count == calls, "once"
    assert torch.equal(torch.get_rng_state(), before)


def reversed_scales(scale):
    """A wrong order."""
    return scale.flip(0)
