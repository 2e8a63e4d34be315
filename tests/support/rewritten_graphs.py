"""Dumps the rewritten graphs of many models as text, and compares two dumps node for node.

    python -m tests.support.rewritten_graphs dump FOLDER [PATTERN]
    python -m tests.support.rewritten_graphs compare OLD NEW [--rename "OLD TEXT=>NEW TEXT" ...]

A dump has one file per model, recipe and mode (training, inference) with three graphs each: the joint graph after the pass, and
the forward and the backward that the partitioner made of it; and any other that was rewritten, such as that of a first step. A
node is written as its number, target, arguments, dtype, shape and strides, side of the partition and recomputation tag; names
are left out. `compare` tells files that are equal, that hold the same nodes in another order, and that differ; it exits 1 if
any file differs. Little besides the public API is used, so that versions of the package can be compared: run `dump` in each
checkout.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import itertools
import pathlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from fp8pass import inspect
from fp8pass.runtime import backend
from tests.support.joint import two_ranks
from tests.support.rewritten_models import RECIPES, Run, cases

_TAGS = ("partitioner_tag", "recompute")
_KEYWORD = re.compile(r"(?<=, )\w+=[^,()\[\]]+(?=[,)])")
_REFERENCE = re.compile(r"F?%\d+")

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
            with two_ranks() if name.startswith("parallel") else contextlib.nullcontext():
                text = _dumped(run, recipe, trains)
            if text is not None:
                (folder / f"{title}.txt").write_text(text)


def _dumped(run: Run, recipe: str, trains: bool) -> str | None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    rewritten: list[list[str]] = []

    def recording(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        result = rewrite(graph, *args, **kwargs)
        rewritten.append(list(lines(graph, {})))
        return result

    rewrite = backend.rewrite
    try:
        with mock.patch.object(backend, "rewrite", recording):
            compiled = run(recipe, trains)
        if compiled is None:
            return None
        report = inspect(compiled)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}\n"
    # Delayed scaling's first step runs another graph, which no report shows.
    shown = [list(lines(graph.after.graph, {})) for graph in report.graphs]
    sections = [(f"other {i}", graph) for i, graph in enumerate(graph for graph in rewritten if graph not in shown)]
    for graph in report.graphs:
        for kind in ("after", "forward", "backward"):
            module = getattr(graph, kind)
            saved = {} if kind != "backward" else {n.name: i for i, n in enumerate(graph.forward.graph.nodes)}
            sections.append((f"{graph.name} {kind}", [] if module is None else list(lines(module.graph, saved))))
        sections[-1][1].extend(
            f"gemm {g.module} {g.role} {g.m} {g.n} {g.k} {g.recipe} {g.a_format} {g.b_format} {g.reason}" for g in graph.gemms
        )
        sections[-1][1].extend(
            f"gather {g.module} {g.is_backward} {g.bytes_before} -> {g.bytes_after} {str(g.reason).partition(':')[0]}"
            for g in graph.gathers
        )
    return "".join(f"== {title}\n" + "".join(f"{line}\n" for line in text) for title, text in sections)


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
            place = next(inputs)
            # Equal meshes are inputs each; which of them DTensor reads depends on what the process traced before.
            node = node if "FakeScriptObject" in node else f"{place} {node}"
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


def _outcome(before: list[str], after: list[str]) -> tuple[str, list[str]]:
    """How two dumps of one case differ, and the first nodes that are gone and new."""
    if before == after:
        return "equal", []
    (old_nodes, old_lines), (new_nodes, new_lines) = _contents(before), _contents(after)
    if old_nodes == new_nodes:
        return "order", []
    # The first in graph order; nodes that read them differ, too.
    gone = [f"    - {old_lines[digest]}" for digest in itertools.islice(old_nodes - new_nodes, 3)]
    return "different", gone + [f"    + {new_lines[digest]}" for digest in itertools.islice(new_nodes - old_nodes, 3)]


def compare(old: pathlib.Path, new: pathlib.Path, renamed: list[tuple[str, str]]) -> int:
    """Print every file that differs; the number of those whose nodes differ."""
    result: Counter[str] = Counter()
    for name in sorted({p.name for folder in (old, new) for p in folder.glob("*.txt")}):
        paths = [folder / name for folder in (old, new)]
        outcome, shown = "missing", []
        if all(p.exists() for p in paths):
            before, after = (p.read_text() for p in paths)
            for a, b in renamed:
                before = before.replace(a, b)
            outcome, shown = _outcome(*([_sorted_keywords(line) for line in text.splitlines()] for text in (before, after)))
        result[outcome] += 1
        if outcome != "equal":
            print(f"{outcome:9} {name}", *shown, sep="\n")
    print(", ".join(f"{count} {kind}" for kind, count in result.items()))
    return result["different"] + result["missing"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dumping, comparing = commands.add_parser("dump"), commands.add_parser("compare")
    dumping.add_argument("folder", type=pathlib.Path)
    dumping.add_argument("pattern", nargs="?", default="*")
    for name in ("old", "new"):
        comparing.add_argument(name, type=pathlib.Path)
    comparing.add_argument("--rename", action="append", default=[], metavar="OLD=>NEW")
    given = parser.parse_args()
    if given.command == "compare":
        return min(1, compare(given.old, given.new, [tuple(r.split("=>", 1)) for r in given.rename]))
    warnings.simplefilter("ignore")
    dump(given.folder, given.pattern)
    return 0


if __name__ == "__main__":
    sys.exit(main())
