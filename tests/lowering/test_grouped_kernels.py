"""The Triton kernels of grouped GEMMs: in Triton's interpreter, their launches, and on a GPU."""

import itertools

import pytest
import torch

from benchmarks import catalogue
from benchmarks.catalogue import factors_of, fp8
from benchmarks.variants import recorded
from lowering.formats import E4M3, Granularity
from tests.lowering import grouped_cases
from tests.lowering.kernel_cases import kernel
from tests.lowering.test_kernels import interpreted, needs_gpu, needs_triton
from tests.lowering.test_kernels_compile import compiled

TENSOR, ROW, MX, ONE, TWO = Granularity
#: A layer of Qwen3-30B-A3B: rows, experts, model width, width of gate and up.
S, E, H, F = 65536, 128, 2048, 1536


@pytest.fixture(scope="module")
def in_interpreter() -> dict[str, str | None]:
    return interpreted("tests.lowering.grouped_cases")


@needs_triton
@pytest.mark.parametrize("name", grouped_cases.CASES)
def test_in_the_interpreter(in_interpreter, name):
    assert in_interpreter[name] is None, in_interpreter[name]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", grouped_cases.CASES)
def test_on_a_gpu(name):
    grouped_cases.CASES[name]("cuda")


def offs() -> torch.Tensor:
    return torch.empty(E, dtype=torch.int32)


def stack(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@needs_triton
def test_number_of_launches():
    """A GEMM and a cast of all experts are one; what needs amaxes first is two; copies at padded offsets write their map."""
    for launches, name, arguments, options in (
        (1, "cast_blockwise", ([stack(E, F, H)], E4M3), {"granularity": TWO, "columnwise": True}),
        (2, "cast", ([stack(E, F, H)], [stack(E).float()], E4M3), {"columnwise": True, "with_amax": True}),
        (2, "cast_rowwise", ([stack(E, F, H)], E4M3), {"columnwise": True}),
        (2, "group_columns", (fp8(S // 8, H), offs(), torch.empty(S, dtype=torch.int64)), {}),
        (2, "cast_columns", (stack(S, F), E4M3, offs()), {"granularity": ONE}),
        (2, "cast_columns", (stack(S, F), E4M3, offs()), {"granularity": ONE, "rowwise": True}),
    ):
        assert len(recorded(kernel(name), *arguments, **options)) == launches, name
    for name, call in itertools.islice(catalogue.gemms(), 0, None, 7):
        assert len(call.launches()) == 1, name


@needs_triton
@pytest.mark.parametrize("arch", [89, 90])
def test_clearing_compiles_without_spills(arch):
    from lowering.grouped.kernels.gemm import clear_rows_of_no_group

    (launch,) = recorded(clear_rows_of_no_group, stack(S, F), offs())
    assert compiled(launch, arch).used.stack == 0


@needs_triton
@pytest.mark.parametrize("arch", [89, 90])
def test_moved_rows_compile_without_spills(arch):
    """And move 16 bytes at once."""
    from lowering.grouped.kernels import columns as kernels

    there = recorded(kernels.padded_rows, fp8(S, H), factors_of(ONE, S, H), offs())
    back = recorded(kernels.rows_of_groups, stack(S, F), torch.empty(S, dtype=torch.int32), S)
    assert len(there) == 3
    for launch in (*there, *back):
        result = compiled(launch, arch)
        assert result.used.stack == 0
        if launch.kernel.__name__ == "move_rows_kernel":
            assert "ld.global.v2.b64" in result.ptx
            assert "st.global.v2.b64" in result.ptx
