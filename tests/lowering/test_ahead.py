"""Kernels are compiled in threads before their first launch: the same variants and no others, and nothing is launched."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contestants import contestants
from benchmarks.cross_codegen import capture, launched
from benchmarks.models import block
from benchmarks.variants import Launch, recorded, recording, variant_of
from lowering import hardware
from lowering.formats import E4M3
from lowering.triton import ahead, launch
from lowering.triton.ahead import Described, Kernel
from tests.lowering.kernel_cases import kernel
from tests.lowering.test_limits import some_casts
from tests.support.cases import each
from tests.support.moe import RECIPES, MoE

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


def described(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return ahead.described(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 // x.element_size())


def on_paper(function: Callable[..., Any], args: Any, options: Any) -> list[Launch]:
    found: list[Launch] = []
    with recording(found):
        ahead.on_paper(function, *torch.utils._pytree.tree_map(described, (args, options)))
    return found


def variants(launches: list[Launch]) -> set[str]:
    return {repr(variant_of(each)) for each in launches}


# Which variants.


@needs_triton
def test_a_call_on_paper_compiles_what_the_call_launches():
    for name, call in some_casts():
        if not name.startswith("epilogue"):  # whose arguments are no tensors
            assert variants(on_paper(call.function, call.arguments, call.options)) == variants(call.launches()), name


def qwen2() -> nn.Module:
    """transformers' attention gives casts views of what it computes, some of which Inductor copies first."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=512, num_hidden_layers=1, **sizes))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "block": lambda: block(256, 512, 4, 1, 256),
    "views and copies": lambda: (qwen2(), torch.randint(0, 512, (2, 128))),
    "experts": lambda: (MoE(256, 128), torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)),
}


@needs_triton
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        *(("block", recipe) for recipe in RECIPES),
        *(("views and copies", recipe) for recipe in ("rowwise", "blockwise")),
        *(("experts", recipe) for recipe in RECIPES if recipe != "mxfp8"),  # which has no kernels for experts
    ],
)
def test_what_was_compiled_ahead_is_launched_and_nothing_else(model, recipe):
    made, x = MODELS[model]()
    compiled = contestants((recipe,), with_peers=False)[recipe](made.bfloat16())
    with capture() as graphs:
        out = compiled(x)
        getattr(out, "logits", out).sum().backward()
    foreseen: list[Launch] = []
    found: list[Launch] = []
    for generated, events in launched(graphs):
        for function, _, _, args, options in generated.ahead:
            foreseen += on_paper(function, args, options)
        found += [launch for event in events for launch in event.launches]
    assert len(found) >= 3
    names = [each.kernel.__name__ for each in found]
    assert model != "experts" or any("stack" in name or "columns" in name for name in names)
    assert variants(foreseen) == variants(found)


# How many variants.


def of_matrices(n: int) -> list[torch.Tensor]:
    return [torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(n)]


def of(name: str, *args: Any, **options: Any) -> list[Launch]:
    return recorded(kernel(name), *args, **options)


BOTH = {"columnwise": True, "with_amax": True}
NUMBERED: dict[str, Callable[[int], list[Launch]]] = {
    "place of the scale": lambda n: of("cast", of_matrices(1), [torch.ones(64)[n]], E4M3, **BOTH),
    "place of the scale, one copy": lambda n: of("cast", of_matrices(1), [torch.ones(64)[n]], E4M3),
    "place of the scales": lambda n: of("cast", [torch.empty(4, 64, 64)], [torch.ones(64)[n : n + 4]], E4M3),
    # of two or more: one has a kernel of its own
    "matrices": lambda n: of("cast", of_matrices(n + 1), list(torch.ones(n + 1)), E4M3, **BOTH),
    "blockwise": lambda n: of("cast_with_scales", of_matrices(n), E4M3, granularity="block_1x128"),
    "rowwise": lambda n: of("cast_with_scales", of_matrices(n + 1), E4M3, granularity="row_wise", columnwise=True),
    "scales": lambda n: of("multi_scales", of_matrices(n), E4M3),
    "amaxes of scales": lambda n: of("scales_from_amax", torch.ones(64)[n:], E4M3),
    "number of amaxes": lambda n: of("scales_from_amax", torch.ones(n), E4M3),
    "loaded scales": lambda n: of("load_scales", torch.ones(64), torch.arange(64), n),
    "first slot": lambda n: of("record_amax", torch.ones(64), torch.arange(64), [torch.ones(())] * 2, [n, n + 1]),
    "partial amaxes": lambda n: of("amaxes", [torch.empty(n * 16384, dtype=torch.bfloat16)])[1:],
}


@needs_triton
@each("name", NUMBERED)
def test_numbers_whose_alignment_does_not_matter_make_no_variants(name):
    found = [variants(NUMBERED[name](n)) for n in (1, 2, 3, 16, 17, 32)]
    assert found[0]
    assert all(each == found[0] for each in found)


# Threads.


class Compiler:
    """In the place of Triton's function: says what was asked of it."""

    class fn:
        """The kernel's docstring."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.may_compile = threading.Event()
        self.error = error

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


def submit(compiler: Compiler, size: int) -> Kernel:
    copy = Kernel(compiler)
    arguments = [Described((size,), (1,), torch.float32)]
    ahead.compile_ahead(lambda x: copy[(1,)](x), "copy", torch.device("cuda", 0), arguments, {})
    return copy


def test_the_first_launch_waits_for_what_is_under_way(threads):
    compiler = Compiler()
    copy = submit(compiler, 4)
    threading.Timer(0.2, compiler.may_compile.set).start()
    copy[(1,)](torch.ones(4))
    assert compiler.asked == ["compile for meta", "launch on cpu"]


def test_equal_calls_compile_once(threads):
    compiler = Compiler()
    compiler.may_compile.set()
    for size in (4, 4, 8, 4):
        submit(compiler, size)
    ahead.wait()
    assert len(compiler.asked) == 2


def test_a_failure_ahead_is_logged_and_the_launch_happens(threads, caplog):
    compiler = Compiler(ValueError("no such instruction"))
    compiler.may_compile.set()
    with caplog.at_level(logging.WARNING, "lowering.triton.ahead"):
        submit(compiler, 4)[(1,)](torch.ones(4))
    assert compiler.asked == ["launch on cpu"]
    assert "the kernels of copy could not be compiled ahead: ValueError: no such instruction" in caplog.text


def test_a_forked_process_waits_for_no_thread(threads):
    compiler = Compiler()
    copy = submit(compiler, 4)
    child = os.fork()
    if child == 0:
        copy[(1,)](torch.ones(4))
        os._exit(0 if compiler.asked == ["launch on cpu"] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    compiler.may_compile.set()


def test_a_call_on_paper_keeps_no_table():
    before = dict(launch._TABLES)
    launch.pinned_table([1, 2, 3], torch.device("meta"))
    assert before == launch._TABLES


@pytest.mark.gpu
def test_the_first_launch_finds_the_variant():
    from lowering.tensorwise.kernels import cast, cast_transpose_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    x, scale = torch.ones(112, 48, dtype=torch.bfloat16, device=device), torch.ones((), device=device)
    options = {"columnwise": True, "pad_cols": True}
    ahead.compile_ahead(cast, "cast", device, ([described(x)], [described(scale)], E4M3), options)
    ahead.wait()
    variants_there = len(cast_transpose_kernel.jit.device_caches[device.index][0])
    cast([x], [scale], E4M3, **options)
    assert variants_there == len(cast_transpose_kernel.jit.device_caches[device.index][0])
