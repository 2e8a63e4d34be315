"""Checksums of bytes: any change of them is seen, wherever and however they lie in memory.

Oracle: the formula of the module's docstring, in Python integers.
"""

import numpy as np
import torch

from lowering.formats import E4M3
from lowering.other_ops import checksums
from tests.support.cases import each

M = 2**32


def expected(x: torch.Tensor) -> int:
    """As the int32 of the same bits."""
    data = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for i, word in enumerate(map(int, np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4"))):
        h = (word ^ (i * 0x9E3779B9 % M)) * 0x85EBCA6B % M
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % M
        total += h ^ (h >> 16)
    return (total + M // 2) % M - M // 2


def matrix(dtype=torch.bfloat16, rows=33, cols=7):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)


CASES = {
    **{str(dtype): matrix(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64, E4M3)},
    "bool": matrix() > 0,
    "int64": torch.arange(1000),
    "scalar": torch.tensor(3.0),
    "rows with gaps": matrix()[:, :5],
    "begins at an odd element": matrix().view(-1)[1:],
    "begins at an odd byte": matrix().view(torch.uint8).view(-1)[3:50],
    "expanded": matrix()[:1].expand(4, 7),
    "more than a chunk": torch.arange(600_000, dtype=torch.int32),
}


@each("name", CASES)
def test_the_formula(name):
    x = CASES[name]
    found = checksums([x, x.new_empty(0, 3), x.clone()])
    wanted = expected(x)
    assert found.tolist() == [wanted, 0, wanted]
    assert found.dtype == torch.int32


def test_a_transpose_is_read_as_it_lies_in_memory():
    assert checksums([matrix(), matrix().t()]).unique().numel() == 1


CHANGES = {
    "exchanged rows": lambda x: x.copy_(x[[1, 0, *range(2, 33)]]),
    "exchanged elements": lambda x: x.view(-1).index_copy_(0, torch.tensor([0, 216]), x.view(-1)[[216, 0]]),
    "a last bit": lambda x: x.view(torch.int16)[32, 6].add_(1),
    "signs": lambda x: x[5].neg_(),
    "another scale": lambda x: x.mul_(1.01),
    "a row twice": lambda x: x[3].copy_(x[4]),
    "zeros": lambda x: x.zero_(),
    "away from zero": lambda x: x.add_(torch.where(x >= 0, 0.25, -0.25)),
}


@each("name", CHANGES)
def test_changes_are_seen(name):
    x = matrix()
    before, version = checksums([x]).item(), x._version
    assert checksums([x]).item() == before
    assert x._version == version
    CHANGES[name](x)
    assert checksums([x]).item() != before


def test_every_single_bit_is_seen():
    x = torch.zeros(320, 40, dtype=torch.uint8)
    for i in range(320):
        x[i, i // 8] = 1 << i % 8
    assert len({checksums([y]).item() for y in [torch.zeros_like(x[0]), *x]}) == 321


def test_inference_tensors_and_gradients():
    with torch.inference_mode():
        inside = checksums([matrix()])
    assert torch.equal(inside, checksums([matrix().requires_grad_().detach()]))
