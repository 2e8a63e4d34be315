"""Programs with weights that are written besides the optimizer, and tensors that never train: teachers, targets, backbones."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.lifecycles.harness import ALL_RECIPES, STEPS, program
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, learn, loss_of, mlp, sgd

KEPT = ("cache", "in place")
STALE = {"cache": "StaleWeightError"}
"""`weight_copies="cache"` is the user's word that weights change by recorded writes alone, which these programs break."""
ALL = ("save", "recompute", "cache", "release", "in place", "manual", "strict", "monitor", "by name", "schedule")


@program(recipes=ALL_RECIPES, options=ALL)
def plain(fp8: Any) -> None:
    """The loop that everything else is a variation of, with an evaluation after each step."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        with torch.no_grad():
            fp8.note(evaluation=compiled(batch(100 + step)))
    fp8.scales(compiled)


def _distilled(fp8: Any, update: Any) -> None:
    """A student and its teacher, whose weights follow by `update`."""
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    compiled, taught, optimizer = fp8.compile(student), fp8.compile(teacher), sgd(student, lr=0.5)
    for step in range(STEPS):
        x = batch(step)
        with torch.no_grad():
            aim = taught(x)
        fp8.note(teacher=aim)
        optimizer.zero_grad()
        (compiled(x) - aim - 1).square().mean().backward()
        fp8.note(gradient=student)
        optimizer.step()
        fp8.end_step(compiled)
        update(teacher, student)
        with torch.no_grad():
            fp8.note(after=taught(x))


@program(options=KEPT)
def ema_in_place(fp8: Any) -> None:
    """lerp_ under no_grad: version counters tell of it."""

    def update(teacher: nn.Module, student: nn.Module) -> None:
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.lerp_(new, 0.5)

    _distilled(fp8, update)


@program(recipes=ALL_RECIPES, options=("in place", "cache"), refused=STALE)
def ema_by_data(fp8: Any) -> None:
    """DINO's: `.data` has no version counter in common with the Parameter."""

    def update(teacher: nn.Module, student: nn.Module) -> None:
        for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
            kept.data.mul_(0.5).add_(0.5 * new.detach().data)

    _distilled(fp8, update)


@program()
def target_network(fp8: Any) -> None:
    """SAC's: the target's data follow slowly."""

    def update(teacher: nn.Module, student: nn.Module) -> None:
        for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
            kept.data.mul_(1 - 0.3)
            torch.add(kept.data, new.data, alpha=0.3, out=kept.data)

    _distilled(fp8, update)


@program(recipes=("current", "delayed", "rowwise"))
def ema_by_numpy(fp8: Any) -> None:
    """A view that torch does not know of writes."""

    def update(teacher: nn.Module, student: nn.Module) -> None:
        for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
            view = kept.detach().numpy()
            view *= 0.5
            view += 0.5 * new.detach().numpy()

    _distilled(fp8, update)


@program(recipes=("current", "blockwise", "short"))
def ema_by_vector(fp8: Any) -> None:
    """One vector of all Parameters, written back by `vector_to_parameters`, which sets `.data`."""

    def update(teacher: nn.Module, student: nn.Module) -> None:
        mean = parameters_to_vector(teacher.parameters()) * 0.5 + parameters_to_vector(student.parameters()).detach() * 0.5
        vector_to_parameters(mean, teacher.parameters())

    _distilled(fp8, update)


@program(options=("cache",))
def target_by_load_state_dict(fp8: Any) -> None:
    """A target network that is loaded now and then."""
    _distilled(fp8, lambda teacher, student: teacher.load_state_dict(student.state_dict()))


@program(options=("cache", "in place"))
def ema_by_averaged_model(fp8: Any) -> None:
    """torch's AveragedModel, evaluated in FP8 between steps."""
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    compiled, averaged, optimizer = fp8.compile(model), fp8.compile(average.module), sgd(model, lr=0.5)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        average.update_parameters(model)
        with torch.no_grad():
            fp8.note(average=averaged(batch(50)))


@program(options=("cache",), refused=STALE)
def ema_copied_in_between(fp8: Any) -> None:
    """The weights of the average take the place of the model's for an evaluation, by `.data.copy_`, and give it back."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.5)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        if step % 2 == 0:
            with torch.no_grad():
                fp8.note(own=compiled(batch(51)))
        for kept, new in zip(average, model.parameters(), strict=True):
            kept.lerp_(new.detach(), 0.3)
        saved = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), average, strict=True):
                parameter.data.copy_(kept)
            fp8.note(average=compiled(batch(51)))
            for parameter, kept in zip(model.parameters(), saved, strict=True):
                parameter.data.copy_(kept)
            fp8.note(again=compiled(batch(51)))


@program(options=("cache", "in place", "manual"))
def best_model_at_the_end(fp8: Any) -> None:
    """The weights of the best evaluation are loaded at the end, and evaluated."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.5)
    best, lowest = copy.deepcopy(model.state_dict()), float("inf")
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        model.eval()
        with torch.no_grad():
            loss = loss_of(compiled(batch(52)), batch(52))
        model.train()
        fp8.note(evaluation=loss)
        if step % 4 == 1 and loss < lowest:
            best, lowest = copy.deepcopy(model.state_dict()), float(loss)
    model.load_state_dict(best)
    with torch.no_grad():
        fp8.note(best=compiled(batch(52)))


@program(recipes=("short", "recent", "current"), options=("cache", "in place", "manual", "monitor"))
def exchanged_and_forgotten(fp8: Any) -> None:
    """Right after a backward larger weights take the place of the model's, which is told of it, and give it back later."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model, lr=0.5)
    for step in range(STEPS):
        learn(fp8, compiled, model, optimizer, step)
        if step % 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(8.0 if step % 3 == 1 else 0.125)
            fp8.forget(compiled)
            with torch.no_grad():
                fp8.note(evaluation=compiled(batch(53)))
    fp8.scales(compiled)


@program(recipes=("delayed", "one", "rowwise"), options=("cache", "manual"))
def soup_that_trains_on(fp8: Any) -> None:
    """The sum of several checkpoints, larger than each, is loaded, evaluated and trained on."""
    model = mlp()
    compiled, optimizer = fp8.compile(model), sgd(model)
    saved = []
    for step in range(4):
        learn(fp8, compiled, model, optimizer, step)
        saved.append({name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict({name: torch.stack([each[name] for each in saved]).sum(0) for name in saved[0]})
    fp8.forget(compiled)
    with torch.no_grad():
        fp8.note(soup=compiled(batch(54)))
    for step in range(4, STEPS):
        learn(fp8, compiled, model, optimizer, step)
    fp8.scales(compiled)


class _Backbone(nn.Module):
    def __init__(self, std: float, has_break: bool) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)
        nn.init.normal_(self.backbone.weight, std=std)
        self.backbone.requires_grad_(False)
        self.has_break = has_break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.backbone(x)
        if self.has_break:
            torch._dynamo.graph_break()
        return self.head(h)


def _frozen(fp8: Any, std: float, has_break: bool) -> None:
    torch.manual_seed(0)
    model = _Backbone(std, has_break)
    compiled, optimizer = fp8.compile(model), sgd(model, lr=10.0)
    for step in range(STEPS + 4):
        learn(fp8, compiled, model, optimizer, step)
        fp8.note(out=compiled(batch(53)))


@program(options=("release", "in place", "manual"))
def frozen_backbone(fp8: Any) -> None:
    """In the graph that trains the head."""
    _frozen(fp8, 0.02, has_break=False)


@program(options=("release", "in place", "manual", "monitor"))
def frozen_backbone_before_a_break(fp8: Any) -> None:
    """A graph of its own, which never trains; its weights are small."""
    _frozen(fp8, 5e-4, has_break=True)


class _Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(0), mlp(1, std=2e-3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            torch._dynamo.graph_break()
            aim = self.teacher(x)
            torch._dynamo.graph_break()
        return self.student(x), aim


@program(options=("in place", "manual"))
def teacher_inside_the_model(fp8: Any) -> None:
    """Under no_grad, between graph breaks; small weights."""
    torch.manual_seed(0)
    model = _Taught()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS + 4):
        optimizer.zero_grad()
        out, aim = compiled(batch(step))
        (out - 10 * aim).square().mean().backward()
        fp8.note(aim=aim, gradient=model)
        optimizer.step()
        fp8.end_step(compiled)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.probe = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        nn.init.normal_(self.probe.weight, std=5e-4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).relu()
        return self.head(h) if self.training else self.probe(h)


@program(options=("cache", "in place", "manual"))
def head_that_only_evaluates(fp8: Any) -> None:
    """A head without a step of training, however many steps pass."""
    torch.manual_seed(0)
    model = _TwoHeads()
    compiled, optimizer = fp8.compile(model), sgd(model)
    for step in range(STEPS + 4):
        learn(fp8, compiled, model.train(), optimizer, step)
        with torch.no_grad():
            model.eval()
            fp8.note(probe=compiled(batch(54)))
