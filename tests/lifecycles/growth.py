"""Programs whose weights become others: adapters, merging, freezing, growing, other dtypes, checkpoints."""

import copy
import io
from typing import Any

import torch
from torch import nn

from tests.lifecycles.harness import STEPS, program
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, learn, loss_of, mlp, sgd
from tests.lifecycles.teachers import STALE


class _Lora(nn.Module):
    """A frozen linear with a trained addition of rank 32; `merge` as peft does it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 32, bias=False), nn.Linear(32, outputs, bias=False)
        nn.init.normal_(self.b.weight, std=0.02)
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out if self.merged else out + self.b(self.a(x))

    def merge(self, sign: float) -> None:
        self.base.weight.data += sign * (self.b.weight @ self.a.weight).detach()
        self.merged = sign > 0


def _lora() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_Lora(WIDTH, HIDDEN), nn.GELU(), _Lora(HIDDEN, WIDTH))


@program(options=("release", "cache", "in place", "manual"))
def lora(fp8: Any) -> None:
    """Adapters of frozen linears."""
    model = _lora()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.5)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)


@program(options=("in place", "manual"))
def lora_merged_and_unmerged(fp8: Any) -> None:
    """Merged by `.data +=` for each evaluation, and unmerged to train on."""
    model = _lora()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=1.0)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(apart=compiled(batch(70)))
            for module in (model[0], model[2]):
                module.merge(1.0)
            fp8.note(merged=compiled(batch(70)))
            for module in (model[0], model[2]):
                module.merge(-1.0)
            fp8.note(again=compiled(batch(70)))


@program(options=("cache", "in place", "manual"))
def frozen_in_stages(fp8: Any) -> None:
    """The first linear is frozen after some steps, and trains again later."""
    model = mlp()
    compiled = fp8.compile(model)
    for step in range(STEPS):
        model[0].requires_grad_(not 3 <= step < 7)
        optimizer = sgd(model, lr=0.2)
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(evaluation=compiled(batch(71)))


@program(options=("cache", "in place", "manual"))
def growing_model(fp8: Any) -> None:
    """Layers are appended during training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    compiled = fp8.compile(model)
    for step in range(STEPS):
        if step in (3, 6):
            torch.manual_seed(step)
            model.append(nn.ReLU())
            model.append(nn.Linear(WIDTH, WIDTH))
        learn(fp8, compiled, model, sgd(model), step)


class _Experts(nn.Module):
    """Each expert reads all rows; the weights are one Parameter."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, WIDTH, WIDTH) * 0.05)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.bmm(x.expand(self.weight.shape[0], *x.shape), self.weight.mT).mean(0))


@program(recipes=("short", "delayed", "current"), options=("cache", "in place"))
def experts_added_and_pruned(fp8: Any) -> None:
    """The batched Parameter changes its number of matrices; its histories begin anew, those of inputs and gradients go on."""
    torch.manual_seed(0)
    model = _Experts(4)
    compiled = fp8.compile(model)
    for step in range(STEPS):
        if step in (3, 6):
            kept = model.weight.detach()
            model.weight = nn.Parameter(torch.cat([kept, kept[:1] * 0.5]) if step == 3 else kept[1:].clone())
        learn(fp8, compiled, model, sgd(model), step)


@program(options=("cache", "in place"))
def replaced_parameters(fp8: Any) -> None:
    """A new Parameter in the place of another, larger in the rows: a vocabulary that is resized."""
    model = mlp()
    compiled = fp8.compile(model)
    for step in range(STEPS):
        if step == 4:
            torch.manual_seed(4)
            wider = nn.Linear(HIDDEN, WIDTH)
            model[2].weight, model[2].bias = wider.weight, wider.bias
        if step == 7:
            model[0].weight = nn.Parameter(model[0].weight.detach() * 3)
        learn(fp8, compiled, model, sgd(model), step)


@program(options=("cache", "in place"), refused=STALE)
def pruned_by_data(fp8: Any) -> None:
    """Small weights become 0 after each step, by `.data`."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.2)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        for module in (model[0], model[2]):
            weight = module.weight.data
            weight[weight.abs() < weight.abs().quantile(0.05 * step)] = 0
        with torch.no_grad():
            fp8.note(evaluation=compiled(batch(72)))


@program(recipes=("current", "short", "rowwise"), options=("cache",))
def weight_norm(fp8: Any) -> None:
    """The weight is computed of others in each forward."""
    model = mlp()
    for module in (model[0], model[2]):
        nn.utils.parametrizations.weight_norm(module)
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)


@program(options=("cache", "in place"))
def loaded_in_the_middle(fp8: Any) -> None:
    """`load_state_dict` of other weights between steps and between evaluations."""
    model = mlp()
    others = [mlp(seed).state_dict() for seed in (1, 2)]
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(before=compiled(batch(73)))
            if step % 3 == 1:
                model.load_state_dict(others[step % 2])
            fp8.note(after=compiled(batch(73)))


@program(options=("manual", "in place", "cache", "schedule"))
def resumed_in_the_middle(fp8: Any) -> None:
    """Weights, optimizer and state are saved, and loaded into a model that is new."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if step == 5:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()]), fp8.save(compiled)
            model = mlp(3)
            compiled, optimizer = fp8.compile(model), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model.load_state_dict(saved[0][0])
            optimizer.load_state_dict(saved[0][1])
            fp8.load(compiled, saved[1])
        learn(fp8, compiled, model, optimizer, step)
    fp8.scales(compiled)


@program(options=("manual", "in place", "cache"))
def turned_back_to_a_checkpoint(fp8: Any) -> None:
    """The running model goes back to an earlier step: its weights and its state, evaluated before and after."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.3)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(evaluation=compiled(batch(74)))
        if step == 3:
            saved = copy.deepcopy(model.state_dict()), fp8.save(compiled)
        if step == 7:
            model.load_state_dict(saved[0])
            fp8.load(compiled, saved[1])
            with torch.no_grad():
                fp8.note(back=compiled(batch(74)))


@program(recipes=("short", "current", "blockwise"), options=("cache", "in place"))
def another_dtype(fp8: Any) -> None:
    """The model is cast to bfloat16 and back to float32 during training. In bfloat16 the graph rounds a bias's gradient and
    activations where eager operations do, but for the order of sums: one rounding to 8 bits is 48 dB, some of them less."""
    model = mlp()
    compiled = fp8.compile(model)
    for step in range(STEPS):
        dtype = torch.bfloat16 if 3 <= step < 7 else torch.float32
        model.to(dtype)
        optimizer = sgd(model)
        x = batch(step).to(dtype)
        optimizer.zero_grad()
        out = compiled(x)
        loss = loss_of(out.float(), x.float())
        loss.backward()
        fp8.note(out=out, loss=loss, gradient=model)
        optimizer.step()
        fp8.end_step(compiled)


@program(recipes=("short", "current", "mxfp8"), options=("cache", "in place"))
def swapped_tensors(fp8: Any) -> None:
    """`.to()` with Parameters that are swapped, not written: what tensor-parallel models do."""
    model = mlp()
    compiled = fp8.compile(model)
    for step in range(STEPS):
        if step in (3, 6):
            before = torch.__future__.get_swap_module_params_on_conversion()
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                model.to(torch.float64).to(torch.float32)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(before)
        learn(fp8, compiled, model, sgd(model), step)


@program(recipes=("recent", "current"), options=("manual",))
def saved_to_a_file(fp8: Any) -> None:
    """The weights go through torch.save, and into the same model."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file), assign=step % 2 == 1)
        optimizer = sgd(model)
        with torch.no_grad():
            fp8.note(loss_after=loss_of(compiled(batch(75)), batch(75)))
