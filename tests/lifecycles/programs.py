"""Programs as users write them: who writes the weights when, what backward reads, what is called when.

Writes that leave no trace, hooks on saved tensors and swapped tensors have a row each in `tests/fp8pass/test_stale_weights.py`,
and `test_saved_tensors.py`; here are those that scales and histories depend on.
"""

import contextlib
import copy
import functools
import threading
import types

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import nested_compile_region
from torch.func import functional_call
from torch.nn import functional as F

from tests.lifecycles.harness import ALL_RECIPES, loop, program
from tests.lifecycles.parts import HIDDEN, STEPS, WIDTH, batch, look, loss_of, mlp, sgd, train
from tests.support.models import BrokenBlock, Net, Stack

STALE = {"cache": "StaleWeightError"}
"""`weight_copies="cache"` is the user's word that weights change by recorded writes alone, which these programs break."""
ALL = ("save", "recompute", "cache", "release", "in place", "manual", "strict", "monitor", "by name", "schedule")
LONG = range(STEPS + 4)

#: The loop that everything else is a variation of, with an evaluation after each step.
loop("plain", mlp, recipes=ALL_RECIPES, options=ALL, after=lambda run: look(run, 100 + run.step), scales=True)

# -- teachers, averages, weights that are exchanged


def _distilled(fp8, update):
    """A student and its teacher, which `update` of each pair of Parameters lets follow."""
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    taught = fp8.compile(teacher)

    def after(run):
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                update(kept, new)
        look(run, run.step, taught)

    train(fp8, student, lr=0.5, loss=lambda run, out, x: (out - look(run, x, taught) - 1).square().mean(), after=after)


@program(options=("cache", "in place"))
def ema_in_place(fp8):
    """lerp_ under no_grad: version counters tell of it."""
    _distilled(fp8, lambda kept, new: kept.lerp_(new, 0.5))


@program(recipes=ALL_RECIPES, options=("in place", "cache"), refused=STALE)
def ema_by_data(fp8):
    """DINO's: `.data` has no version counter in common with the Parameter."""
    _distilled(fp8, lambda kept, new: kept.data.mul_(0.5).add_(0.5 * new.data))


def _exchange(run):
    """Right after a backward larger weights take the place of the model's, which is told of it, and give it back later."""
    if run.step % 3:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(8.0 if run.step % 3 == 1 else 0.125)
        run.fp8.forget(run.call)
        look(run, 53)


given = {"recipes": ("short", "recent", "current"), "options": ("cache", "in place", "manual", "monitor")}
loop("exchanged_and_forgotten", mlp, **given, lr=0.5, after=_exchange, scales=True)


# -- weights that never train


class _Backbone(nn.Module):
    def __init__(self, std, has_break):
        super().__init__()
        self.backbone, self.head = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)
        nn.init.normal_(self.backbone.weight, std=std)
        self.backbone.requires_grad_(False)
        self.has_break = has_break

    def forward(self, x):
        h = self.backbone(x)
        if self.has_break:
            torch._dynamo.graph_break()
        return self.head(h)


# Evaluated with gradients, and no backward. Before a break the backbone has a graph of its own, which never trains.
evaluated = {"lr": 10.0, "steps": LONG, "after": lambda run: run.fp8.note(out=run.call(batch(53)))}
given = {"options": ("release", "in place", "manual", "monitor"), **evaluated}
loop("frozen_backbone", lambda: _Backbone(0.02, False), **given)
loop("frozen_backbone_before_a_break", lambda: _Backbone(5e-4, True), **given)


class _Taught(nn.Module):
    """A teacher under no_grad, between graph breaks; small weights."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(0), mlp(1, std=2e-3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            torch._dynamo.graph_break()
            aim = self.teacher(x)
            torch._dynamo.graph_break()
        return self.student(x), aim


def _from_the_aim(run, found, x):
    run.fp8.note(aim=found[1])
    return (found[0] - 10 * found[1]).square().mean()


loop("teacher_inside_the_model", _Taught, options=("in place", "manual"), steps=LONG, loss=_from_the_aim)


# -- optimizers


def _adamw(compiles_step):
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, fused=True)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager") if compiles_step else optimizer.step
        optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
        return optimizer

    return make


# Compiled, a kernel for all Parameters raises no version counters.
for compiled in (False, True):
    given = {"options": ("cache", "save"), "optimizer": _adamw(compiled), "after": lambda run: look(run, 60)}
    loop("adamw_fused" + "_and_compiled" * compiled, mlp, **given)


@program(options=("cache", "save", "manual", "monitor"))
def optimizer_in_backward(fp8):
    """Each Parameter is updated as soon as its gradient is there, and has none afterwards."""
    model = mlp()
    own = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def update(parameter):
        own[parameter].step()
        parameter.grad = None

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(update)
    none = types.SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    train(fp8, model, optimizer=lambda _: none, also=lambda _: fp8.note(weight=model[0].weight, bias=model[2].bias))


# Three microbatches a step. With automatic steps, each forward ends a step.
loop("accumulation", mlp, options=("cache", "manual", "by name"), parts=3, scales=True)


def _evaluates(run, out, x):
    """Behind the forward: also in the first step, and before the backward of a policy that acts without gradients."""
    return loss_of(out, x) + (out * look(run, 500 + run.step)).mean()


given = {"recipes": ("short", "delayed"), "options": ("manual",)}  # with state: current scaling has no boundary
loop("evaluation_before_the_first_boundary", lambda: mlp(std=5e-4), **given, parts=2, loss=_evaluates)
loop("evaluation_before_backward", mlp, options=("manual", "in place", "cache"), loss=_evaluates)


@program(options=("manual", "by name"))
def microbatches_before_backward(fp8):
    """Two forwards, then two backwards: a boundary falls between a forward and its backward."""

    def through(run, x):
        run.other = batch(300 + run.step)
        return run.call(x), run.call(run.other)

    train(fp8, mlp(), through=through, loss=lambda run, out, x: loss_of(out[0], x) + loss_of(out[1], run.other))


@program(options=("cache", "manual"))
def scaler_with_overflow(fp8):
    """A loss scale that overflows in some steps: these leave the weights and the histories as they are."""

    def optimizer(model):
        scaled = sgd(model)
        step, scaled.step = scaled.step, lambda: all(p.grad.isfinite().all() for p in model.parameters()) and step()
        return scaled

    def unscale(run):
        for parameter in run.model.parameters():
            parameter.grad.div_(2.0**10)

    def loss(run, out, x):
        return loss_of(out, x) * (2.0**10 if run.step % 3 else float("inf"))

    train(fp8, mlp(), optimizer=optimizer, loss=loss, also=unscale, scales=True)


# -- models that become others


class _Lora(nn.Module):
    """A frozen linear with a trained addition of rank 32; `merge` as peft does it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 32, bias=False), nn.Linear(32, outputs, bias=False)
        nn.init.normal_(self.b.weight, std=0.02)
        self.merged = False

    def forward(self, x):
        out = self.base(x)
        return out if self.merged else out + self.b(self.a(x))

    def merge(self, sign):
        self.base.weight.data += sign * (self.b.weight @ self.a.weight).detach()
        self.merged = sign > 0


def _lora():
    return nn.Sequential(_Lora(WIDTH, HIDDEN), nn.GELU(), _Lora(HIDDEN, WIDTH))


def _merge(run):
    """By `.data +=` for each evaluation, and unmerged to train on."""
    look(run, 70)
    for sign in (1.0, -1.0):
        for module in (run.model[0], run.model[2]):
            module.merge(sign)
        look(run, 70)


loop("lora", _lora, options=("release", "cache", "in place", "manual"), lr=0.5)
loop("lora_merged_and_unmerged", _lora, options=("in place", "manual"), lr=1.0, after=_merge)
stages = {"before": lambda run: run.model[0].requires_grad_(not 3 <= run.step < 7), "after": lambda run: look(run, 71)}
loop("frozen_in_stages", mlp, options=("cache", "in place", "manual"), lr=0.2, **stages)


def _experts():
    """Each expert reads all rows; the weights are one Parameter."""
    return Net(
        lambda self, x: self.out(torch.bmm(x.expand(self.weight.shape[0], *x.shape), self.weight.mT).mean(0)),
        weight=nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.05),
        out=nn.Linear(WIDTH, WIDTH),
    )


def _add_and_prune(run):
    """The number of matrices changes; histories of the stack begin anew, those of inputs and gradients go on."""
    kept = run.model.weight.detach()
    if run.step in (3, 6):
        run.model.weight = nn.Parameter(torch.cat([kept, kept[:1] * 0.5]) if run.step == 3 else kept[1:].clone())


given = {"recipes": ("short", "delayed", "current"), "options": ("cache", "in place")}
loop("experts_added_and_pruned", _experts, **given, before=_add_and_prune)


def _replace(run):
    """A new Parameter in the place of another, and one of other values."""
    if run.step == 4:
        run.model[2].weight, run.model[2].bias = mlp(4)[2].parameters()
    if run.step == 7:
        run.model[0].weight = nn.Parameter(run.model[0].weight.detach() * 3)


loop("replaced_parameters", mlp, options=("cache", "in place"), before=_replace)


def _load(run):
    look(run, 73)
    if run.step % 3 == 1:
        run.model.load_state_dict(mlp(1 + run.step % 2).state_dict())
    look(run, 73)


loop("loaded_in_the_middle", mlp, options=("cache", "in place"), after=_load)


@program(options=("manual", "in place", "cache", "schedule"))
def resumed_in_the_middle(fp8):
    """Weights, optimizer and state are saved, and loaded into a model that is new."""
    models = [mlp(), mlp(3)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models)
    saved = fp8.save(train(fp8, models[0], optimizer=lambda _: first, steps=range(5)).call)
    compiled = fp8.compile(models[1])
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    fp8.load(compiled, saved)
    train(fp8, models[1], compiled, optimizer=lambda _: second, steps=range(5, STEPS), scales=True)


def _noted(run, out, x):
    run.fp8.note(out=out)
    return loss_of(out.float(), x.float())


cast = {"before": lambda run: run.model.to(torch.bfloat16 if 3 <= run.step < 7 else torch.float32), "loss": _noted}
given = {"recipes": ("short", "current", "blockwise"), "options": ("cache", "in place")}
loop("another_dtype", mlp, **given, **cast, batch_of=lambda run, i: batch(i).to(run.model[0].weight.dtype))

# -- what backward reads


def _cloned():
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


#: Small losses, as a mean over many tokens gives: gradients need their own scales.
SMALL = {"lr": 50.0, "loss": lambda run, out, x: 1e-3 * loss_of(out, x), "scales": True}
given = {"recipes": ALL_RECIPES, "options": ("monitor", "manual", "in place", "save", "recompute", "strict")}
loop("hooks_that_clone", mlp, **given, around=_cloned, **SMALL)


@program(recipes=("short", "delayed", "blockwise"))
def hooks_around_blocks(fp8):
    """An eager model of compiled blocks, each with hooks of its own."""
    blocks = nn.ModuleList(mlp(seed) for seed in range(2))
    calls = [fp8.compile(block) for block in blocks]

    def run(x):
        for call in calls:
            with _cloned():
                x = x + call(x)
        return x

    train(fp8, blocks, run)
    for call in calls:
        fp8.scales(call)


def _checkpointed(reentrant):
    def through(run, x):
        return torch.utils.checkpoint.checkpoint(run.call, x, use_reentrant=reentrant)

    return {"through": through, "batch_of": lambda run, i: batch(i).requires_grad_(), "scales": True}


# Backward runs the forward again; where it is reentrant, the first run has no gradients, and the recomputation records.
loop("checkpoint_around_the_model", mlp, options=("manual", "in place", "cache", "monitor"), **_checkpointed(False))
given = {"recipes": ("delayed", "short", "recent", "current")}
loop("reentrant_checkpoint_around_the_model", mlp, **given, **_checkpointed(True))
loop("checkpoint_and_hooks", mlp, recipes=("delayed", "short", "current"), around=_cloned, **_checkpointed(False))


@program(recipes=("short", "current"), options=("manual", "schedule"))
def checkpointed_and_evaluated(fp8):
    """The batch of a checkpointed forward is evaluated before its backward."""

    def evaluated(run, x):
        out = torch.utils.checkpoint.checkpoint(run.call, x, use_reentrant=False)
        look(run, x)
        return out

    train(fp8, mlp(), batch_of=lambda run, i: batch(i).requires_grad_(), through=evaluated, scales=True)


def _checkpoints_blocks():
    """Recomputation in the graph: the partitioner's."""
    return Stack((mlp(seed) for seed in range(3)), residual=True, use_reentrant=False)


given = {"options": ("save", "recompute", "cache", "manual", "by name")}
loop("checkpoint_inside_the_model", _checkpoints_blocks, **given, scales=True)


class _Reversible(torch.autograd.Function):
    """y1 = x1, y2 = x2 + f(x1); backward computes x2 from the outputs, and f again."""

    @staticmethod
    def forward(ctx, x1, x2, f, *parameters):
        ctx.f, ctx.parameters = f, parameters
        with torch.no_grad():
            y2 = x2 + f(x1)
        ctx.save_for_backward(x1.detach(), y2)
        return x1.clone(), y2

    @staticmethod
    def backward(ctx, g1, g2):
        x1, _ = ctx.saved_tensors
        with torch.enable_grad():
            x1 = x1.detach().clone().requires_grad_()
            out = ctx.f(x1)
        grads = torch.autograd.grad(out, [x1, *ctx.parameters], g2)
        return g1 + grads[0], g2, None, *grads[1:]


@program(recipes=("delayed", "short", "current", "rowwise", "blockwise"), options=("cache",))
def reversible_blocks(fp8):
    """RevNet's: a custom Function runs compiled blocks without gradients, and in its backward again, on other tensors."""
    blocks = nn.ModuleList(mlp(seed, std=5e-4) for seed in range(2))
    calls = [fp8.compile(block) for block in blocks]

    def through(run, x1):
        x2 = batch(run.step + 200)
        for block, call in zip(blocks, calls, strict=True):
            x1, x2 = _Reversible.apply(x2.requires_grad_(), x1.requires_grad_(), call, *block.parameters())
        fp8.note(out=x2)
        return 1e-4 * (x1 + x2)

    train(fp8, blocks, calls[0], lr=1e-3, steps=LONG, through=through, loss=lambda run, out, x: out.square().mean())


# -- what is called when


@program(options=("manual", "in place", "cache", "by name", "monitor"))
def gan(fp8):
    """A generator and a critic, each trained on what the other one gives."""
    generator, critic = mlp(0), mlp(1, outputs=32)
    makes, judges = fp8.compile(generator), fp8.compile(critic)
    first, second = sgd(generator, 0.02), sgd(critic, 0.02)
    for step in range(STEPS):
        noise, real = batch(step), batch(400 + step)
        second.zero_grad()
        loss = judges(makes(noise).detach()).mean() - judges(real).mean() + judges(real).square().mean()
        loss.backward()
        fp8.note(critic=critic, critic_loss=loss)
        second.step()
        fp8.end_step(judges)
        first.zero_grad()
        loss = -judges(makes(noise)).mean()
        loss.backward()
        fp8.note(generator=generator, loss=loss)
        first.step()
        fp8.end_step(makes)


@program(options=("in place", "manual"))
def several_models(fp8):
    """Three models in one process, by turns; two of them share their code."""
    models = [mlp(0), mlp(1), mlp(2, hidden=96)]
    calls = [fp8.compile(m) for m in models]
    for step in range(STEPS):
        for i in ((0, 1, 2), (2, 0), (1,))[step % 3]:
            train(fp8, models[i], calls[i], steps=[step])
    for call in calls:
        with torch.no_grad():
            fp8.note(out=call(batch(80)))


@program(options=("manual",))
def compiled_inside_compiled(fp8):
    """A module that is compiled in place lies in another that is compiled; also in a Sequential, whose forward is torch's."""
    inner = [mlp(1), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    for model in inner:
        fp8.compile(model, in_place=True)
    for own, container in zip(inner, (lambda *layers: Stack(layers), nn.Sequential), strict=True):
        model = container(nn.Linear(WIDTH, WIDTH), nn.ReLU(), own, nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        call = fp8.compile(model)
        train(fp8, model, call, ends=(call, own))


@program(options=("manual", "strict"))
def compiled_blocks(fp8):
    """An eager model whose blocks are compiled in place, and called in a loop."""
    blocks = nn.ModuleList(mlp(seed) for seed in range(3))
    for block in blocks:
        fp8.compile(block, in_place=True)
    train(fp8, blocks, lambda x: functools.reduce(lambda y, block: y + block(y), blocks, x), ends=blocks)


# Two graphs of one model.
loop("graph_break", lambda: BrokenBlock(WIDTH, HIDDEN), options=("in place", "manual", "monitor"), scales=True)


def _interrupted(fp8, in_backward, error=InterruptedError):
    """Some steps are given up between forward and backward, or by a hook in the middle of backward; training goes on."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)

    def stop(_):
        raise error

    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        with contextlib.suppress(error):
            out = compiled(x)
            if step in (2, 5):
                out.register_hook(stop) if in_backward else stop(out)
            loss = loss_of(out, x)
            loss.backward()
            fp8.note(loss=loss, gradient=model)
            optimizer.step()
        fp8.end_step(compiled)
    fp8.scales(compiled)


@program(options=("in place", "cache"))
def exception_after_the_forward(fp8):
    _interrupted(fp8, in_backward=False)


@program(options=("in place", "manual"))
def exception_in_backward(fp8):
    _interrupted(fp8, in_backward=True)


@program(options=("save", "recompute", "manual"))
def retained_graph(fp8):
    """Two backwards through one forward."""

    def loss(run, out, x):
        out.mean().backward(retain_graph=True)
        return loss_of(out, x)

    train(fp8, mlp(), loss=loss, scales=True)


@program(recipes=("current", "rowwise", "recent"), options=("in place",))
def two_threads(fp8):
    """Two threads call one model, one after the other: a thread's autograd state is its own."""
    model = mlp()
    compiled = fp8.compile(model)
    for step in range(STEPS):
        thread = threading.Thread(target=train, args=(fp8, model, compiled), kwargs={"steps": [step]})
        thread.start()
        thread.join()


@program(options=("manual",))
def functional_weights(fp8):
    """MAML's inner step: the compiled function is called with weights that are no Parameters of the model."""
    model = mlp()
    compiled = fp8.compile(lambda weights, x: functional_call(model, weights, (x,)))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for step in range(STEPS):
        loss = loss_of(compiled(weights, batch(step)), batch(step))
        grads = torch.autograd.grad(loss, list(weights.values()))
        fp8.note(loss=loss, **dict(zip((n.replace(".", "_") for n in weights), grads, strict=True)))
        weights = {n: (p - 0.05 * g).detach().requires_grad_() for (n, p), g in zip(weights.items(), grads, strict=True)}
        fp8.end_step(compiled)


def _tied():
    """One weight, which is read as it is and transposed."""
    return Net(
        lambda self, x: F.linear(F.linear(x, self.weight).relu(), self.weight.t()),
        weight=nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.1),
    )


loop("tied_autoencoder", _tied, options=("in place", "manual", "cache"))
rows = {"batch_of": lambda run, i: batch(i, rows=(32, 48, 33)[i % 3]), "after": lambda run: look(run, batch(81, rows=1))}
loop("other_shapes", mlp, options=("in place", "manual", "cache"), **rows)


class _Region(nn.Module):
    """A block that Dynamo traces once for all of its calls."""

    def __init__(self, seed):
        super().__init__()
        self.block = mlp(seed)

    @nested_compile_region
    def forward(self, x):
        return x + self.block(x)


class _Regions(nn.Module):
    """A region of regions, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _Region(0), _Region(1)

    @nested_compile_region
    def forward(self, x):
        return self.first(self.second(self.first(x)).tanh())


def _half_frozen():
    model = nn.Sequential(_Region(2), _Regions(), _Region(3))
    model[0].block[0].requires_grad_(False)
    return model


given = {"options": ("manual", "save", "recompute"), "steps": range(STEPS // 2)}
loop("regions_in_regions", _half_frozen, **given, after=lambda run: look(run, 82))

# -- models


def _hyper():
    """One network makes the weights of another."""
    return Net(
        lambda self, x: F.linear(x, self.maker(self.code)),
        code=nn.Parameter(torch.randn(WIDTH, 32)),
        maker=nn.Linear(32, WIDTH),
    )


loop("hypernetwork", _hyper, recipes=("short", "rowwise"), steps=range(4))
# -- first steps, boundaries, interrupts

given = {"recipes": ("short", "delayed", "one"), "scales": True}
loop("evaluated_first", mlp, **given, before=lambda run: [look(run, i) for i in range(12) if run.step == 0])


def _zero():
    """A weight that starts at 0, as LoRA's second one does, and a branch whose gradient is 0 for as long."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(model[1].weight)
    model[1].weight.requires_grad_(False)
    return model


def _leave_zero(run):
    if run.step == 7:
        run.model[1].weight.data.copy_(1e-3 * torch.eye(WIDTH))


zero = {"recipes": ("recent", "current", "rowwise_with_gw_hp"), "steps": LONG, "scales": True}
loop("zero_for_some_steps", _zero, **zero, before=_leave_zero)
# An infinity damages no history, not even an empty one. Without a step of the optimizer it does not stay.
infinite = {"batch_of": lambda run, i: batch(i).index_fill(0, torch.tensor([0]), torch.inf if i in (0, 4) else 1.0), "lr": 0.0}
loop("infinite_in_some_steps", mlp, recipes=("one", "current", "mxfp8"), **infinite, scales=True)


def _end_step_before_backward(run, x):
    """With manual steps, the boundary between forward and backward, behind which scales are others."""
    out = run.call(x)
    run.fp8.end_step(run.call)
    return out


ended = {"through": _end_step_before_backward, "ends": (), "options": ("manual",), "scales": True}
for around in (contextlib.nullcontext, _cloned):
    name = "backward_behind_a_boundary" + "_and_hooks" * (around is _cloned)
    loop(name, mlp, recipes=("short", "recent", "current"), around=around, **ended)


@program(recipes=("current",))
def mutated_and_aliased_inputs(fp8):
    model = mlp()

    def call(x, y):
        x.add_(1)
        return model(x) + y.flip(0), x.view(-1)

    x = batch(0)
    out, view = fp8.compile(call)(x, x)
    assert view.data_ptr() == x.data_ptr()
    fp8.note(out=out, x=x)
