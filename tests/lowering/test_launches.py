"""Launches of Triton's kernels: compiled in threads before the first, the same variants and no others; casts compared with the
reference when a variant is first launched; tables of addresses that are kept."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.cudagraph_trees as trees
from torch import nn

from benchmarks.contestants import contestants
from benchmarks.cross_codegen import capture, launched
from benchmarks.models import block
from benchmarks.variants import Launch, recorded, recording, variant_of
from lowering import hardware
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.triton import ahead, launch, trial
from lowering.triton.ahead import Described, Kernel
from lowering.triton.trial import MiscompiledKernel, small_arguments, tried
from tests.lowering.test_limits import some_casts
from tests.support.cases import each
from tests.support.moe import MoE

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


def described(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return ahead.described(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 // x.element_size())


def on_paper(function: Callable[..., Any], args: Any, options: Any) -> list[Launch]:
    with recording(found := []):
        ahead.on_paper(function, *torch.utils._pytree.tree_map(described, (args, options)))
    return found


def variants(launches: list[Launch]) -> set[str]:
    return {repr(variant_of(each)) for each in launches}


# -- compiled ahead


@needs_triton
def test_a_call_on_paper_compiles_what_the_call_launches():
    for name, call in some_casts():
        if not name.startswith("epilogue"):  # whose arguments are no tensors
            assert variants(on_paper(call.function, call.arguments, call.options)) == variants(call.launches()), name


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "block": lambda: block(256, 512, 4, 1, 256),
    "experts": lambda: (MoE(256, 128), torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)),
}


@needs_triton
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("block", "delayed"),
        ("block", "mxfp8"),
        ("experts", "rowwise"),
        ("experts", "blockwise"),
    ],
)
def test_what_was_compiled_ahead_is_launched_and_nothing_else(model, recipe):
    made, x = MODELS[model]()
    compiled = contestants((recipe,), with_peers=False)[recipe](made.bfloat16())
    with capture() as graphs:
        out = compiled(x)
        getattr(out, "logits", out).sum().backward()
    foreseen, found = [], []
    for generated, events in launched(graphs):
        for function, _, _, args, options in generated.ahead:
            foreseen += on_paper(function, args, options)
        found += [launch for event in events for launch in event.launches]
    assert len(found) >= 3
    assert variants(foreseen) == variants(found)


class Compiler:
    """In the place of Triton's function: says what was asked of it."""

    class fn:
        """The kernel's docstring."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked, self.may_compile, self.error = [], threading.Event(), error

    def warmup(self, x: torch.Tensor, grid: tuple[int, ...]) -> None:
        self.may_compile.wait(10)
        if self.error is not None:
            raise self.error
        self.asked.append(f"compile for {x.device}")

    def run(self, x: torch.Tensor, grid: tuple[int, ...], warmup: bool) -> None:
        assert not warmup
        self.asked.append(f"launch on {x.device}")


@pytest.fixture
def threads(monkeypatch) -> Iterator[None]:
    """Threads that know of no GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "_SUBMITTED", set())
    yield
    ahead.wait()


def submit(compiler: Compiler) -> Kernel:
    copy = Kernel(compiler)
    arguments = [Described((4,), (1,), torch.float32)]
    ahead.compile_ahead(lambda x: copy[(1,)](x), "copy", torch.device("cuda", 0), arguments, {})
    return copy


def test_the_first_launch_waits_for_what_is_under_way(threads):
    compiler = Compiler()
    copy = submit(compiler)
    threading.Timer(0.2, compiler.may_compile.set).start()
    copy[(1,)](torch.ones(4))
    submit(compiler)  # an equal call
    ahead.wait()
    assert compiler.asked == ["compile for meta", "launch on cpu"]


def test_a_failure_ahead_is_logged_and_the_launch_happens(threads, caplog):
    compiler = Compiler(ValueError("no such instruction"))
    compiler.may_compile.set()
    with caplog.at_level(logging.WARNING, "lowering.triton.ahead"):
        submit(compiler)[(1,)](torch.ones(4))
    assert compiler.asked == ["launch on cpu"]
    assert "the kernels of copy could not be compiled ahead: ValueError: no such instruction" in caplog.text


# -- tried


def cast(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = (x * scale).to(E4M3)
    return q, q.t().contiguous()


class Casts:
    """Casts that launch a variant for each dtype, and keep the shapes of their calls."""

    def __init__(self, is_wrong=False):
        self.is_wrong, self.calls = is_wrong, []

    def __call__(self, x, scale):
        self.calls.append(tuple(x.shape))
        if getattr(ahead._THREAD, "launched", None) is not None:
            target = SimpleNamespace(arch=90)  # of a kernel that Triton has compiled
            metadata = SimpleNamespace(target=target)
            ahead._THREAD.launched.append(SimpleNamespace(hash=x.dtype, name="some_kernel", metadata=metadata))
        q, q_t = cast(x, scale)
        if self.is_wrong:
            q_t.view(torch.uint8)[3, 5] ^= 1
        return q, q_t

    __name__ = "cast"


@pytest.fixture
def nothing_tried(monkeypatch):
    monkeypatch.setattr(trial, "_TRIED", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


X, SCALE = torch.randn(768, 640), torch.tensor(3.0)


def test_once_per_variant(nothing_tried):
    casts = Casts()
    call = tried(casts, cast)
    for x in (X, X, X.bfloat16(), X.bfloat16(), X):
        assert torch.equal(call(x, SCALE)[0].float(), cast(x, SCALE)[0].float())
    assert casts.calls == [(768, 640), (256, 256), (768, 640), (768, 640), (256, 256), (768, 640), (768, 640)]


@needs_triton
def test_a_wrong_byte_is_an_error_that_names_kernel_triton_and_ptxas(nothing_tried):
    call = tried(Casts(is_wrong=True), cast)
    for _ in range(2):  # it is not trusted the second time
        with pytest.raises(MiscompiledKernel) as raised:
            call(X, SCALE)
        for part in ("lowering::cast", "1 of 65536 bytes", "some_kernel", "Triton 3.", "ptxas 1", "TRITON_PTXAS_PATH"):
            assert part in str(raised.value)


def test_nothing_is_tried_while_a_graph_is_captured_or_kernels_compile_ahead(nothing_tried, monkeypatch):
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


def aligned(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def variants_of(operation: str, *args, **options) -> list[str]:
    function = NAMESPACE.operations[operation].implementations()[-2].__wrapped__
    return [repr(variant_of(launch)) for launch in recorded(function, *args, **options)]


EXPERTS, BOTH = torch.empty(128, 4096, 2048, dtype=torch.bfloat16), {"columnwise": True}
MATRICES = [aligned(4096, 4096), aligned(1024, 4096), aligned(14336, 4096)] * 32
ROWS = {"granularity": "row_wise", **BOTH}
ONE = [torch.ones(())]
CALLS = [
    *(("cast", ([x], ONE, E5M2), BOTH | {"with_amax": True}) for x in (
        aligned(4095, 4097), aligned(4096, 1), aligned(1024, 640), aligned(4096, 4096).t(), aligned(4096, 4112)[:, 1:4097],
    )),
    ("cast", ([EXPERTS], [torch.ones(128)], E4M3), BOTH | {"with_amax": True}),
    ("cast_with_scales", ([EXPERTS[:77, :4095, :2047]], E4M3), ROWS | {"pad_rows": True}),
    ("cast_with_scales", ([*MATRICES, MATRICES[0].float(), MATRICES[1][1:, 1:]], E4M3), ROWS),
    ("quantize", (torch.empty(9, 8192, 4099)[..., 1:], *ONE, E4M3), {}),
]  # fmt: skip


@needs_triton
@each(("operation", "args", "options"), CALLS)
def test_a_trial_takes_the_variants_of_the_call(operation, args, options):
    """Of any shape, strides and address, and of many matrices two of each kind: 64 MiB, where experts alone took 8 GB."""
    few, how = small_arguments(args, options)
    tensors = [x for x in torch.utils._pytree.tree_leaves((few, how)) if isinstance(x, torch.Tensor)]
    assert sum(x.untyped_storage().nbytes() for x in tensors) <= 64 << 20
    assert set(variants_of(operation, *args, **options)) == set(variants_of(operation, *few, **how))


# -- tables of addresses

CUDA = torch.device("cuda", 0)


def test_a_thread_of_its_own_has_no_cuda_graphs():
    """torch 2.11 fails an assertion where a thread that autograd did not start asks for its manager of CUDA graphs."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(launch._inductor_warms_up, CUDA).result() is False


@pytest.fixture
def on_device(monkeypatch):
    """Stands in for the tables' copies to a GPU, and for the stream that calls run in."""
    there = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7), pinned=[])

    def pin(count):
        there.pinned.append(count)
        return torch.empty(count, dtype=torch.int64)

    empty = {"_TABLES": {}, "_TABLES_OF_GRAPHS": {}, "_reserved": []}
    for name, value in {**empty, "_on_device": lambda values, device: torch.tensor(values), "_pinned": pin}.items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: there.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return there


def test_cuda_graphs_of_one_model_leave_the_tables_of_others_alone(on_device, monkeypatch):
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(trees, "get_manager", lambda index, create=True: manager)
    first = launch.pinned_table([1, 2], CUDA)
    assert launch.pinned_table([1, 2], CUDA) is first, "a model without CUDA graphs, which another one of the process has"
    on_device.stream = manager.stream  # Inductor warms up in it
    assert launch.pinned_table([1, 2], CUDA) is not launch.pinned_table([1, 2], CUDA)
    assert list(launch._TABLES) == [(CUDA, 7, (1, 2))], "nothing of the graph's memory pool is kept"


def test_a_capture_allocates_no_pinned_memory(on_device, monkeypatch):
    """It may wait for the device, which capture forbids. What a replay reads belongs to it alone."""
    monkeypatch.setattr(launch, "_RESERVE", 8)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **options: self)  # to the GPU
    launch.pinned_table([1, 2], CUDA)
    launch.pinned_table([3], CUDA)
    assert on_device.pinned == [8], "at the first call, which warms up"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    values = [[1, 2], [3, 4, 5], [1, 2], [6, 7]]
    tables = [launch.pinned_table(each, CUDA) for each in values]
    assert on_device.pinned == [8]
    assert tables[2] is tables[0]
    assert len({table.untyped_storage().data_ptr() for table in tables}) == 1
    assert launch.pinned_table([8, 9], CUDA).tolist() == [8, 9]
    assert on_device.pinned == [8, 2], "more than is left"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch.pinned_table([1, 2], CUDA)
    assert on_device.pinned == [8, 2, 8], "for the next graph"
    assert [table.tolist() for table in tables] == values
