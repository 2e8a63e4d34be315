"""State and its neighbours where a mistake shows late: one history entry, the 65th tensor, loading between two evaluations."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, state
from tests.support.models import mlp


def compiled_mlp(recipe, seed=0, **options):
    torch.manual_seed(seed)
    model = mlp()
    return model, fp8_compile(model, recipe, backend="aot_eager", **options)


def train(compiled, *batches):
    for x in batches:
        compiled(x).square().sum().backward()


def test_a_history_of_one_step_is_loaded_as_it_was():
    """Behind a boundary all its entries are 0: the scale alone tells that it is no empty one."""
    recipe = DelayedScaling(amax_history_len=1)
    model, compiled = compiled_mlp(recipe, step="manual")
    x = torch.randn(16, 64)
    train(compiled, x)
    state(compiled).step()
    other, loaded = compiled_mlp(recipe, step="manual")
    other.load_state_dict(model.state_dict())
    state(loaded).load_state_dict(state(compiled).state_dict())
    assert loaded(x * 3).equal(compiled(x * 3))


def test_counts_of_non_finite_amaxes_outlive_the_65th_tensor():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(30))
            self.num = 1

        def forward(self, x):
            for layer in self.layers[: self.num]:
                x = layer(x)
            return x

    model = Growing()
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=2), backend="aot_eager", select="all", step="manual")
    store = compiled._orig_mod and state(compiled)
    compiled(torch.full((16, 32), float("inf"))).sum().backward()
    store.step()
    before = store.num_non_finite("layers.0:input")
    assert before == 1
    model.layers.extend(nn.Linear(32, 32) for _ in range(40))  # more than the model had when it was compiled
    model.num = 70
    compiled(torch.randn(16, 32)).sum().backward()
    store.step()
    assert len(store.tensors) > 128
    assert store.num_non_finite("layers.0:input") == before


@pytest.mark.parametrize("copies", ["auto", "cache"])
def test_an_evaluation_after_loading_has_the_loaded_scales(copies):
    recipe = DelayedScaling(amax_history_len=2)
    model, compiled = compiled_mlp(recipe, weight_copies=copies, step="manual")
    x = torch.randn(16, 64)
    train(compiled, x)
    state(compiled).step()
    saved, weights = state(compiled).state_dict(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        wanted = compiled(x)
        for parameter in model.parameters():
            parameter.mul_(37.0)
    train(compiled, x)
    state(compiled).step()
    model.load_state_dict(weights)
    with torch.no_grad():
        compiled(x)  # keeps copies with the scales of the larger weights
        state(compiled).load_state_dict(saved)
        assert compiled(x).equal(wanted)


def test_the_smallest_amax_counts_where_a_tensor_has_a_smaller_one():
    model, x = nn.Linear(64, 64, bias=False), torch.randn(16, 64) * 1e-3
    plain, bounded = (
        fp8_compile(model, Float8CurrentScaling(amax_epsilon=epsilon), backend="aot_eager", select="all") for epsilon in (0, 64)
    )

    def cast(t, amax):
        scale = torch.tensor(448.0) / amax
        return (t * scale).to(torch.float8_e4m3fn).float(), scale.reciprocal()

    (a, scale_a), (b, scale_b) = (cast(t, torch.tensor(64.0)) for t in (x, model.weight.detach()))
    with torch.no_grad():
        assert bounded(x).equal((a @ b.t()) * (scale_a * scale_b))
        assert not bounded(x).equal(plain(x))


def test_an_embedding_that_code_reads_eagerly_is_not_released():
    """The compiled part has the weight as a Linear's; the embedding itself runs outside of it."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
            self.trained = nn.Linear(64, 64)
            self.head.weight = self.embedding.weight.requires_grad_(False)

        def forward(self, x):
            return self.head(self.trained(x))

    model = Tied()
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all", release_frozen=True)
    for _ in range(2):
        compiled(torch.randn(16, 64)).sum().backward()
    assert "embedding" in str(inspect(compiled).released if hasattr(inspect(compiled), "released") else inspect(compiled))
    assert model.embedding(torch.arange(4)).isfinite().all()


@pytest.mark.parametrize(("algo", "expected"), [("max", 8.0), ("most_recent", 2.0)])
def test_a_scaling_factor_of_ones_own_takes_the_amax_that_the_recipe_says(algo, expected):
    recipe = DelayedScaling(
        amax_history_len=4,
        amax_compute_algo=algo,
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: fp8_max / amax,
    )
    _, compiled = compiled_mlp(recipe)
    for amax in (1.0, 8.0, 2.0):
        compiled(torch.full((16, 64), amax)).sum().backward()
        state(compiled).step()
    assert state(compiled).scale("0:input") == 448.0 / expected
