"""The short way to a node's fake value gives what FakeTensorMode gives: sizes, strides, dtype, device and shared storage."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from fp8pass.graph import fakes
from tests.support.cases import each

aten = torch.ops.aten
ops = torch.ops.lowering
E4M3 = torch.float8_e4m3fn

CALLS = {
    "select": (aten.select.int, lambda t: (t["vector"], 0, 5), {}),
    "slice": (aten.slice.Tensor, lambda t: (t["vector"], 0, 3, 7), {}),
    "unsqueeze": (aten.unsqueeze.default, lambda t: (t["vector"], 1), {}),
    "permute": (aten.permute.default, lambda t: (t["x"], [1, 0]), {}),
    "reshape as a view": (aten.reshape.default, lambda t: (t["x"], [4, 16, 48]), {}),
    "reshape as a copy": (aten.reshape.default, lambda t: (t["turned"], [64 * 48]), {}),
    "of a parameter": (aten.permute.default, lambda t: (t["parameter"], [1, 0]), {}),
    "cast": (ops.cast.default, lambda t: ([t["x"]], [t["scale"]], E4M3), {"columnwise": True, "pad_cols": True}),
    "cast of a parameter": (ops.cast.default, lambda t: ([t["parameter"]], [t["scale"]], E4M3), {"with_amax": True}),
    "blockwise": (ops.cast_blockwise.default, lambda t: ([t["x"]], E4M3), {"granularity": "block_1x128", "columnwise": True}),
    "several": (ops.cast.default, lambda t: ([t["x"], t["parameter"]], [t["scale"]] * 2, E4M3), {"with_amax": True}),
    "GEMM": (
        ops.scaled_mm.default,
        lambda t: (t["a"], t["b"], t["scale"], t["scale"], None),
        {"out_dtype": torch.bfloat16, "fast_accum": True},
    ),
    "not a view and not ours": (aten.relu.default, lambda t: (t["x"],), {}),
    "nothing": (ops.record_amax.default, lambda t: (t["vector"], t["slots"], [t["scale"]], [2]), {}),
}


def tensors(mode: FakeTensorMode, device: str) -> dict[str, torch.Tensor]:
    with mode:
        x = torch.empty(64, 48, dtype=torch.bfloat16, device=device)
        return {
            "x": x,
            "turned": x.t(),
            "parameter": torch.nn.Parameter(torch.empty(32, 48, device=device)),
            "vector": torch.empty(9, device=device),
            "slots": torch.empty(9, dtype=torch.int64, device=device),
            "scale": torch.empty((), device=device),
            "a": torch.empty(64, 48, dtype=E4M3, device=device),
            "b": torch.empty(32, 48, dtype=E4M3, device=device).t(),
        }


@each("device", ["cpu", "cuda", "meta"])
@each("name", CALLS)
def test_it_is_what_the_mode_gives(name, device):
    mode = FakeTensorMode()
    target, arguments, options = CALLS[name]
    given = tensors(mode, device)
    args = arguments(given)
    made, wanted = tree_leaves(fakes.result_of(mode, target, args, options)), None
    with mode, torch.no_grad():
        wanted = tree_leaves(target(*args, **options))
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert type(one) is type(other)
        if not isinstance(one, FakeTensor):
            assert one == other
            continue
        for fact in ("shape", "dtype", "device", "requires_grad", "fake_mode"):
            assert getattr(one, fact) == getattr(other, fact), fact
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
        inputs = {name: t.untyped_storage()._cdata for name, t in given.items()}
        shared = [[n for n, at in inputs.items() if at == t.untyped_storage()._cdata] for t in (one, other)]
        assert shared[0] == shared[1], "reinplacing takes what shares a storage for one buffer"


def test_what_the_mode_knows_more_of_is_left_to_it(monkeypatch):
    def never(*args):
        raise AssertionError("the short way")

    monkeypatch.setattr(fakes, "in_kernel_invocation_manager", never)
    mode, other = FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode()
    with mode:
        scale = torch.empty(())
    symbolic = mode.from_tensor(torch.empty(64, 48))
    (made,) = fakes.result_of(mode, ops.cast.default, ([symbolic], [scale], E4M3), {})
    assert made.shape[0] == symbolic.shape[0]
    assert not isinstance(made.shape[0], int), "symbolic sizes"
    with pytest.raises(AssertionError, match="Mixing fake modes"):
        fakes.result_of(other, ops.cast.default, ([tensors(mode, "cpu")["x"]], [scale], E4M3), {})
    real = torch.arange(6.0).reshape(2, 3)
    assert fakes.result_of(torch.no_grad(), aten.permute.default, (real, [1, 0]), {}).equal(real.t()), "no fake tensors"
    assert fakes.result_of(mode, operator.getitem, ((scale, symbolic), 1), {}) is symbolic


def test_the_short_way_is_taken(monkeypatch):
    taken = []
    manager = fakes.in_kernel_invocation_manager

    def spy(mode):
        taken.append(mode)
        return manager(mode)

    monkeypatch.setattr(fakes, "in_kernel_invocation_manager", spy)
    mode = FakeTensorMode()
    given = tensors(mode, "cuda")
    for target, arguments, options in CALLS.values():
        fakes.result_of(mode, target, arguments(given), options)
    assert len(taken) == len(CALLS) - 1, "all but the operation that is neither a view nor ours"
