"""The Triton kernels against the reference: in Triton's interpreter, and on a GPU where there is one."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import catalogue
from benchmarks.catalogue import factors_of, fp8
from benchmarks.variants import recorded
from lowering import hardware
from lowering.operation import NAMESPACE
from lowering.triton import launch as launch_helpers
from tests.lowering import grouped_cases, kernel_cases
from tests.lowering.grouped_cases import ONE, TWO
from tests.lowering.kernel_cases import kernel
from tests.lowering.test_kernels_compile import compiled
from tests.support.cases import each

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


@pytest.fixture(scope="module")
def in_interpreter() -> dict[str, str | None]:
    """The error of each case in Triton's interpreter, which only a process of its own can switch on."""
    command = [sys.executable, "-W", "ignore", "-m", grouped_cases.__name__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_triton
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_in_the_interpreter(in_interpreter, name):
    assert in_interpreter[name] is None, in_interpreter[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_on_a_gpu(name):
    kernel_cases.CASES[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 14336), (4099, 5003)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8", kernel_cases.FP8)
def test_large_matrices_on_a_gpu(shape, dtype, fp8):
    x, scale = torch.randn(shape, dtype=dtype, device="cuda"), torch.tensor(30.0, device="cuda")
    kernel_cases.check("cast", [x], [scale], fp8, columnwise=True, with_amax=True)


def test_no_kernel_counts_tiles_by_a_sum_that_may_overflow():
    """But those of groups, whose rows are counted by int32 offsets and whose columns are a layer's."""
    sources = [p for p in (ROOT / "lowering").rglob("*kernels.py") if "grouped" not in p.parts]
    assert len(sources) == 6
    assert [path.name for path in sources if "tl.cdiv(" in path.read_text()] == []


@needs_triton
@each("size", [2**31 - 8191, 2**31 - 8190, 2**31 - 1, 2**31 + 1])
def test_enough_programs_for_the_largest_tensors(size):
    """By the host's arithmetic, without memory."""
    x = torch.empty(size, dtype=torch.bfloat16, device="meta")
    scale = torch.empty((), device="meta")
    launches = [*recorded(kernel("amaxes"), [x]), *recorded(kernel("quantize"), x, scale, kernel_cases.E4M3)]
    for launch in launches:
        if "BLOCK_C" in launch.arguments:
            tile = launch.arguments["BLOCK_R"] * launch.arguments["BLOCK_C"]
            assert launch.programs == -(-size // tile)
            assert size in [value for value in launch.arguments.values() if isinstance(value, int)]


@needs_triton
def test_tables_of_addresses_are_used_again(monkeypatch):
    """Addresses repeat from step to step. Only so many tables are kept, those that were used last."""
    monkeypatch.setattr(launch_helpers, "_TABLES", {})
    monkeypatch.setattr(launch_helpers, "MOST_TABLES", 3)
    on_cpu = torch.device("cpu")
    first = launch_helpers.pinned_table([1, 2], on_cpu)
    assert first.tolist() == [1, 2]
    assert launch_helpers.pinned_table([1, 2], on_cpu) is first
    for value in range(4):
        launch_helpers.pinned_table([value], on_cpu)
        assert launch_helpers.pinned_table([1, 2], on_cpu) is first
    assert list(launch_helpers._TABLES) == [(on_cpu, 0, values) for values in ((2,), (3,), (1, 2))]
    xs, scales = [torch.zeros(16, 16), torch.zeros(32, 16)], list(torch.ones(2))
    copies = [recorded(kernel("amaxes"), xs)[0].arguments["table"] for _ in range(2)]
    assert copies[0] is copies[1], "the same matrices at the same addresses"
    assert recorded(kernel("cast"), xs, scales, kernel_cases.E4M3, with_amax=True)[0].arguments["table"] is not copies[0]


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu():
    x = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda")
    x[-1] = -9.0
    assert kernel("amaxes")([x]).item() == 9.0
    q = kernel("quantize")(x, torch.tensor(1.0, device="cuda"), kernel_cases.E4M3)
    assert q[-1].float().item() == -9.0
    far = torch.zeros((2, 2**31), dtype=torch.bfloat16, device="cuda")[:, : 2**27 : 2**20]
    far[1, 5] = 3.0
    kernel_cases.check("cast", [far], [torch.tensor(1.0, device="cuda")], kernel_cases.E4M3)


@needs_triton
def test_int32_holds_every_distance_inside_a_whole_tile():
    from lowering.triton.launch import MAX_STRIDE, is_whole

    def matrix(*strides: int) -> torch.Tensor:
        return torch.empty_strided((256, 128), strides, device="meta")

    far = matrix(MAX_STRIDE, MAX_STRIDE)
    assert sum(stride * (128 - 1) for stride in far.stride()) < 2**31
    assert is_whole([far, matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(MAX_STRIDE + 1, 1), matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(1, MAX_STRIDE + 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(128, 1)[:255]], 128, 128)


@needs_triton
@pytest.mark.parametrize("dtype", kernel_cases.INPUTS)
def test_a_result_is_written_over_its_sums_where_they_have_the_same_form(monkeypatch, dtype):
    from lowering.triton import epilogue

    launched = mock.MagicMock()
    launched.__getitem__.return_value = lambda *args, **options: None
    monkeypatch.setattr(epilogue, "epilogue_kernel", launched)
    sums, product = next(
        (s, p) for s, p in kernel_cases.products_of_lines("cpu") if p.out_dtype == dtype and s.shape[1] == p.b.shape[1]
    )
    out = epilogue.launch(sums, product.b.shape[1], product, True)
    assert (out is sums) is (dtype == torch.float32)


@needs_triton
@each("name", NAMESPACE.operations)
def test_every_provider_has_the_signature_of_its_reference(name):
    """Signatures of lazy providers are compared when they are imported, which raises where they differ."""
    *providers, reference = NAMESPACE.operations[name].implementations()
    names = {function.__name__.removesuffix("_on_cpu") for function in providers}
    assert names - {"by_decision"} <= {reference.__name__}  # which stands beside its reference
    assert reference not in providers


# -- groups: a layer of Qwen3-30B-A3B: rows, experts, model width, width of gate and up

S, E, H, F = 65536, 128, 2048, 1536


def offs() -> torch.Tensor:
    return torch.empty(E, dtype=torch.int32)


def stack(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@needs_triton
def test_number_of_launches():
    """A GEMM and a cast of all experts are one; what needs amaxes first is two; copies at padded offsets write their map."""
    for launches, name, arguments, options in (
        (1, "cast_with_scales", ([stack(E, F, H)], kernel_cases.E4M3), {"granularity": TWO, "columnwise": True}),
        (2, "cast", ([stack(E, F, H)], [stack(E).float()], kernel_cases.E4M3), {"columnwise": True, "with_amax": True}),
        (2, "cast_with_scales", ([stack(E, F, H)], kernel_cases.E4M3), {"granularity": "row_wise", "columnwise": True}),
        (2, "transposed_copy", (fp8(S // 8, H), offs(), torch.empty(S, dtype=torch.int64)), {}),
        (2, "cast_columns", (stack(S, F), kernel_cases.E4M3, offs()), {"granularity": ONE}),
        (2, "cast_columns", (stack(S, F), kernel_cases.E4M3, offs()), {"granularity": ONE, "rowwise": True}),
    ):
        assert len(recorded(kernel(name), *arguments, **options)) == launches, name
    for name, call in itertools.islice(catalogue.gemms(), 0, None, 7):
        assert len(call.launches()) == 1, name


@needs_triton
@pytest.mark.parametrize("arch", [89, 90])
def test_moved_rows_compile_without_spills(arch):
    """And move 16 bytes at once."""
    from lowering.grouped import column_kernels as kernels

    there = recorded(kernels.padded_rows, fp8(S, H), factors_of(ONE, S, H), offs())
    back = recorded(kernels.rows_of_groups, stack(S, F), torch.empty(S, dtype=torch.int32), S)
    assert len(there) == 3
    for launch in (*there, *back):
        result = compiled(launch, arch)
        assert result.used.stack == 0
        if launch.kernel.__name__ == "move_rows_kernel":
            assert "ld.global.v2.b64" in result.ptx
            assert "st.global.v2.b64" in result.ptx
