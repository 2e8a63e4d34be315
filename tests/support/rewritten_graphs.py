"""Dumps the rewritten graphs of the models of `mutations.py` as text, for `diff -r` between two versions of the package.

    python -m tests.support.rewritten_graphs FOLDER [PATTERN]

A dump has one file per model and recipe, with the joint graph as it leaves the passes: a node is its number, target, arguments,
dtype, shape and strides, side of the partition and recomputation tag; names are left out. Behind the nodes stand the
decisions, one per GEMM. Run it in each checkout.
"""

import fnmatch
import itertools
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tests.support.mutations import MODELS, RECIPES, recipe_of, rewritten

_TAGS = ("partitioner_tag", "recompute")


def lines(graph: fx.Graph) -> Iterator[str]:
    """One line per node."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        given = [_argument(a, number) for a in node.args]
        given += [f"{k}={_argument(v, number)}" for k, v in sorted(node.kwargs.items())]
        words = [_value(node.meta.get("val")), *(str(node.meta[key]) for key in _TAGS if node.meta.get(key) is not None)]
        yield f"%{number[node]} = {node.op} {target}({', '.join(given)}) {' '.join(words)}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]({','.join(map(str, value.stride()))})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value, value))})"
    return type(value).__name__


def _argument(value: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, number) for v in value)}]"
    return str(value)


def main(folder: pathlib.Path, pattern: str = "*") -> None:
    """Write the files whose names match."""
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for model, recipe in itertools.product(MODELS, RECIPES):
        name = f"{model}.{recipe}".replace(" ", "-")
        if fnmatch.fnmatchcase(name, pattern) and recipe_of(model, recipe) is not None:
            with rewritten(model, recipe) as work:
                decided = [f"{d.site.module} {d.site.role}: {d.reason or d.recipe.name}" for d in work.plan.decisions]
                (folder / f"{name}.txt").write_text("\n".join([*lines(work.graph), *decided]) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
