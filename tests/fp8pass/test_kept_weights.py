"""FP8 copies of weights that are kept between calls: equal to what a cast in each call gives, made as seldom as possible, never
out of date.

Oracles: the same model with weight_copies="save", which casts every weight in every call; a fresh compilation after a change.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.weights import cache
from tests.support.cases import rest
from tests.support.copies import CastNode
from tests.support.models import BrokenLayers, LlamaBlock, mlp
from tests.support.moe import MoE

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def launches(monkeypatch):
    """The number of weights that each launch outside of the graphs has quantized."""
    found = []

    def recording(kind, weights, scale):
        found.append(len(weights))
        return quantize(kind, weights, scale)

    quantize = cache.quantize
    monkeypatch.setattr(cache, "quantize", recording)
    return found


def compile_model(model, recipe="current", **options):
    torch._dynamo.reset()
    return fp8_compile(model, recipe, backend="aot_eager", select="all", **options)


def train(build, recipe, copies, *, num_steps=2, microbatches=2, checkpoints=False, boundary=False, x=X[0], **options):
    """Outputs, gradients and histories of some steps; one optimizer step for several microbatches."""
    torch.manual_seed(0)
    model = build()
    compiled = compile_model(model, recipe, weight_copies=copies, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(num_steps):
        for i in range(microbatches):
            batch = (x + i).to(next(model.parameters()).dtype).requires_grad_()
            out = checkpoint(compiled, batch, use_reentrant=False) if checkpoints else compiled(batch)
            if boundary:
                state(compiled).step()
            out.float().square().mean().backward()
            found += [out.detach(), batch.grad]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, state(compiled).state_dict(), compiled


def same(left, right):
    assert len(left) == len(right) > 0
    assert [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if not torch.equal(a, b)] == []


def same_training(build, recipe, **options):
    kept, histories, compiled = train(build, recipe, "cache", **options)
    uncached, expected, _ = train(build, recipe, "save", **options)
    same(kept, uncached)
    assert list(histories) == list(expected)
    assert [key for key in expected if not torch.equal(histories[key], expected[key])] == []
    return compiled


def casts_of_weights(compiled):
    """Matrices of the shapes of weights that the graphs still cast."""
    weights = {tuple(w.shape) for g in inspect(compiled).graphs for w in g.kept}
    read = [CastNode.read(n) for g in inspect(compiled).graphs for n in g.after.graph.nodes]
    return [m.name for c in read if c is not None for m in c.matrices if tuple(m.meta["val"].shape) in weights]


# -- training


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise_with_gw_hp", *rest(["delayed", "current", "rowwise", "mxfp8"])])
def test_training_is_equal_and_casts_each_weight_once_per_optimizer_step(recipe, launches):
    compiled = same_training(lambda: mlp(64, 96, 64), recipe, step="manual", microbatches=3)
    kinds = 2 if recipe == "rowwise_with_gw_hp" else 1
    assert launches == [2] * kinds * 2, "two weights, one launch per kind and step"
    assert casts_of_weights(compiled) == []
    assert all(w.kept and w.reason is None for g in inspect(compiled).graphs for w in g.kept)


@pytest.mark.parametrize(
    ("recipe", "checkpoints"),
    [
        *(("delayed", False), ("rowwise", False), ("delayed", True), ("mxfp8", True)),
        *rest((recipe, True) for recipe in RECIPES if recipe not in ("delayed", "mxfp8")),
    ],
)
def test_a_boundary_between_forward_and_backward(recipe, checkpoints):
    same_training(mlp, recipe, step="manual", boundary=True, checkpoints=checkpoints)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_run_behind_the_boundary_leaves_the_recomputation_its_copies(recipe):
    """A forward of the next step makes the copies anew before a checkpointed one of the step before is run again."""
    found = []
    for copies in ("cache", "save"):
        torch.manual_seed(0)
        model = mlp(64, 96, 64)
        compiled = compile_model(model, recipe, weight_copies=copies, step="manual")
        for i in range(3):
            compiled(X[i]).square().mean().backward()
            state(compiled).step()
        with torch.no_grad():
            model[0].weight.mul_(3)  # by the scale of the step before they saturate
        model.zero_grad()
        first = checkpoint(compiled, X[0].clone().requires_grad_(), use_reentrant=False)
        state(compiled).step()
        second = compiled(X[1])
        first.square().mean().backward()
        second.square().mean().backward()
        found.append([first.detach(), second.detach(), *(p.grad for p in model.parameters())])
    same(*found)


@pytest.mark.parametrize("initial", ["current", "one"])
def test_a_step_for_each_microbatch(initial, launches):
    """After a boundary that leaves a weight and its scale as they were, copies are kept."""
    recipe = DelayedScaling(initial_scale=initial, amax_history_len=2)
    same_training(mlp, recipe, microbatches=3, num_steps=1)
    assert launches == ([2] if initial == "current" else [2, 2]), "the scale 1, then that of the amax"


@pytest.mark.parametrize("recipe", ["current", "rowwise", *rest(["delayed", "blockwise", "mxfp8"])])
def test_experts(recipe, launches):
    same_training(lambda: MoE().bfloat16(), recipe, x=torch.randn(40, 64, generator=torch.Generator().manual_seed(1)))
    if recipe != "delayed":  # its scales change with the microbatches' steps
        assert sum(launches) == 2 * 3, "the router's and two stacks, in two steps"


def test_odd_sizes_and_both_orientations():
    same_training(lambda: nn.Sequential(nn.Linear(50, 33), nn.Linear(33, 50)), "delayed", x=torch.randn(7, 50))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", *rest(["current", "blockwise", "rowwise"])])
def test_instances_that_share_a_graph(recipe, launches):
    compiled = same_training(lambda: BrokenLayers(3), recipe, microbatches=2)
    assert sorted(len(g.kept) for g in inspect(compiled).graphs if g.gemms) == [3, 3], "each serves three layers"
    assert launches[-1] == 6 or recipe == "delayed", "the second step makes the copies of all instances in one launch"


# -- what changes a weight


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def test_never_out_of_date_within_one_storage():
    """Another part of the same storage is other values, which no version tells of."""
    model, parts = mlp(64, 96, 64), torch.randn(2, 96, 64)
    model[0].weight.data = parts[0]
    compiled, plain = compile_model(model, weight_copies="cache"), compile_model(model, weight_copies="save")
    with torch.no_grad():
        for part in parts:
            model[0].weight.data = part
            assert torch.equal(compiled(X[0]), plain(X[0]))


def test_a_frozen_weight_is_frozen_until_it_trains():
    """requires_grad_ back and forth, with changes in between: gradients reach it where they do under torch.compile alone, whose
    version 2.11 does not see the flip."""
    model = mlp(64, 96, 64)
    compiled, plain = compile_model(model, weight_copies="cache"), compile_model(model, weight_copies="save")
    without_us = torch.compile(model, backend="aot_eager")
    for trains in (False, True, False, True):
        model[0].weight.requires_grad_(trains)
        found = []
        for run in (compiled, plain):
            model.zero_grad()
            out = run(X[0])
            out.sum().backward()
            found.append([out.detach(), model[2].weight.grad.clone()])
        same(*found)
        has_gradient = model[0].weight.grad is not None
        model.zero_grad()
        without_us(X[0]).sum().backward()
        assert has_gradient == (model[0].weight.grad is not None)
        assert has_gradient == trains or (torch.__version__ < (2, 13) and not has_gradient)
        in_place(model)


def test_a_backward_reads_the_copy_of_its_own_forward():
    model = mlp(64, 96, 64)
    found = []
    for copies in ("cache", "save"):
        own = copy.deepcopy(model)
        compiled = compile_model(own, weight_copies=copies)
        x = X[0].clone().requires_grad_()
        first = compiled(x)
        if copies == "cache":
            in_place(own)
            compiled(X[1])
        first.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


# -- evaluation


@pytest.mark.parametrize("recipe", ["current", "rowwise_with_gw_hp", *rest(["delayed", "blockwise", "rowwise", "mxfp8"])])
def test_evaluation_reads_no_weight_in_high_precision(recipe, launches):
    model = LlamaBlock(64, 128, 2)
    compiled = compile_model(model, recipe, weight_copies="cache")
    with torch.inference_mode():
        first, second = compiled(X), compiled(X)
        assert torch.equal(first, second)
    assert sum(launches) == 7
    (graph,) = inspect(compiled).graphs
    used = [n for n in graph.after.graph.find_nodes(op="placeholder") if n.users and n.meta["val"].dim() == 2]
    assert {n.meta["val"].dtype.itemsize for n in used if n.meta["val"].numel() >= 64 * 64} == {1}
    assert sum(w.bytes for w in graph.kept) == sum(p.numel() for p in model.parameters() if p.dim() == 2)
    expected = compile_model(model, recipe, weight_copies="save")
    with torch.no_grad():
        assert torch.equal(first, expected(X))


@pytest.mark.parametrize("copies", ["auto", "cache"])
def test_evaluation_between_steps_equals_training_with_the_same_scales(copies):
    model = mlp(64, 96, 64)
    compiled = compile_model(model, "delayed", weight_copies=copies, step="manual")
    for step in range(3):
        trained = compiled(X)
        with torch.no_grad():
            assert step == 0 or torch.equal(compiled(X), trained), "the first step's scales are those of its own tensors"
        trained.sum().backward()
        in_place(model)
        state(compiled).step()


def test_training_takes_the_memory_of_evaluation_back():
    """Copies that the training graph does not read are given up."""
    model = mlp(64, 96, 64)
    compiled = compile_model(model, weight_copies="cache")
    kept = compiled._fp8pass_session.weights.cache._weights
    with torch.no_grad():
        compiled(X)
    assert [w.made is not None for w in kept.values()] == [True, True]
    session = compiled._fp8pass_session
    outer = session.begin_forward(())
    assert [w.made for w in kept.values()] == [None, None]
    session.end_forward(outer)


def test_copies_go_with_their_model():
    model = mlp(64, 96, 64).requires_grad_(False)
    compiled = compile_model(model, weight_copies="cache")
    compiled(X)
    kept = compiled._fp8pass_session.weights.cache._weights
    assert len(kept) == 2
    model[0].weight = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    compiled(X)
    assert len(kept) == 2, "those of the Parameter that is gone are gone"


# -- frozen weights


def test_frozen_weights_are_quantized_once(launches):
    model = mlp(64, 96, 64)
    model[0].requires_grad_(False)
    found = []
    for copies in ("cache", "save"):
        own = copy.deepcopy(model)
        compiled = compile_model(own, "delayed", weight_copies=copies)
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1)
        results = []
        for i in range(3):
            out = compiled(X[i])
            out.square().mean().backward()
            optimizer.step()
            results += [out.detach(), own[2].weight.detach().clone()]
        found.append(results)
    same(*found)
    assert sorted(launches) == [1, 1, 2], "three steps, and the scale of a weight that stays does, too"


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_frozen_weights_that_were_only_evaluated_are_kept_in_the_orientation_that_training_needs(recipe):
    model = mlp(64, 96, 64).requires_grad_(False)
    found = []
    for copies in ("cache", "save"):
        compiled, x = compile_model(model, recipe, weight_copies=copies), X[0].clone().requires_grad_()
        with torch.no_grad():
            before = compiled(x)
        compiled(x).square().mean().backward()
        found.append([before, x.grad])
    same(*found)


def test_nothing_dequantized_and_no_weight_is_saved_for_backward():
    model = mlp(64, 96, 64).requires_grad_(False)
    compiled = compile_model(model, weight_copies="cache")
    compiled(X.clone().requires_grad_()).sum().backward()
    (graph,) = inspect(compiled).graphs
    weights = {(96, 64), (64, 96)}
    used = [n for n in graph.backward.graph.find_nodes(op="placeholder") if n.users and tuple(n.meta["val"].shape) in weights]
    assert {n.meta["val"].dtype for n in used} == {torch.float8_e4m3fn}
    assert len(used) == 2


# -- what cannot be kept


def test_fsdp_frees_parameters_between_uses():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = BrokenLayers(1)
        plain = compile_model(copy.deepcopy(model), weight_copies="save")
        fully_shard(model.layers[0])
        compiled = fp8_compile(model, "current", backend="aot_eager", select="all", weight_copies="cache")
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(X), plain(X))
        report = inspect(compiled)
        weights = [w for g in report.graphs for w in g.kept]
        assert weights
        assert {w.reason for w in weights} == {"sharded: FSDP gathers the Parameter before each use and frees it afterwards"}
        assert re.search(r"2 weights are quantized at each call: sharded: FSDP", str(report))
    finally:
        torch.distributed.destroy_process_group()


def test_derived_weights_and_inference_tensors_have_their_reasons():
    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ (self.weight + 1) @ self.other

    with torch.inference_mode():
        untracked = Derived()
    for model, reasons in (
        (Derived(), [None, "derived: add computes it from Parameters in each call"]),
        (untracked, ["derived: add", "untracked: made in torch.inference_mode(), so its changes are not counted"]),
    ):
        compiled = compile_model(model, weight_copies="cache")
        with torch.inference_mode():
            compiled(X)
        found = [w.reason for g in inspect(compiled).graphs for w in g.kept]
        for reason in reasons:
            assert any(f is None if reason is None else (f or "").startswith(reason) for f in found), (found, reason)
        assert "quantized at each call: derived: add" in str(inspect(compiled))


@pytest.mark.parametrize("copies", ["auto", "save", "recompute"])
def test_the_other_choices_keep_nothing(copies, launches):
    compiled = compile_model(mlp(64, 96, 64).requires_grad_(False), weight_copies=copies)
    compiled(X)
    assert launches == []
    assert inspect(compiled).graphs[0].kept == []


def test_inspect_counts_the_copies():
    compiled = compile_model(mlp(64, 96, 64), weight_copies="cache")
    with torch.no_grad():
        compiled(X)
    report = inspect(compiled)
    assert "2 weights are quantized when changed, not at each call: 12,288 bytes of FP8 copies are kept." in str(report)
    first, _ = report.to_dict()["graphs"][0]["kept"]
    assert first == {"module": "0", "shape": (96, 64), "kept": True, "bytes": 6144, "reason": None}
    assert [n for n in report.graphs[0].state_inputs if "weight" in n][:2] == ["fp8_weight_0_data", "fp8_weight_0_scale_inv"]


def test_trained_copies_are_no_static_inputs():
    """CUDA graphs copy them: their addresses change with every optimizer step. Those of frozen weights stay."""
    from fp8pass.runtime import dynamo_graphs

    found = []
    original = dynamo_graphs._add_placeholder

    def recording(graph, after, given, example):
        node = original(graph, after, given, example)
        if given.name.startswith("fp8_weight"):
            found.append(("tensor_dict" in node.meta, given.is_static))
        return node

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo_graphs, "_add_placeholder", recording)
        model = mlp(64, 96, 64)
        model[0].requires_grad_(False)
        compile_model(model, weight_copies="cache")(X)
    assert set(found) == {(True, True), (False, False)}
