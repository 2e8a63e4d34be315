"""Carrying out a plan: rows that a padded GEMM of a batch cuts off. tests/fp8pass/test_shapes.py has the forms of products."""

import dataclasses

import torch
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.joint import calls, trace
from tests.support.models import Net
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3


def test_cut_rows_of_a_batch_leave_no_gaps():
    """A batch on the left of one GEMM and on the right of another, whose N, 40, is padded: so are the rows of the first."""
    right, left = (nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((64, 48), (48, 64)))
    model = Net(lambda m, x: (torch.bmm(x, m.right), torch.bmm(m.left, x.mT)), right=right, left=left)
    compiled, x = fp8_compile(model, "current", backend="aot_eager", select="all"), torch.randn(4, 40, 64)
    for found, wanted in zip(compiled(x), model(x), strict=True):
        assert found.stride() == wanted.stride()
        assert sqnr(wanted, found) >= SQNR_LINEAR_E4M3
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_generated_code_reads_products_with_gaps_and_only_results_of_the_model_have_none():
    joint = trace(nn.Sequential(*(nn.Linear(n, m) for n, m in ((32, 20), (20, 24)))), torch.randn(2, 16, 32), trains=False)
    joint = dataclasses.replace(joint, options=dataclasses.replace(joint.options, contiguous_outputs=False))
    (copied,) = calls(joint.run().graph, torch.ops.aten.clone.default)
    assert copied.meta["val"].shape == (32, 24)
