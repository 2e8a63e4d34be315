"""FP8 copies of weights that are kept between calls: equal to what a cast in each call gives, made as seldom as possible, never
out of date.

Oracles: the same model with weight_copies="save", which casts every weight in every call; a fresh compilation after a change.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, inspect, state
from fp8pass.runtime.wrap import session_of
from fp8pass.scales import exchanges
from fp8pass.weights import cache
from tests.support.cases import rest
from tests.support.copies import CastNode
from tests.support.models import BrokenLayers, LlamaBlock, Net, mlp
from tests.support.moe import MoE
from tests.support.training import fp8 as compile_model
from tests.support.training import gradients, same

X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def launches(monkeypatch):
    """The number of weights that each launch outside of the graphs has quantized."""
    found, quantize = [], cache.quantize
    monkeypatch.setattr(
        cache, "quantize", lambda kind, weights, scale: found.append(len(weights)) or quantize(kind, weights, scale)
    )
    return found


def make():
    return mlp(64, 96, 64)


def kept_of(compiled):
    """What is known of the weights of all graphs."""
    return [w for g in inspect(compiled).graphs for w in g.kept]


def train(build, recipe, copies, *, num_steps=2, microbatches=2, x=X[0], **options):
    """Outputs, gradients and histories of some steps, one optimizer step for several microbatches; and the compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    compiled = compile_model(model, recipe, weight_copies=copies, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(num_steps):
        for i in range(microbatches):
            batch = (x + i).to(next(model.parameters()).dtype).requires_grad_()
            out = compiled(batch)
            out.float().square().mean().backward()
            found += [out.detach(), batch.grad]
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [found, state(compiled).state_dict()], compiled


def same_with_a_cast_in_each_call(model, run):
    """What `run(model, copies)` finds, of copies of the model."""
    torch._dynamo.reset()
    assert same(*(run(copy.deepcopy(model), copies) for copies in ("cache", "save")))


# -- training


def half_frozen():
    model = make()
    model[0].requires_grad_(False)
    return model


def experts():
    return MoE().bfloat16()


def layers():
    return BrokenLayers(3)


def twice(launches):
    """Two weights, one launch per optimizer step."""
    return launches == [2, 2]


MANY = {"step": "manual", "microbatches": 3}
TOKENS = {"x": torch.randn(40, 64, generator=torch.Generator().manual_seed(1))}
EACH = {"microbatches": 3, "num_steps": 1}
FIRST, ONE = (DelayedScaling(amax_history_len=2, initial_scale=initial) for initial in ("current", "one"))
#: (model, recipe, options of `train`, what the numbers of weights of the launches are to be)
SITUATIONS = [
    (make, "blockwise", MANY, twice),
    (make, "rowwise_with_gw_hp", MANY, lambda launches: launches == [2] * 4),  # two kinds of copies
    *rest((make, recipe, MANY, twice) for recipe in ("delayed", "current", "rowwise", "mxfp8")),
    # After a boundary that leaves a weight and its scale as they were, copies are kept; the scale 1, then that of the amax.
    (mlp, FIRST, EACH, lambda launches: launches == [2]),
    (mlp, ONE, EACH, twice),
    # The router's and two stacks, in two steps. With delayed scaling, scales change with the microbatches' steps.
    *((experts, recipe, TOKENS, lambda launches: sum(launches) == 6) for recipe in ("current", "rowwise")),
    *rest((experts, recipe, TOKENS, lambda launches: sum(launches) == 6) for recipe in ("blockwise", "mxfp8")),
    *rest([(experts, "delayed", TOKENS, len)]),
    # The second step makes the copies of all instances in one launch.
    *((layers, recipe, {}, check) for recipe, check in (("delayed", len), ("mxfp8", lambda launches: launches[-1] == 6))),
    *rest((layers, recipe, {}, lambda launches: launches[-1] == 6) for recipe in ("current", "blockwise", "rowwise")),
    # The scale of a weight that stays does, too.
    (half_frozen, "delayed", {"num_steps": 3, "microbatches": 1}, lambda launches: sorted(launches) == [1, 1, 2]),
]


@pytest.mark.parametrize(("build", "recipe", "options", "check"), SITUATIONS)
def test_training_is_equal_and_weights_are_cast_as_seldom_as_possible(build, recipe, options, check, launches):
    (kept, compiled), (expected, _) = (train(build, recipe, copies, **options) for copies in ("cache", "save"))
    assert same(kept, expected)
    assert check(launches), launches
    if build is layers:
        assert sorted(len(g.kept) for g in inspect(compiled).graphs if g.gemms) == [3, 3], "each serves three layers"
    if build is make:
        assert all(w.kept and w.reason is None for w in kept_of(compiled))
        shapes = {tuple(w.shape) for w in kept_of(compiled)}
        casts = [CastNode.read(n) for g in inspect(compiled).graphs for n in g.after.graph.nodes]
        assert not any(tuple(m.meta["val"].shape) in shapes for c in casts if c is not None for m in c.matrices)


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_run_behind_the_boundary_leaves_the_recomputation_its_copies(recipe):
    """A forward of the next step makes the copies anew before a checkpointed one of the step before is run again."""

    def run(model, copies):
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
        return [first.detach(), second.detach(), gradients(model)]

    same_with_a_cast_in_each_call(make(), run)


class Waits(TorchDispatchMode):
    """Records waits of the host for a device: values that it reads, and numbers of its own that become a tensor there."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "aten.equal")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_copies_that_a_step_made_out_of_date_are_made_without_waiting_for_the_device(recipe, monkeypatch):
    found, current, tolist = [], cache.WeightCache.current, torch.Tensor.tolist

    def recorded(*args, **options):
        with Waits(found):
            return current(*args, **options)

    model = make()
    compiled = compile_model(model, recipe, weight_copies="cache", step="manual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            monkeypatch.setattr(cache.WeightCache, "current", recorded)
            monkeypatch.setattr(exchanges.Arriving, "are_there", property(lambda self: False))
            monkeypatch.setattr(torch.Tensor, "tolist", lambda self: found.append("tolist") or tolist(self))
        weights = list(session_of(compiled).weights.cache._weights.values()) if step else []
        made = [weight.made for weight in weights]
        compiled(X[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state(compiled).step()
    assert len(made) == 2
    assert all(before is not w.made for before, w in zip(made, weights, strict=True)), "made again each step"
    assert found == []


# -- what changes a weight


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def test_never_out_of_date_within_one_storage():
    """Another part of the same storage is other values, which no version tells of, and so is a transpose in the same memory."""
    model, parts = nn.Linear(64, 64).requires_grad_(False), torch.randn(2, 64, 64)
    compiled, plain = (compile_model(model, weight_copies=copies) for copies in ("cache", "save"))
    for values in (parts[0], parts[1], parts[1].t()):
        model.weight.data = values
        assert torch.equal(compiled(X[0]), plain(X[0]))


def test_a_frozen_weight_is_frozen_until_it_trains():
    """requires_grad_ back and forth, with changes in between: gradients reach it where they do under torch.compile alone, whose
    version 2.11 does not see the flip."""
    model = make()
    compiled, plain = (compile_model(model, weight_copies=copies) for copies in ("cache", "save"))
    without_us = torch.compile(model, backend="aot_eager")
    for trains in (False, True, False, True):
        model[0].weight.requires_grad_(trains)
        found = []
        for run in (without_us, compiled, plain):
            model.zero_grad()
            out = run(X[0])
            out.sum().backward()
            found.append([out.detach(), model[2].weight.grad.clone(), model[0].weight.grad is not None])
        assert same(*found[1:])
        assert found[0][2] == found[1][2]
        assert found[1][2] == trains or (torch.__version__ < (2, 13) and not found[1][2])
        in_place(model)


def test_a_backward_reads_the_copy_of_its_own_forward():
    def run(model, copies):
        compiled, x = compile_model(model, weight_copies=copies), X[0].clone().requires_grad_()
        first = compiled(x)
        if copies == "cache":
            in_place(model)
            compiled(X[1])
        first.sum().backward()
        return x.grad

    same_with_a_cast_in_each_call(make(), run)


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
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(first, compile_model(model, recipe, weight_copies="save")(X))


def test_copies_are_given_up_for_training_that_does_not_read_them_and_with_their_parameters():
    model = make()
    compiled = compile_model(model, weight_copies="cache")
    session = session_of(compiled)
    kept = session.weights.cache._weights
    with torch.no_grad():
        compiled(X)
    assert [w.made is not None for w in kept.values()] == [True, True]
    session.end_forward(session.begin_forward(()))
    assert [w.made for w in kept.values()] == [None, None]
    model[0].weight = nn.Parameter(torch.randn(96, 64))
    with torch.no_grad():
        compiled(X)
    assert len(kept) == 2, "those of the Parameter that is gone are gone"


# -- frozen weights


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_frozen_weights_that_were_only_evaluated_are_kept_in_the_orientation_that_training_needs(recipe):
    """Then no weight is dequantized or saved for the backward: it reads the copies."""

    def run(model, copies):
        compiled, x = compile_model(model, recipe, weight_copies=copies), X[0].clone().requires_grad_()
        with torch.no_grad():
            before = compiled(x)
        compiled(x).square().mean().backward()
        if copies == "cache":
            (graph,) = [graph for graph in inspect(compiled).graphs if graph.trains]
            read = [n.meta["val"] for n in graph.backward.graph.find_nodes(op="placeholder") if n.users]
            weights = [value.dtype for value in read if tuple(value.shape) in ((96, 64), (64, 96))]
            assert weights == [torch.float8_e4m3fn] * 2
        return before, x.grad

    same_with_a_cast_in_each_call(make().requires_grad_(False), run)


# -- what cannot be kept, and what is said


def test_fsdp_frees_parameters_between_uses():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = BrokenLayers(1)
        plain = compile_model(copy.deepcopy(model), weight_copies="save")
        fully_shard(model.layers[0])
        compiled = compile_model(model, weight_copies="cache")
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(X), plain(X))
        reasons = {w.reason for w in kept_of(compiled)}
        assert reasons == {"sharded: FSDP gathers the Parameter before each use and frees it afterwards"}
        assert "2 weights are quantized at each call: sharded: FSDP" in str(inspect(compiled))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_derived_weights_and_inference_tensors_have_their_reasons(mode):
    with mode():
        weights = {name: nn.Parameter(torch.randn(64, 64)) for name in ("weight", "other")}
        model = Net(lambda m, x: x @ (m.weight + 1) @ m.other, **weights)
    compiled = compile_model(model, weight_copies="cache")
    with torch.inference_mode():
        compiled(X)
    untracked = "untracked: made in torch.inference_mode(), so its changes are not counted"
    reasons = {w.reason for w in kept_of(compiled)}
    assert (untracked if mode is torch.inference_mode else None) in reasons
    assert any((reason or "").startswith("derived: add computes it from Parameters in each call") for reason in reasons)
    assert "quantized at each call: derived: add" in str(inspect(compiled))


def test_inspect_counts_the_copies_and_the_other_choices_keep_none(launches):
    for copies in ("auto", "save", "recompute"):
        compiled = compile_model(make().requires_grad_(False), weight_copies=copies)
        compiled(X)
        assert launches == kept_of(compiled) == []
    compiled = compile_model(make(), weight_copies="cache")
    with torch.no_grad():
        compiled(X)
    report = inspect(compiled)
    assert "2 weights are quantized when changed, not at each call: 12,288 bytes of FP8 copies are kept." in str(report)
    first, _ = report.to_dict()["graphs"][0]["kept"]
    assert first == {"module": "0", "shape": (96, 64), "kept": True, "bytes": 6144, "reason": None}
    assert [n for n in report.graphs[0].state_inputs if "weight" in n][:2] == ["fp8_weight_0_data", "fp8_weight_0_scale_inv"]


def test_a_weight_that_is_one_matrix_in_a_graph_and_several_in_another():
    """torch multiplies a strided batch by a frozen weight as one matrix per element of the batch, by one that trains as one."""

    def run(copies):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = {"first": nn.Linear(64, 64), "then": nn.Linear(64, 96), "last": nn.Linear(96, 64)}
        model = Net(lambda m, x: m.last(m.then(m.first(x.transpose(0, 1))).relu()), **layers)
        compiled, found, shapes = compile_model(model, DelayedScaling(amax_history_len=2), weight_copies=copies), [], set()
        for i in range(6):
            model.first.weight.requires_grad_(i % 3 != 1)
            model.then.requires_grad_(i % 2 == 0)
            model.zero_grad()
            found.append(compiled((X + i).requires_grad_()))
            found[-1].square().mean().backward()
            found += [p.grad for p in model.parameters() if p.grad is not None]
            shapes.add(state(compiled).amax_history("first:weight").shape)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
            with torch.no_grad():
                found.append(compiled(X))
        return found, shapes

    (cached, shapes), (wanted, _) = run("cache"), run("save")
    assert shapes == {(2,)}, "the pass makes one product of them"
    assert same(cached, wanted)
