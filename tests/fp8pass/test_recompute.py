"""FP8 copies that backward makes itself: what is saved instead, that no bit changes, and where copies are still saved."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_compile, inspect
from fp8pass.rewrite import runner
from fp8pass.rewrite.launches import MANY_ROWS
from lowering.formats import FP8_MAX
from tests.support.cases import rest
from tests.support.joint import trace
from tests.support.models import LlamaBlock, Net
from tests.support.training import assert_equal, compiled_step
from tests.tolerances import SAVED_WITHOUT_WEIGHTS

RECIPES = [DelayedScaling(amax_history_len=4), Float8CurrentScaling()]


train = functools.partial(compiled_step, count=3)


def saved_fp8(compiled) -> list[tuple[int, ...]]:
    """Shapes of the FP8 tensors that forward saves for backward."""
    (graph,) = inspect(compiled).graphs
    (results,) = graph.forward.graph.find_nodes(op="output")[0].args
    values = [n.meta["val"] for n in results if isinstance(n, fx.Node)]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dtype in FP8_MAX]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_transformer_block_saves_less_than_bf16(recipe):
    x = torch.randn(4, 64, 128, dtype=torch.bfloat16)
    ours, _ = train(LlamaBlock().bfloat16(), recipe, x, weight_copies="recompute")
    theirs, _ = train(LlamaBlock().bfloat16(), recipe, x, rules={"*": None})
    assert saved_fp8(ours) == []
    assert inspect(ours).graphs[0].saved_bytes <= SAVED_WITHOUT_WEIGHTS * inspect(theirs).graphs[0].saved_bytes


def autograd_keeps(call, x) -> int:
    """Bytes that autograd holds after a forward, Parameters that backward reads among them, the input not."""
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() != x.untyped_storage().data_ptr():
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call(x)
    del out
    return sum(sizes.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_backward_reads_fp8_copies_where_bf16_reads_parameters(recipe):
    """The default for few rows: the copies that are saved are half the Parameters that bf16's backward reads."""
    block = LlamaBlock().bfloat16()
    x = torch.randn(4, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    theirs = autograd_keeps(torch.compile(block, backend="aot_eager_decomp_partition"), x)
    torch._dynamo.reset()
    ours = autograd_keeps(fp8_compile(block, recipe, backend="aot_eager"), x)
    assert ours <= SAVED_WITHOUT_WEIGHTS * theirs


@pytest.mark.parametrize("recipe", [*RECIPES, *rest(["blockwise", "rowwise"])], ids=str)
def test_recomputed_copies_change_no_bit(recipe):
    x = torch.randn(2, 32, 128)
    block = LlamaBlock()
    _, recomputed = train(copy.deepcopy(block), recipe, x)
    with runner.without("plan recomputation"):
        plain, saved = train(block, recipe, x)
    assert {(64, 128), (128, 64)} & set(saved_fp8(plain))
    assert_equal(recomputed, saved)


def test_a_value_that_backward_does_not_have_is_saved_in_fp8():
    """The norm's result is also a residual, which needs no gradient of its own: nothing keeps it for backward."""

    def post_norm(m, x):
        x = m.norm(x)
        return x + torch.tanh(m.inner(x))

    model = Net(post_norm, norm=nn.LayerNorm(64), inner=nn.Linear(64, 64))
    compiled, _ = train(model, "delayed", torch.randn(48, 64))
    assert sorted(saved_fp8(compiled)) == [(48, 64), (64, 64)]


def test_a_mask_is_saved_and_not_the_noise_that_it_is_made_of():
    layers = {"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)}
    model = Net(lambda m, x: m.down(F.gelu(m.up(x)) * (torch.rand(48, 96) > 0.5)), **layers)
    compiled, _ = train(model, "current", torch.randn(48, 64), weight_copies="recompute")
    (graph,) = inspect(compiled).graphs
    (results,) = graph.forward.graph.find_nodes(op="output")[0].args
    saved = [n for n in results if isinstance(n, fx.Node) and n.meta["val"].shape == (48, 96)]
    assert sorted(str(n.meta["val"].dtype) for n in saved) == ["torch.bool", "torch.float32"], "the mask, and GELU's input"
    assert not any("rand" in str(n.target) for n in graph.backward.graph.nodes)


# -- the plan


def planned(model, *shape, recipe="current", **options):
    """Names of the tensors whose backward-only copies backward makes, and of the weights among them."""
    plan = trace(model, torch.randn(shape), recipe=recipe, **options).run("plan recomputation").plan
    values = {str(t.name) for t in plan.copies if t.name.kind != "weight" and t.value.root in plan.recomputed}
    return values, {str(t.name) for t in plan.recomputed_weights}


def two_linears(between) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), between, nn.Linear(96, 64))


def test_what_is_computed_again_and_what_is_kept_as_it_is():
    assert planned(two_linears(nn.GELU()), 48, 64) == ({"2:input"}, set())
    assert planned(LlamaBlock(), 2, 32, 128)[0] == {"wq:input", "wo:input", "gate:input", "down:input"}
    # Softmax reads its own result in backward; the result of a linear is read by nobody there.
    plan = trace(two_linears(nn.Softmax(-1)), torch.randn(48, 64), recipe="current").run("plan recomputation").plan
    assert list(plan.recomputed.values()) == [frozenset()]
    assert planned(two_linears(nn.Identity()), 48, 64)[0] == set()


def test_hand_written_casts_would_write_the_value_once_more():
    """Casts of whole blocks join the code before them, others are kernels of their own."""
    assert planned(two_linears(nn.GELU()), 48, 64, recipe="blockwise")[0] == set()
    whole = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    assert planned(whole, 128, 128, recipe="blockwise")[0] == {"2:input"}
    assert planned(whole, 144, 128, recipe="blockwise")[0] == set()
    assert planned(whole, 128, 128, recipe=Float8BlockScaling(use_f32_scales=True))[0] == set()
    assert planned(whole, 128, 128, recipe=Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1))[0] == set()
    assert planned(whole, 128, 128, recipe="mxfp8")[0] == set()


def test_inference_and_computed_weights_recompute_nothing():
    assert planned(two_linears(nn.GELU()), 48, 64, trains=False, weight_copies="recompute") == (set(), set())

    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 2)

    assert planned(Scaled(64, 64), 48, 64, weight_copies="recompute") == (set(), set())


def test_the_users_checkpointing_takes_precedence_but_for_weights():
    from torch.utils.checkpoint import checkpoint

    model = two_linears(nn.GELU())
    values, weights = planned(lambda x: checkpoint(model, x, use_reentrant=False), 48, 64, weight_copies="recompute")
    assert (values, len(weights)) == (set(), 2)


@pytest.mark.parametrize(
    ("choice", "rows", "is_recomputed"),
    [("save", MANY_ROWS, False), ("auto", MANY_ROWS - 16, False), ("auto", MANY_ROWS, True), ("recompute", 16, True)],
)
def test_which_weights_are_recomputed(choice, rows, is_recomputed):
    _, weights = planned(nn.Linear(16, 16, bias=False), rows, 16, weight_copies=choice)
    assert bool(weights) == is_recomputed
