"""Compiled models over their life: many steps, moves, reloads, copies, threads, deletion."""

import concurrent.futures
import contextlib
import copy
import cProfile
import dataclasses
import gc
import pickle
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8Warning, NotCompiledError, OptionError, UnsupportedCopyError, UnsupportedDeviceError
from fp8pass.runtime import backend
from tests.support.models import Net, ResidualMlp, mlp
from tests.support.training import fp8, fp8_mlp, train
from tests.tolerances import LINEAR_CALLS

RECIPE = DelayedScaling(amax_history_len=4)


def x(columns=64):
    return torch.randn(16, columns)


def step(compiled, given):
    return train(compiled, given)[0]


def num_tensors():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_fifty_steps_compile_once_and_keep_memory():
    model, compiled = fp8_mlp(RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = []
    for count in (5, 45):
        for _ in range(count):
            optimizer.zero_grad()
            step(compiled, x())
            optimizer.step()
        found.append((counters["stats"]["unique_graphs"], num_tensors()))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= found[0][1]
    assert len(inspect(compiled).graphs) == 1


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_the_model_itself_is_unchanged_and_loaded_and_replaced_parameters_keep_names():
    model, compiled = fp8_mlp(RECIPE)
    keys = list(model.state_dict())
    step(compiled, x())
    assert list(model.state_dict()) == keys
    assert type(model) is nn.Sequential
    assert list(compiled.parameters()) == list(model.parameters())
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
    names = state(compiled).tensors
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    step(compiled, x())
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight) * 3)
    step(compiled, x())
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
        step(compiled, given)
        names = state(compiled).tensors
        with torch.no_grad():
            compiled(given)
        assert len(inspect(compiled).graphs) == 2, "one trains"
        torch._dynamo.reset()
        gc.collect()
        assert len(inspect(compiled).graphs) == 2, "what ran last can be inspected"
    assert state(compiled).tensors == names
    amax = float(given.abs().max())
    assert state(compiled).amax_history("0:input").tolist() == pytest.approx([0, 0, amax, amax])


def test_two_recipes_side_by_side_and_one_model_compiled_twice():
    model, delayed = fp8_mlp(RECIPE)
    current, again, given = fp8(model), fp8(model, RECIPE), x()
    for compiled in (delayed, current, again, delayed, current, again):
        step(compiled, given)
    assert [{g.recipe for g in inspect(compiled).gemms} for compiled in (delayed, current)] == [{"delayed"}, {"current"}]
    assert state(current).tensors == []
    step(again, given * 100)
    state(again).step()
    assert state(again).scale("0:input") < state(delayed).scale("0:input")


def test_copies_and_pickles_are_refused_with_the_way_to_do_it():
    model, compiled = fp8_mlp(RECIPE)
    for way, message in (
        (copy.deepcopy, "deepcopy the model itself"),
        (copy.copy, "deepcopy the"),
        (pickle.dumps, "state_dict"),
    ):
        with pytest.raises(UnsupportedCopyError, match=message):
            way(compiled)
    twin, given = fp8(copy.deepcopy(model), RECIPE), x()
    step(compiled, given)
    state(twin).load_state_dict(state(compiled).state_dict())
    assert step(twin, given).equal(step(compiled, given))


def test_deleted_models_and_replaced_parameters_leave_nothing_behind(collected):
    model, compiled = fp8_mlp("current")

    def num_containers():
        gc.collect()
        return sum(type(o) in (frozenset, dict, tuple, list) for o in gc.get_objects())

    found = []
    for count in (3, 30):
        for _ in range(count):
            model[0].weight = nn.Parameter(torch.randn(96, 64))
            step(compiled, x())
        found.append(num_containers())
    assert found[1] < found[0] + 50  # kinds of calls, up to a bound
    model, compiled = fp8_mlp(RECIPE)
    step(compiled, x())
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


@pytest.mark.gpu
def test_to_another_device_and_back():
    (model, compiled), given = fp8_mlp(RECIPE), x()
    step(compiled, given)
    view = state(compiled)
    for device in ("cuda", "cpu"):
        model.to(device)
        step(compiled, given.to(device))
        view.step()
        assert len(view.tensors) == 6
        assert view.scale("0:input").device.type == device
    assert view.amax_history("0:input")[-3:].tolist() == [given.abs().max()] * 3


@pytest.mark.slow
def test_the_pass_is_linear_in_the_number_of_layers(monkeypatch):
    """Counted in Python calls of the pass, which unlike seconds are the same on every machine."""
    original, num_calls, totals = backend.rewrite, [], []

    def counted(*args):
        profiler = cProfile.Profile()
        result = profiler.runcall(original, *args)
        num_calls.append(sum(entry.callcount for entry in profiler.getstats()))
        return result

    monkeypatch.setattr(backend, "rewrite", counted)
    for num_layers in (12, 48):
        torch._dynamo.reset()
        num_calls.clear()
        compiled = fp8(nn.Sequential(*(ResidualMlp() for _ in range(num_layers))), RECIPE)
        step(compiled, x())
        assert len(inspect(compiled).gemms) == 6 * num_layers - 1
        totals.append(sum(num_calls))  # the graph, and the variant that the first step runs
    few, many = totals
    assert many <= LINEAR_CALLS * 4 * few


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_a_gpu_without_fp8_is_refused_and_the_emulation_is_named(capability, is_refused, monkeypatch):
    check_device = backend.check_device
    monkeypatch.setattr(backend, "cuda_capability", lambda device: capability if device.type == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    check_device(torch.device("cpu"))
    message = rf"A100 has compute capability 8\.{capability[1]}.*8\.9.*emulate.*CPU"
    with pytest.raises(UnsupportedDeviceError, match=message) if is_refused else contextlib.nullcontext():
        check_device(torch.device("cuda", 0))


def named():
    return Net(
        lambda self, x: self.mlp(torch.tanh(self.attention(x))),
        attention=nn.Linear(64, 64),
        mlp=nn.Sequential(nn.Linear(64, 64), nn.GELU()),
        norm=nn.LayerNorm(64),  # these two are not called
        memory=nn.GRU(64, 64),
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"O": None}, "The rule 'O' has matched no GEMM."),
        ({"attention": "current", "atention:output": None}, "'atention:output' has matched no GEMM. Did you mean 'attention'?"),
        ({"*": "current", "mlp.0": None}, "The rule 'mlp.0' decides nothing: its GEMMs match '*' first."),
        ({"*:output": None, "*:grad_weight": None, "attention": "current"}, "GEMMs match '*:output', '*:grad_weight' first."),
        ({"attention:grad_input": None}, "has matched no GEMM. The module has none with the role grad_input."),
        ({"mlp": None}, "has matched no GEMM. It does not cover the modules inside; did you mean 'mlp.*'?"),
        ({"n*m": "current"}, "The rule 'n*m' has matched no GEMM. norm is a LayerNorm, which has none."),
        ({"me*": "current"}, "has matched no GEMM. memory is a GRU, which runs eagerly: torch._dynamo.config.allow_rnn = True"),
        ({"mlp:grad_weight": None}, "It does not cover the modules inside; did you mean 'mlp.*:grad_weight'?"),
    ],
)
def test_a_rule_that_decides_nothing_is_reported_with_the_cause(rules, message):
    compiled = fp8(named(), RECIPE, rules=rules)
    step(compiled, x())
    assert message in str(inspect(compiled))
    assert inspect(compiled).unmatched_rules == [list(rules)[-1]]


def test_a_rule_for_a_layer_that_cannot_run_in_fp8_has_no_effect():
    model = named()
    model.mlp.double()
    model.mlp.register_forward_pre_hook(lambda module, args: args[0].double())
    compiled = fp8(model, RECIPE, rules={"mlp.*": "current"})
    message = r"The rule 'mlp\.\*' has no effect: mlp\.0 runs in high precision under any rule \(dtype\)\."
    with pytest.warns(Fp8Warning, match=message):
        step(compiled, x())
    assert inspect(compiled).unmatched_rules == ["mlp.*"]


@pytest.mark.parametrize(("mode", "num_resets"), [("reduce-overhead", 1), (None, 0)])
def test_a_reset_of_dynamo_forgets_recorded_cuda_graphs(mode, num_resets):
    compiled = fp8_compile(mlp(), "delayed", mode=mode)
    compiled(x())
    with mock.patch("torch._inductor.cudagraph_trees.reset_cudagraph_trees") as reset:
        torch._dynamo.reset()
    assert reset.call_count == num_resets


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

    _, compiled = fp8_mlp(Watching())
    step(compiled, x())  # a graph, and the one of its first step, which is compiled in the call
    assert {owned for owned, _ in seen} == {True}
    assert hasattr(torch.compiler, "_compile_session_context") <= min(flag for _, flag in seen)
    assert len(inspect(compiled).graphs) == 1


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"),
    reason="in torch 2.11 a compiled model cannot be called in a thread while another thread traces one",
)
def test_threads_that_meet_in_the_first_evaluation():
    """One of them traces the model while the others are in calls that watch which modules run."""
    for steps in range(4):
        torch._dynamo.reset()
        _, compiled = fp8_mlp(RECIPE)
        for _ in range(steps):
            step(compiled, x())
        given, start = x(), threading.Barrier(4)

        @torch.no_grad()
        def evaluate(_, compiled=compiled, given=given, start=start):
            start.wait()
            return [compiled(given) for _ in range(8)]

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            outs = [out for found in threads.map(evaluate, range(4)) for out in found]
        assert all(out.equal(outs[0]) for out in outs)
        assert not inspect(compiled).ran_eagerly


@pytest.mark.parametrize("recipe", [RECIPE, "current"], ids=["delayed", "current"])
@pytest.mark.parametrize("in_place", [False, True])
def test_lazy_modules_that_the_first_call_materializes(recipe, in_place):
    model = nn.Sequential(nn.LazyLinear(96), nn.ReLU(), nn.LazyLinear(32))
    compiled = fp8(model, recipe, in_place=in_place)
    step(compiled, x())
    assert model[0].weight.grad.shape == (96, 64)
    assert {g.quantized for g in inspect(compiled).gemms} == {True}
