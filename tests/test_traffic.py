"""Inductor's H200 code for a Llama block and for experts, generated without a GPU: kernels, bytes, and that tensors are read
once."""

import functools
import importlib.util

import pytest
import torch

from benchmarks import traffic
from benchmarks.contestants import steady
from benchmarks.cross_codegen import RTX_5090, Event, Report, capture, report
from benchmarks.traffic import DIM, TOKENS, counted, launched_by, llama_block, megabytes
from fp8pass import fp8_compile, monitor
from lowering import hardware
from lowering.formats import FP8_MAX

pytestmark = [
    pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code"),
    # transformers' experts ask cached functions for versions while they are traced.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

#: Bytes besides GEMMs and attention, relative to bf16's. Casts read what bf16 writes and write one or two bytes an element.
#: Current scaling reads everything twice, because the amax of a tensor is known after its first read; rowwise scaling some
#: things three times, for the amaxes of rows and of columns, but a norm's row is in registers.
BYTES = {"delayed": 1.6, "blockwise": 1.9, "rowwise": 2.2}
GEMMS = 21
#: Launches of casts and scales for each GEMM. A cast of every operand by itself takes 2, with scales of their own 4.
LAUNCHES = {"delayed": 0.75, "blockwise": 0.75, "rowwise": 1.0}


def compiler(recipe: str | None) -> traffic.Compile:
    """None is plain torch.compile."""
    return torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))


@functools.cache
def graphs_of(recipe: str | None) -> list[tuple[Report, list[Event]]]:
    """The generated code of forward and backward, and what it would launch."""
    return launched_by(compiler(recipe))


def reports_of(recipe: str | None) -> list[Report]:
    return [generated for generated, _ in graphs_of(recipe)]


@pytest.mark.parametrize("recipe", BYTES)
def test_launches_and_bytes(recipe):
    reports, plain = reports_of(recipe), reports_of(None)
    assert megabytes(reports) <= BYTES[recipe] * megabytes(plain)
    launches = [counted(graphs_of(of)).launches for of in (recipe, None)]
    assert launches[0] - launches[1] <= LAUNCHES[recipe] * GEMMS
    assert sum(k.is_gemm for r in reports for k in r.kernels) == GEMMS + 2


def test_high_precision_is_written_only_where_something_else_needs_it():
    """Matrices of tokens that kernels besides GEMMs leave in memory."""

    def matrices(reported):
        written = [item for kernel in reported.elementwise for item in kernel.writes.items()]
        return [name for name, (dtype, numel) in written if dtype not in FP8_MAX and numel >= TOKENS * DIM]

    forward, backward = reports_of("delayed")
    assert len(matrices(forward)) == 1, "the block's output"
    assert len(matrices(backward)) == 2, "the gradients of both residual sums"


def test_scales_of_blocks_become_mxfp8s_in_one_launch_a_gemm():
    graphs = launched_by(compiler("blockwise"), gpu=RTX_5090)
    gemms = [event for _, events in graphs for event in events if event.name == "lowering::scaled_mm"]
    assert [len(event.inner) for event in gemms] == [1] * GEMMS
    assert {len(inner.launches) for event in gemms for inner in event.inner} == {1}
    assert counted(graphs).launches == counted(graphs_of("blockwise")).launches + GEMMS


def test_a_measured_step_moves_little_more_and_others_run_the_code_they_always_run():
    """Statistics join casts; what is in memory is read once more."""
    torch._dynamo.reset()
    compiled = fp8_compile(llama_block(), steady("rowwise"))
    with capture() as graphs, monitor(compiled, every=100):
        for _ in range(2):  # the first step is a measured one
            compiled(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    reports = report(graphs)
    measured, others = reports[:2], reports[2:]
    assert any("quantization_statistics.default(" in r.code for r in measured), "for both copies, of what is in memory"
    assert [r.code for r in others] == [r.code for r in reports_of("rowwise")]
    assert megabytes(others) < megabytes(measured) <= traffic.MEASURED_STEP * megabytes(others)


def test_kept_copies_leave_no_casts_of_weights():
    """In a further microbatch no weight is cast; a second evaluation reads one byte per parameter."""
    parameters = sum(p.numel() for p in llama_block().parameters() if p.dim() == 2)
    cached, outside, compared = traffic.microbatches(steady("delayed"), "cache")
    assert (cached.casts, cached.high_precision, outside) == (0, 0, 7), "each weight is cast once in 8 microbatches"
    assert cached.fp8 == 2 * parameters, "by the forward GEMM and that of the input's gradient"
    assert compared == 2 * parameters, "of bfloat16, each byte once"
    kept = traffic.evaluation(steady("delayed"), "cache")
    assert kept == traffic.WeightTraffic(casts=0, high_precision=0, fp8=parameters, launches=0)
    assert traffic.evaluation(steady("delayed")).casts >= 3 * parameters, "two bytes read, and a copy written"


# -- the experts of Qwen3-30B-A3B


needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
#: Bytes besides GEMMs, and besides those of kernels that read weights, relative to bf16's.
EXPERT_BYTES = {"delayed": (1.25, 0.9), "blockwise": (1.4, 1.13)}


@functools.cache
def experts_of(recipe: str | None) -> list[Report]:
    return traffic.reports_of_experts(compiler(recipe), traffic.EXPERT_TOKENS)


@needs_transformers
@pytest.mark.parametrize("recipe", EXPERT_BYTES)
def test_bytes_besides_gemms_of_experts(recipe):
    base, found = (traffic.expert_traffic(experts_of(r)) for r in (None, recipe))
    assert base.weight_bytes == 0
    assert found.gemms == base.gemms == 9
    most, most_besides_weights = EXPERT_BYTES[recipe]
    assert found.num_bytes <= most * base.num_bytes
    assert found.other_bytes <= most_besides_weights * base.other_bytes
    assert [r.host_waits for r in experts_of(recipe)] == [[], []], "the numbers of rows per expert stay on the GPU"


@needs_transformers
def test_weights_are_read_once_a_side_and_every_gemm_of_experts_is_in_fp8():
    reports = experts_of("delayed")
    parameters = 3 * traffic.EXPERTS * traffic.HIDDEN * traffic.EXPERT_FFN
    read_and_written = traffic.expert_traffic(reports).weight_bytes
    assert read_and_written == pytest.approx(2 * (2 + 1) * parameters, rel=0.01), "bfloat16 read, one copy written, twice"
    names = [kernel.name for reported in reports for kernel in reported.kernels]
    assert sum("scaled_grouped_mm" in name for name in names) == 6
    assert not any("_grouped_mm" in name and "scaled" not in name for name in names)
    # The forward's kernel of SwiGLU quantizes the activation; for the backward the products that it comes from are kept.
    activation = traffic.EXPERT_TOKENS * traffic.TOP_K * traffic.EXPERT_FFN
    written = [item for kernel in experts_of("blockwise")[0].elementwise for item in kernel.writes.values()]
    assert (torch.float8_e4m3fn, activation) in written
    assert (torch.bfloat16, activation) not in written


# -- values that are saved in FP8
