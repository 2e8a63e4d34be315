"""Full garbage collections wait while a graph is compiled, and what was set before comes back."""

import gc
import threading

import pytest
import torch

from fp8pass import fp8_compile
from fp8pass.capture.garbage import RARE, rarer_collections


@pytest.fixture(autouse=True)
def own_thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_only_full_collections_wait():
    gc.set_threshold(700, 10, 10)
    with rarer_collections():
        assert gc.get_threshold() == (700, 10, RARE)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (700, 10, 5 * RARE), (50_000, 7, 3)])
def test_a_users_setting_comes_back_and_is_never_made_more_frequent(own):
    gc.set_threshold(*own)
    with rarer_collections():
        inside = gc.get_threshold()
    assert inside[:2] == own[:2]
    assert inside[2] == max(own[2], RARE)
    assert gc.get_threshold() == own


def test_an_error_restores_it():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(RuntimeError, match="compilation"), rarer_collections():
        raise RuntimeError("compilation")
    assert gc.get_threshold() == (700, 10, 10)


def test_threads_that_compile_at_once_restore_it_when_the_last_is_done():
    gc.set_threshold(700, 10, 10)
    inside, leave = threading.Event(), threading.Event()

    def compile_long():
        with rarer_collections():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=compile_long)
    with rarer_collections():
        thread.start()
        inside.wait()
    assert gc.get_threshold() == (700, 10, RARE)
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_forward_and_backward_are_compiled_with_it(monkeypatch):
    from torch._inductor import compile_fx

    seen = []
    compile_inner = compile_fx.compile_fx_inner

    def spy(*args, **kwargs):
        seen.append(gc.get_threshold())
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    gc.set_threshold(700, 10, 10)
    model = fp8_compile(torch.nn.Linear(32, 32), "current")
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert seen == [(700, 10, RARE)] * 2
    assert gc.get_threshold() == (700, 10, 10)
