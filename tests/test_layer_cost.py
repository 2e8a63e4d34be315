"""The estimate of a step: what is counted in the generated code, and what the model makes of it."""

import pytest
import torch

from benchmarks import h100_model, kernel_cost, layer_cost
from benchmarks.contestants import steady
from benchmarks.cross_codegen import Event
from fp8pass import fp8_compile
from fp8pass.cost import H100, H200
from lowering import hardware

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """A small block under delayed scaling."""
    ((model, x),) = kernel_cost.block(256, 512, 4, 1, 1024)
    return kernel_cost.step(model, lambda m: fp8_compile(m, steady("delayed")), x)


def test_every_launch_of_a_step_is_replayed(events):
    names = [event.name for event in events]
    assert names.count("aten::_scaled_mm") == 21
    assert sum("attention" in event.name and event.generated is None for event in events) == 2
    casts = [launch.kernel.__name__ for event in events if event.name == "lowering::cast" for launch in event.launches or ()]
    assert "multi_cast_transpose_amax_kernel" in casts
    assert all(event.num_bytes > 0 for event in events if event.generated is not None or event.launches)
    swiglu = [event for event in events if event.generated is not None and "silu" in event.name]
    assert [event.num_bytes // (1024 * 512) for event in swiglu] == [5, 11], "bytes per element, forward and backward"


#: Of the kernels that compute SwiGLU in the block of an 8B Llama, forward and backward: the most of `issue / memory`. Above 0.8
#: instructions limit a kernel, not memory. That is so where a recipe computes SwiGLU again for each copy or pass, as for
#: blockwise's columnwise copies and in rowwise's passes: there instructions may take a tenth longer than memory.
SWIGLU = {"delayed": (0.8, 0.8), "current": (0.8, 0.8), "blockwise": (0.8, 1.1), "rowwise": (1.1, 1.1), "mxfp8": (0.8, 0.8)}


@pytest.mark.parametrize("recipe", SWIGLU)
def test_instructions_of_swiglu(recipe):
    ((model, x),) = kernel_cost.block(4096, 14336, 32, 2, 8192)
    events = kernel_cost.step(model, lambda m: fp8_compile(m, steady(recipe)), x)
    swiglu = [event for event in events if event.generated is not None and "silu" in event.name and event.num_bytes > 1e6]
    for is_backward, limit in zip((False, True), SWIGLU[recipe], strict=True):
        found = [event for event in swiglu if ("silu_backward" in event.name) is is_backward]
        assert 1 <= len(found) <= 3, "a pass for the amaxes of rows, one for those of columns, and one that casts"
        for event in found:
            program = max(kernel_cost.generated_programs(event), key=h100_model.share_of_copy)
            assert h100_model.issue_to_memory(program) <= limit, event.name
            assert h100_model.resident(program) * program.warps >= 16, event.name


def gemm(name: str, *shapes: tuple[int, ...]) -> Event:
    return Event(name, 0, shapes=tuple((BF16, shape) for shape in shapes))


def test_gemms_run_at_the_stated_rates():
    flops = 2 * 64 * 128 * 32
    for name, kind, shapes in (
        ("aten::mm", "bf16", ((64, 32), (32, 128))),
        ("aten::addmm", "bf16", ((128,), (64, 32), (32, 128))),
        ("aten::_scaled_mm", "fp8", ((64, 32), (32, 128), (), ())),
        ("lowering::scaled_mm_blockwise", "blockwise", ((64, 32), (32, 128))),
    ):
        found = layer_cost.estimate([gemm(name, *shapes)])
        rates = [H200.bf16_flops * speed_up for speed_up in layer_cost.SPEED_UP[kind]]
        assert found.gemms == pytest.approx([flops / rate for rate in rates])
        assert (found.kernels, found.attention) == (0, 0)


def test_scales_of_rows_make_a_gemm_slower():
    """As the cost model has it: one place says by how much."""
    shapes = tuple((BF16, shape) for shape in ((64, 32), (32, 128)))
    scales = tuple((torch.float32, shape) for shape in ((64, 1), (1, 128)))
    found = layer_cost.estimate([Event("aten::_scaled_mm", 0, shapes=shapes + scales)])
    per_tensor = layer_cost.estimate([gemm("aten::_scaled_mm", (64, 32), (32, 128), (), ())])
    ratio = H200.row_wise_flops / H200.fp8_flops
    assert [t / r for t, r in zip(per_tensor.gemms, found.gemms, strict=True)] == pytest.approx([ratio, ratio])


def test_an_h100_differs_in_memory_and_in_gemms():
    event = Event("lowering::cast", 1 << 30)
    times = [layer_cost.event_seconds(event, device) - h100_model.LAUNCH for device in (H100, H200)]
    assert times[0] / times[1] == pytest.approx(H200.memory_bandwidth / H100.memory_bandwidth)
    gemms = [layer_cost.estimate([gemm("aten::mm", (64, 32), (32, 128))], device).gemms[0] for device in (H100, H200)]
    assert gemms[0] / gemms[1] == pytest.approx(H200.bf16_flops / H100.bf16_flops)
    program = h100_model.Program(registers=64, shared=0, warps=8, instructions=500, load_bytes=16384, store_bytes=16384)
    shares = [h100_model.share_of_copy(program, device.memory_bandwidth) for device in (H100, H200)]
    assert shares[0] > shares[1], "instructions limit a kernel less where memory is slower"


def test_attention_is_causal():
    heads = (2, 8, 1024, 128)
    forward = layer_cost.estimate([gemm("aten::_scaled_dot_product_flash_attention", heads, heads, heads)])
    assert forward.attention == pytest.approx(4 * 2 * 8 * 1024**2 * 128 / 2 / layer_cost.ATTENTION["forward"])
    assert forward.total(high=True, with_attention=False) == 0
