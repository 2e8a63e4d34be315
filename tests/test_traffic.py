"""Inductor's H200 code for a Llama block and for experts, generated without a GPU: kernels, bytes, and that tensors are read
once."""

import functools
import importlib.util
from collections.abc import Iterable

import pytest
import torch

from benchmarks import traffic
from benchmarks.contestants import steady
from benchmarks.cross_codegen import H200, H200_CUDA_12_8, RTX_4090, RTX_5090, Event, Kernel, Report, capture, report
from benchmarks.traffic import (
    DIM,
    FFN,
    TOKENS,
    WeightTraffic,
    counted,
    elementwise_kernels,
    evaluation,
    launched_by,
    llama_block,
    megabytes,
    microbatches,
    traffic_of,
)
from fp8pass import fp8_compile, monitor
from lowering import hardware
from lowering.formats import FP8_MAX

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

#: Bytes besides GEMMs and attention, relative to bf16's. Casts read what bf16 writes and write one or two bytes an element.
#: Current scaling reads everything twice, because the amax of a tensor is known after its first read; rowwise scaling some
#: things three times, for the amaxes of rows and of columns, but a norm's row is in registers.
BYTES = {"delayed": 1.6, "current": 2.2, "blockwise": 1.9, "rowwise": 2.2}
GEMMS = 21
#: Launches of casts and scales for each GEMM. A cast of every operand by itself takes 2, with scales of their own 4.
LAUNCHES = {"delayed": 0.75, "current": 1.5, "blockwise": 0.75, "rowwise": 1.0}


GPUS = {"H200": H200, "CUDA 12.8": H200_CUDA_12_8, "RTX 4090": RTX_4090, "RTX 5090": RTX_5090}


def compiler(recipe: str | None) -> traffic.Compile:
    """None is plain torch.compile."""
    return torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe))


@functools.cache
def _graphs(recipe: str | None, rows: int, gpu: str) -> list[tuple[Report, list[Event]]]:
    return launched_by(compiler(recipe), rows, GPUS[gpu])


def graphs_of(recipe: str | None, rows: int = TOKENS, gpu: str = "H200") -> list[tuple[Report, list[Event]]]:
    """The generated code of forward and backward, and what it would launch."""
    return _graphs(recipe, rows, gpu)


def reports_of(recipe: str | None, rows: int = TOKENS) -> list[Report]:
    return [generated for generated, _ in graphs_of(recipe, rows)]


@pytest.mark.parametrize(("recipe", "rows"), [("delayed", 4096), ("blockwise", 32768)])
def test_kernels_where_weights_are_cast_twice(recipe, rows):
    """With 4096 rows and more copies of weights are recomputed in backward: a launch per layer and side makes them."""
    reports = reports_of(recipe, rows)
    kernels, usual = (len(elementwise_kernels(of)) for of in (reports, reports_of(recipe)))
    assert kernels <= usual + 2, "one launch more, and what Inductor then fuses in another way"
    assert len(casts_of_many(elementwise_kernels(reports))) == 3, "the weights on either side, and the gradients of q, k and v"


def casts_of_many(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The launches that cast several matrices: of one they read the matrix and at most its scale."""
    return [k for k in kernels if "lowering.cast" in k.name and len(k.reads) > 2]


def high_precision_matrices(reported: Report) -> list[str]:
    """Matrices of tokens x something, in high precision, that kernels besides GEMMs leave in memory."""
    written = [item for k in reported.elementwise for item in k.writes.items()]
    return [name for name, (dtype, numel) in written if dtype not in FP8_MAX and numel >= TOKENS * DIM]


@pytest.mark.parametrize("recipe", BYTES)
def test_launches_and_bytes(recipe):
    reports, plain = reports_of(recipe), reports_of(None)
    assert megabytes(reports) <= BYTES[recipe] * megabytes(plain)
    launches = [counted(graphs_of(of)).launches for of in (recipe, None)]
    assert launches[0] - launches[1] <= LAUNCHES[recipe] * GEMMS
    assert sum(k.is_gemm for r in reports for k in r.kernels) == GEMMS + 2


def test_high_precision_is_written_only_where_something_else_needs_it():
    forward, backward = reports_of("delayed")
    assert len(high_precision_matrices(forward)) == 1, "the block's output"
    assert len(high_precision_matrices(backward)) == 2, "the gradients of both residual sums"


@pytest.mark.parametrize(
    ("recipe", "gpu"),
    [("current", "RTX 4090"), ("delayed", "RTX 5090"), ("blockwise", "RTX 4090"), ("rowwise", "RTX 5090")],
)
def test_other_gpus_move_and_launch_what_an_h200_does(recipe, gpu):
    graphs = graphs_of(recipe, gpu=gpu)
    assert counted(graphs) == counted(graphs_of(recipe))
    sizes = [sorted(k.num_bytes for k in generated.elementwise) for generated, _ in graphs]
    assert sizes == [sorted(k.num_bytes for k in generated.elementwise) for generated, _ in graphs_of(recipe)]


@pytest.mark.parametrize("gpu", ["CUDA 12.8", "RTX 4090"])
def test_scales_of_rows_applied_afterwards_cost_at_most_a_kernel_for_each_gemm_of_the_backward(gpu):
    """The forward's 7 accumulate fast, which torch's own GEMM with scales does. A kernel of its own reads float32 and writes
    bfloat16; where code reads the product anyway, that code applies them."""
    found, usual = counted(graphs_of("rowwise", gpu=gpu)), counted(graphs_of("rowwise"))
    gradients = 6 * TOKENS * DIM + TOKENS * FFN + 4 * DIM * DIM + 3 * DIM * FFN
    assert usual.megabytes < found.megabytes <= usual.megabytes + (4 + 2) * gradients / 1e6
    assert usual.launches < found.launches < usual.launches + 14
    assert found.gemms == usual.gemms


def test_scales_of_blocks_become_mxfp8s_in_one_launch_a_gemm():
    """They are read in 4 bytes for 128 values and written in 4 codes: a sixteenth of the operands at most."""
    graphs, usual = graphs_of("blockwise", gpu="RTX 5090"), counted(graphs_of("blockwise"))
    gemms = [event for _, events in graphs for event in events if event.name == "lowering::scaled_mm"]
    assert [len(event.inner) for event in gemms] == [1] * 21
    assert {len(inner.launches) for event in gemms for inner in event.inner} == {1}
    found = counted(graphs)
    assert found.launches == usual.launches + 21
    operands = sum(rows * cols for event in gemms for dtype, (rows, cols) in event.shapes if dtype in FP8_MAX)
    assert usual.megabytes < found.megabytes <= usual.megabytes + operands / 16 / 1e6


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
def test_a_measured_step_moves_little_more_and_others_run_the_code_they_always_run(recipe):
    """Statistics join casts; what is in memory is read once more."""

    def step(compiled):
        x = torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()

    torch._dynamo.reset()
    compiled = fp8_compile(llama_block(), steady(recipe))
    with capture() as graphs, monitor(compiled, every=100):
        step(compiled)  # the first step is a measured one
        step(compiled)
    reports = report(graphs)
    measured, others = reports[:2], reports[2:]
    assert [r.name.partition("_")[0] for r in reports] == ["forward", "backward"] * 2
    calls = sum(r.code.count("quantization_statistics.default(") for r in measured)
    assert (calls == 0) == (recipe == "delayed"), "what is in memory is read by a kernel, once for both copies"
    assert [r.code for r in others] == [r.code for r in reports_of(recipe)]
    assert megabytes(reports_of(recipe)) < megabytes(measured) <= traffic.MEASURED_STEP * megabytes(reports_of(recipe))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_kept_copies_leave_no_casts_of_weights(recipe):
    """In a further microbatch no weight is cast; a second evaluation reads one byte per parameter."""
    parameters = sum(p.numel() for p in llama_block().parameters() if p.dim() == 2)
    cached, outside, compared = microbatches(steady(recipe), "cache")
    assert (cached.casts, cached.high_precision, outside) == (0, 0, 7), "each weight is cast once in 8 microbatches"
    assert cached.fp8 == 2 * parameters, "by the forward GEMM and that of the input's gradient"
    each, outside, _ = microbatches(steady(recipe), "save", count=1)
    assert each.casts >= 4 * parameters, "two bytes read, and two copies written"
    assert outside == 0
    assert evaluation(steady(recipe), "cache") == WeightTraffic(casts=0, high_precision=0, fp8=parameters, launches=0)
    assert evaluation(steady(recipe)).casts >= 3 * parameters, "two bytes read, and a copy written"
    assert compared == 2 * parameters, "of bfloat16, each byte once"


# -- the experts of Qwen3-30B-A3B


def needs_transformers(test):
    """It asks cached functions for versions while it is traced."""
    test = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")(test)
    return pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")(test)


#: Bytes besides GEMMs, and besides those of kernels that read weights, relative to bf16's.
EXPERT_BYTES = {"delayed": (1.25, 0.9), "current": (1.45, 1.1), "blockwise": (1.4, 1.13)}


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


@needs_transformers
def test_the_activation_of_experts_is_written_in_blocks_alone():
    """The forward's kernel of SwiGLU quantizes it; for the backward the products that it comes from are kept."""
    forward, _ = experts_of("blockwise")
    activation = traffic.EXPERT_TOKENS * traffic.TOP_K * traffic.EXPERT_FFN
    written = [item for kernel in forward.elementwise for item in kernel.writes.values()]
    assert (torch.float8_e4m3fn, activation) in written
    assert (torch.bfloat16, activation) not in written


# -- values that are saved in FP8


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"], ids=str)
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_saving_in_fp8_adds_hardly_a_kernel_and_at_most_a_twentieth_of_the_traffic(recipe):
    """Casts join the kernels that read the values in the forward, the way back those that read them in the backward. A norm's
    backward, with statistics of the rounded values, reads so much that Inductor does not join it to the two blockwise casts of
    its result, which share a launch no more."""

    def reports(saved):
        if recipe is None and saved is None:
            return traffic_of(torch.compile, TOKENS)
        how = {"recipe": None if recipe is None else steady(recipe), "weight_copies": "recompute", "saved_activations": saved}
        return traffic_of(lambda model: fp8_compile(model, **how), TOKENS)

    plain, ours = reports(None), reports("fp8")
    assert len(elementwise_kernels(ours)) <= len(elementwise_kernels(plain)) + (recipe == "blockwise")
    assert megabytes(ours) <= 1.05 * megabytes(plain)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_a_gpu_without_fp8_instructions_gets_code_without_them(monkeypatch):
    monkeypatch.setattr("fp8pass.rewrite.saved.as_bytes", lambda node: True)
    monkeypatch.setattr("fp8pass.rewrite.verify_partitioned.as_bytes", lambda node: True)
    codes = [report.code for report in traffic_of(lambda model: fp8_compile(model, None, saved_activations="fp8"), TOKENS)]
    assert not any(word in code for code in codes for word in ("float8", "fp8e4", "cvt.rn.satfinite"))
    assert all("*u8" in code for code in codes)
