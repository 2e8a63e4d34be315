"""Activation checkpointing: amaxes recorded once, recomputation with the scales of the first run."""

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from tests.support.models import Stack, mlp

RECIPE = DelayedScaling(amax_history_len=4)


def stack(**options):
    """Blocks that are checkpointed inside of the compiled model, or not."""
    return Stack((mlp(32, 64, 32) for _ in range(2)), **options)


def train(model, compiled, batches):
    outputs = []
    for x in batches:
        model.zero_grad()
        out = compiled(x)
        out.square().sum().backward()
        outputs.append(out.detach())
    return outputs, [p.grad.clone() for p in model.parameters()]


def batches(count=3):
    return [torch.randn(16, 32) * (i + 1) for i in range(count)]


def assert_same_training(make_model, make_other, data):
    torch.manual_seed(0)
    model = make_model()
    other = make_other()
    other.load_state_dict(model.state_dict())
    compiled = [fp8_compile(m, RECIPE, backend="aot_eager") for m in (model, other)]
    results = [train(m, c, data) for m, c in zip((model, other), compiled, strict=True)]
    for ours, theirs in zip(*results, strict=True):
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    states = [state(c).state_dict() for c in compiled]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][key].equal(states[1][key]) for key in states[0])
    return compiled


def test_checkpoint_inside_the_model_changes_no_bit():
    plain, checkpointed = assert_same_training(stack, lambda: stack(use_reentrant=False), batches())
    assert inspect(checkpointed).graphs[0].saved_bytes < inspect(plain).graphs[0].saved_bytes
    backward = inspect(checkpointed).graphs[0].backward.graph
    recorded = [n for n in backward.nodes if n.target is torch.ops.lowering.record_amax.default]
    assert len(recorded) == 1


def keep_gemms(ctx, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_policy_that_saves_gemms_recomputes_none():
    def contexts():
        return create_selective_checkpoint_contexts(keep_gemms)

    compiled = assert_same_training(stack, lambda: stack(use_reentrant=False, context_fn=contexts), batches())[1]
    report = inspect(compiled)
    num_gradients = sum(g.role != "output" for g in report.gemms)
    backward = report.graphs[0].backward.graph
    assert len([n for n in backward.nodes if n.target is torch.ops.lowering.scaled_mm.default]) == num_gradients


class Gated(nn.Module):
    """Results of GEMMs are cheaper to compute again than to save, by the partitioner's count, which does not know our GEMMs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x


def test_a_small_memory_budget_recomputes_no_fp8_gemm_either():
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=0.1):
        compiled = fp8_compile(Gated(), "current", backend="aot_eager")
        compiled(torch.randn(64, 64, requires_grad=True)).sum().backward()
    (graph,) = inspect(compiled).graphs
    gemms = [n for n in graph.backward.graph.nodes if n.target is torch.ops.lowering.scaled_mm.default]
    assert len(gemms) == sum(g.role != "output" for g in inspect(compiled).gemms) == 8
