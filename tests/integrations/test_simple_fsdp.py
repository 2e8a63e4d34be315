"""SimpleFSDP as torchtitan 0.3.0 has it, on two ranks: what FP8 does to training, and what FSDP passes see of the gathers.

`tests/distributed/test_simple_fsdp_gather.py` has the same with a stand-in, which needs no torchtitan.
"""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend

from fp8pass import Float8BlockScaling, MXFP8BlockScaling, fp8_compile, inspect
from fp8pass.integrations.graph_trainer import fp8_run, register_fp8_pipeline
from fp8pass.rewrite import runner
from tests.distributed.models import seeded, train
from tests.distributed.support import run_on_ranks
from tests.distributed.test_simple_fsdp_gather import MLP, all_gathers, buckets
from tests.integrations.test_graph_trainer import PACKAGE, batch, built, trainer_of

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BLOCKS, SQUARES = Float8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)


@pytest.fixture(autouse=True)
def _theirs():
    pytest.importorskip("torchtitan", reason="its SimpleFSDP is tested (pip install --no-deps torchtitan==0.3.0)")


def theirs(name):
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return importlib.import_module(f"{PACKAGE}.{name}")


def sharded(model, dtype=None):
    module, mesh = theirs("simple_fsdp"), init_device_mesh("cpu", (dist.get_world_size(),))
    return module.data_parallel(model, mesh, mode="fully_shard", mp_policy=module.MixedPrecisionPolicy(dtype, torch.float32))


# -- training


def curves(rank, recipes):
    rules, found = {"emb": None, "head": None}, []
    for recipe in recipes:
        torch._dynamo.reset()
        model = sharded(seeded(layers=1))
        compiled = fp8_compile(model, recipe, rules=rules, backend="aot_eager")
        # Theirs sums gradients over the ranks.
        losses = train(compiled, model.parameters(), range(30), rank, 2)
        gathers = inspect(compiled).graphs[-1].gathers
        torch._dynamo.reset()
        alone = seeded(layers=1)
        single = fp8_compile(alone, recipe, rules=rules, backend="aot_eager")
        expected = train(single, alone.parameters(), range(30), 0, 1)
        found.append((losses, expected, [g.quantized for g in gathers]))
    return found


def test_thirty_steps_follow_one_rank():
    for results in run_on_ranks(curves, 2, ["delayed", "current"]):
        for losses, alone, quantized in results:
            assert quantized == [True] * 3
            assert losses[-1] < losses[0]
            assert sum(losses[-3:]) == pytest.approx(sum(alone[-3:]), rel=0.01)


# -- what FSDP's passes see


def seen(rank, recipes):
    find, found = theirs("fsdp_patterns").find_fsdp_unshard_outputs, []
    for recipe in recipes:
        results, shapes = [], []
        for left_out in ((), ("plan gathers",)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = sharded(MLP(256), torch.bfloat16)
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
            with runner.without(*left_out):
                compiled = fp8_compile(model, recipe, backend="aot_eager", select="all")
                for _ in range(2):
                    loss = compiled(x).square().mean()
                    loss.backward()
                    results.append([loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())])
            (graph,) = inspect(compiled).graphs
            inputs = graph.after.graph.find_nodes(op="placeholder")
            sizes = [len(bucket) for bucket in buckets(graph.after.graph)]
            shapes.append((sum(len(find(n)) for n in inputs), sizes, [g.quantized for g in graph.gathers]))
        same = [
            a.equal(b) for ours, plain in zip(results[:2], results[2:], strict=True) for a, b in zip(ours, plain, strict=True)
        ]
        found.append((same, *shapes, len(all_gathers(graph.after))))
    return found


def test_their_walker_and_the_buckets_find_every_gather():
    for results in run_on_ranks(seen, 2, [BLOCKS, SQUARES]):
        for same, ours, plain, gathers in results:
            assert all(same)
            assert ours == (3, [3], [True, True])
            assert plain == (3, [3], [])
            assert gathers == 3


# -- GraphTrainer's passes on it


def steps_of(rank, pipeline, disabled):
    """Losses and weights of three steps, the collectives of the graph, and the run in FP8."""
    estimation = importlib.import_module("torch.utils._runtime_estimation")
    estimation.get_gpu_dram_gbps = lambda: 3000.0  # the order of collectives is of no matter here
    trainer_class = theirs("trainer").GraphTrainer
    config, model = built("llama3")
    for module in model.modules():
        if hasattr(module, "sdpa_backends"):
            module.sdpa_backends = [SDPBackend.MATH]
    model = sharded(model, torch.bfloat16)
    trainer = trainer_of(trainer_class, config, model, pipeline, disabled)
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(3):
        for hook in filter(None, [theirs("registry").PRE_TRAIN_STEP_HOOKS.get(pipeline)]):
            hook(trainer)
        args = (*batch(10 * step + rank, config.vocab_size), torch.tensor(32.0))
        losses.append(trainer._make_fx_forward_backward_step(model, *args, parameters, {}).item())
        optimizer.step()
        optimizer.zero_grad()
    sent = [n for n in trainer._traced_step.gm.graph.nodes if "all_gather_into_tensor" in str(n.target)]
    weights = [p.to_local().detach().clone() for p in parameters]
    return losses, weights, len(sent), trainer


def bucketed(rank, recipe):
    bucketing, remat = "joint_transformer_block_bucketing_reordering_pass", "selective_activation_remat_pass"
    found = []
    for pipeline, disabled in (("fp8_test", []), ("fp8_test", [bucketing]), ("fp8_test", [bucketing, remat]), ("default", [])):
        if pipeline != "default":
            register_fp8_pipeline(pipeline, recipe)
        losses, weights, sent, trainer = steps_of(rank, pipeline, ["cudagraph_pass", *disabled])
        table = None if pipeline == "default" else fp8_run(trainer).rewritten.inspect()
        found.append((losses, weights, sent, table and [g.quantized for g in table.graphs[0].gathers]))
    return found


def test_graph_trainers_bucketing_and_recomputation_change_no_bit():
    for ours, unbucketed, saved, plain in run_on_ranks(bucketed, 2, "blockwise"):
        assert ours[3] == [True] * 5
        assert ours[2] == plain[2] < unbucketed[2], "as many buckets as in high precision"
        for other in (unbucketed, saved):
            assert ours[0] == other[0]
            assert all(a.equal(b) for a, b in zip(ours[1], other[1], strict=True))
        assert ours[0] == pytest.approx(plain[0], rel=0.01)
