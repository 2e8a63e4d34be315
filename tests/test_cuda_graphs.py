"""CUDA graphs, `mode="reduce-overhead"`, by torch's own rules, on Inductor's H200 code of a Llama block: what a replay copies,
why a graph would not be recorded, and what its wrapper waits for. Runs without a GPU."""

import pytest
import torch

from benchmarks.contestants import steady
from benchmarks.traffic import DIM, TOKENS, llama_block, train
from fp8pass import fp8_compile, monitor
from lowering import hardware
from tests.support.cuda_graphs import recorded
from tests.support.moe import MoE

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

#: The bytes of the block's input, and of the gradient of its output.
ACTIVATION = 2 * TOKENS * DIM


def assert_recorded(graphs, copied=ACTIVATION):
    """Every graph is recorded whole, and nothing in its wrapper waits for the device."""
    assert [g.copied for g in graphs] == [[copied]] * len(graphs)
    assert [(g.refusals, g.num_partitions, g.report.host_waits) for g in graphs] == [([], 1, [])] * len(graphs)


def compiled(recipe, **options):
    torch._dynamo.reset()
    return fp8_compile(llama_block(), steady(recipe), **options)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "rowwise", "mxfp8"])
def test_a_replay_copies_the_activation_alone(recipe):
    """State, Parameters, scales and what the forward saves have addresses that stay. Every graph is recorded, whole."""
    model = compiled(recipe)

    def run():
        train(model)
        with torch.no_grad():
            model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16))

    graphs = recorded(run)
    assert [g.report.name.partition("_")[0] for g in graphs] == ["forward", "backward", "inference"]
    assert_recorded(graphs)


def test_a_measured_step_is_recorded_too():
    model = compiled("delayed")
    with monitor(model, every=100):
        graphs = recorded(lambda: [train(model) for _ in range(2)])
    assert len(graphs) == 4, "the measured step's, and those of others"
    assert [(g.copied, g.refusals) for g in graphs] == [([ACTIVATION], [])] * 4


def test_copies_of_frozen_and_evaluated_weights_are_where_they_were():
    frozen = compiled("blockwise", weight_copies="cache")
    frozen.requires_grad_(False)
    graphs = recorded(lambda: train(frozen))
    evaluated = compiled("blockwise", weight_copies="cache")
    with torch.no_grad():
        graphs += recorded(lambda: evaluated(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16)))
    assert [g.copied for g in graphs] == [[ACTIVATION]] * 3


def test_copies_of_weights_that_train_are_copied_into_the_graph():
    """Their addresses may change with each optimizer step: both copies of every weight."""
    cached = compiled("current", weight_copies="cache")
    forward, backward = recorded(lambda: train(cached))
    parameters = sum(p.numel() for p in cached.parameters() if p.dim() == 2)
    assert sum(forward.copied) == pytest.approx(ACTIVATION + 2 * parameters, rel=1e-4)
    assert backward.copied == [ACTIVATION]


def test_experts_are_recorded_whole():
    model = fp8_compile(MoE(256, 128).bfloat16(), steady("blockwise"))
    x = torch.zeros(256, 256, dtype=torch.bfloat16, requires_grad=True)
    graphs = recorded(lambda: model(x).sum().backward())
    assert len(graphs) == 2
    assert_recorded(graphs, copied=x.nbytes)


def test_values_saved_in_fp8_have_addresses_that_stay():
    """The forward's copies are outputs of its graph, and the backward's inputs."""
    model = compiled("blockwise", saved_activations="fp8")
    graphs = recorded(lambda: train(model))
    assert len(graphs) == 2
    assert_recorded(graphs)
