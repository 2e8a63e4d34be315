"""Casts that are compared with the reference when a variant of theirs is first launched."""

import types

import pytest
import torch

from benchmarks.variants import recorded, variant_of
from lowering import hardware
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.triton import ahead, trial
from lowering.triton.trial import MiscompiledKernel, filled, small_arguments, small_layout, tried
from tests.support.cases import each

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


def launched(hash_: str) -> types.SimpleNamespace:
    """Stands in for a kernel that Triton has compiled."""
    target = types.SimpleNamespace(arch=90)
    return types.SimpleNamespace(hash=hash_, name="some_kernel", metadata=types.SimpleNamespace(target=target))


def cast(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = (x * scale).to(E4M3)
    return q, q.t().contiguous()


class Casts:
    """Casts that launch what they are told to, and count their calls."""

    def __init__(self, variants=lambda x: "one", is_wrong=lambda x: False):
        self.variants, self.is_wrong, self.calls = variants, is_wrong, []

    def __call__(self, x, scale):
        self.calls.append(tuple(x.shape))
        if getattr(ahead._THREAD, "launched", None) is not None:
            ahead._THREAD.launched.append(launched(self.variants(x)))
        q, q_t = cast(x, scale)
        if self.is_wrong(x):
            q_t.view(torch.uint8)[3, 5] ^= 1
        return q, q_t

    __name__ = "cast"


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch):
    monkeypatch.setattr(trial, "_TRIED", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


X, SCALE = torch.randn(768, 640), torch.tensor(3.0)


def test_once_per_variant():
    casts = Casts(variants=lambda x: str(x.dtype))
    call = tried(casts, cast)
    for x in (X, X, X.bfloat16(), X.bfloat16(), X):
        assert torch.equal(call(x, SCALE)[0].float(), cast(x, SCALE)[0].float())
    assert casts.calls == [(768, 640), (256, 256), (768, 640), (768, 640), (256, 256), (768, 640), (768, 640)]


@needs_triton
def test_a_wrong_byte_is_an_error_that_names_kernel_triton_and_ptxas():
    call = tried(Casts(is_wrong=lambda x: True), cast)
    for _ in range(2):  # it is not trusted the second time
        with pytest.raises(MiscompiledKernel) as raised:
            call(X, SCALE)
        for part in ("lowering::cast", "1 of 65536 bytes", "some_kernel", "Triton 3.", "ptxas 1", "TRITON_PTXAS_PATH"):
            assert part in str(raised.value)


def test_nothing_is_tried_while_a_graph_is_captured_or_kernels_compile_ahead(monkeypatch):
    casts = Casts()
    call = tried(casts, cast)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call(X, SCALE)
    ahead.on_paper(call, (X, SCALE), {})
    assert casts.calls == [(768, 640)] * 2
    assert not trial._TRIED
    state = torch.get_rng_state()
    call(X, SCALE)
    assert casts.calls[2:] == [(768, 640), (256, 256)]
    assert torch.equal(torch.get_rng_state(), state), "random numbers of the user stay"


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def variants_of(operation: str, *args, **options) -> list[str]:
    function = NAMESPACE.operations[operation].implementations()[-2].__wrapped__
    return [repr(variant_of(launch)) for launch in recorded(function, *args, **options)]


SHAPES = [(4096, 4096), (4095, 4097), (4096, 1), (1, 4096), (1, 1), (100, 300), (4096, 640), (4096, 14336), (4095, 2047)]
WIDE = aligned(4096, 4112)
VIEWS = [aligned(4096, 4096).t(), WIDE[:, 1:4097], WIDE[:, :4096], WIDE[:, :4095]]


@needs_triton
@each(
    ("operation", "given", "options"),
    [
        ("cast", ([torch.ones(())], E5M2), {"columnwise": True, "with_amax": True}),
        ("cast", ([torch.ones(())], E5M2), {}),
        ("cast_with_scales", (E4M3,), {"granularity": "block_128x128", "columnwise": True}),
        ("cast_with_scales", (E4M3,), {"granularity": "block_1x32", "square": True, "columnwise": True}),
    ],
)
def test_a_small_tensor_takes_the_same_variants(operation, given, options):
    """Calls of every shape, of other strides, off an aligned address."""
    for x in [*(aligned(*shape) for shape in (*SHAPES, (1024, 1024))), *VIEWS, aligned(512, 384, dtype=torch.float32)]:
        small = filled(small_layout(x), torch.Generator())
        both = [variants_of(operation, [m], *given, **options)[:1] for m in (x, small)]
        assert both[0] == both[1], (operation, tuple(x.shape), x.stride())


def large_calls() -> dict[str, tuple[str, tuple, dict]]:
    """Calls for all experts of a layer, for batches beside matrices, of all matrices of a model, and of an activation."""
    experts = torch.empty(128, 4096, 2048, dtype=torch.bfloat16)
    weights = [aligned(4096, 4096), aligned(1024, 4096), aligned(14336, 4096)] * 32
    layout, rows = {"columnwise": True}, {"granularity": "row_wise"}
    return {
        "experts": ("cast", ([experts], [torch.ones(128)], E4M3), layout | {"with_amax": True}),
        "experts, one copy": ("cast", ([experts], [torch.ones(128)], E5M2), {}),
        "experts of one scale": ("cast", ([experts.mT], [torch.ones(())], E4M3), layout),
        "experts rowwise": ("cast_with_scales", ([experts], E4M3), layout | rows),
        "experts blockwise": ("cast_with_scales", ([experts], E4M3), layout | {"granularity": "block_128x128"}),
        "one expert": ("cast", ([experts[:1]], [torch.ones(1)], E4M3), layout),
        "ragged experts": ("cast_with_scales", ([experts[:77, :4095, :2047]], E4M3), layout | rows | {"pad_rows": True}),
        "batches beside a matrix": ("cast", ([experts, experts[0]], [torch.ones(128), torch.ones(())], E4M3), layout),
        "weights": ("cast", (weights, [torch.ones(())] * len(weights), E4M3), layout),
        "of two dtypes": ("cast_with_scales", ([*weights, weights[0].float(), weights[1][1:, 1:]], E4M3), layout | rows),
        "an activation": ("quantize", (torch.empty(16, 8192, 4096, dtype=torch.bfloat16), torch.ones(()), E4M3), {}),
        "a slice of one": ("quantize", (torch.empty(9, 8192, 4099)[..., 1:], torch.ones(()), E4M3), {}),
    }


@needs_triton
@each("name", large_calls())
def test_a_trial_of_many_matrices_takes_two_of_each_kind(name):
    """Enough for all variants that are launched: at most 64 MiB, where experts alone took 8 GB."""
    operation, args, options = large_calls()[name]
    few, how = small_arguments(args, options)
    tensors = [x for x in torch.utils._pytree.tree_leaves((few, how)) if isinstance(x, torch.Tensor)]
    assert sum(x.untyped_storage().nbytes() for x in tensors) <= 64 << 20
    assert set(variants_of(operation, *args, **options)) == set(variants_of(operation, *few, **how))


@needs_triton
def test_every_cast_of_floats_is_tried():
    untried = {"cast_columns"}  # rows by an index: each copy is converted by itself
    for name, operation in NAMESPACE.operations.items():
        if name.startswith(("cast", "quantize")):
            providers = operation.implementations()[:-1]
            assert [hasattr(p, "__wrapped__") for p in providers] == [name not in untried] * len(providers), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(512, 256), (511, 257), (512, 1)])
def test_casts_on_a_gpu_pass_their_trials(shape, device):
    """A CPU computes the same calls, which are tried on a GPU alone."""
    x, scale = torch.randn(shape, device=device, dtype=torch.bfloat16), torch.ones((), device=device)
    operations, before = NAMESPACE.operations, len(trial._TRIED)
    for dtype in (E4M3, E5M2):
        operations["cast"]([x], [scale], dtype, columnwise=True, with_amax=True)
        for granularity in ("row_wise", "block_1x128", "block_128x128", "block_1x32"):
            operations["cast_with_scales"]([x], dtype, granularity=granularity, columnwise=True)
    assert len(trial._TRIED) >= 10 if device == "cuda" else len(trial._TRIED) == before
