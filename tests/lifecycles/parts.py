"""Models, batches and the loop that programs share. Widths are small, and 160 is more than a block of 128."""

import contextlib
import types

import torch
from torch import nn

STEPS, ROWS, WIDTH, HIDDEN = 10, 32, 64, 160


def mlp(seed=0, inputs=WIDTH, hidden=HIDDEN, outputs=WIDTH, std=None):
    """Two linears and a GELU. std: of the weights, where not torch's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
    for linear in (model[0], model[2]) if std is not None else ():
        nn.init.normal_(linear.weight, std=std)
    return model


def batch(step, rows=ROWS, width=WIDTH):
    """The same numbers at each run; their size differs between steps."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 + step)) * (1 + step % 3)


def loss_of(out, x):
    """Mean squared error from what a model of the same width is to learn."""
    return (out - x.detach().roll(1, -1).tanh()).square().mean()


def sgd(model, lr=0.05):
    """Without moments, so that what differs stays as small as it is."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def look(run, at, call=None):
    """An evaluation, noted: of a batch, or of the one of a step. call: instead of the program's compiled model."""
    with torch.no_grad():
        out = (run.call if call is None else call)(batch(at) if isinstance(at, int) else at)
    run.fp8.note(evaluation=out)
    return out


def train(
    fp8,
    model,
    call=None,
    *,
    lr=0.05,
    optimizer=None,
    steps=range(STEPS),
    parts=1,
    batch_of=lambda run, i: batch(i),
    through=lambda run, x: run.call(x),
    around=contextlib.nullcontext,
    loss=lambda run, out, x: loss_of(out, x),
    before=lambda run: None,
    also=lambda run: None,
    after=lambda run: None,
    ends=None,
    scales=False,
):
    """Steps of training, whose losses and gradients are noted; returns the run, with what is compiled as `call`.

    Functions get the run: `fp8`, `model`, `call`, `step`. optimizer: made of the model; none is SGD of what trains in the step.
    parts: microbatches of a step. through: calls the model, with `around` set. before, also, after: called before a step,
    before its optimizer's step, and behind it. ends: whose steps end, if not the call's. scales: noted at the end.
    """
    run = types.SimpleNamespace(fp8=fp8, model=model, call=fp8.compile(model) if call is None else call)
    made = None if optimizer is None else optimizer(model)
    for run.step in steps:
        before(run)
        used = sgd(model, lr) if made is None else made
        used.zero_grad()
        for part in range(parts):
            x = batch_of(run, parts * run.step + part)
            with around():
                out = through(run, x)
            value = loss(run, out, x)
            value.backward()
            fp8.note(loss=value, **({"dx": x.grad} if x.requires_grad else {}))
        fp8.note(gradient=model)
        also(run)
        used.step()
        fp8.end_step(*([run.call] if ends is None else ends))
        after(run)
    if scales:
        fp8.scales(run.call)
    return run
