"""GraphTrainer: its own trainer, tracer and passes on a CPU, where it is installed, and the order of passes where it is not."""

import functools
import importlib
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import fp8_compile, inspect, rewrite_graph
from fp8pass.errors import NotCompiledError, OptionError, RecipeError
from fp8pass.integrations import graph_trainer as integration
from fp8pass.integrations.graph_trainer import fp8_run, register_fp8_pipeline, share_launches_pass, with_rewrite
from fp8pass.options import CompileOptions

PACKAGE = "torchtitan.experiments.graph_trainer"
#: What needs a GPU's driver, and a pass that takes the attention of CPUs for an operation that draws random numbers.
NOT_ON_CPUS = ["cudagraph_pass", "joint_transformer_block_bucketing_reordering_pass", "selective_activation_remat_pass"]


# -- the order of passes


def named(name):
    def graph_pass(gm, example_inputs=None):
        return gm

    graph_pass.__name__ = name
    return graph_pass


def order(*names):
    found = with_rewrite([functools.partial(named(name)) for name in names], functools.partial(named("rewrite")), named("last"))
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
    def full_inductor_compilation_pass(gm, example_inputs=None):
        inductor_config.post_grad_custom_pre_pass(gm.graph)
        return gm

    called = []
    (_, full, _) = with_rewrite([full_inductor_compilation_pass], named("rewrite"), named("last"))
    graph = fx.symbolic_trace(nn.Sigmoid())
    configured = inductor_config.patch(post_grad_custom_pre_pass=lambda graph: called.append("theirs"))
    with mock.patch.object(integration, "prepare", side_effect=lambda graph: called.append("ours")), configured:
        assert full(graph) is graph
    assert called == ["theirs", "ours"]


def test_options_are_checked_before_anything_is_registered():
    with pytest.raises(RecipeError, match="Did you mean 'delayed'"):
        register_fp8_pipeline(recipe="delaid")
    with pytest.raises(OptionError, match="the option 'mode' is unknown here"):
        register_fp8_pipeline(mode="max-autotune")
    with pytest.raises(NotCompiledError, match=r"pass --compile\.pass_pipeline fp8"):
        fp8_run(nn.Linear(1, 1))


def test_a_trainer_that_would_run_no_pipeline_is_refused():
    before_step, _ = integration.pipeline(CompileOptions())
    for mode, has_pipelines, message in (
        ("aot_fx_trace", True, "pipeline parallelism runs no pass pipeline"),
        ("jit", False, "mode='jit' and enable_passes=True no pass pipeline runs"),
        ("aot_fx_trace", False, "has traced its step already"),
    ):
        trainer = mock.Mock(_traced_step=object())
        trainer.parallel_dims.pp_enabled = has_pipelines
        trainer.config.compile = mock.Mock(enable=True, mode=mode, enable_passes=True)
        with pytest.raises(OptionError, match=message):
            before_step(trainer)


# -- the real one


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "flavor"), [("delayed", "debugmodel"), ("blockwise", "debugmodel_moe")])
def test_a_model_of_theirs_trains_as_with_fp8_compile(recipe, flavor):
    """A layer of Qwen3 with SDPA, which CPUs have: GraphTrainer's hook, its tracer and its passes."""
    pytest.importorskip("torchtitan", reason="its GraphTrainer is tested (pip install --no-deps torchtitan==0.3.0)")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    utilities, common, registry, qwen3, theirs = (
        importlib.import_module(f"torchtitan.experiments.graph_trainer.{name}")
        for name in ("tests._trainer_test_utils", "common_utils", "registry", "qwen3", "trainer")
    )
    register_fp8_pipeline("fp8_test", recipe)
    config = qwen3.model_registry(flavor, attn_backend="sdpa").model
    config.layers = config.layers[:1]
    config.enable_weight_tying = False  # GraphTrainer counts the gradient of a tied weight twice
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(config.build())
        with torch.no_grad():
            models[-1].init_states(buffer_device=torch.device("cpu"))
        common.annotate_module_fqns(models[-1])
    model, other = models
    trainer = utilities.build_minimal_trainer(model, config, theirs.GraphTrainer, compile_disable_passes=NOT_ON_CPUS)
    trainer._traced_step, trainer.device = None, torch.device("cpu")
    trainer.config.compile.pass_pipeline = "fp8_test"
    compiled = fp8_compile(other, recipe, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    parameters, count = [p for p in model.parameters() if p.requires_grad], torch.tensor(32.0)
    for _ in range(5):
        tokens = torch.randint(0, config.vocab_size, (2, 17))
        x, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        registry.PRE_TRAIN_STEP_HOOKS["fp8_test"](trainer)
        found = trainer._make_fx_forward_backward_step(model, x, labels, count, parameters, {})
        expected = common.compute_annotated_loss(trainer.loss_fn, compiled(x), labels, {"global_valid_tokens": count})
        expected.backward()
        assert found.equal(expected.detach())
        gradients = [(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
        assert all(p is q is None or p.equal(q) for p, q in gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gemms = fp8_run(trainer).rewritten.inspect().gemms
    assert sum(g.quantized for g in gemms) == sum(g.quantized for g in inspect(compiled).gemms) >= 15
    assert any(g.quantized and "experts" in g.module for g in gemms) == ("moe" in flavor)
    assert fp8_run(trainer).rewritten.is_first_step is False


# -- our passes


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_shared_launches_change_no_result_and_gemms_of_the_forward_are_saved(recipe):
    def step(w, v, x):
        loss = (torch.nn.functional.silu(x @ w.t()) @ v.t()).square().mean()
        return [loss, *torch.autograd.grad(loss, [w, v])]

    inputs = [torch.randn(32, 32, requires_grad=i < 2) for i in range(3)]
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    usual, shared = (rewrite_graph(graph, recipe, inputs=["w", "v"]) for _ in range(2))
    shared.graph = integration.save_fp8_gemms_pass(share_launches_pass(shared.graph))
    for _ in range(3):
        assert all(a.equal(b) for a, b in zip(usual(*inputs), shared(*inputs), strict=True))
        assert str(shared.state.state_dict()) == str(usual.state.state_dict())
        usual.state.step(), shared.state.step()
    ops, before, after = torch.ops.lowering, *([n.target for n in each.graph.graph.nodes] for each in (usual, shared))
    assert ops.scales_from_amax.default not in after, "which is a launch of its own"
    assert (ops.multi_scales.default in after) == (ops.scales_from_amax.default in before) == (recipe == "current")
    records = shared.graph.graph.find_nodes(op="call_function", target=ops.record_amax.default)
    assert [n.kwargs.get("in_parts") for n in records] == [True] * len(records)
    assert bool(records) == (recipe == "delayed")
    saved = [str(n.target) for n in shared.graph.graph.nodes if "recompute" in n.meta and "scaled_mm" in str(n.target)]
    assert saved == ["lowering.scaled_mm.default"] * 2
