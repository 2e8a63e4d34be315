"""The registered operations: schemas, shape functions and dispatch; what references compute."""

import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.part0.samples import samples
from lowering.operation import NAMESPACE
from tests.support.moe import offsets

ops = torch.ops.lowering


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


def test_recording_leaves_the_version_counter_alone():
    """Autograd keeps the staging row for backward; recording into it must not look like a change of a saved tensor."""
    amax = torch.zeros(4)
    version = amax._version
    ops.record_amax(amax, torch.arange(4), [torch.tensor(2.0)], [1])
    assert (amax[1], amax._version) == (2.0, version)


def test_checksums_see_every_bit_and_exchanged_elements_but_no_transposition():
    x = torch.zeros(320, 40, dtype=torch.uint8)
    for i in range(320):
        x[i, i // 8] = 1 << i % 8
    assert ops.checksums([torch.zeros_like(x[0]), *x]).unique().numel() == 321
    matrix = torch.randn(33, 7)
    assert ops.checksums([matrix, matrix.t(), matrix.flip(0)]).unique().numel() == 2


def test_cpu_operations_do_not_import_triton():
    code = (
        "import sys, torch, lowering; lowering.cast_transpose_amax(torch.ones(4, 4), torch.tensor(1.0), "
        "torch.float8_e4m3fn); print('triton' in sys.modules, any('.kernels.' in m for m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False False"


def test_valid_rows():
    """Rows of the groups, and rows that some slot of a group reads: also from the end, not those of slots beyond."""
    offs = offsets([2, 0, 3])
    assert ops.valid_rows(offs, 7).tolist() == [True] * 5 + [False] * 2
    index = torch.tensor([0, 3, 3, -1, 1, 2, 5])
    assert ops.valid_rows(offs, 8, index).tolist() == [True, True, False, True, False, False, False, True]
