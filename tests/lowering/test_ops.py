"""The registered operations: schemas, shape functions and dispatch of the operations; what their public functions refuse."""

import functools
import subprocess
import sys

import pytest
import torch

import lowering
from benchmarks.part0.samples import samples
from lowering import gemm
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.tensorwise import reference

SCALE = torch.tensor(3.0)
OPERATIONS = sorted(NAMESPACE.operations)


def history(length: int):
    return torch.rand(length, 6), torch.ones(6), torch.full((6,), 448.0)


@functools.cache
def calls(name: str) -> list[tuple[tuple, dict]]:
    """Arguments and options of the calls of an operation in the catalogue, `benchmarks/part0/samples.py`."""
    return [(sample.arguments, sample.options) for sample in samples(name, torch.device("cpu"))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_schema_and_shape_function(name):
    """opcheck. Its tracing test, which takes longer, has fewer calls, without NaN: it compares results as numbers."""
    operation = getattr(torch.ops.lowering, name).default
    traced = 0
    for args, kwargs in calls(name):
        utils = ["test_faketensor", "test_autograd_registration"]
        if not any(t.element_size() == 1 and t.is_floating_point() for t in tensors_of([args, list(kwargs.values())])):
            utils.append("test_schema")  # which multiplies the inputs, as FP8 tensors cannot be
        results = tensors_of([operation(*copies(args), **kwargs)])
        if traced < 3 and not any(t.float().isnan().any() for t in results):
            utils.append("test_aot_dispatch_dynamic")
            traced += 1
        torch.library.opcheck(operation, args, kwargs, test_utils=utils)
    assert traced


def copies(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [copies(item) for item in value] if isinstance(value, (list, tuple)) else value


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_public_names():
    for name in lowering.__all__:
        assert callable(getattr(lowering, name)) or isinstance(getattr(lowering, name), type)


def test_public_functions_equal_the_reference():
    x = torch.randn(33, 50)
    assert torch.equal(lowering.amax(x), reference.amax(x))
    assert torch.equal(
        torch.ops.lowering.scales_from_amax(torch.tensor(3.0), E4M3, margin=1, epsilon=4.0, power_of_2=True)[0],
        reference.scale_from_amax(torch.tensor(3.0), E4M3, margin=1, epsilon=4.0, power_of_2=True),
    )
    assert torch.equal(bits(lowering.quantize(x, SCALE, E5M2)), bits(reference.quantize(x, SCALE, E5M2)))
    got = lowering.cast_transpose_amax(x, SCALE, E4M3, pad_rows=True)
    for actual, expected in zip(
        got, reference.cast([x], [SCALE], E4M3, pad_rows=True, columnwise=True, with_amax=True), strict=True
    ):
        assert torch.equal(bits(actual), bits(expected))
    a, b = torch.randn(16, 32).to(E4M3), torch.randn(32, 16).to(E4M3)
    out = lowering.scaled_mm(a, b, SCALE, SCALE, out_dtype=torch.float32)
    assert torch.equal(out, gemm.scaled_mm(a, b, SCALE, SCALE, None, out_dtype=torch.float32))


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def test_recording_leaves_the_version_counter_alone():
    """Autograd keeps the staging row for backward; recording into it must not look like a change of a saved tensor."""
    amax = torch.zeros(4)
    version = amax._version
    torch.ops.lowering.record_amax(amax, torch.arange(4), [torch.tensor(2.0)], [1])
    assert amax[1] == 2.0
    assert amax._version == version


def test_cpu_operations_do_not_import_triton():
    code = (
        "import sys, torch, lowering; lowering.cast_transpose_amax(torch.ones(4, 4), torch.tensor(1.0), "
        "torch.float8_e4m3fn); print('triton' in sys.modules, any('.kernels.' in m for m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False False"
