"""The lowerings of casts and amaxes on the CPU's Inductor: bit for bit what `reference` computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from lowering.formats import E4M3, E5M2
from lowering.inductor import register_lowerings
from lowering.tensorwise import reference

ops = torch.ops.lowering


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A pointwise producer that is exact in every precision, as long as it does not overflow."""
    return x * 2


def row_flagged(x: torch.Tensor) -> torch.Tensor:
    """A producer with a reduction over rows, exact in every precision."""
    return x * (2 - (x.abs().amax(1, keepdim=True) < 1e30).to(x.dtype))


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    dtype: torch.dtype = torch.float32
    producer: object = doubled

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}-{str(self.dtype).removeprefix('torch.')}-{self.producer.__name__}"


CASES = [
    Case(64, 128),
    Case(64, 192, torch.bfloat16),
    Case(32, 64, torch.float16),
    Case(48, 64),
    Case(50, 32, torch.bfloat16),
    Case(33, 50),
    Case(0, 64),
    Case(64, 128, torch.float32, row_flagged),
    Case(37, 48, torch.bfloat16, row_flagged),
]
SCALE = 3.7


def values(case: Case, special: bool) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(case.rows, case.cols) * 40
    if special and x.numel():
        x[0, :6] = torch.tensor([torch.inf, -torch.inf, 30000.0, -0.0, 1e-8, -30000.0])
        x[-1, -1] = torch.nan
    return x.to(case.dtype)


def casts(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, module) -> list[torch.Tensor]:
    """Every cast, each of a producer of its own."""
    return [
        module.cast(x + 0, scale, dtype),
        module.cast(x + 0, scale, dtype, columnwise=True),
        *module.cast_amax(x + 0, scale, dtype, pad_outer=True),
        *module.cast_amax(x + 0, scale, dtype, columnwise=True, pad_outer=True),
        *module.cast_transpose(x + 0, scale, dtype, pad_cols=True),
        *module.cast_transpose_amax(x, scale, dtype),
        *module.cast_transpose_amax(x, scale, dtype, pad_rows=True, pad_cols=True),
        module.amax(x),
    ]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its bytes, with one bit pattern for NaN: the sign of a NaN is nobody's concern."""
    nan = x.isnan() if x.dtype == torch.float32 else x.to(torch.float32).isnan()
    whole = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.uint8)
    return torch.where(nan, 127, whole)


def assert_same(results, expected) -> None:
    assert len(results) == len(expected)
    for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert (result.dtype, result.shape, result.is_contiguous()) == (wanted.dtype, wanted.shape, True), i
        assert torch.equal(bits(result), bits(wanted)), f"result {i}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_casts_equal_the_reference(case):
    register_lowerings()

    @torch.compile(dynamic=False)
    def compiled(x, scale):
        x = case.producer(x)
        return casts(x, scale, E4M3, ops) + casts(x, scale, E5M2, ops)

    scale = torch.tensor(SCALE)
    for special in (False, True):
        x = values(case, special)
        produced = case.producer(x)
        expected = casts(produced, scale, E4M3, reference) + casts(produced, scale, E5M2, reference)
        assert_same(compiled(x, scale), expected)


def test_inputs_and_gemm_outputs_go_to_the_hand_written_op():
    register_lowerings()

    @torch.compile(dynamic=False)
    def compiled(x, w, scale):
        return *ops.cast_transpose_amax(w, scale, E4M3), *ops.cast_transpose_amax(x @ w, scale, E5M2)

    x, w = torch.ones(16, 32), torch.randn(32, 48)
    scale = torch.tensor(SCALE)
    expected = (*reference.cast_transpose_amax(w, scale, E4M3), *reference.cast_transpose_amax(x @ w, scale, E5M2))
    assert_same(compiled(x, w, scale), expected)


def test_what_is_in_memory_anyway_takes_no_more_compiled_kernels_on_the_cpu():
    register_lowerings()

    def function(x, w, scale):
        y = x * 2
        product = y @ w
        scales = ops.scales_from_amax(ops.amax(y), E4M3)
        return product, *ops.cast_transpose_amax(y, scale, E4M3), ops.cast(y, scales[0], E4M3), scales[1]

    x, w, scale = torch.randn(32, 48), torch.randn(48, 16), torch.tensor(SCALE)
    results, (code,) = run_and_get_code(torch.compile(function, dynamic=False), x, w, scale)
    y = x * 2
    by_amax = reference.scale_from_amax(reference.amax(y), E4M3)
    expected = (y @ w, *reference.cast_transpose_amax(y, scale, E4M3), reference.cast(y, by_amax, E4M3), 1 / by_amax)
    assert_same(results[1:], expected[1:])
    assert code.count("async_compile.cpp_pybinding(") == 1, "the producer's"


def test_dynamic_rows():
    register_lowerings()

    @torch.compile(dynamic=True)
    def compiled(x, scale):
        return ops.cast_transpose_amax(x * 2, scale, E4M3)

    scale = torch.tensor(SCALE)
    for rows in (17, 64, 100):
        x = torch.randn(rows, 64)
        assert_same(compiled(x, scale), reference.cast_transpose_amax(x * 2, scale, E4M3))
