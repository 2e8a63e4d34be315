"""Keys of `options` that torch.compile takes itself, arguments written in the wrong place, and the C++ wrapper."""

import pytest
import torch

from fp8pass import fp8_compile
from fp8pass.errors import OptionError
from tests.support.models import mlp
from tests.support.training import train


def by_name(model, recipe, options, **own):
    return torch.compile(model, backend="fp8pass", options={"recipe": recipe, **own, **options})


@pytest.mark.parametrize(
    ("compile_model", "given"),
    [
        (fp8_compile, {"backend": "aot_eager"}),
        (fp8_compile, {"backend": "aot_eager", "in_place": True}),
        (by_name, {"backend": "aot_eager"}),
        pytest.param(fp8_compile, {}, marks=pytest.mark.exhaustive),
        pytest.param(fp8_compile, {"in_place": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_guard_filter_fn_is_torch_compiles(compile_model, given):
    """Without guards on sizes a call with other rows runs the graph of the first one."""
    seen = []

    def keep(guards):
        seen.extend(guards)
        return [True] * len(guards)

    options = {"guard_filter_fn": keep, **({} if "backend" in given else {"epilogue_fusion": False})}
    before = dict(options)
    train(compile_model(mlp(), "current", options=options, **given), torch.randn(16, 64))
    assert seen
    assert options == before, "the dict stays as it was, for the next model"


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
        fp8_compile(mlp(), "current", backend=backend, options=options)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_cpp_wrapper_is_refused(recipe):
    """It would end the process: torch passes a list of one tensor wrongly."""
    with pytest.raises(OptionError, match=r"cpp_wrapper.*190551.*leave it out"):
        fp8_compile(mlp(), recipe, options={"cpp_wrapper": True})
    compiled = fp8_compile(mlp(), recipe)
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(Exception, match=r"190551.*TORCHINDUCTOR_CPP_WRAPPER=0"):
        compiled(torch.randn(16, 64))
