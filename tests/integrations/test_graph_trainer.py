"""GraphTrainer: its own trainer, tracer and passes on a CPU, where it is installed, and the order of passes where it is not."""

import functools
import importlib
import types
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from benchmarks.cross_codegen import _as_on_gpu, _empty_like, _runs_kernels
from benchmarks.variants import recording
from fp8pass import fp8_compile, inspect, rewrite_graph
from fp8pass.errors import NotCompiledError, OptionError, RecipeError
from fp8pass.integrations import graph_trainer as integration
from fp8pass.integrations.graph_trainer import (
    fp8_run,
    pipeline,
    register_fp8_pipeline,
    save_fp8_gemms_pass,
    share_launches_pass,
    with_rewrite,
)
from fp8pass.options import CompileOptions
from lowering import hardware

PACKAGE = "torchtitan.experiments.graph_trainer"
#: What needs a GPU's driver, and a pass that takes the attention of CPUs for an operation that draws random numbers.
NOT_ON_CPUS = ["cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass", "selective_activation_remat_pass"]


# -- the order of passes


def named(name):
    def graph_pass(gm, example_inputs=None):
        return gm

    graph_pass.__name__ = name
    return graph_pass


def rewrite(gm, example_inputs=None):
    return gm


last = named("last")


def order(*names):
    passes = [functools.partial(named(name)) for name in names]
    found = with_rewrite(passes, functools.partial(rewrite), last)
    return [(p.func if isinstance(p, functools.partial) else p).__name__ for p in found]


def test_the_rewrite_comes_after_the_clean_up_and_before_the_memory_policy():
    clean_up = ["eliminate_dead_code_pass", "canonicalize_graph_pass", "deduplicate_fsdp_unshard_chains_pass"]
    rest = ["selective_activation_remat_pass", "regional_inductor_pass"]
    policy = ["tag_with_memory_policy_pass", "save_fp8_gemms_pass"]
    ours = [rest[0], "share_launches_pass", rest[1]]
    assert order(*clean_up, policy[0], *rest) == [*clean_up, "rewrite", *policy, *ours, "last"]
    assert order("canonicalize_graph_pass", *rest) == ["canonicalize_graph_pass", "rewrite", *ours, "last"]
    assert order(*rest) == ["rewrite", *ours, "last"]
    assert order("full_inductor_compilation_pass") == ["rewrite", "prepared_inductor_pass", "last"]


def test_full_inductor_prepares_its_graph_behind_the_pass_that_is_configured():
    def theirs(graph):
        called.append("theirs")

    def full_inductor_compilation_pass(gm, example_inputs=None):
        inductor_config.post_grad_custom_pre_pass(gm.graph)
        keys.append(inductor_config.post_grad_custom_pre_pass.uuid())
        return gm

    called, keys = [], []
    (_, full, _) = with_rewrite([full_inductor_compilation_pass], rewrite, last)
    graph = fx.symbolic_trace(nn.Sigmoid())
    with mock.patch.object(integration, "prepare", side_effect=lambda graph: called.append("ours")):
        assert full(graph) is graph
        for given in (theirs, [theirs, theirs]):
            with inductor_config.patch(post_grad_custom_pre_pass=given):
                assert full(graph) is graph
                assert inductor_config.post_grad_custom_pre_pass is given
    assert called == ["ours", "theirs", "ours", "theirs", "theirs", "ours"]
    assert keys[0] is not None
    assert keys[1:] == [None, None], "theirs has no key, so nothing is cached"


def test_options_are_checked_before_anything_is_registered():
    with pytest.raises(RecipeError, match="Did you mean 'delayed'"):
        register_fp8_pipeline(recipe="delaid")
    with pytest.raises(OptionError, match="the option 'mode' is unknown here"):
        register_fp8_pipeline(mode="max-autotune")
    with pytest.raises(NotCompiledError, match=r"pass --compile\.pass_pipeline fp8"):
        fp8_run(nn.Linear(1, 1))


def test_a_trainer_that_would_run_no_pipeline_is_refused():
    def hook(pp_enabled=False, **given):
        options = {"enable": True, "mode": "aot_fx_trace", "enable_passes": True} | given
        trainer = type("Trainer", (), {})()
        trainer.parallel_dims = types.SimpleNamespace(pp_enabled=pp_enabled)
        trainer.config = types.SimpleNamespace(compile=types.SimpleNamespace(**options))
        trainer._traced_step = object()
        before_step, _ = pipeline(CompileOptions())
        before_step(trainer)

    with pytest.raises(OptionError, match="pipeline parallelism runs no pass pipeline"):
        hook(pp_enabled=True)
    with pytest.raises(OptionError, match="mode='jit' and enable_passes=True no pass pipeline runs"):
        hook(mode="jit")
    with pytest.raises(OptionError, match="has traced its step already"):
        hook()


# -- the real one


@pytest.fixture(scope="module")
def graph_trainer():
    pytest.importorskip("torchtitan", reason="its GraphTrainer is tested (pip install --no-deps torchtitan==0.3.0)")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return importlib.import_module(f"{PACKAGE}.trainer").GraphTrainer


def built(name, flavor="debugmodel", layers=1):
    """A debug model of a few layers with SDPA, which CPUs have, as its trainer would prepare it."""
    spec = importlib.import_module(f"{PACKAGE}.{name}").model_registry(flavor, attn_backend="sdpa")
    spec.model.layers = spec.model.layers[:layers]
    if getattr(spec.model, "enable_weight_tying", False):  # GraphTrainer counts the gradient of a tied weight twice
        spec.model.enable_weight_tying = False
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    importlib.import_module(f"{PACKAGE}.common_utils").annotate_module_fqns(model)
    return spec.model, model


def trainer_of(graph_trainer, config, model, pipeline, disabled=NOT_ON_CPUS, **options):
    utilities = importlib.import_module(f"{PACKAGE}.tests._trainer_test_utils")
    trainer = utilities.build_minimal_trainer(model, config, graph_trainer, compile_disable_passes=disabled, **options)
    trainer._traced_step, trainer.device = None, torch.device("cpu")
    trainer.config.compile.pass_pipeline = pipeline
    return trainer


def batch(step, vocabulary):
    tokens = torch.randint(0, vocabulary, (2, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step_of(trainer, model, pipeline, step):
    """One GraphTrainer.train_step: the hook, then forward and backward."""
    registry = importlib.import_module(f"{PACKAGE}.registry")
    registry.PRE_TRAIN_STEP_HOOKS[pipeline](trainer)
    tokens, labels = batch(step, model.tok_embeddings.weight.shape[0])
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return trainer._make_fx_forward_backward_step(model, tokens, labels, torch.tensor(32.0), parameters, {})


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a mixture of experts on a busy machine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize(
    ("name", "flavor", "layers"),
    [("llama3", "debugmodel", 1), ("qwen3", "debugmodel", 1), ("qwen3", "debugmodel_moe", 1), ("deepseek_v3", "debugmodel", 2)],
)
def test_a_model_of_theirs_trains_as_with_fp8_compile(graph_trainer, recipe, name, flavor, layers):
    register_fp8_pipeline("fp8_test", recipe)
    config, model = built(name, flavor, layers)
    keys = list(model.state_dict())
    trainer = trainer_of(graph_trainer, config, model, "fp8_test")
    _, other = built(name, flavor, layers)
    compiled = fp8_compile(other, recipe, backend="aot_eager")
    loss_fn = importlib.import_module(f"{PACKAGE}.common_utils").compute_annotated_loss
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for step in range(20):
        found = step_of(trainer, model, "fp8_test", step)
        tokens, labels = batch(step, config.vocab_size)
        expected = loss_fn(trainer.loss_fn, compiled(tokens), labels, {"global_valid_tokens": torch.tensor(32.0)})
        expected.backward()
        assert found.equal(expected.detach())
        gradients = [(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
        assert all(p is q is None or p.equal(q) for p, q in gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(model.state_dict()) == keys
    run = fp8_run(trainer)
    table = run.rewritten.inspect()
    num_quantized = sum(g.quantized for g in table.gemms)
    assert num_quantized == sum(g.quantized for g in inspect(compiled).gemms) >= 15
    has_experts = "moe" in flavor or name == "deepseek_v3"
    assert any(g.quantized and "experts" in g.module for g in table.gemms) == has_experts
    if recipe == "delayed":
        assert not run.rewritten.is_first_step
        assert len(run.state.state_dict()) > 0
        saved = [n for n in run.rewritten.graph.graph.nodes if "scaled_mm" in str(n.target)]
        saved += [n for n in run.rewritten.graph.graph.nodes if "scaled_grouped_mm" in str(n.target)]
        assert len(saved) == num_quantized


# -- our passes


def traced_step(size=32):
    """Forward and backward of two layers, and their inputs."""

    def step(w, v, x):
        loss = (torch.nn.functional.silu(x @ w.t()) @ v.t()).square().mean()
        return [loss, *torch.autograd.grad(loss, [w, v])]

    torch.manual_seed(0)
    inputs = [torch.randn(size, size, requires_grad=i < 2) for i in range(3)]
    return make_fx(step, tracing_mode="fake")(*inputs), inputs


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
def test_shared_launches_change_no_result(recipe):
    graph, inputs = traced_step()
    usual, shared = (rewrite_graph(graph, recipe, inputs=["w", "v"]) for _ in range(2))
    shared.graph = share_launches_pass(shared.graph)
    for _ in range(3):
        assert all(a.equal(b) for a, b in zip(usual(*inputs), shared(*inputs), strict=True))
        found, expected = shared.state.state_dict(), usual.state.state_dict()
        assert str(found) == str(expected)
        usual.state.step(), shared.state.step()


def launched_by(graph):
    """Our kernels, in order, by operations that run as they are; a GEMM launches nothing here."""
    launches = []
    for node in graph.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name.startswith("lowering::") and _runs_kernels(name):
            fakes = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            args, kwargs = tree_map(_empty_like, fakes)
            with _as_on_gpu(), recording(launches):
                node.target(*args, **kwargs)
    return Counter(launch.kernel.__name__ for launch in launches)


@pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton's kernels")
def test_scales_and_amaxes_take_no_launch_of_their_own():
    graph, _ = traced_step(512)
    usual = rewrite_graph(graph, "delayed", inputs=["w", "v"]).graph
    assert launched_by(usual)["finish_amax_kernel"] >= 4
    shared = launched_by(share_launches_pass(usual))
    assert "finish_amax_kernel" not in shared
    assert 2 <= shared["multi_amax_kernel"] <= 4, "either side's record, of what is aligned and what is not"
    current = rewrite_graph(graph, "current", inputs=["w", "v"]).graph
    scales = torch.ops.lowering.scales_from_amax.default, "which is a launch of its own"
    assert any(n.target is scales[0] for n in current.graph.nodes), scales[1]
    assert not any(n.target is scales[0] for n in share_launches_pass(current).graph.nodes), scales[1]


def test_gemms_of_the_forward_are_saved():
    def step(w, x):
        loss = (x @ w.t()).square().mean()
        return [loss, *torch.autograd.grad(loss, [w])]

    graph = make_fx(step, tracing_mode="fake")(torch.randn(32, 32, requires_grad=True), torch.randn(32, 32))
    graph = save_fp8_gemms_pass(rewrite_graph(graph, "delayed", inputs=["w"]).graph)
    tagged = [str(n.target) for n in graph.graph.nodes if "recompute" in n.meta and "scaled_mm" in str(n.target)]
    assert tagged == ["lowering.scaled_mm.default"]
