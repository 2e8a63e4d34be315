"""Inductor's H200 code for the experts of Qwen3-30B-A3B, generated without a GPU: bytes and kernels besides GEMMs."""

import functools

import pytest
import torch

from benchmarks import traffic
from benchmarks.common import has_torchao
from benchmarks.contestants import steady
from benchmarks.cross_codegen import Report
from fp8pass import fp8_compile
from lowering import hardware

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code"),
    # transformers asks cached functions for versions while it is traced.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

TOKENS = 32768
#: Bytes besides GEMMs, and besides those of kernels that read weights, relative to bf16's.
BOUNDS = {"delayed": (1.25, 0.9), "current": (1.45, 1.1), "blockwise": (1.4, 1.13)}


@functools.cache
def reports_of(recipe: str | None) -> list[Report]:
    compile_model = torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))
    return traffic.reports_of_experts(compile_model, TOKENS)


@pytest.mark.parametrize("recipe", BOUNDS)
def test_bytes_besides_gemms(recipe):
    base, found = (traffic.expert_traffic(reports_of(r)) for r in (None, recipe))
    assert base.weight_bytes == 0
    assert found.gemms == base.gemms == 9
    most, most_besides_weights = BOUNDS[recipe]
    assert found.num_bytes <= most * base.num_bytes
    assert found.other_bytes <= most_besides_weights * base.other_bytes


def test_weights_are_read_once_a_side_and_every_gemm_of_experts_is_in_fp8():
    reports = reports_of("delayed")
    parameters = 3 * traffic.EXPERTS * traffic.HIDDEN * traffic.EXPERT_FFN
    read_and_written = traffic.expert_traffic(reports).weight_bytes
    assert read_and_written == pytest.approx(2 * (2 + 1) * parameters, rel=0.01), "bfloat16 read, one copy written, twice"
    names = [kernel.name for reported in reports for kernel in reported.kernels]
    assert sum("scaled_grouped_mm" in name for name in names) == 6
    assert not any("_grouped_mm" in name and "scaled" not in name for name in names)


def test_the_activation_of_experts_is_written_in_blocks_alone():
    """The forward's kernel of SwiGLU quantizes it; for the backward the products that it comes from are kept."""
    forward, _ = reports_of("blockwise")
    activation = TOKENS * traffic.TOP_K * traffic.EXPERT_FFN
    written = [item for kernel in forward.elementwise for item in kernel.writes.values()]
    assert (torch.float8_e4m3fn, activation) in written
    assert (torch.bfloat16, activation) not in written


def test_gradients_of_experts_in_blocks_are_read_once():
    """By one kernel, which writes both copies."""
    _, backward = reports_of("blockwise")
    casts = {name: [k for k in backward.elementwise if name in k.name] for name in ("cast_blockwise", "cast_columns")}
    assert not any(traffic.STACKS.isdisjoint(k.inputs.values()) for k in casts["cast_blockwise"]), "weights alone"
    moved = sorted(k.num_bytes for k in casts["cast_columns"])[-2:]
    elements = [TOKENS * traffic.TOP_K * columns for columns in (2 * traffic.EXPERT_FFN, traffic.HIDDEN)]
    assert moved == pytest.approx([4 * each for each in elements], rel=0.05), "bfloat16 read, two copies written"


@pytest.mark.parametrize("recipe", BOUNDS)
def test_no_wrapper_waits_for_the_gpu(recipe):
    """The numbers of rows per expert stay there."""
    assert [r.host_waits for r in reports_of(recipe)] == [[], []]


def test_the_input_of_the_experts_is_quantized_before_it_is_gathered():
    """In both directions: casts read tokens x width, the gather moves bytes."""
    kernels = [kernel for reported in reports_of("delayed") for kernel in reported.elementwise]
    gathered = TOKENS * traffic.TOP_K * traffic.HIDDEN
    assert not any((torch.bfloat16, gathered) in k.writes.values() for k in reports_of("delayed")[0].elementwise)
    assert any(k.num_bytes == pytest.approx(3 * TOKENS * traffic.HIDDEN, rel=0.01) for k in kernels)


@pytest.mark.skipif(not has_torchao(), reason="needs torchao")
@pytest.mark.parametrize("recipe", BOUNDS)
def test_less_than_torchaos_conversion(recipe):
    """With weights and without, by the same count."""
    with traffic.torchao_rowwise():
        theirs = traffic.expert_traffic(_torchaos())
    ours = traffic.expert_traffic(reports_of(recipe))
    assert ours.num_bytes < theirs.num_bytes
    assert ours.other_bytes < theirs.other_bytes


@functools.cache
def _torchaos() -> list[Report]:
    return traffic.reports_of_experts(torch.compile, TOKENS)
