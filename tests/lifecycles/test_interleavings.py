"""Random programs against the reference: steps of every kind, layers that come in later, states saved and loaded anywhere."""

import contextlib
import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.utils import checkpoint

from tests.lifecycles.harness import Entry, check
from tests.lifecycles.parts import WIDTH, batch, loss_of, mlp


class Branches(nn.Module):
    """A trunk, two branches of which a call takes one, and layers behind them that are added while it trains."""

    def __init__(self, has_break):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b, self.added = nn.Linear(WIDTH, WIDTH), mlp(1), nn.Linear(WIDTH, WIDTH), nn.ModuleList()
        self.has_break, self.fails = has_break, False

    def add(self):
        torch.manual_seed(len(self.added))
        self.added.append(nn.Linear(WIDTH, WIDTH))

    @torch.compiler.disable
    def fail(self):
        if self.fails:
            raise ValueError("a batch that is refused")

    def forward(self, x, branch, num_added):
        hidden = self.trunk(x).relu()
        if self.has_break:
            torch._dynamo.graph_break()  # which the reference sees
            self.fail()
        hidden = self.a(hidden) if branch else self.b(hidden)
        for layer in self.added[:num_added]:
            hidden = hidden + 0.3 * layer(hidden)
        return hidden


class Session:
    """A program that runs with the product and with the reference."""

    def __init__(self, fp8, has_break):
        self.fp8, self.has_break, self.saved, self.rules = fp8, has_break, None, {}
        self.model = Branches(has_break)
        self.call = fp8.compile(self.model)

    def x(self, number):
        return batch(number) * (1, 1, 3, 0.2)[number % 4]

    def forward(self, number, reentrant=None):
        x, rest = self.x(number), (number % 2 == 0, number % (1 + len(self.model.added)))
        if reentrant is None:
            return loss_of(self.call(x, *rest), x)
        return loss_of(checkpoint.checkpoint(self.call, x.requires_grad_(), *rest, use_reentrant=reentrant), x)

    def backward(self, losses):
        """A backward for each, as it comes, and the end of the step."""
        for loss in losses:
            if loss.requires_grad:  # not where all that it passed is frozen
                loss.backward()
            self.fp8.note(loss=loss)
        self.fp8.note(gradient=self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
        self.model.zero_grad()
        self.fp8.end_step(self.call)

    def look(self, number, mode=torch.no_grad):
        with mode():
            self.fp8.note(evaluation=self.call(self.x(number), number % 2 == 1, len(self.model.added)).clone())

    # -- the operations

    def train(self, number):
        self.backward([self.forward(number)])

    def microbatches(self, number):
        self.backward(self.forward(i) for i in (number, number + 1))

    def forwards_then_backwards(self, number):
        losses = [self.forward(number), self.forward(number + 1)]
        self.backward(losses[:: 1 - number % 2 * 2])

    def checkpointed(self, number):
        self.backward([self.forward(number, reentrant=number % 3 == 0)])

    def checkpointed_later(self, number):
        losses = [self.forward(i, reentrant=False) for i in (number, number + 1)]
        if number % 3:
            self.look(number)
        self.backward(losses[:: 1 - number % 2 * 2])

    def evaluate(self, number):
        self.look(number, (torch.no_grad, torch.inference_mode)[number % 2])

    def evaluate_midway(self, number):
        loss = self.forward(number)
        self.look(number, (torch.no_grad, torch.inference_mode)[number % 2])
        self.backward([loss])

    def functional(self, number):
        """Other tensors in the places of the Parameters, for an evaluation or for a step that gives them its gradients."""
        others = {
            n: (p.detach() * (1, 1.5)[number % 2]).requires_grad_(p.requires_grad) for n, p in self.call.named_parameters()
        }
        x = self.x(number)
        with contextlib.nullcontext() if number % 3 else torch.no_grad():
            loss = loss_of(functional_call(self.call, others, (x, number % 2 == 0, len(self.model.added))), x)
        if loss.requires_grad:
            loss.backward()
            found = {n.removeprefix("_orig_mod."): t.grad for n, t in others.items() if t.grad is not None}
            self.fp8.note(**{f"functional {name}": gradient for name, gradient in found.items()})
        self.fp8.note(functional=loss)
        self.fp8.end_step(self.call)

    def forward_alone(self, number):
        self.fp8.note(given_up=self.forward(number))

    def fail(self, number):
        self.model.fails = True
        with pytest.raises(ValueError, match="refused") if self.has_break else contextlib.nullcontext():
            self.forward(number)
        self.model.fails = False

    def add(self, number):
        self.model.add()

    def replace(self, number):
        """Another layer in the place of a branch, or of one of its layers."""
        torch.manual_seed(number)
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.mul_((0.1, 1.0, 4.0)[number % 3])
        if number % 2:
            self.model.b = layer
        else:
            self.model.a[0] = nn.Linear(*reversed(self.model.a[0].weight.shape))

    def remove(self, number):
        if len(self.model.added):
            del self.model.added[number % len(self.model.added)]

    def insert(self, number):
        torch.manual_seed(number)
        self.model.added.insert(0, nn.Linear(WIDTH, WIDTH))

    def exchange(self, number):
        """An average in the place of a layer, for an evaluation."""
        own = self.model.trunk
        self.model.trunk = copy.deepcopy(own)
        with torch.no_grad():
            self.model.trunk.weight.mul_(2)
        self.look(number)
        self.model.trunk = own

    def write(self, number):
        with torch.no_grad():
            self.model.trunk.weight.mul_((0.5, 1.5)[number % 2])

    def freeze(self, number):
        layer = (self.model.trunk, self.model.b)[number % 2]
        layer.requires_grad_(not layer.weight.requires_grad)

    def switch(self, number):
        self.rules = RULES[number % len(RULES)]
        self.fp8.use_rules(self.call, self.rules)

    def save(self, number):
        self.saved = self.fp8.save(self.call), copy.deepcopy(self.model.state_dict()), len(self.model.added), self.rules

    def resume(self, number):
        """In the same model, or in a new one, where Dynamo may know the old one's code."""
        if self.saved is None:
            return
        state, weights, num_added, rules = self.saved
        if number % 2 or num_added != len(self.model.added) or rules != self.rules:
            self.rules = rules
            self.model = Branches(self.has_break)
            for _ in range(num_added):
                self.model.add()
            self.call = self.fp8.compile(self.model)
            self.fp8.use_rules(self.call, self.rules)
        self.model.load_state_dict(weights)
        self.fp8.load(self.call, state)


RULES = (
    {}, {"trunk": None}, {"b:grad_weight": None}, {"*:grad_input": None}, {"trunk:output": None}, {"*": None},
    {"a.*": None, "added.*:output": None}, {"*:output": None, "*:grad_weight": None}, {"b:output": None, "b:grad_input": None},
)  # fmt: skip
OPERATIONS = (
    "train", "microbatches", "forwards_then_backwards", "checkpointed", "checkpointed_later", "evaluate", "evaluate_midway",
    "functional", "forward_alone", "fail", "add", "replace", "remove", "insert", "exchange", "write", "freeze", "switch",
    "save", "resume",
)  # fmt: skip


@torch._dynamo.config.patch(recompile_limit=64)
def run(fp8, has_break, program):
    """The operations, then training of every layer that is there, and the scales."""
    session = Session(fp8, has_break)
    for operation, number in program:
        getattr(session, operation)(number)
    for parameter in session.model.parameters():
        parameter.requires_grad_()
    for number in range(max(4, 1 + len(session.model.added))):
        session.train(number)
    fp8.scales(session.call)


PROGRAMS = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 11)), min_size=3, max_size=8)


@pytest.mark.timeout(3600)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    PROGRAMS, st.booleans(), st.sampled_from(("short", "one", "recent")), st.sampled_from(("", "in place", "manual", "cache"))
)
@example(
    [("train", 1), ("add", 0), ("save", 0), ("evaluate_midway", 3), ("resume", 1), ("checkpointed_later", 4)],
    False,
    "short",
    "",
)
@example([("add", 0), ("add", 1), ("train", 2), ("remove", 0)], True, "short", "")
@example([("checkpointed_later", 5)], True, "short", "")
@example(
    [("add", 0), ("train", 3), ("insert", 6), ("train", 6), ("replace", 5), ("exchange", 0), ("remove", 1)], False, "short", ""
)
def test_interleavings(program, has_break, recipe, option):
    check(Entry(f"{program}, {has_break}", lambda fp8: run(fp8, has_break, program), (), (), {}), recipe, option)
