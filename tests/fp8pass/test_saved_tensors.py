"""Hooks on saved tensors, such as those of activation offloading, change nothing: scales, histories, gradients, statistics.

Oracle: the same run without hooks, bit for bit.
"""

import contextlib
import functools
import io

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, monitor, state
from fp8pass.scales import store
from tests.support.cases import rest
from tests.support.training import fp8, fp8_mlp, gradients, same

DELAYED = DelayedScaling(amax_history_len=4)


def on_disk(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


HOOKS = {
    "clone": (lambda t: t.clone(), lambda t: t),
    "copy on the way back": (lambda t: t, lambda t: t.clone()),
    "another memory format": (lambda t: t.detach().clone().contiguous(), lambda t: t),
    "NumPy": (lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "disk": (on_disk, lambda data: torch.load(io.BytesIO(data))),
    "large ones": (lambda t: t.clone() if t.nbytes >= 1024 else t, lambda t: t),
    "small ones": (lambda t: t.clone() if t.nbytes < 1024 else t, lambda t: t),
    "CUDA's or none": (lambda t: (t.device, t.cpu().clone()), lambda pair: pair[1].to(pair[0])),
}


def hooks_of(name):
    return saved_tensors_hooks(*HOOKS[name])


@contextlib.contextmanager
def nested():
    with hooks_of("NumPy"), hooks_of("clone"):
        yield


TRACKED: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def numbered():
    """TRL's and torchtune's OffloadActivations, one for all steps: a tensor is a number from pack to unpack, which happens
    once, and after a backward none is left."""
    assert not TRACKED

    def pack(t):
        number = len(TRACKED)
        is_small = t.nbytes < 64 or isinstance(t, torch.nn.Parameter)
        TRACKED[number] = t if is_small else torch.empty_like(t).copy_(t)
        return number

    with saved_tensors_hooks(pack, TRACKED.pop):
        yield


CONTEXTS = {
    "numbered": numbered,
    **{name: lambda name=name: hooks_of(name) for name in HOOKS},
    "save_on_cpu": save_on_cpu,
    "nested": nested,
}


OFTEN = ["numbered", "clone", "copy on the way back", "NumPy", "save_on_cpu", "nested"]


def run(context, recipe=DELAYED, *, call=lambda model, x: model(x), measured=False, steps=4, **options):
    """Everything that training leaves behind: gradients of each step, the state, the numbers of the monitor."""
    torch._dynamo.reset()
    model, compiled = fp8_mlp(recipe, **options)
    watch, found = monitor(compiled, every=2) if measured else None, []
    for step in range(steps):
        model.zero_grad()
        x = (torch.randn(32, 64) * (step + 1)).requires_grad_()
        with context():
            out = call(compiled, x)
        (1e-3 * out.square().mean()).backward()
        found.append({**gradients(model), "x": x.grad})
    return found, state(compiled).state_dict(), [] if watch is None else [repr(t) for t in watch.latest.tensors]


@functools.cache
def unhooked(**options):
    """What `run` finds without hooks: the same for all of them."""
    return run(contextlib.nullcontext, **options)


def check_unchanged(context, **options):
    assert same(run(context, **options), unhooked(**options))


@pytest.mark.parametrize("name", [*OFTEN, *rest(name for name in CONTEXTS if name not in OFTEN)])
def test_hooks_around_a_model(name):
    options = {"measured": name in ("clone", "NumPy", "disk")}
    check_unchanged(CONTEXTS[name], **options)
    saved = unhooked(**options)[1]
    assert all(v.item() > 1e3 for k, v in saved.items() if "grad_output" in k and k.endswith(".scale"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("NumPy", {"recipe": r, "measured": True, "steps": 2}) for r in ("current", "blockwise", "rowwise", "mxfp8")),
        *rest([("clone", {"backend": "inductor", "steps": 3})]),
    ],
)
def test_hooks_that_see_bytes_of_fp8_tensors_and_hooks_around_generated_code(name, options):
    """NumPy has no FP8; statistics are kept."""
    check_unchanged(lambda: hooks_of(name), **options)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_hooks_around_checkpointing_and_within(use_reentrant, measured):
    def call(compiled, x):
        return checkpoint(compiled, x, use_reentrant=use_reentrant)

    def within(compiled, x):
        def hooked(y):
            with hooks_of("clone"):
                return compiled(y)

        return checkpoint(hooked, x, use_reentrant=use_reentrant)

    options = {"measured": measured, "steps": 3}
    check_unchanged(lambda: hooks_of("clone"), call=call, **options)
    assert same(run(contextlib.nullcontext, call=within, **options), unhooked(call=call, **options))


def test_a_hook_that_raises_leaves_the_model_usable():
    def refuse(tensor):
        raise ValueError("no room")

    _, compiled = fp8_mlp(DELAYED)
    with pytest.raises(ValueError, match="no room"), saved_tensors_hooks(refuse, lambda t: t):
        compiled(torch.randn(32, 64))
    compiled(torch.randn(32, 64)).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_backward_whose_store_has_grown_since_its_forward_records(monkeypatch):
    monkeypatch.setattr(store, "_SMALLEST", 8)

    def product(x, n):
        for _ in range(n):
            x = torch.tanh(x @ x.t())
        return x

    compiled = fp8(product, DELAYED, step="manual", dynamic=False)
    x = torch.randn(64, 64, requires_grad=True)
    out = compiled(x, 1)
    held = state(compiled)
    (name,) = [n for n in held.tensors if "grad" in n]
    compiled(x, 5)
    out.square().sum().backward()
    staged = held.state_dict()[f"{name}.amax_history"][0]
    held.step()
    assert held.amax_history(name).count_nonzero() == 1
    assert held.amax_history(name)[-1] == staged, "a state of the step that has not ended has it, too"
    assert held.scale(name) != 1


def test_a_loaded_state_replaces_what_a_backward_left_in_outgrown_memory(monkeypatch):
    monkeypatch.setattr(store, "_SMALLEST", 8)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    compiled = fp8(lambda layer, x: layer(x), DELAYED, step="manual")
    out = compiled(layers[0], torch.randn(64, 64))
    held = state(compiled)
    for layer in layers:
        compiled(layer, torch.randn(64, 64))
    empty = held.state_dict()
    out.square().sum().backward()
    held.load_state_dict(empty)
    held.step()
    assert held.amax_history("layer:grad_output").count_nonzero() == 0
