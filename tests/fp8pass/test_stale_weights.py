"""Writes to Parameters that leave no trace: with the defaults nothing is out of date; with weight_copies="cache" that is an
error, within stated bounds.

Oracle: a twin with weight_copies="save", which casts every weight in every call, written to in the same way.
"""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8Error, StaleWeightError
from fp8pass.weights.cache import CHECKED_CALLS
from tests.support.cases import each, rest
from tests.support.models import BrokenLayers, mlp

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def compile_model(model, recipe="current", **options):
    return fp8_compile(model, recipe, backend="aot_eager", select="all", **options)


# -- programs that write


def polyak(model):
    """A target network, or a teacher."""
    for p in model.parameters():
        p.data.mul_(0.5).add_(0.25)


def merged_adapter(model):
    model[0].weight.data += 0.1 * torch.ones(96, 64)


def from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def copied_average(model):
    for p in model.parameters():
        p.data.copy_(p.detach() * 0.5)


def numpy_view(model):
    model[0].weight.detach().numpy()[:] *= 0.5


def dlpack_view(model):
    torch.from_dlpack(model[0].weight.detach()).mul_(0.5)


def fused_by_hand(model):
    given = list(model.parameters())
    zeros = [[torch.zeros_like(p) for p in given] for _ in range(2)]
    steps = [torch.tensor(1.0) for _ in given]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    with torch.no_grad():
        torch._fused_adamw_(given, [torch.ones_like(p) for p in given], *zeros, [], steps, **options)


def foreach_on_data(model):
    torch._foreach_mul_([p.data for p in model.parameters()], 0.5)


def exchanged_rows(model):
    weight = model[2].weight.data
    weight.copy_(weight.flip(0))


def other_storage(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def swapped(model):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach() * 0.5, model[0].weight.requires_grad))


def assigned(model):
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)


def in_inference_mode(model):
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(0.5)


def replaced(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5, model[0].weight.requires_grad)


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def half_frozen(model):
    model[0].requires_grad_(False)
    in_place(model)


def optimizer_step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.Adam(model.parameters()).step()
    model.zero_grad()


def loaded(model):
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


def exchanged(model):
    """As exponential moving averages are swapped in."""
    for p in model.parameters():
        other = p.detach() * 0.5
        p.data, other = other, p.data


def assigned_twice(model):
    """The second storage may lie where the first one was."""
    for p in model.parameters():
        p.data = p.data * 3
        p.data = p.data * 0.5


def masters_elsewhere(model):
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    torch.optim.SGD(masters, lr=0.1).step()
    for p, master in zip(model.parameters(), masters, strict=True):
        p.data.copy_(master)


def averaged_for_evaluation(model):
    model.train(not model.training)
    copied_average(model)


TRACED = (in_place, half_frozen, optimizer_step, loaded, exchanged, assigned_twice, assigned, replaced)
"""Programs that torch's version counter or an address tells of."""
TOLD = (masters_elsewhere, averaged_for_evaluation)
"""Those that an optimizer's step or a change of mode tells of, where weights train."""
WRITES = (
    *TRACED[:6],
    polyak,
    merged_adapter,
    from_vector,
    copied_average,
    numpy_view,
    dlpack_view,
    fused_by_hand,
    foreach_on_data,
    exchanged_rows,
    other_storage,
    swapped,
    assigned,
    in_inference_mode,
    replaced,
    *TOLD,
)


def by_turns(turn, frozen=(False, True)):
    """Every program under two recipes, with and without weights that train. The fast suite has one of these for each program:
    all recipes by turns, and of two tests with different turns each has the other half of `frozen`."""
    fast, others = [], []
    for i, write in enumerate(WRITES):
        recipes = [RECIPES[(i + shift) % len(RECIPES)] for shift in (turn, 3 - turn)]
        fast.append((write, recipes[0], frozen[(i + i // len(RECIPES) + turn) % len(frozen)]))
        others += [row for row in itertools.product([write], recipes, frozen) if row != fast[-1]]
    ids = [f"{write.__name__}-{recipe}" + "-frozen" * is_frozen for write, recipe, is_frozen in [*fast, *others]]
    return pytest.mark.parametrize(("write", "recipe", "frozen"), [*fast, *rest(others)], ids=ids)


def pair(recipe, frozen=False, **options):
    """A model and its twin, each compiled, with the same state."""
    torch.manual_seed(0)
    model = mlp(64, 96, 64).requires_grad_(not frozen)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    found = [(model, compile_model(model, recipe, **options)), (twin, compile_model(twin, recipe, weight_copies="save"))]
    for own, compiled in found:
        compiled(X.clone().requires_grad_()).square().mean().backward()
        own.zero_grad()
    return found


def evaluated(pairs):
    with torch.no_grad():
        return [compiled(X) for _, compiled in pairs]


def trained(pairs):
    found = []
    for _, compiled in pairs:
        x = X.clone().requires_grad_()
        out = compiled(x)
        out.square().mean().backward()
        found.append(torch.cat([out.detach(), x.grad]))
    return found


@by_turns(0)
def test_nothing_is_out_of_date_with_the_defaults(write, recipe, frozen):
    pairs = pair(recipe, frozen)
    before = evaluated(pairs)
    for i, run in enumerate((evaluated, trained)):
        for model, _ in pairs:
            write(model)
        ours, theirs = run(pairs)
        assert torch.equal(ours, theirs)
        assert i or not torch.equal(before[0], ours)


@by_turns(3)
def test_the_cache_is_right_or_raises_at_the_next_boundary(write, recipe, frozen):
    """Between two microbatches; after the error training goes on with the right copies."""
    pairs = pair(recipe, frozen, weight_copies="cache")
    trained(pairs)
    for model, _ in pairs:
        write(model)
    try:
        ours, theirs = trained(pairs)
    except StaleWeightError:
        assert write not in TRACED
        assert frozen or write not in TOLD
        ours, theirs = trained(pairs)
    assert torch.equal(ours, theirs)


@by_turns(0, frozen=[False])
def test_the_cache_is_silent_in_inference_for_a_stated_number_of_calls_at_most(write, recipe, frozen):
    pairs = pair(recipe, frozen, weight_copies="cache")
    evaluated(pairs)
    for model, _ in pairs:
        write(model)
    for _ in range(CHECKED_CALLS):
        try:
            ours, theirs = evaluated(pairs)
        except StaleWeightError:
            ours, theirs = evaluated(pairs)
            break
    assert torch.equal(ours, theirs)


def test_the_error_names_the_parameter_the_cause_and_both_ways_out():
    ((model, compiled), (twin, _)) = pairs = pair("current", weight_copies="cache")
    trained(pairs)
    model[2].weight.data.mul_(2)
    text = r"Parameter 2\.weight has changed since.*\.data.*_fused_adamw_.*refresh_weights\(\).*weight_copies='auto'"
    with pytest.raises(StaleWeightError, match=text) as caught:
        compiled(X)
    assert isinstance(caught.value, Fp8Error)
    for own in (model, twin):
        own[2].weight.data.mul_(2)
    twin[2].weight.data.mul_(2)
    state(compiled).refresh_weights()
    assert torch.equal(*trained(pairs))


def test_refreshing_after_each_write_raises_nothing():
    pairs = pair("current", weight_copies="cache")
    for _ in range(3):
        for model, _ in pairs:
            polyak(model)
        state(pairs[0][1]).refresh_weights()
        assert torch.equal(*trained(pairs))


def test_checks_disturb_nothing():
    ((model, compiled), _) = pair("current", weight_copies="cache")
    versions = [p._version for p in model.parameters()]
    for _ in range(3):
        out = compiled(X)
        with torch.inference_mode():
            compiled(X)
        out.square().mean().backward()
    assert [p._version for p in model.parameters()] == versions


def test_a_model_in_parts_is_checked_by_one_launch(monkeypatch):
    launches = []
    original = torch.ops.lowering.checksums
    monkeypatch.setattr(torch.ops.lowering, "checksums", lambda xs: launches.append(len(xs)) or original(xs))
    torch._dynamo.reset()
    model = BrokenLayers(3)
    compiled = compile_model(model, weight_copies="cache")
    x = torch.randn(16, 64)
    compiled(x).sum().backward()
    num_weights = sum(launches)
    launches.clear()
    compiled(x).sum().backward()
    assert launches == [num_weights]
    next(p for p in model.parameters() if p.dim() == 2).data.mul_(2)
    with pytest.raises(StaleWeightError):
        compiled(x)


@each("fused", [True, False])
@each("how", ["step", "function", "inductor"])
def test_compiled_optimizers_are_seen_at_once(fused, how):
    from torch._dynamo.utils import counters

    pairs = pair("current", weight_copies="cache")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=not fused) for model, _ in pairs]
    steps = [torch.compile(o.step, backend="inductor" if how == "inductor" else "aot_eager") for o in optimizers]
    if how == "function":
        steps = [torch.compile(lambda o=o: o.step(), backend="aot_eager") for o in optimizers]
    num_graphs = []
    for _ in range(4):
        assert torch.equal(*trained(pairs))
        for step in steps:
            step()
        num_graphs.append(counters["stats"]["unique_graphs"])
        assert torch.equal(*evaluated(pairs))
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert num_graphs[1] == num_graphs[-1], "nothing is compiled again"


def test_a_compiled_optimizer_that_ran_before_the_model():
    pairs = pair("current", weight_copies="save")
    model = pairs[0][0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    compiled, plain = compile_model(model, weight_copies="cache"), pairs[0][1]
    for _ in range(3):
        plain(X).square().mean().backward()
        step()
        assert torch.equal(compiled(X), plain(X))
        optimizer.zero_grad()


def test_loaded_scales_are_those_of_cached_copies():
    """Copies that an evaluation keeps are of the scales before `load_state_dict`."""
    pairs = pair(DelayedScaling(amax_history_len=2), weight_copies="cache")
    for _, compiled in pairs:
        state(compiled).step()
    for _, compiled in pairs:
        saved = state(compiled).state_dict()
        with torch.no_grad():
            compiled(X)
        state(compiled).load_state_dict({k: v / 8 if k.endswith(".scale") else v for k, v in saved.items()})
    ours, theirs = evaluated(pairs)
    assert torch.equal(ours, theirs)


def test_inspect_says_what_is_kept_and_why():
    ((_, compiled), _) = pair("current")
    assert [w for g in inspect(compiled).graphs for w in g.kept] == []
    ((_, compiled), _) = pair("current", weight_copies="cache")
    assert re.search(
        r"2 weights are quantized when changed.*kept\. weight_copies='cache' compares them", str(inspect(compiled))
    )


def test_merged_adapters_of_peft():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    torch._dynamo.reset()
    adapted = peft.get_peft_model(mlp(64, 96, 64), peft.LoraConfig(target_modules=["0", "2"], r=32, init_lora_weights=False))
    compiled = compile_model(adapted.eval(), weight_copies="auto")
    with torch.no_grad():
        for change in (adapted.merge_adapter, adapted.unmerge_adapter, adapted.merge_adapter):
            compiled(X)
            change()
            own = compiled(X)
            torch._dynamo.reset()
            assert torch.equal(own, compile_model(adapted, weight_copies="save")(X))
