"""The operations under Inductor on the CPU, and arithmetic of the lowerings that needs no GPU's code."""

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from lowering.formats import E4M3, E5M2
from lowering.inductor import register_lowerings
from lowering.tensorwise import reference

ops = torch.ops.lowering


@config.patch(fx_graph_cache=False)  # whose key does not have the lowerings
def test_on_the_cpu_operations_run_as_they_are():
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
        assert "'torch.ops.lowering" not in code, "test_ops.py holds the strides of results, which no assertion repeats"


def test_grouped_operations_equal_those_of_one_tensor():
    xs = [torch.randn(16, 48), torch.randn(7, 9).bfloat16(), torch.zeros(0, 4)]
    assert torch.equal(ops.amaxes(xs), torch.stack([reference.amax(x) for x in xs]))
    assert ops.take(torch.arange(5.0), [3, 1]).tolist() == [3.0, 1.0]
