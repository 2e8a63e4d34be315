"""Compiled models over their life: many steps, moves, reloads, copies, threads, deletion."""

import copy
import cProfile
import dataclasses
import gc
import pickle
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8Warning, NotCompiledError, OptionError, UnsupportedCopyError, UnsupportedDeviceError
from tests.support.models import ResidualMlp, mlp
from tests.tolerances import LINEAR_CALLS

RECIPE = DelayedScaling(amax_history_len=4)


def make(recipe=RECIPE, **options):
    torch.manual_seed(0)
    model = mlp()
    return model, fp8_compile(model, recipe, backend="aot_eager", **options)


def step(compiled, x):
    out = compiled(x)
    out.square().sum().backward()
    return out.detach()


def test_fifty_steps_compile_once_and_keep_memory():
    model, compiled = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(count):
        for _ in range(count):
            optimizer.zero_grad()
            step(compiled, torch.randn(16, 64))
            optimizer.step()

    train(5)
    graphs = counters["stats"]["unique_graphs"]
    gc.collect()
    before = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    train(45)
    gc.collect()
    after = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(inspect(compiled).graphs) == 1
    assert after <= before


def test_the_model_itself_is_unchanged():
    model, compiled = make()
    keys = list(model.state_dict())
    step(compiled, torch.randn(16, 64))
    assert list(model.state_dict()) == keys
    assert type(model) is nn.Sequential
    assert list(compiled.parameters()) == list(model.parameters())
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)


def test_load_state_dict_and_replaced_parameters_keep_names():
    model, compiled = make()
    step(compiled, torch.randn(16, 64))
    names = state(compiled).tensors
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    step(compiled, torch.randn(16, 64))
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight) * 3)
    step(compiled, torch.randn(16, 64))
    assert state(compiled).tensors == names
    state(compiled).step()
    assert state(compiled).amax_history("0:weight")[-1] == model[0].weight.abs().max()


def test_dynamo_reset_keeps_the_state():
    _, compiled = make()
    x = torch.randn(16, 64)
    step(compiled, x)
    names = state(compiled).tensors
    torch._dynamo.reset()
    step(compiled, x)
    view = state(compiled)
    assert view.tensors == names
    assert view.amax_history("0:input").tolist() == pytest.approx([float(x.abs().max()), 0, 0, float(x.abs().max())])


def test_two_recipes_side_by_side_and_one_model_compiled_twice():
    model, delayed = make()
    current = fp8_compile(model, Float8CurrentScaling(), backend="aot_eager")
    again = fp8_compile(model, RECIPE, backend="aot_eager")
    x = torch.randn(16, 64)
    for _ in range(2):
        for compiled in (delayed, current, again):
            step(compiled, x)
    assert {g.recipe for g in inspect(delayed).gemms} == {"delayed"}
    assert {g.recipe for g in inspect(current).gemms} == {"current"}
    assert state(current).tensors == []
    step(again, x * 100)
    state(again).step()
    assert state(again).scale("0:input") < state(delayed).scale("0:input")


def test_copies_and_pickles_are_refused_with_the_way_to_do_it():
    model, compiled = make()
    for way in (copy.deepcopy, copy.copy):
        with pytest.raises(UnsupportedCopyError, match="deepcopy the model itself"):
            way(compiled)
    with pytest.raises(UnsupportedCopyError, match="state_dict"):
        pickle.dumps(compiled)
    twin = fp8_compile(copy.deepcopy(model), RECIPE, backend="aot_eager")
    x = torch.randn(16, 64)
    step(compiled, x)
    state(twin).load_state_dict(state(compiled).state_dict())
    assert step(twin, x).equal(step(compiled, x))


def test_deleted_models_return_their_memory():
    model, compiled = make()
    step(compiled, torch.randn(16, 64))
    inspect(compiled)
    parameter = weakref.ref(model[0].weight)
    session = weakref.ref(compiled.__dict__["_fp8pass_session"])
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None
    assert session() is None


def test_an_error_in_the_model_leaves_the_session_usable():
    compiled = fp8_compile(nn.Sequential(nn.Linear(32, 32)), RECIPE, backend="aot_eager")
    step(compiled, torch.randn(16, 32))
    with pytest.raises(RuntimeError, match="size"):
        compiled(torch.randn(16, 33))
    x = torch.randn(16, 32)
    step(compiled, x)
    state(compiled).step()
    assert state(compiled).amax_history("0:input")[-1] == x.abs().max()


def test_a_model_without_any_matmul():
    compiled = fp8_compile(nn.LayerNorm(8), RECIPE, backend="aot_eager")
    x = torch.randn(4, 8)
    assert compiled(x).equal(nn.LayerNorm(8)(x))
    assert inspect(compiled).gemms == []
    assert "No compiled graph has a matmul" in str(inspect(compiled))
    assert state(compiled).tensors == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "inducter"}, "Did you mean 'inductor'"),
        ({"step": "automatic"}, "Did you mean 'auto'"),
        ({"weight_copies": "saved"}, r"weight_copies is 'saved'. Did you mean 'save'\?"),
        ({"weight_copies": "remade"}, r"Did you mean 'recompute'\? Use one of 'auto', 'save', 'recompute', 'cache'"),
        ({"weight_copies": 1}, "weight_copies is 1. Use one of"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "generates no code"),
        ({"options": {"max_autotun": True}}, "max_autotun"),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, "takes one of the two"),
        ({"options": "max_autotune"}, "options is 'max_autotune', a str; use a dict"),
        ({"dynamic": "maybe"}, "dynamic is 'maybe'; use True, False or None"),
        ({"fullgraph": "yes"}, "fullgraph is 'yes'; use True or False"),
        ({"fullgraph": None}, "fullgraph is None; use True or False"),
        ({"in_place": 1}, "in_place is 1; use True or False"),
        ({"amax_reduction_group": "world"}, "amax_reduction_group is 'world', a str; pass a ProcessGroup"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        fp8_compile(mlp(), RECIPE, **options)


def test_only_compiled_models_have_inspection_and_state():
    for look in (inspect, state):
        with pytest.raises(NotCompiledError, match="did not come from fp8_compile"):
            look(mlp())
    with pytest.raises(OptionError, match="compiled already"):
        fp8_compile(make()[1], RECIPE)
    with pytest.raises(OptionError, match=r"pass an nn\.Module"):
        fp8_compile(3, RECIPE)
    with pytest.raises(OptionError, match=r"the class Linear; pass an instance: Linear\(...\)"):
        fp8_compile(nn.Linear, RECIPE)


def test_dynamic_fullgraph_mode_and_options_reach_torch_compile(monkeypatch):
    seen = {}
    real = torch.compile

    def spy(model, **kwargs):
        seen.update(kwargs)
        return real(model, **kwargs)

    monkeypatch.setattr(torch, "compile", spy)
    fp8_compile(mlp(), RECIPE, dynamic=True, fullgraph=True, mode="max-autotune-no-cudagraphs")
    assert seen["dynamic"] is True
    assert seen["fullgraph"] is True
    assert seen["backend"].options.patches["max_autotune"] is True
    fp8_compile(mlp(), RECIPE, options={"epilogue_fusion": False})
    assert seen["backend"].options.patches == {"epilogue_fusion": False}


def test_state_inputs_are_static_for_cuda_graphs():
    from fp8pass.runtime import frame

    marks = []
    real = frame.with_extra_inputs

    def spy(*args):
        gm, examples = real(*args)
        marks.extend(n.meta["tensor_dict"] for n in gm.graph.find_nodes(op="placeholder")[-4:])
        return gm, examples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "with_extra_inputs", spy)
        _, compiled = make()
        step(compiled, torch.randn(16, 64))
    assert marks == [{"_dynamo_static_input_type": "unguarded"}] * 8, "the graph, and its variant for the first step"
    session = compiled.__dict__["_fp8pass_session"]
    (store,) = session.stores
    addresses = (store.scale.data_ptr(), store.amax_history.data_ptr())
    for _ in range(3):
        step(compiled, torch.randn(16, 64))
    assert addresses == (store.scale.data_ptr(), store.amax_history.data_ptr())


@pytest.mark.gpu
def test_to_another_device_and_back():
    model, compiled = make()
    x = torch.randn(16, 64)
    step(compiled, x)
    for device in ("cuda", "cpu"):
        model.to(device)
        step(compiled, x.to(device))
        state(compiled).step()
        view = state(compiled)
        assert len(view.tensors) == 6
        assert view.scale("0:input").device.type == device
    assert view.amax_history("0:input")[-3:].tolist() == [x.abs().max()] * 3


@pytest.mark.slow
def test_the_pass_is_linear_in_the_number_of_layers(monkeypatch):
    """Counted in Python calls of the pass, which unlike seconds are the same on every machine."""
    from fp8pass.runtime import backend

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
        compiled = fp8_compile(nn.Sequential(*(ResidualMlp() for _ in range(num_layers))), RECIPE, backend="aot_eager")
        step(compiled, torch.randn(16, 64))
        assert len(inspect(compiled).gemms) == 6 * num_layers - 1
        totals.append(sum(num_calls))  # the graph, and the variant that the first step runs
    few, many = totals
    assert many <= LINEAR_CALLS * 4 * few


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_a_gpu_without_fp8_is_refused_and_the_emulation_is_named(capability, is_refused, monkeypatch):
    from fp8pass.runtime import backend

    check_device = backend.check_device
    monkeypatch.setattr(backend, "cuda_capability", lambda device: capability if device.type == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    check_device(torch.device("cpu"))
    if is_refused:
        with pytest.raises(
            UnsupportedDeviceError, match=rf"A100 has compute capability 8\.{capability[1]}.*8\.9.*emulate.*CPU"
        ):
            check_device(torch.device("cuda", 0))
    else:
        check_device(torch.device("cuda", 0))


def test_a_misspelt_rule_is_reported_with_the_nearest_module():
    _, compiled = make(rules={"O": None})
    step(compiled, torch.randn(16, 64))
    assert "The rule 'O' has matched no GEMM." in str(inspect(compiled))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.mlp = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.mlp(torch.tanh(self.attention(x)))

    compiled = fp8_compile(Named(), RECIPE, rules={"atention:output": None, "mlp": None}, backend="aot_eager")
    step(compiled, torch.randn(16, 64))
    assert "The rule 'atention:output' has matched no GEMM. Did you mean 'attention'?" in str(inspect(compiled))
    assert inspect(compiled).unmatched_rules == ["atention:output"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*": "current", "0": None}, "The rule '0' decides nothing: its GEMMs match '*' first."),
        ({"*:output": None, "*:grad_weight": None, "0": "current"}, "its GEMMs match '*:output', '*:grad_weight' first."),
        ({"0:grad_input": None}, "The rule '0:grad_input' has matched no GEMM. The module has none with the role grad_input."),
    ],
)
def test_a_rule_that_decides_nothing_is_reported_with_the_cause(rules, message):
    _, compiled = make(rules=rules)
    step(compiled, torch.randn(16, 64))
    assert message in str(inspect(compiled))
    assert inspect(compiled).unmatched_rules == [list(rules)[-1]]


def test_a_rule_for_a_layer_that_cannot_run_in_fp8_has_no_effect():
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.exact = nn.Linear(64, 64), nn.Linear(64, 64).double()

        def forward(self, x):
            return self.exact(self.up(x).double())

    compiled = fp8_compile(Exact(), RECIPE, rules={"exact": "current"}, backend="aot_eager")
    message = r"The rule 'exact' has no effect: exact runs in high precision under any rule \(dtype\)\."
    with pytest.warns(Fp8Warning, match=message):
        step(compiled, torch.randn(16, 64))
    assert inspect(compiled).unmatched_rules == ["exact"]


@pytest.mark.parametrize("role", ["", ":grad_weight"])
def test_a_rule_for_a_container_is_reported_with_the_glob_for_what_is_inside(role):
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 32))
    compiled = fp8_compile(model, "current", rules={f"0{role}": None}, backend="aot_eager")
    step(compiled, torch.randn(16, 32))
    assert f"The rule '0{role}' has matched no GEMM. It does not cover the modules inside; did you mean '0.*{role}'?" in str(
        inspect(compiled)
    )


@pytest.mark.parametrize(("mode", "num_resets"), [("reduce-overhead", 1), (None, 0)])
def test_a_reset_of_dynamo_forgets_recorded_cuda_graphs(mode, num_resets):
    compiled = fp8_compile(mlp(), "delayed", mode=mode)
    compiled(torch.randn(16, 64))
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

    _, compiled = make(Watching())
    step(compiled, torch.randn(16, 64))  # a graph, and the one of its first step, which is compiled in the call
    assert {owned for owned, _ in seen} == {True}
    assert hasattr(torch.compiler, "_compile_session_context") <= min(flag for _, flag in seen)
    assert len(inspect(compiled).graphs) == 1


@pytest.mark.parametrize("recipe", [RECIPE, "current"], ids=["delayed", "current"])
@pytest.mark.parametrize("in_place", [False, True])
def test_lazy_modules_that_the_first_call_materializes(recipe, in_place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(96), nn.ReLU(), nn.LazyLinear(32))
    compiled = fp8_compile(model, recipe, backend="aot_eager", in_place=in_place)
    step(compiled, torch.randn(16, 64))
    assert model[0].weight.grad.shape == (96, 64)
    assert {g.quantized for g in inspect(compiled).gemms} == {True}
