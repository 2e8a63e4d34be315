"""Keys of `options` that torch.compile takes itself, arguments written in the wrong place, and the C++ wrapper."""

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile
from fp8pass.errors import OptionError


def model():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_guard_filter_fn_is_torch_compiles(backend, in_place):
    """Without guards on sizes a call with other rows runs the graph of the first one."""
    seen = []

    def keep(guards):
        seen.extend(guards)
        return [True] * len(guards)

    options = {"guard_filter_fn": keep}
    compiled = fp8_compile(model(), "current", backend=backend, options=options, in_place=in_place)
    compiled(torch.randn(16, 32)).sum().backward()
    assert seen
    assert options == {"guard_filter_fn": keep}, "the dict stays as it was, for the next model"


def test_guard_filter_fn_by_the_backends_name():
    seen = []
    options = {"recipe": "current", "backend": "aot_eager", "guard_filter_fn": lambda g: seen.extend(g) or [True] * len(g)}
    torch.compile(model(), backend="fp8pass", options=options)(torch.randn(16, 32)).sum().backward()
    assert seen


@pytest.mark.slow
def test_guard_filter_fn_beside_options_of_inductor():
    seen = []
    options = {"epilogue_fusion": False, "guard_filter_fn": lambda g: seen.extend(g) or [True] * len(g)}
    fp8_compile(model(), "current", options=options)(torch.randn(16, 32)).sum().backward()
    assert seen


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_place": True}, r"in_place is an argument of fp8_compile itself; write fp8_compile\(model, ..., in_place=True\)"),
        ({"rules": None}, r"rules is an argument of fp8_compile itself"),
        ({"use_aoti": True}, r"use_aoti.*leave it out"),
        ({"guard_filter_fn": len, "fullgraph": True}, r"fullgraph=True"),
    ],
)
def test_words_in_the_wrong_place(backend, options, message):
    with pytest.raises(OptionError, match=message):
        fp8_compile(model(), "current", backend=backend, options=options)


def test_in_place_by_the_backends_name():
    compiled = torch.compile(model(), backend="fp8pass", options={"recipe": "current", "in_place": True})
    with pytest.raises(Exception, match=r"'in_place'=True is an argument of fp8_compile.*in_place=True"):
        compiled(torch.randn(16, 32))


def test_options_of_inductor_stay_inductors():
    with pytest.raises(OptionError, match="generates no code"):
        fp8_compile(model(), "current", backend="aot_eager", options={"max_autotune": True})


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_cpp_wrapper_is_refused(recipe):
    """It would end the process: torch passes a list of one tensor wrongly."""
    with pytest.raises(OptionError, match=r"cpp_wrapper.*190551.*leave it out"):
        fp8_compile(model(), recipe, options={"cpp_wrapper": True})
    compiled = fp8_compile(model(), recipe)
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(Exception, match=r"190551.*TORCHINDUCTOR_CPP_WRAPPER=0"):
        compiled(torch.randn(16, 32))
