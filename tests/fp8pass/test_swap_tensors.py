"""No weak references to users' Parameters: torch exchanges the content of tensors, which `module.to` may do, and results are
right after it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import fp8_compile, state
from tests.support.cases import each
from tests.support.models import BrokenLayers, mlp

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def compile_model(model, recipe="current", **options):
    torch._dynamo.reset()
    return fp8_compile(model, recipe, backend="aot_eager", select="all", **options)


def use(compiled, model, x=X):
    compiled(x.clone().requires_grad_()).float().square().mean().backward()
    model.zero_grad()
    with torch.no_grad():
        return compiled(x)


@pytest.fixture
def swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def by_name(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="fp8pass", options={"recipe": "current", "inner": "aot_eager"})


WAYS = {
    "defaults": compile_model,
    "cache": lambda model: compile_model(model, weight_copies="cache"),
    "delayed": lambda model: compile_model(model, "delayed"),
    "in place": lambda model: compile_model(model, in_place=True),
    "function": lambda model: compile_model(lambda x: model(x)),
    "function with cache": lambda model: compile_model(lambda x: model(x), weight_copies="cache"),
    "released": lambda model: compile_model(model, release_frozen=True),
    "checkpointed": lambda model: (lambda c: lambda x: checkpoint(c, x, use_reentrant=False))(compile_model(model)),
    "functional_call": lambda model: (lambda c: lambda x: torch.func.functional_call(c, dict(c.named_parameters()), (x,)))(
        compile_model(model)
    ),
}


@each("way", WAYS)
def test_no_parameter_has_a_weak_reference(way):
    for model in (mlp(64, 96, 64), BrokenLayers(2)):
        use(WAYS[way](model), model)
        gc.collect()
        assert [name for name, p in model.named_parameters() if weakref.getweakrefs(p)] == []


def test_inductor_leaves_none_either():
    model = mlp(64, 96, 64)
    torch._dynamo.reset()
    compiled = fp8_compile(model, "current")
    use(compiled, model)
    assert [name for name, p in model.named_parameters() if weakref.getweakrefs(p)] == []


@each("recipe", RECIPES)
@each("copies", ["auto", "cache"])
def test_results_are_right_after_a_swap(recipe, copies, swaps):
    model = mlp(64, 96, 64)
    twin = copy.deepcopy(model)
    ours, theirs = (
        compile_model(model, recipe, weight_copies=copies),
        fp8_compile(twin, recipe, backend="aot_eager", select="all", weight_copies="save"),
    )
    for own, compiled in ((model, ours), (twin, theirs)):
        use(compiled, own)
    changes = (
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.cpu(),
        lambda m: torch.utils.swap_tensors(m[0].weight, nn.Parameter(m[0].weight.detach() * 0.5)),
        lambda m: torch.utils.swap_tensors(m[0].bias, nn.Parameter(m[0].bias.detach() + 1)),
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    )
    for change in changes:
        found = []
        for own, compiled in ((model, ours), (twin, theirs)):
            change(own)
            found.append(use(compiled, own, X.to(own[0].weight.dtype)))
        assert torch.equal(*found)


def test_two_parameters_of_a_model_are_exchanged():
    model = mlp(64, 64, 64)
    compiled = compile_model(model, "delayed", weight_copies="cache")
    use(compiled, model)
    names = list(state(compiled).tensors)
    torch.utils.swap_tensors(model[0].weight, model[2].weight)
    ours = use(compiled, model)
    assert list(state(compiled).tensors) == names
    torch._dynamo.reset()
    assert (ours - fp8_compile(copy.deepcopy(model), "current", backend="aot_eager", select="all")(X)).abs().max() < 0.3


def test_released_weights_load_with_swaps(swaps):
    model = mlp(64, 96, 64).requires_grad_(False)
    values = {k: v * 0.5 for k, v in model.state_dict().items()}
    compiled = compile_model(model, release_frozen=True)
    compiled(X)
    assert model[0].weight.untyped_storage().nbytes() == 0
    model.load_state_dict(values)
    other = mlp(64, 96, 64).requires_grad_(False)
    other.load_state_dict(values)
    assert torch.equal(compiled(X), fp8_compile(other, "current", backend="aot_eager", select="all")(X))


def test_tensor_parallel_models_move(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(mlp(64, 96, 64), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        compiled = compile_model(model)
        use(compiled, model)
        model.to(torch.bfloat16)
        model.cpu()
        assert use(compiled, model, X.bfloat16()).dtype == torch.bfloat16
    finally:
        torch.distributed.destroy_process_group()


def test_an_identity_that_comes_back_is_another_parameter():
    """Parameters of deleted layers leave their identities to those of new ones: each has a history of its own."""
    compiled = fp8_compile(lambda layer, x: layer(x), "delayed", backend="aot_eager", select="all")
    identities = set()
    for i in range(6):
        layer = nn.Linear(64, 64)
        with torch.no_grad():
            layer.weight.mul_(1000.0 if i % 2 else 0.001)
        identities.add(id(layer.weight))
        out = compiled(layer, X)
        assert (out - layer(X)).abs().max() <= 0.1 * layer(X).abs().max()
        out.sum().backward()
        state(compiled).step()
        del out
        layer = None
        gc.collect()
