"""The Triton kernels of grouped GEMMs: in Triton's interpreter, their launches, and on a GPU."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks.variants import Launch, recorded
from lowering import hardware
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.scaling import scale_shape
from tests.lowering import grouped_cases
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


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8).view(dtype)


def offs() -> torch.Tensor:
    return torch.empty(E, dtype=torch.int32)


def factors(kind: Granularity, outer: int, inner: int, has_groups: bool) -> torch.Tensor:
    """In the layout that casts give them."""
    if kind is TENSOR:
        return torch.empty(E if has_groups else ())
    shape = scale_shape(outer, inner, kind)
    scales = torch.empty((E, *shape) if has_groups else shape)
    return scales.mT.contiguous().mT if kind is ONE else scales


def rows_times_experts(a_kind, b_kind, dtype=E4M3, rows=S, k=H, n=F, **options) -> tuple:
    a, b = fp8(rows, k, dtype=dtype), fp8(E, n, k).mT
    scales = factors(a_kind, rows, k, False), factors(b_kind, n, k, True)
    return "scaled_grouped_mm", (a, b, *scales, offs()), {"granularity_a": a_kind, "granularity_b": b_kind, **options}


def grad_weight(kind, dtype=E5M2) -> tuple:
    width = padded_width(S, E, alignment(kind))
    a, b = fp8(F, width, dtype=dtype), fp8(H, width).t()
    scales = [factors(kind, outer, width, kind is ROW) for outer in (F, H)]
    return "scaled_grouped_mm", (a, b, *scales, offs()), {"granularity_a": kind, "granularity_b": kind}


def stack(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


CALLS: dict[str, Callable[[], tuple]] = {
    "output": lambda: rows_times_experts(TENSOR, TENSOR, fast_accum=True),
    "output to float32, with a bias": lambda: rows_times_experts(TENSOR, TENSOR, out_dtype=torch.float32, bias=stack(E, F)),
    "output with ragged sizes": lambda: rows_times_experts(TENSOR, TENSOR, k=200, n=130),
    "output of few rows": lambda: rows_times_experts(ONE, TWO, rows=2048),
    "output rowwise": lambda: rows_times_experts(ROW, ROW),
    "output blockwise": lambda: rows_times_experts(ONE, TWO),
    "grad_input": lambda: rows_times_experts(TENSOR, TENSOR, E5M2),
    "grad_input rowwise by one scale": lambda: rows_times_experts(ROW, TENSOR, E5M2),
    "grad_input blockwise": lambda: rows_times_experts(ONE, TWO, E5M2),
    "grad_weight": lambda: grad_weight(TENSOR),
    "grad_weight rowwise": lambda: grad_weight(ROW),
    "grad_weight blockwise": lambda: grad_weight(ONE),
    "stacks": lambda: ("scaled_grouped_mm", (fp8(8, 512, H), fp8(8, F, H).mT, stack(8).float(), stack(8).float()), {}),
    "amax_stack": lambda: ("multi_amax", ([stack(E, F, H)],), {"per_matrix": True}),
    "cast_stack": lambda: ("cast", ([stack(E, F, H)], [stack(E).float()], E4M3), {}),
    "cast_stack_amax columnwise e5m2": lambda: (
        "cast", ([stack(E, F, H)], [stack(E).float()], E5M2), {"rowwise": False, "columnwise": True, "with_amax": True}
    ),
    "cast_transpose_stack_amax": lambda: (
        "cast", ([stack(E, F, H)], [stack(E).float()], E4M3), {"columnwise": True, "with_amax": True}
    ),
    "cast_transpose_stack of transposes": lambda: (
        "cast", ([stack(E, H, F).mT], [stack(E).float()], E4M3), {"columnwise": True}
    ),
    "cast_transpose_stack_amax ragged": lambda: (
        "cast", ([stack(3, 33, 50)], [stack(3).float()], E5M2), {"pad_rows": True, "columnwise": True, "with_amax": True}
    ),
    "cast_stack_rowwise": lambda: ("cast_rowwise", ([stack(E, F, H)], E4M3), {}),
    "cast_transpose_stack_rowwise": lambda: ("cast_rowwise", ([stack(E, F, H)], E4M3), {"columnwise": True}),
    "cast_stack_blockwise of rows": lambda: ("cast_blockwise", ([stack(1, S, H)], E4M3), {"granularity": ONE}),
    "cast_transpose_stack_blockwise": lambda: (
        "cast_blockwise", ([stack(E, F, H)], E4M3), {"granularity": TWO, "columnwise": True}
    ),
    "cast_transpose_stack_blockwise of transposes": lambda: (
        "cast_blockwise", ([stack(E, H, F).mT], E4M3), {"granularity": TWO, "columnwise": True}
    ),
    "group_columns": lambda: ("group_columns", (fp8(S, H), offs()), {}),
    "group_columns gathered": lambda: ("group_columns", (fp8(S // 8, H), offs(), torch.empty(S, dtype=torch.int64)), {}),
    "cast_columns rowwise": lambda: ("cast_columns", (stack(S, F), E5M2, offs()), {"granularity": "row_wise"}),
    "cast_columns blockwise": lambda: ("cast_columns", (stack(S, F), E4M3, offs()), {"granularity": ONE}),
    "cast_columns blockwise gathered": lambda: (
        "cast_columns",
        (stack(S // 8, H), E5M2, offs(), torch.empty(S, dtype=torch.int32)),
        {"granularity": ONE, "power_of_2": False},
    ),
}  # fmt: skip


def launches(name: str, arch: int) -> list[Launch]:
    from lowering.grouped.kernels import gemm
    from tests.lowering.kernel_cases import kernel

    operation, arguments, options = CALLS[name]()
    with mock.patch.object(hardware, "cuda_capability", return_value=divmod(arch, 10)):
        if operation == "scaled_grouped_mm":
            return recorded(gemm.scaled_grouped_mm, GroupedGemm(*arguments, **options))
        return recorded(kernel(operation), *arguments, **options)


@needs_triton
def test_number_of_launches():
    """A GEMM and a cast of all experts are one; what needs amaxes first is two; copies at padded offsets write their map."""
    counted = {name: len(launches(name, 90)) for name in CALLS}
    assert {n for n, count in counted.items() if CALLS[n]()[0] == "scaled_grouped_mm" and count != 1} == set()
    assert counted["cast_transpose_stack_amax"] == 2
    assert counted["cast_transpose_stack_rowwise"] == 2
    assert counted["cast_transpose_stack_blockwise"] == 1
    assert counted["group_columns gathered"] == counted["cast_columns blockwise"] == 2


@needs_triton
@pytest.mark.parametrize("arch", [89, 90])
def test_clearing_compiles_without_spills(arch):
    from lowering.grouped.kernels.gemm import clear_rows_of_no_group

    (launch,) = recorded(clear_rows_of_no_group, stack(S, F), offs())
    assert compiled(launch, arch).stack == 0


@needs_triton
@pytest.mark.parametrize("arch", [89, 90])
def test_moved_rows_compile_without_spills(arch):
    """And move 16 bytes at once."""
    from lowering.grouped.kernels import columns as kernels

    there = recorded(kernels.padded_rows, fp8(S, H), factors(ONE, S, H, False), offs())
    back = recorded(kernels.rows_of_groups, stack(S, F), torch.empty(S, dtype=torch.int32), S)
    assert len(there) == 3
    for launch in (*there, *back):
        result = compiled(launch, arch)
        assert result.stack == 0
        if launch.kernel.__name__ == "move_rows_kernel":
            assert "ld.global.v2.b64" in result.ptx
            assert "st.global.v2.b64" in result.ptx
