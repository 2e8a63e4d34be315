"""The registered operations: schemas, shape functions and dispatch; their public functions; under Inductor on the CPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_leaves, tree_map_only

import lowering
from benchmarks.part0.samples import samples
from lowering import gemm
from lowering.formats import E4M3, E5M2
from lowering.inductor import register_lowerings
from lowering.operation import NAMESPACE
from lowering.tensorwise import reference
from tests.support.fp8 import same_bits

ops = torch.ops.lowering
SCALE = torch.tensor(3.0)


def tensors_of(*values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(NAMESPACE.operations))
def test_schema_and_shape_function(name):
    """opcheck. Its tracing test, which takes longer, has fewer calls, without NaN: it compares results as numbers."""
    operation = getattr(ops, name).default
    traced = 0
    for sample in samples(name, torch.device("cpu")):
        args, options = sample.arguments, sample.options
        utils = ["test_faketensor", "test_autograd_registration"]
        if not any(t.element_size() == 1 and t.is_floating_point() for t in tensors_of(args, options)):
            utils.append("test_schema")  # which multiplies the inputs, as FP8 tensors cannot be
        results = tensors_of(operation(*tree_map_only(torch.Tensor, torch.clone, args), **options))
        if traced < 3 and not any(t.float().isnan().any() for t in results):
            utils.append("test_aot_dispatch_dynamic")
            traced += 1
        torch.library.opcheck(operation, args, options, test_utils=utils)
    assert traced


def test_public_functions_equal_the_reference():
    for name in lowering.__all__:
        assert callable(getattr(lowering, name))
    x, three = torch.randn(33, 50), torch.tensor(3.0)
    options = {"margin": 1, "epsilon": 4.0, "power_of_2": True}
    layout = {"pad_rows": True, "columnwise": True, "with_amax": True}
    a, b = torch.randn(16, 32).to(E4M3), torch.randn(32, 16).to(E4M3)
    for found, wanted in (
        ([lowering.amax(x)], [reference.amax(x)]),
        ([ops.scales_from_amax(three, E4M3, **options)[0]], [reference.scale_from_amax(three, E4M3, **options)]),
        ([lowering.quantize(x, SCALE, E5M2)], [reference.quantize(x, SCALE, E5M2)]),
        (lowering.cast_transpose_amax(x, SCALE, E4M3, pad_rows=True), reference.cast([x], [SCALE], E4M3, **layout)),
        ([lowering.scaled_mm(a, b, s, s) for s in (SCALE, SCALE.view(1))], [gemm.scaled_mm(a, b, SCALE, SCALE, None)] * 2),
        (ops.amaxes([x, x[:7].bfloat16(), x[:0]]), [reference.amax(x), reference.amax(x[:7].bfloat16()), torch.tensor(0.0)]),
        (ops.take(torch.arange(5.0), [3, 1]), torch.tensor([3.0, 1.0])),
    ):
        assert all(same_bits(actual, expected) for actual, expected in zip(found, wanted, strict=True))


def test_recording_leaves_the_version_counter_alone():
    """Autograd keeps the staging row for backward; recording into it must not look like a change of a saved tensor."""
    amax = torch.zeros(4)
    version = amax._version
    ops.record_amax(amax, torch.arange(4), [torch.tensor(2.0)], [1])
    assert (amax[1], amax._version) == (2.0, version)


def test_packed_is_the_bytes_one_after_another():
    parts = [torch.randn(3, 5).t(), torch.randn(4, dtype=torch.bfloat16), torch.arange(7, dtype=torch.uint8)]
    expected = b"".join(np.ascontiguousarray(p.view(torch.int16) if p.dtype is torch.bfloat16 else p).tobytes() for p in parts)
    assert ops.packed(parts).numpy().tobytes() == expected


def test_cpu_operations_do_not_import_triton():
    code = (
        "import sys, torch, lowering; lowering.cast_transpose_amax(torch.ones(4, 4), torch.tensor(1.0), "
        "torch.float8_e4m3fn); print('triton' in sys.modules, any('.kernels.' in m for m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False False"


@config.patch(fx_graph_cache=False)  # whose key does not have the lowerings
def test_under_inductor_on_the_cpu_operations_run_as_they_are():
    """No C++ is generated for them: the only kernels are the producers'."""
    register_lowerings()

    def function(x, w, staging, slots):
        scale, inverse = ops.load_scales(staging, slots, 2)
        rowwise, columnwise, amax = ops.cast([x * 2], [ops.take(scale, [0])[0]], E4M3, columnwise=True, with_amax=True)
        own, own_inverse = ops.scales_from_amax(ops.amaxes([x * 3]), E5M2)
        lines, of_lines = ops.cast_with_scales([x * 5], E4M3, granularity="row_wise")
        ops.record_amax(staging, slots, [amax], [1])
        product = ops.scaled_mm(rowwise, ops.cast([w], [own], E4M3)[0].t(), inverse[0], own_inverse)
        return rowwise, columnwise, amax, own, lines, of_lines, product

    x, w, slots = torch.randn(48, 64), torch.randn(32, 64), torch.tensor([2, 0, 1])
    ours = torch.rand(3) + 0.5
    theirs = ours.clone()
    expected = function(x, w, theirs, slots)
    for dynamic in (False, True):
        staging = ours.clone()
        torch._dynamo.reset()
        results, (code,) = run_and_get_code(torch.compile(function, dynamic=dynamic), x, w, staging, slots)
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result.float(), wanted.float())
        assert torch.equal(staging, theirs)
        assert code.count("async_compile.cpp_pybinding(") == 1, "the three products are one kernel"
        assert "'torch.ops.lowering" not in code, "opcheck holds the strides of results, which no assertion repeats"
