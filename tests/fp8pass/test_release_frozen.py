"""`release_frozen=True`: the same numbers from one FP8 copy, no high-precision bytes, and errors that say what to do.

Oracles: the same model with weight_copies="save", which casts every weight in every call; bytes of storages; exports of a model
that kept its values.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, fp8_uncompile, inspect, state, state_dict_fp8
from fp8pass.errors import ReleasedWeightError
from fp8pass.weights import released as without_values
from fp8pass.weights import releases
from tests.support.cases import each
from tests.support.engines import dequantized
from tests.support.models import Net, mlp
from tests.support.training import fp8, gradients, same

X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    """A frozen MLP with a trained adapter beside its first linear."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = mlp(64, 96, 64).requires_grad_(False), nn.Linear(64, 96)

    def forward(self, x):
        return self.base[2](self.base[1](self.base[0](x) + self.adapter(x)))


def train(model, compiled, num_steps=3, checkpoints=False):
    """Outputs and gradients of some steps, and an evaluation."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for i in range(num_steps):
        x = X[i % 3].clone().requires_grad_()
        out = checkpoint(compiled, x, use_reentrant=False) if checkpoints else compiled(x)
        out.square().mean().backward()
        found += [out.detach(), x.grad, gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, compiled(x)]


def released(recipe="current", make=Adapted, num_steps=2):
    """A model that trained with released weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = fp8(model, recipe, release_frozen=True)
    train(model, compiled, num_steps)
    return model, compiled


def reasons(compiled):
    return {name: r.reason and str(r.reason) for name, r in inspect(compiled).released.items()}


def bytes_of(model):
    """Those of frozen matrices in high precision."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.requires_grad and p.dim() == 2)


@pytest.mark.parametrize(("recipe", "checkpoints"), [("delayed", False), ("rowwise", True)])
def test_training_is_equal_without_the_values(recipe, checkpoints):
    runs = []
    for options in ({"weight_copies": "save"}, {"release_frozen": True}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Adapted()
        compiled = fp8(model, recipe, **options)
        runs.append(train(model, compiled, 3, checkpoints))
    assert same(*runs)
    assert bytes_of(model) == 0
    assert f"2 frozen weights are released: {4 * 2 * 64 * 96:,} bytes of high precision are free." in str(inspect(compiled))


def test_reading_raises_and_what_reads_nothing_does_not():
    model, _ = released()
    weight = model.base[0].weight
    for read in (
        lambda: model(X[0]),
        lambda: weight.data.add_(1),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: model.bfloat16(),
    ):
        with torch.no_grad(), pytest.raises(ReleasedWeightError, match=r"has no values.*restore_weights"):
            read()
    assert model.to("cpu", torch.float32) is model
    assert (weight.shape, weight.dtype, weight.device.type) == ((96, 64), torch.float32, "cpu")
    assert "no values" in repr(weight)
    assert list(model.state_dict()) == list(Adapted().state_dict())


def test_new_values_are_taken_and_given_back_again():
    model, compiled = released(num_steps=1)
    given = {k: v * 1.5 for k, v in Adapted().state_dict().items() if k != "base.2.weight"}
    model.load_state_dict(given, strict=False)
    model.base[2].weight.data = torch.full((64, 96), 0.01)
    state(compiled).restore_weights()
    fresh = copy.deepcopy(model)
    expected = train(fresh, fp8(fresh, weight_copies="save"), 1)
    torch._dynamo.reset()
    assert same(train(model, compiled, 1), expected)
    assert bytes_of(model) == 0


@each("recipe", ["rowwise", "mxfp8"])
def test_restored_values_and_exports_are_those_of_the_copies(recipe):
    model, compiled = released(recipe)
    assert set(reasons(compiled).values()) == {None}
    assert model.base[0].weight.untyped_storage().nbytes() == 0
    torch.manual_seed(0)
    original, x = Adapted().base[0].weight, X[0]
    with torch.no_grad():
        before, exported = compiled(x), dict(state_dict_fp8(compiled))
        state(compiled).restore_weights()
        weight = model.base[0].weight
        assert type(weight) is nn.Parameter
        assert same(dequantized(exported["base.0.weight"], exported["base.0.weight_scale"]), weight.data)
        assert 0 < (weight - original).abs().max() < 0.04 * original.abs().max()
        assert torch.equal(compiled(x), before), "the copies stay"


def test_uncompiled_models_have_their_values():
    model = Adapted()
    train(model, fp8(model, release_frozen=True, in_place=True))
    fp8_uncompile(model)
    assert model(X[0]).shape == (16, 64)


def test_a_weight_that_is_to_train_needs_its_values_and_another_compiled_model_finds_the_copies():
    model, compiled = released()
    with torch.no_grad():
        expected = compiled(X[0])
        assert torch.equal(fp8(model, release_frozen=True)(X[0]), expected)
    with pytest.raises(ReleasedWeightError, match="as 'rowwise' does: this Parameter has no values"):
        fp8(model, "rowwise", release_frozen=True)(X[0])
    state(compiled).restore_weights()
    model.base[0].weight.requires_grad_(True)
    compiled(X[0]).sum().backward()
    assert model.base[0].weight.grad is not None


def test_weights_with_other_readers_stay():
    """The second base weight is read by an adapter's merge, too, the first one by an embedding."""

    class Merged(Adapted):
        def forward(self, x):
            h = self.base[0](x) + self.adapter(x)
            merged = h @ (self.base[2].weight * 0.5).t() + self.base[2](h)
            return merged + nn.functional.embedding(torch.arange(16), self.base[0].weight)

    model, compiled = released(make=Merged)
    assert reasons(compiled) == {
        "base.0.weight": "readers: embedding of a compiled graph reads it in high precision",
        "base.2.weight": "readers: mul of a compiled graph reads it in high precision",
    }
    assert "1 frozen weight keeps high precision: readers: mul" in str(inspect(compiled))
    model(X[0])


def test_evaluation_first_waits_for_the_training_graph():
    model = Adapted()
    compiled = fp8(model, "rowwise", release_frozen=True)
    with torch.no_grad():
        compiled(X[0])
    assert set(reasons(compiled).values()) == {"readers: no graph with a backward has run, which may need more of it"}
    train(model, compiled)
    assert bytes_of(model) == 0


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_a_scale_that_may_change_keeps_the_values():
    model = Adapted()
    compiled = fp8(model, DelayedScaling(initial_scale="one"), release_frozen=True)
    compiled(X[0]).sum().backward()
    assert set(reasons(compiled).values()) == {"scales: the next step may change its scale"}
    train(model, compiled, 1)
    assert bytes_of(model) == 0


def test_an_embedding_that_eager_code_reads_keeps_its_values():
    """The compiled forward reads the weight in FP8 alone; the embedding is called outside of it, by the user."""
    model = Net(lambda m, h: m.head(h), embedding=nn.Embedding(96, 64), head=nn.Linear(64, 96, bias=False))
    model.head.weight = model.embedding.weight
    model.requires_grad_(False)
    compiled = fp8(model, release_frozen=True)
    for _ in range(2):
        compiled(model.embedding(torch.arange(16)))
    assert "an embedding reads it" in reasons(compiled)["embedding.weight"]


@pytest.mark.parametrize("is_first", [True, False])
def test_eager_code_never_reads_a_released_weight(is_first, monkeypatch):
    """Elementwise reads of a storage without bytes would end the process: it has its values, or is refused before it runs."""

    class Read(Adapted):
        reads = is_first

        @torch.compiler.disable
        def read(self, x):
            return x + self.base[0].weight.sum() * 0

        def forward(self, x):
            out = super().forward(x)
            return self.read(out) if self.reads else out

    monkeypatch.setattr(without_values, "CAN_REFUSE", False)
    monkeypatch.setattr(releases, "CAN_REFUSE", False)
    model = Read()
    compiled = fp8(model, release_frozen=True)
    expected = compiled(X[0])
    if is_first:
        assert all("code between graphs may read it" in reason for reason in reasons(compiled).values())
    else:
        model.reads = True
        with pytest.raises(ReleasedWeightError, match=r"code at a graph break.*restore_weights"):
            compiled(X[0])
        state(compiled).restore_weights()
    for _ in range(2):  # it keeps its values from now on
        assert torch.equal(compiled(X[0]), expected)
