"""Dumps the rewritten graphs of many models as text, and compares two dumps node for node.

    python -m tests.support.rewritten_graphs dump FOLDER [PATTERN]
    python -m tests.support.rewritten_graphs compare OLD NEW [--rename "OLD TEXT=>NEW TEXT" ...]

A dump has one file per model, recipe and mode (training, inference) with three graphs each: the joint graph after the pass, and
the forward and the backward that the partitioner made of it. A node is written as its number, target, arguments, dtype, shape
and strides, side of the partition and recomputation tag; names are left out. `compare` tells files that are equal, that hold
the same nodes in another order, and that differ; it exits 1 if any file differs. Only the public API is used, so that any two
versions of the package can be compared: run `dump` in each checkout.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import hashlib
import inspect as python_inspect
import itertools
import pathlib
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fp8pass import Float8BlockScaling, api, fp8_compile, inspect
from tests.emulation.cases import Ragged, Tiles
from tests.support.models import LlamaBlock, mlp
from tests.zoo.models import TORCH, TRANSFORMERS

RECIPES = ("delayed", "current", "blockwise")
_TAGS = ("partitioner_tag", "recompute")
_KEYWORD = re.compile(r"(?<=, )\w+=[^,()\[\]]+(?=[,)])")
_REFERENCE = re.compile(r"F?%\d+")

Run = Callable[[str, bool], Any]
"""(recipe, whether it trains) -> what `fp8_compile` returned, after its calls."""


# -- models


def _call(compiled: Any, inputs: Any, trains: bool, select: Callable[[Any], torch.Tensor] = lambda out: out) -> Any:
    with torch.set_grad_enabled(trains):
        out = compiled(**inputs) if isinstance(inputs, dict) else compiled(*inputs)
    if trains:
        select(out).square().mean().backward()
    return compiled


def _compile(model: Any, recipe: Any, **options: Any) -> Any:
    """`fp8_compile` without the heuristics that later versions added to the choice of GEMMs and the first step."""
    known = python_inspect.signature(fp8_compile).parameters
    if "select" in known:
        options["select"] = "all"
    return fp8_compile(model, recipe, backend="aot_eager", **options)


def _zoo(name: str) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        case = {**TRANSFORMERS, **TORCH}[name]()
        return _call(_compile(case.model, recipe), case.inputs, trains, case.select)

    return run


def _own(build: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        model = build().to(dtype)
        return _call(_compile(model, recipe, **options), (torch.randn(shape, dtype=dtype, requires_grad=trains),), trains)

    return run


class _Checkpointed(LlamaBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, 0] * 0).long()
        return self.head(self.up(self.embedding(tokens))) + self.head(x)


def _sequence_parallel(bias: bool, **options: Any) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        from tests.distributed.models import BATCH, TOKENS, seeded, tensor_parallel

        model = seeded(bias=bias)
        tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence=True)
        return _call(_compile(model, recipe, **options), (torch.zeros(BATCH, TOKENS, dtype=torch.long),), trains)

    return run


def _gathered(recipe_of_blockwise: Any, dim: int, *shape: int, dtype: torch.dtype = torch.float32) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        import torch.distributed as dist
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        class Gathering(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(all_gather_tensor_autograd(x, dim, dist.group.WORLD))

        chosen = recipe_of_blockwise if recipe == "blockwise" else recipe
        compiled = _compile(Gathering(shape[-1], 48, dtype=dtype), chosen)
        return _call(compiled, (torch.randn(shape).to(dtype).requires_grad_(trains),), trains)

    return run


def _copies(choice: str) -> str:
    """`weight_copies` by either of its names."""
    words = {"save": "saved", "recompute": "remade"}
    return choice if "recompute" in python_inspect.getsource(api) else words[choice]


def cases() -> dict[str, Run]:
    """Every model that is dumped."""
    odd = nn.Sequential(nn.Linear(50, 37), nn.GELU(), nn.Linear(37, 50))
    rules = {"2:grad_weight": None, "2": "current", "0:output": "blockwise"}
    found = {f"zoo-{name}": _zoo(name) for name in (*TORCH, *TRANSFORMERS)}
    found |= {
        "llama-bf16": _own(LlamaBlock, 2, 64, 128, dtype=torch.bfloat16),
        "llama-save": _own(LlamaBlock, 2, 64, 128, weight_copies=_copies("save")),
        "llama-recompute": _own(LlamaBlock, 2, 64, 128, weight_copies=_copies("recompute")),
        "llama-many-rows": _own(lambda: LlamaBlock(32, 48, 2), 1, 4096, 32),
        "llama-checkpointed": _own(_Checkpointed, 2, 32, 128),
        "mlp": _own(mlp, 16, 64),
        "mlp-rules": _own(mlp, 16, 64, rules=rules),
        "mlp-odd": _own(lambda: copy.deepcopy(odd), 33, 50),
        "mlp-dynamic": _own(mlp, 24, 64, dynamic=True),
        "tied": _own(_Tied, 48, 32),
        "ragged": _own(Ragged, 33, 50),
        "tiles": _own(Tiles, 80, 192),
        "parallel-sequence": _sequence_parallel(False),
        "parallel-bias": _sequence_parallel(True),
        "parallel-rule": _sequence_parallel(False, rules={"layers.*.up": None}),
        "parallel-1d": _gathered(Float8BlockScaling(), 0, 128, 144),
        "parallel-1d-3": _gathered(Float8BlockScaling(use_f32_scales=True), 1, 3, 128, 144),
        "parallel-2d": _gathered(Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), 0, 256, 96),
        "parallel-2d-bf16": _gathered(
            Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), 0, 256, 96, dtype=torch.bfloat16
        ),
        "parallel-crossing": _gathered(Float8BlockScaling(), 0, 96, 144, dtype=torch.bfloat16),
    }
    return found


# -- text


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]({','.join(map(str, value.stride()))})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value, value))})"
    return type(value).__name__


def _argument(value: Any, number: dict[fx.Node, Any]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, number) for v in value)}]"
    return str(value)


def lines(graph: fx.Graph, saved: dict[str, int]) -> Iterator[str]:
    """One line per node. `saved`: for a backward graph, the forward's nodes by name, whose values its inputs are."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        origin = f" = saved F%{saved[node.name]}" if node.op == "placeholder" and node.name in saved else ""
        yield f"%{number[node]} = {_described(node, number)}{origin}"


def _described(node: fx.Node, number: dict[fx.Node, Any]) -> str:
    target = "" if node.op in ("placeholder", "output") else str(node.target)
    given = [_argument(a, number) for a in node.args]
    given += [f"{k}={_argument(v, number)}" for k, v in sorted(node.kwargs.items())]
    tags = [str(node.meta[key]) for key in _TAGS if node.meta.get(key) is not None]
    return f"{node.op} {target}({', '.join(given)}) {_value(node.meta.get('val'))} {' '.join(tags)}".rstrip()


def dump(folder: pathlib.Path, pattern: str) -> None:
    """Write one file per model, recipe and mode."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, run), recipe, trains in itertools.product(cases().items(), RECIPES, (True, False)):
        title = f"{name}.{recipe}.{'train' if trains else 'infer'}"
        if fnmatch.fnmatchcase(title, pattern):
            with _process_group(name.startswith("parallel")):
                (folder / f"{title}.txt").write_text(_dumped(run, recipe, trains))


def _dumped(run: Run, recipe: str, trains: bool) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        report = inspect(run(recipe, trains))
    except Exception:
        return f"raised\n{traceback.format_exc(limit=1)}"
    text = []
    for graph in report.graphs:
        for kind in ("after", "forward", "backward"):
            module = getattr(graph, kind)
            saved = {} if kind != "backward" else {n.name: i for i, n in enumerate(graph.forward.graph.nodes)}
            text += [f"== {graph.name} {kind}", *(() if module is None else lines(module.graph, saved))]
        text += [
            f"gather {g.module} {g.is_backward} {g.bytes_before} -> {g.bytes_after} {str(g.reason).partition(':')[0]}"
            for g in graph.gathers
        ]
    return "\n".join(text) + "\n"


class _process_group:
    """Two ranks without a second process, for models that gather: collectives are traced and move nothing."""

    def __init__(self, needed: bool):
        self.needed = needed

    def __enter__(self) -> None:
        if self.needed:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def __exit__(self, *raised: object) -> None:
        if self.needed:
            torch.distributed.destroy_process_group()


# -- comparison


def _contents(text: list[str]) -> tuple[Counter[str], dict[str, str]]:
    """The nodes of a dump as digests of what they compute from what, whatever their order; and the line of each.

    The backward's inputs are known by what they are in the forward, and the forward's outputs count as a set: the order
    in which the partitioner saves values follows from the order of the nodes.
    """
    digests: dict[str, str] = {}
    section = ""
    inputs = itertools.count()
    found: Counter[str] = Counter()
    lines: dict[str, str] = {}
    for line in text:
        number, equals, node = line.partition(" = ")
        if not equals:
            section, inputs = line, itertools.count()
            found[line] += 1
            lines[line] = line
            continue
        node = _REFERENCE.sub(lambda m: digests[m[0]], node)
        if node.startswith("placeholder") and "= saved " not in node:
            node = f"{next(inputs)} {node}"
        if node.startswith("output") and section.endswith("forward"):
            node = " ".join(sorted(node.split(", ")))
        digests[number] = hashlib.sha256(node.encode()).hexdigest()[:16]
        if section.endswith("forward"):
            digests[f"F{number}"] = digests[number]
        found[digests[number]] += 1
        lines.setdefault(digests[number], line)
    return found, lines


def _sorted_keywords(line: str) -> str:
    """The line with its keyword arguments in alphabetical order, which a renamed one may have left."""
    words = iter(sorted(_KEYWORD.findall(line)))
    return _KEYWORD.sub(lambda _: next(words), line)


def compare(old: pathlib.Path, new: pathlib.Path, renamed: list[tuple[str, str]]) -> int:
    """Print every file that differs; the number of those whose nodes differ."""
    names = sorted({p.name for folder in (old, new) for p in folder.glob("*.txt")})
    result: Counter[str] = Counter()
    for name in names:
        paths = [folder / name for folder in (old, new)]
        if not all(p.exists() for p in paths):
            result["missing"] += 1
            print(f"missing   {name}")
            continue
        before, after = (p.read_text().splitlines() for p in paths)
        for a, b in renamed:
            before = [line.replace(a, b) for line in before]
        before, after = ([_sorted_keywords(line) for line in lines] for lines in (before, after))
        if before == after:
            result["equal"] += 1
            continue
        (old_nodes, old_lines), (new_nodes, new_lines) = _contents(before), _contents(after)
        if old_nodes == new_nodes:
            result["order"] += 1
            print(f"order     {name}")
            continue
        result["different"] += 1
        print(f"different {name}")
        for sign, gone, texts in (("-", old_nodes - new_nodes, old_lines), ("+", new_nodes - old_nodes, new_lines)):
            for digest in itertools.islice(gone, 3):  # the first in graph order; nodes that read them differ, too
                print(f"    {sign} {texts[digest]}")
    print(", ".join(f"{count} {kind}" for kind, count in result.items()))
    return result["different"] + result["missing"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("folder", type=pathlib.Path)
    dumping.add_argument("pattern", nargs="?", default="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=pathlib.Path)
    comparing.add_argument("new", type=pathlib.Path)
    comparing.add_argument("--rename", action="append", default=[], metavar="OLD=>NEW")
    given = parser.parse_args()
    if given.command == "compare":
        return min(1, compare(given.old, given.new, [tuple(r.split("=>", 1)) for r in given.rename]))
    warnings.simplefilter("ignore")
    dump(given.folder, given.pattern)
    return 0


if __name__ == "__main__":
    sys.exit(main())
