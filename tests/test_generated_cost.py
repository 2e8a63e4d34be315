"""The kernels that Inductor generates for a step: each is replayed and counted, and memory limits those of SwiGLU."""

import pytest

from benchmarks import h100_model, kernel_cost
from benchmarks.contestants import steady
from benchmarks.cross_codegen import Event
from fp8pass import fp8_compile
from lowering import hardware

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")


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
