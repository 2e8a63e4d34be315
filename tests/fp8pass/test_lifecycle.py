"""Compiled models over their life: moves, reloads, copies, threads, deletion."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import NotCompiledError, OptionError, UnsupportedCopyError, UnsupportedDeviceError
from fp8pass.runtime import backend
from tests.support.cases import each
from tests.support.models import Net, mlp
from tests.support.training import fp8, fp8_mlp, train

RECIPE = DelayedScaling(amax_history_len=4)


def x():
    return torch.randn(16, 64)


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_the_model_itself_is_unchanged_and_loaded_and_replaced_parameters_keep_names():
    model, compiled = fp8_mlp(RECIPE)
    keys = list(model.state_dict())
    train(compiled, x())
    assert list(model.state_dict()) == keys
    assert list(compiled.parameters()) == list(model.parameters())
    names = state(compiled).tensors
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    train(compiled, x())
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight) * 3)
    train(compiled, x())
    assert state(compiled).tensors == names
    state(compiled).step()
    assert state(compiled).amax_history("0:weight")[-1] == model[0].weight.abs().max()


@pytest.fixture
def collected():
    """The collector goes through what the test makes, not through what is there already."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_dynamo_reset_keeps_the_state_and_graphs_that_it_gave_up_are_no_graphs_of_the_model(collected):
    (_, compiled), given = fp8_mlp(RECIPE), x()
    for _ in range(2):
        train(compiled, given)
        assert len(inspect(compiled).graphs) == 1
        torch._dynamo.reset()
        gc.collect()
        assert len(inspect(compiled).graphs) == 1, "what ran last can be inspected"
    state(compiled).step()
    amax = float(given.abs().max())
    assert state(compiled).amax_history("0:input").tolist() == pytest.approx([0, 0, amax, amax])


def test_copies_and_pickles_are_refused_with_the_way_to_do_it():
    _, compiled = fp8_mlp(RECIPE)
    ways = {copy.deepcopy: "deepcopy the model itself", copy.copy: "deepcopy the", pickle.dumps: "state_dict"}
    for way, message in ways.items():
        with pytest.raises(UnsupportedCopyError, match=message):
            way(compiled)


def test_deleted_models_leave_nothing_behind(collected):
    model, compiled = fp8_mlp(RECIPE)
    train(compiled, x())
    inspect(compiled)
    gone = weakref.ref(model[0].weight), weakref.ref(compiled.__dict__["_fp8pass_session"])
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_only_compiled_models_have_inspection_and_state():
    for look in (inspect, state):
        with pytest.raises(NotCompiledError, match="did not come from fp8_compile"):
            look(mlp())
    for model, message in (
        (fp8_mlp()[1], "compiled already"),
        (3, r"pass an nn\.Module"),
        (nn.Linear, r"the class Linear; pass an instance: Linear\(...\)"),
    ):
        with pytest.raises(OptionError, match=message):
            fp8_compile(model, RECIPE)
    compiled, given = fp8(nn.LayerNorm(64), RECIPE), x()
    assert compiled(given).equal(nn.LayerNorm(64)(given))
    assert inspect(compiled).gemms == state(compiled).tensors == []
    assert "No compiled graph has a matmul" in str(inspect(compiled))


def test_a_gpu_without_fp8_is_refused_and_the_emulation_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "cuda_capability", lambda device: (8, 6))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        with pytest.raises(UnsupportedDeviceError, match=r"A100 has compute capability 8\.6.*8\.9.*emulate.*CPU"):
            backend.check_device(torch.device("cuda", 0))
        patch.setattr(backend, "cuda_capability", lambda device: (8, 9))
        backend.check_device(torch.device("cuda", 0))


@each(
    "rules, message",
    [
        ({"attention": "current", "atention:output": None}, "'atention:output' has matched no GEMM. Did you mean 'attention'?"),
        ({"*:output": None, "*:grad_weight": None, "attention": "current"}, "GEMMs match '*:output', '*:grad_weight' first."),
        ({"me*": "current"}, "has matched no GEMM. memory is a GRU, which runs eagerly: torch._dynamo.config.allow_rnn = True"),
    ],
)
def test_a_rule_that_decides_nothing_is_reported_with_the_cause(rules, message):
    children = {"attention": nn.Linear(64, 64), "mlp": nn.Sequential(nn.Linear(64, 64), nn.GELU())}
    not_called = {"memory": nn.GRU(64, 64)}
    model = Net(lambda m, x: m.mlp(torch.tanh(m.attention(x))), **children, **not_called)
    compiled = fp8(model, RECIPE, rules=rules)
    train(compiled, x())
    assert message in str(inspect(compiled))
    assert inspect(compiled).unmatched_rules == [list(rules)[-1]]


def test_what_is_compiled_behind_dynamo_holds_its_lock():
    """Tracing exchanges `nn.Module.__call__` for all threads: another one that compiles then must wait, and one that calls its
    model must be let through."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching(DelayedScaling):
        """Looks around while a graph is planned."""

        def quantization(self, operand, role):
            seen.append((compile_lock._is_owned(), torch.compiler.is_compiling()))
            return super().quantization(operand, role)

    train(fp8_mlp(Watching())[1], x())  # a graph, and the one of its first step, which is compiled in the call
    assert {owned for owned, _ in seen} == {True}
    assert hasattr(torch.compiler, "_compile_session_context") <= min(flag for _, flag in seen)
