"""Joint and inference graphs of small models as the rewrite gets them, and the passes of the rewrite one by one.

`trace` compiles a model up to the point where the rewrite would begin, and hands out what it would begin with.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx

from fp8pass import fp8_compile
from fp8pass.errors import Fp8Error
from fp8pass.graph.gemms import GraphContext
from fp8pass.recipes import Recipe
from fp8pass.rewrite.plan import Decision
from fp8pass.rewrite.runner import PASSES, Options, Work
from fp8pass.rules import Rules
from fp8pass.runtime import backend
from fp8pass.schemes.emitter import StateNodes, state_nodes


@dataclasses.dataclass(frozen=True)
class Joint:
    """The input of the rewrite of one graph. `run` changes `graph` once it comes to a pass that edits."""

    graph: fx.Graph
    context: GraphContext
    rules: Rules
    inputs: Mapping[Hashable, fx.Node]
    options: Options

    @property
    def state(self) -> dict[Recipe, StateNodes]:
        """The placeholders of each recipe that keeps state."""
        return state_nodes(self.inputs)

    def run(self, until: str = "verify", without: tuple[str, ...] = ("fold elements",)) -> Work:
        """Run the passes up to the one called `until`, but for those in `without`: without folding, each scale is a node."""
        names = [name for name, _ in PASSES]
        assert {until, *without} <= set(names), f"passes are {names}"
        work = Work(self.graph, self.context, self.rules, self.inputs, self.options, frozenset(self.graph.nodes))
        for name, run in PASSES[: names.index(until) + 1]:
            if name not in without or name == until:
                work = run(work)
        return work


class _Traced(Fp8Error):
    """Ends the compilation: an Fp8Error leaves `fp8_compile`'s models as it is."""

    def __init__(self, joint: Joint):
        super().__init__("traced")
        self.joint = joint


def _hand_out(
    keeps: bool, graph: fx.Graph, context: GraphContext, rules: Rules, inputs: Mapping[Hashable, fx.Node], options: Options
) -> None:
    """keeps: hand out the second of two attempts to compile a graph, which has the kept copies of weights as inputs."""
    if keeps and options.may_ask:
        Joint(graph, context, rules, inputs, options).run("take kept weights")
    raise _Traced(Joint(graph, context, rules, inputs, dataclasses.replace(options, may_ask=False)))


def trace(
    model: Callable[..., Any], *inputs: Any, recipe: Any = "delayed", trains: bool = True, keeps: bool = False, **options: Any
) -> Joint:
    """The first graph that a call of `model` compiles. `options` are those of `fp8_compile`, but that all GEMMs are selected.

    trains: whether gradients are on; where no input or Parameter wants one, the graph is an inference graph all the same.
    keeps: whether copies of weights are kept between calls where that is possible; else the graph casts them.
    """
    torch._dynamo.reset()
    options = {"select": "all", **options}
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    with mock.patch.object(backend, "rewrite", functools.partial(_hand_out, keeps)), torch.set_grad_enabled(trains):
        try:
            compiled(*inputs)
        except _Traced as traced:
            return traced.joint
    raise AssertionError("the model compiled no graph that the rewrite sees")


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """The nodes that call an operation, in graph order."""
    return list(graph.find_nodes(op="call_function", target=target))


def placeholder(graph: fx.Graph, part: str) -> fx.Node:
    """The one placeholder whose name contains `part`."""
    (found,) = (n for n in graph.find_nodes(op="placeholder") if part in str(n.target))
    return found


def decisions(work: Work) -> dict[tuple[str, str], Decision]:
    """The decisions of the plan by module and role, which must be unique."""
    found = {(d.site.module, d.site.role): d for d in work.plan.decisions}
    assert len(found) == len(work.plan.decisions)
    return found


@contextlib.contextmanager
def two_ranks() -> Iterator[None]:
    """A process group of two ranks without a second process: collectives are traced and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
