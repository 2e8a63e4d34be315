"""All-gathers in graphs: what a rank gives them, and programs with the pass that moves them behind casts and without."""

from collections.abc import Callable
from typing import Any

import torch

from fp8pass import inspect
from fp8pass.rewrite import runner
from fp8pass.tools.inspection import Inspection

GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"


def collectives(graph) -> list[tuple[str, torch.dtype, int]]:
    """Name, dtype and number of bytes that a rank gives each collective of a graph."""
    nodes = [n for n in graph.graph.nodes if str(n.target).startswith("_c10d_functional")]
    nodes = [n for n in nodes if "wait_tensor" not in str(n.target)]
    given = [n.args[0].meta["val"] for n in nodes]
    return [(str(n.target).split(".")[1], x.dtype, x.numel() * x.element_size()) for n, x in zip(nodes, given, strict=True)]


def count(graph, name: str, dtype: torch.dtype) -> int:
    """Collectives of a name and dtype."""
    return [found[:2] for found in collectives(graph)].count((name, dtype))


def with_and_without(run: Callable[[], tuple[list[Any], Any]]) -> tuple[list[Any], list[Any], Inspection, Inspection]:
    """The results of a program with the gathers moved and without, and the inspections of both; `run` compiles it anew, and
    gives its results and what is compiled."""
    found = []
    for left_out in ((), ("plan gathers",)):
        torch._dynamo.reset()
        with runner.without(*left_out):
            results, compiled = run()
        found.append(([r if r is None else r.detach().clone() for r in results], inspect(compiled)))
    (moved, ours), (kept, theirs) = found
    return moved, kept, ours, theirs


def equal(moved: list[Any], kept: list[Any]) -> bool:
    """Bit for bit; results that there are none of are None in both."""
    return all(a is b is None or a.equal(b) for a, b in zip(moved, kept, strict=True))
