"""`release_frozen=True`: the same numbers from one FP8 copy, no high-precision bytes, and errors that say what to do.

Oracles: the same model with weight_copies="save", which casts every weight in every call; bytes of storages; exports of a model
that kept its values.
"""

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_uncompile, inspect, state, state_dict_fp8
from fp8pass.errors import OptionError, ReasonKind, ReleasedWeightError
from fp8pass.options import CompileOptions
from fp8pass.weights import released as without_values
from fp8pass.weights import releases
from tests.support.cases import rest
from tests.support.models import Net, mlp
from tests.support.moe import MoE
from tests.support.training import fp8, gradients, same

X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
#: Recipe -> whether one copy is enough.
RECIPES = {"delayed": True, "current": True, "blockwise": True, "rowwise": False, "mxfp8": False}
CODE = "readers: code between graphs may read it, which torch's builds without CUDA cannot refuse"


class Adapted(nn.Module):
    """A frozen MLP with a trained adapter beside its first linear."""

    def __init__(self, width=64, hidden=96):
        super().__init__()
        self.base = mlp(width, hidden, width).requires_grad_(False)
        self.adapter = nn.Linear(width, hidden)

    def forward(self, x):
        return self.base[2](self.base[1](self.base[0](x) + self.adapter(x)))


class AdaptedExperts(Adapted):
    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 64, 48), requires_grad=False)

    def forward(self, x):
        return torch.bmm(super().forward(x).expand(3, -1, -1), self.stack)


class AdaptedMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter, self.moe = nn.Linear(64, 64), MoE().requires_grad_(False)
        self.bfloat16()

    def forward(self, x):
        return self.moe(self.adapter(x))


def train(model, compiled, num_steps=3, checkpoints=False):
    """Outputs and gradients of some steps, and an evaluation."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found, weight = [], model.adapter.weight
    for i in range(num_steps):
        x = X[i % 3][:, : weight.shape[1]].to(weight.dtype).requires_grad_()
        out = checkpoint(compiled, x, use_reentrant=False) if checkpoints else compiled(x)
        out.float().square().mean().backward()
        found += [out.detach(), x.grad, gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, compiled(x)]


def released(recipe="current", make=Adapted, num_steps=2, checkpoints=False, compares=False, **options):
    """A model that trained with released weights; where it compares, as it would have with casts in each call."""
    torch._dynamo.reset()
    runs = []
    for own in ({"weight_copies": "save"}, {"release_frozen": True})[not compares :]:
        torch.manual_seed(0)
        model = make()
        compiled = fp8(model, recipe, **own, **options)
        runs.append(train(model, compiled, num_steps, checkpoints))
    assert same(runs[0], runs[-1])
    return model, compiled


def reasons(compiled):
    return {name: r.reason and str(r.reason) for name, r in inspect(compiled).released.items()}


def bytes_of(model, compiled):
    """Frozen matrices in high precision, and all FP8 copies with their scales."""
    weights = [p for p in model.parameters() if not p.requires_grad and p.dim() == 2]
    kept = compiled._fp8pass_session.weights.cache._weights.values()
    made = [w.made for w in kept if w.made is not None and not w.parameter.requires_grad]
    parts = [t for m in made for t in (*m.data.values(), *m.scale_inv.values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parts}
    return sum(w.untyped_storage().nbytes() for w in weights), sum(storages.values())


# -- the same numbers


SIZES = ((64, 96), (50, 33))
FAST, OTHERS = (
    [(recipe, functools.partial(Adapted, *SIZES[(i + turn) % 2]), {}) for i, recipe in enumerate(RECIPES)] for turn in range(2)
)
CHECKPOINTED = [(recipe, Adapted, {"checkpoints": True}) for recipe in ("rowwise", "delayed")]
EXPERTS = [(recipe, AdaptedExperts, {}) for recipe in ("delayed", Float8BlockScaling(x_block_scaling_dim=1))]  # turned, too


@pytest.mark.parametrize(("recipe", "make", "options"), [*FAST, CHECKPOINTED[0], *rest([*OTHERS, CHECKPOINTED[1], *EXPERTS])])
def test_training_is_equal_without_the_values(recipe, make, options):
    model, compiled = released(recipe, make, 3, compares=True, **options)
    weights = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad and p.dim() > 1}
    report, (high, low), numel = inspect(compiled), bytes_of(model, compiled), sum(weights.values())
    assert high == 0
    if numel == 2 * 64 * 96:
        assert numel <= low <= numel * (1.05 if RECIPES[recipe] else 2.2)
    assert {name: r.bytes for name, r in report.released.items()} == {name: 4 * count for name, count in weights.items()}
    assert f"{len(weights)} frozen weights are released: {4 * numel:,} bytes of high precision are free." in str(report)


def test_generated_code():
    """Inductor's, on the CPU: the same gradients of adapters, and the memory is given back."""
    model, compiled = released("current", lambda: Adapted(32, 48).bfloat16(), compares=True, backend="inductor")
    high, low = bytes_of(model, compiled)
    assert high == 0
    assert 0 < low <= 1.1 * 2 * 32 * 48
    compiled(X[0][:, :32].bfloat16()).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.adapter.parameters())


# -- reads and new values


def test_reading_raises_and_what_reads_nothing_does_not():
    model, _ = released()
    weight = model.base[0].weight
    for read in (
        lambda: model(X[0]),
        lambda: weight.data.add_(1),
        lambda: weight * 2,
        lambda: weight[0],
        lambda: copy.deepcopy(model),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: Adapted().base[0].weight.copy_(weight),
        lambda: model.bfloat16(),
        lambda: weight.detach() + 1,
        lambda: nn.init.zeros_(weight),
    ):
        with torch.no_grad(), pytest.raises(ReleasedWeightError, match=r"has no values.*restore_weights"):
            read()
    assert model.to("cpu", torch.float32) is model
    assert (weight.shape, weight.numel(), weight.dtype, weight.device.type) == ((96, 64), 96 * 64, torch.float32, "cpu")
    assert "no values" in repr(weight)
    assert isinstance(weight, nn.Parameter)
    assert list(model.state_dict()) == list(Adapted().state_dict())


@pytest.mark.parametrize("way", ["load", "load by assigning", "assign"])
def test_new_values_are_taken_and_given_back_again(way):
    model, compiled = released(num_steps=1)
    if way == "assign":
        model.base[0].weight.data = torch.full((96, 64), 0.01)
    else:
        model.load_state_dict({k: v * 1.5 for k, v in Adapted().state_dict().items()}, assign=way != "load")
    state(compiled).restore_weights()
    fresh = copy.deepcopy(model)
    expected = train(fresh, fp8(fresh, weight_copies="save"), 1)
    torch._dynamo.reset()
    assert same(train(model, compiled, 1), expected)
    assert bytes_of(model, compiled)[0] == 0


def test_a_new_weight_with_the_identity_of_a_bias_that_is_gone_is_released():
    """A Parameter that replaces another is often where an earlier one was: its identity says nothing of it."""
    model, compiled = released(num_steps=1)
    readers = compiled._fp8pass_session.weights.releases._readers
    bias, weight = model.base[2].bias, nn.Parameter(torch.randn(96, 64), requires_grad=False)
    assert readers.get(bias) == "scaled_mm"
    model.base[2].bias, model.base[0].weight = nn.Parameter(torch.zeros(64), requires_grad=False), weight
    seen, reader = readers._known.pop(id(bias))
    seen.id = id(weight)  # as where the interpreter gives the memory of the one to the other
    readers._known[id(weight)] = seen, reader
    train(model, compiled, 1)
    assert reasons(compiled) == {"base.0.weight": None, "base.2.weight": None}


def as_bytes(tensors):
    return {n: t.contiguous().view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in dict(tensors).items()}


@pytest.mark.parametrize(
    ("recipe", "make", "name"),
    [
        ("current", Adapted, "base.0.weight"),
        ("rowwise", AdaptedMoE, "moe.up"),  # both orientations are kept
        *rest((recipe, Adapted, "base.0.weight") for recipe in ("delayed", "blockwise", "rowwise", "mxfp8")),
    ],
)
def test_restored_values_and_exports_are_those_of_the_copies(recipe, make, name):
    model, compiled = released(recipe, make)
    torch.manual_seed(0)
    plain = make()
    keeping = fp8(plain, recipe)
    train(plain, keeping, 2)
    x = X[0].to(model.adapter.weight.dtype)
    for call in (compiled, keeping):
        call(x).float().sum().backward()  # a step that has not ended
    assert same(as_bytes(state_dict_fp8(compiled)), as_bytes(state_dict_fp8(keeping)))
    assert set(reasons(compiled).values()) == {None}
    assert model.get_parameter(name).untyped_storage().nbytes() == 0
    with torch.no_grad():
        before = compiled(x)
        state(compiled).restore_weights()
        weight, original = model.get_parameter(name), plain.get_parameter(name)
        assert type(weight) is nn.Parameter
        assert 0 < (weight - original).abs().max() < 0.04 * original.abs().max()
        assert torch.equal(compiled(x), before), "the copies stay"
    assert bytes_of(model, compiled)[0] == 0


def test_a_weight_that_is_to_train_needs_its_values():
    model, compiled = released()
    model.base[0].weight.requires_grad_(True)
    with pytest.raises(ReleasedWeightError, match="restore_weights"):
        compiled(X[0])
    state(compiled).restore_weights()
    model.base[0].weight.requires_grad_(True)
    compiled(X[0]).sum().backward()
    assert model.base[0].weight.grad is not None


def test_uncompiled_models_have_their_values_and_other_compiled_ones_find_the_copies():
    model, compiled = released()
    expected = compiled(X[0])
    del compiled
    assert torch.equal(fp8(model, release_frozen=True)(X[0]), expected)
    with pytest.raises(ReleasedWeightError, match="as 'rowwise' does: this Parameter has no values"):
        fp8(model, "rowwise", release_frozen=True)(X[0])
    model = Adapted()
    train(model, fp8(model, release_frozen=True, in_place=True))
    fp8_uncompile(model)
    assert model(X[0]).shape == (16, 64)


# -- what keeps its values


def test_torchs_fast_path_of_encoders_is_an_error_that_says_how_to_leave_it():
    encoder = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True, dropout=0.0).requires_grad_(False)
    model, x = nn.Sequential(encoder, nn.Linear(64, 64)), torch.randn(2, 16, 64)
    compiled, was_enabled = fp8(model, release_frozen=True, select="all"), torch.backends.mha.get_fastpath_enabled()
    for _ in range(2):
        compiled(x).sum().backward()
    model.eval()
    try:
        torch.backends.mha.set_fastpath_enabled(True)
        with torch.no_grad(), pytest.raises(ReleasedWeightError, match=r"on the copies: .*set_fastpath_enabled\(False\)"):
            compiled(x)
        torch._dynamo.reset()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            assert compiled(x).isfinite().all()
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


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
    assert inspect(compiled).to_dict()["released"]["base.0.weight"]["bytes"] == 0
    model(X[0])


def test_evaluation_first_waits_for_the_training_graph():
    model = Adapted()
    compiled = fp8(model, "rowwise", release_frozen=True)
    with torch.no_grad():
        compiled(X[0])
    assert set(reasons(compiled).values()) == {"readers: no graph with a backward has run, which may need more of it"}
    train(model, compiled)
    assert bytes_of(model, compiled)[0] == 0
    model = Adapted().requires_grad_(False)
    compiled = fp8(model, release_frozen=True)
    with torch.no_grad():
        assert torch.equal(compiled(X[0]), compiled(X[0]))
    assert bytes_of(model, compiled)[0] == 0, "nothing of it trains"


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_a_scale_that_may_change_and_scales_that_are_laid_out_otherwise_keep_the_values():
    model = Adapted()
    compiled = fp8(model, DelayedScaling(initial_scale="one"), release_frozen=True)
    compiled(X[0]).sum().backward()
    assert set(reasons(compiled).values()) == {"scales: the next step may change its scale"}
    train(model, compiled, 1)
    assert bytes_of(model, compiled)[0] == 0
    compiled = fp8(AdaptedMoE(), "mxfp8", release_frozen=True)
    compiled(X[0].bfloat16()).float().sum().backward()
    assert inspect(compiled).released["moe.up"].reason.kind is ReasonKind.SHAPE
    assert "keep high precision: shape: a batch of matrices with scales of parts of rows" in str(inspect(compiled))


def test_an_embedding_that_eager_code_reads_keeps_its_values():
    """The compiled forward reads the weight in FP8 alone; the embedding is called outside of it, by the user."""
    model = Net(lambda m, h: m.head(h), embedding=nn.Embedding(96, 64), head=nn.Linear(64, 96, bias=False))
    model.head.weight = model.embedding.weight
    model.requires_grad_(False)
    compiled = fp8(model, release_frozen=True)
    for _ in range(2):
        compiled(model.embedding(torch.arange(16)))
    assert "an embedding reads it" in reasons(compiled)["embedding.weight"]


# -- eager code in the call


class Read(Adapted):
    """Eager code reads a frozen weight before, between or after its graphs."""

    where = None

    @torch.compiler.disable
    def read(self, x):
        return x + self.base[0].weight.sum() * 0

    def forward(self, x):
        x = self.read(x) if self.where == "before" else x
        h = self.base[0](x) + self.adapter(x)
        h = self.read(h) if self.where == "between" else h
        out = self.base[2](self.base[1](h))
        return self.read(out) if self.where == "after" else out


@pytest.mark.parametrize(
    ("place", "is_first"), [("between", True), ("before", True), ("after", True), ("between", False), ("after", False)]
)
def test_eager_code_never_reads_a_released_weight(place, is_first, monkeypatch):
    """In the call, where Parameters are what guards ask for: code around a graph break is refused before it runs, or the weight
    has its values. Elementwise reads of a storage without bytes would end the process."""
    monkeypatch.setattr(without_values, "CAN_REFUSE", False)
    monkeypatch.setattr(releases, "CAN_REFUSE", False)
    model = Read()
    compiled = fp8(model, release_frozen=True)
    model.where = place if is_first else None
    expected = compiled(X[0])
    if is_first:
        assert set(reasons(compiled).values()) == {CODE}
        assert torch.equal(compiled(X[0]), expected)
        return
    assert bytes_of(model, compiled)[0] == 0
    model.where = place
    for _ in range(2):
        with pytest.raises(ReleasedWeightError, match=r"code at a graph break.*restore_weights"):
            compiled(X[0])
    state(compiled).restore_weights()
    for _ in range(2):  # it keeps its values from now on
        assert torch.equal(compiled(X[0]), expected)


@pytest.mark.parametrize("can_refuse", [False, True])
def test_graph_breaks_only_where_reads_are_refused(can_refuse, monkeypatch):
    class Broken(Adapted):
        def forward(self, x):
            h = self.base[0](x)
            torch._dynamo.graph_break()
            return self.base[2](h + self.adapter(x))

    monkeypatch.setattr(releases, "CAN_REFUSE", can_refuse)
    _, compiled = released(make=Broken)
    assert set(reasons(compiled).values()) == {None if can_refuse else CODE}


def test_a_call_lets_the_parameters_of_other_models_refuse():
    """Unless Dynamo traces, which may meet any; one that a compiled model got since its last call is told of as others are."""
    weight, seen = released()[0].base[0].weight, []

    @torch.compiler.disable
    def note():
        seen.append(type(weight).__name__)

    def noted(m, x):
        note()
        return m.linear(x)

    other = Net(noted, linear=nn.Linear(64, 96, bias=False))
    compiled = fp8(other)
    for _ in range(3):
        compiled(X[0]).sum().backward()
    assert seen[1:] == ["ReleasedParameter"] * 2
    other.linear.weight = weight
    with pytest.raises(ReleasedWeightError, match="has no values"):
        compiled(X[0])
    assert type(weight).__name__ == "ReleasedParameter"


def test_the_backend_by_its_name_does_not_release():
    with pytest.raises(OptionError, match=r"use fp8_compile\(..., in_place=True\)"):
        CompileOptions.named(None, {"release_frozen": True}, None)
