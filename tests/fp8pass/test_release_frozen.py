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

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_compile, fp8_uncompile, inspect, state, state_dict_fp8
from fp8pass.errors import OptionError, ReasonKind, ReleasedWeightError
from fp8pass.options import CompileOptions
from fp8pass.weights import released as without_values
from fp8pass.weights import releases
from tests.support.cases import rest
from tests.support.models import mlp
from tests.support.moe import MoE

X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
#: Recipe -> whether one copy is enough.
RECIPES = {"delayed": True, "current": True, "blockwise": True, "rowwise": False, "mxfp8": False}


class Adapted(nn.Module):
    """A frozen MLP with a trained adapter beside its first linear."""

    def __init__(self, width=64, hidden=96):
        super().__init__()
        self.base = mlp(width, hidden, width).requires_grad_(False)
        self.adapter = nn.Linear(width, hidden)

    def forward(self, x):
        return self.base[2](self.base[1](self.base[0](x) + self.adapter(x)))


def compile_model(model, recipe="current", **options):
    torch._dynamo.reset()
    return fp8_compile(model, recipe, backend="aot_eager", select="all", **options)


def train(model, compiled, num_steps=3, checkpoints=False):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for i in range(num_steps):
        x = X[i % 3][:, : model.adapter.in_features].clone().requires_grad_()
        out = checkpoint(compiled, x, use_reentrant=False) if checkpoints else compiled(x)
        out.square().mean().backward()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, compiled(x)]


def released(recipe="current", model=None, num_steps=2, **options):
    torch.manual_seed(0)
    model = model or Adapted()
    compiled = compile_model(model, recipe, release_frozen=True, **options)
    train(model, compiled, num_steps)
    return model, compiled


def bytes_of(model, compiled):
    """Frozen matrices in high precision, and all FP8 copies with their scales."""
    weights = [p for p in model.parameters() if not p.requires_grad and p.dim() == 2]
    kept = compiled._fp8pass_session.weights.cache._weights.values()
    made = [w.made for w in kept if not w.parameter.requires_grad]
    parts = [t for m in made for t in (*m.data.values(), *m.scale_inv.values())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in parts}
    return sum(w.untyped_storage().nbytes() for w in weights), sum(storages.values())


SIZES = ((64, 96), (50, 33))


@pytest.mark.parametrize(
    ("recipe", "width", "hidden"),
    [
        *((recipe, *SIZES[i % 2]) for i, recipe in enumerate(RECIPES)),
        *rest((recipe, *SIZES[1 - i % 2]) for i, recipe in enumerate(RECIPES)),
    ],
)
def test_training_is_equal_without_the_values(recipe, width, hidden):
    found = []
    for options in ({"release_frozen": True}, {"weight_copies": "save"}):
        torch.manual_seed(0)
        model = Adapted(width, hidden)
        compiled = compile_model(model, recipe, **options)
        found.append(train(model, compiled))
        if "release_frozen" in options:
            report, (high, low) = inspect(compiled), bytes_of(model, compiled)
    assert [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)] == []
    numel = 2 * width * hidden
    assert high == 0
    if (width, hidden) == SIZES[0]:
        assert numel <= low <= numel * (1.05 if RECIPES[recipe] else 2.2)
    assert {name: r.bytes for name, r in report.released.items()} == dict.fromkeys(
        ("base.0.weight", "base.2.weight"), 4 * width * hidden
    )
    assert f"2 frozen weights are released: {4 * numel:,} bytes of high precision are free." in str(report)


def test_reading_raises_and_what_reads_nothing_does_not():
    model, _ = released()
    weight = model.base[0].weight
    reads = {
        "linear": lambda: model(X[0]),
        "add_": lambda: weight.data.add_(1),
        "mul": lambda: weight * 2,
        "getitem": lambda: weight[0],
        "clone": lambda: copy.deepcopy(model),
        "reduce": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "copy_ from it": lambda: Adapted().base[0].weight.copy_(weight),
        "to": lambda: model.bfloat16(),
        "detach": lambda: weight.detach() + 1,
        "zero_": lambda: nn.init.zeros_(weight),
    }
    for name, read in reads.items():
        with torch.no_grad(), pytest.raises(ReleasedWeightError, match=r"has no values.*restore_weights"):
            print(name, read())
    assert model.to("cpu", torch.float32) is model
    assert (weight.shape, weight.numel(), weight.dtype, weight.device.type) == ((96, 64), 96 * 64, torch.float32, "cpu")
    assert "no values" in repr(weight)
    assert isinstance(weight, nn.Parameter)
    assert list(model.state_dict()) == list(Adapted().state_dict())


def loaded(model, **options):
    model.load_state_dict({k: v * 1.5 for k, v in Adapted().state_dict().items()}, **options)


def assigned(model):
    model.base[0].weight.data = torch.full((96, 64), 0.01)


def test_new_values_are_taken_and_given_back_again():
    for change in (loaded, lambda model: loaded(model, assign=True), assigned):
        model, compiled = released(num_steps=1)
        torch.manual_seed(1)
        change(model)
        state(compiled).restore_weights()
        fresh = copy.deepcopy(model)
        expected = train(fresh, compile_model(fresh, weight_copies="save"), 1)
        torch._dynamo.reset()
        assert all(torch.equal(a, b) for a, b in zip(train(model, compiled, 1), expected, strict=True))
        assert bytes_of(model, compiled)[0] == 0


@pytest.mark.parametrize("recipe", ["current", "rowwise", *rest(["delayed", "blockwise", "mxfp8"])])
def test_restored_values_and_exports_are_those_of_the_copies(recipe):
    model, compiled = released(recipe)
    torch.manual_seed(0)
    plain = Adapted()
    keeping = compile_model(plain, recipe)
    train(plain, keeping, 2)
    found, expected = dict(state_dict_fp8(compiled)), dict(state_dict_fp8(keeping))
    assert list(found) == list(expected)
    assert [n for n in found if not torch.equal(as_bytes(found[n]), as_bytes(expected[n]))] == []
    with torch.no_grad():
        before = compiled(X[0])
        state(compiled).restore_weights()
        weight = model.base[0].weight
        assert type(weight) is nn.Parameter
        error = (weight - plain.base[0].weight).abs().max() / plain.base[0].weight.abs().max()
        assert 0 < error < 0.04
        assert torch.equal(compiled(X[0]), before), "the copies stay"
    assert bytes_of(model, compiled)[0] == 0


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def test_a_weight_that_is_to_train_needs_its_values():
    model, compiled = released()
    model.base[0].weight.requires_grad_(True)
    with pytest.raises(ReleasedWeightError, match="restore_weights"):
        compiled(X[0])
    state(compiled).restore_weights()
    model.base[0].weight.requires_grad_(True)
    compiled(X[0]).sum().backward()
    assert model.base[0].weight.grad is not None


def test_uncompiled_models_have_their_values():
    model, compiled = released(in_place=True)
    assert compiled is model
    fp8_uncompile(model)
    assert model(X[0]).shape == (16, 64)


def test_another_compiled_model_finds_the_copies():
    model, compiled = released()
    expected = compiled(X[0])
    del compiled
    again = compile_model(model, release_frozen=True)
    assert torch.equal(again(X[0]), expected)
    other = compile_model(model, "rowwise", release_frozen=True)
    with pytest.raises(ReleasedWeightError, match="as 'rowwise' does: this Parameter has no values"):
        other(X[0])


class Merged(Adapted):
    """The second base weight is read by an adapter's merge, too, the first one by an embedding."""

    def forward(self, x):
        h = self.base[0](x) + self.adapter(x)
        return (
            h @ (self.base[2].weight * 0.5).t()
            + self.base[2](h)
            + nn.functional.embedding(torch.arange(16), self.base[0].weight)
        )


def test_weights_with_other_readers_stay():
    model, compiled = released(model=Merged())
    report = inspect(compiled)
    assert {n: str(r.reason) for n, r in report.released.items()} == {
        "base.0.weight": "readers: embedding of a compiled graph reads it in high precision",
        "base.2.weight": "readers: mul of a compiled graph reads it in high precision",
    }
    assert "1 frozen weight keeps high precision: readers: mul" in str(report)
    assert report.to_dict()["released"]["base.0.weight"]["bytes"] == 0
    model(X[0])


def test_evaluation_first_waits_for_the_training_graph():
    model = Adapted()
    compiled = compile_model(model, "rowwise", release_frozen=True)
    with torch.no_grad():
        compiled(X[0])
    assert {str(r.reason) for r in inspect(compiled).released.values()} == {
        "readers: no graph with a backward has run, which may need more of it"
    }
    train(model, compiled)
    assert bytes_of(model, compiled)[0] == 0
    model = Adapted().requires_grad_(False)
    compiled = compile_model(model, release_frozen=True)
    with torch.no_grad():
        assert torch.equal(compiled(X[0]), compiled(X[0]))
    assert bytes_of(model, compiled)[0] == 0, "nothing of it trains"


def test_a_scale_that_may_change_keeps_the_values():
    model = Adapted()
    compiled = compile_model(model, DelayedScaling(initial_scale="one"), release_frozen=True)
    compiled(X[0]).sum().backward()
    assert {str(r.reason) for r in inspect(compiled).released.values()} == {"scales: the next step may change its scale"}
    train(model, compiled, 1)
    assert bytes_of(model, compiled)[0] == 0


def test_graph_breaks_only_where_reads_are_refused(monkeypatch):
    class Broken(Adapted):
        def forward(self, x):
            h = self.base[0](x)
            torch._dynamo.graph_break()
            return self.base[2](h + self.adapter(x))

    for can_refuse in (False, True):
        monkeypatch.setattr(releases, "CAN_REFUSE", can_refuse)
        _, compiled = released(model=Broken())
        reasons = {str(r.reason) for r in inspect(compiled).released.values()}
        wanted = "readers: code between graphs may read it, which torch's builds without CUDA cannot refuse"
        assert reasons == ({"None"} if can_refuse else {wanted})


@pytest.mark.parametrize("recipe", ["rowwise", *rest(["delayed"])])
def test_checkpointing(recipe):
    found = []
    for options in ({"release_frozen": True}, {"weight_copies": "save"}):
        torch.manual_seed(0)
        model = Adapted()
        compiled = compile_model(model, recipe, **options)
        found.append(train(model, compiled, checkpoints=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_experts_are_turned_too():
    class Experts(Adapted):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 64, 48), requires_grad=False)

        def forward(self, x):
            return torch.bmm(super().forward(x).expand(3, -1, -1), self.stack)

    for recipe in ("delayed", Float8BlockScaling(x_block_scaling_dim=1)):
        found = []
        for options in ({"release_frozen": True}, {"weight_copies": "save"}):
            torch.manual_seed(0)
            model = Experts()
            compiled = compile_model(model, recipe, **options)
            found.append(train(model, compiled))
            if "release_frozen" in options:
                assert inspect(compiled).released["stack"].reason is None
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_call_lets_the_parameters_of_other_models_refuse():
    """Unless Dynamo traces, which may meet any; one that a compiled model got since its last call is told of as others are."""
    model, _ = released()
    weight, seen = model.base[0].weight, []

    @torch.compiler.disable
    def note():
        seen.append(type(weight).__name__)

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(*reversed(weight.shape), bias=False)

        def forward(self, x):
            note()
            return self.linear(x)

    other = Other()
    compiled, x = compile_model(other), torch.randn(16, weight.shape[1])
    for _ in range(3):
        compiled(x).sum().backward()
    assert seen[1:] == ["ReleasedParameter"] * 2
    other.linear.weight = weight
    with pytest.raises(ReleasedWeightError, match="has no values"):
        compiled(x)
    assert type(weight).__name__ == "ReleasedParameter"


@pytest.mark.parametrize(
    ("place", "is_first"), [("between", True), ("before", True), ("after", True), ("between", False), ("after", False)]
)
def test_eager_code_never_reads_a_released_weight(place, is_first, monkeypatch):
    """In the call, where Parameters are what guards ask for: code around a graph break is refused before it runs, or the weight
    has its values. Elementwise reads of a storage without bytes would end the process."""
    monkeypatch.setattr(without_values, "CAN_REFUSE", False)
    monkeypatch.setattr(releases, "CAN_REFUSE", False)

    class Read(Adapted):
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

    torch.manual_seed(0)
    model = Read()
    compiled = compile_model(model, release_frozen=True)
    if is_first:
        model.where = place
    expected = compiled(X[0])
    if is_first:
        reasons = {str(r.reason) for r in inspect(compiled).released.values()}
        assert reasons == {"readers: code between graphs may read it, which torch's builds without CUDA cannot refuse"}
        assert torch.equal(compiled(X[0]), expected)
        return
    assert bytes_of(model, compiled)[0] == 0
    model.where = place
    for _ in range(2):
        with pytest.raises(ReleasedWeightError, match=r"code at a graph break.*restore_weights"):
            compiled(X[0])
    state(compiled).restore_weights()
    assert torch.equal(compiled(X[0]), expected)
    assert torch.equal(compiled(X[0]), expected), "it keeps its values from now on"


def test_generated_code():
    """Inductor's, on the CPU: the same gradients of adapters, and the memory is given back."""
    found = []
    for options in ({"release_frozen": True}, {"weight_copies": "save"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Adapted(32, 48).bfloat16()
        compiled = fp8_compile(model, "current", backend="inductor", select="all", **options)
        results = []
        for i in range(2):
            compiled(X[i][:, :32].bfloat16()).float().square().mean().backward()
            results += [p.grad.clone() for p in model.adapter.parameters()]
        found.append(results)
        if "release_frozen" in options:
            high, low = bytes_of(model, compiled)
            assert high == 0
            assert 0 < low <= 1.1 * 2 * 32 * 48
    assert [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)] == []
    assert all(g.abs().max() > 0 for g in found[0])


def test_experts_with_scales_of_rows():
    """Both orientations are kept. Restored values and exports are those of the copies; stacks whose scales are laid out
    otherwise keep their values, with the reason."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.adapter = nn.Linear(64, 64)
            self.moe = MoE().requires_grad_(False)

        def forward(self, x):
            return self.moe(self.adapter(x))

    exports = []
    for recipe, options in (("rowwise", {"release_frozen": True}), ("rowwise", {"weight_copies": "save"})):
        torch.manual_seed(0)
        model = Experts().bfloat16()
        compiled = compile_model(model, recipe, **options)
        for i in range(2):
            compiled(X[i].bfloat16()).float().square().mean().backward()
        exports.append({**dict(state_dict_fp8(compiled)), "gradient": model.adapter.weight.grad})
        if "release_frozen" in options:
            assert {str(inspect(compiled).released[f"moe.{n}"].reason) for n in ("up", "down")} == {"None"}
            assert model.moe.up.untyped_storage().nbytes() == 0
            state(compiled).restore_weights()
            restored = model.moe.up.detach().clone()
    assert (restored - model.moe.up).abs().max() < 0.04 * model.moe.up.abs().max()
    assert [n for n in exports[1] if not torch.equal(as_bytes(exports[0][n]), as_bytes(exports[1][n]))] == []
    model = Experts().bfloat16()
    compiled = compile_model(model, "mxfp8", release_frozen=True)
    compiled(X[0].bfloat16()).float().sum().backward()
    assert inspect(compiled).released["moe.up"].reason.kind is ReasonKind.SHAPE
    assert "keep high precision: shape: a batch of matrices with scales of parts of rows" in str(inspect(compiled))


def test_options():
    with pytest.raises(OptionError, match=r"release_frozen=True and weight_copies='save'.*use 'auto' or 'cache'"):
        fp8_compile(mlp(), release_frozen=True, weight_copies="save")
    with pytest.raises(OptionError, match="CUDA graphs"):
        fp8_compile(mlp(), release_frozen=True, mode="reduce-overhead")
    with pytest.raises(OptionError, match="release_frozen"):
        fp8_compile(mlp(), release_frozen=1)
    with pytest.raises(OptionError, match=r"use fp8_compile\(..., in_place=True\)"):  # the backend by its name
        CompileOptions.named(None, {"release_frozen": True}, None)


def test_an_embedding_that_eager_code_reads_keeps_its_values():
    """The compiled forward reads the tied weight in FP8 alone; the embedding is called outside of it, by the user."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
            self.head.weight = self.embedding.weight
            self.requires_grad_(False)

        def forward(self, h):
            return self.head(h)

    model = Tied()
    compiled = compile_model(model, release_frozen=True)
    for _ in range(2):
        compiled(model.embedding(torch.arange(16)))
    assert "an embedding reads it" in str(inspect(compiled).released["embedding.weight"].reason)
