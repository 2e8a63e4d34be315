"""Dynamo's graphs: what is read off them, and copies of them, with extra inputs and without regions.

Dynamo's graph must not change: its guards are built from it later. Extra inputs are placeholders behind its own: NOTE [extra
inputs] in `fp8pass.inputs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.fx._lazy_graph_module import _make_graph_module
from torch.nn.modules.conv import _ConvNd

from fp8pass.graph.gemms import GraphInput, Surroundings
from fp8pass.graph.origin import Path, begins, joined, module_path, parse_path
from fp8pass.inputs import ExtraInput
from fp8pass.runtime.eager import function_name
from fp8pass.runtime.instances import Held, ModuleNames, Placement, without_common_end
from fp8pass.weights.fsdp import not_kept, sharded

#: What Dynamo writes for an attribute whose name is a number, as nn.ParameterList has them.
_GETATTR = re.compile(r"^getattr\((.*), '(\d+)'\)$")
#: The functions of a module that return what the module returns; "inner" is the part of `_call_impl` that runs hooks.
_CALLS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "inner"})


# -- inputs


def describe_inputs(
    graph: fx.Graph, root: nn.Module | None = None, fsdp_gather: bool = False, frame: CodeType | None = None
) -> tuple[GraphInput, ...]:
    """Describe the inputs of a graph as far as Dynamo and the root module know them. fsdp_gather: also how FSDP2 gathers them.
    frame: the code that Dynamo traced, where the graph is all of it."""
    embeddings = set() if root is None else {id(weight) for weight in embedding_weights(root)}
    inputs = zip(graph.find_nodes(op="placeholder"), real_inputs(graph), strict=True)
    found = ((_describe(node, real, id(real) in embeddings), real) for node, real in inputs)
    return tuple(dataclasses.replace(x, sharded=sharded(real, frame, x.owner)) if fsdp_gather else x for x, real in found)


def embedding_weights(root: nn.Module) -> list[Any]:
    """The weights of all nn.Embeddings below a module, and of what `get_output_embeddings()` returns, where one has it."""
    weights = [m.weight for m in root.modules() if isinstance(m, nn.Embedding)]
    for module in root.modules():
        getter = getattr(module, "get_output_embeddings", None)
        try:
            found = getter() if callable(getter) else None
        except (AttributeError, NotImplementedError):  # transformers declares it for models that have no output embedding, too
            continue
        outputs = found if isinstance(found, (list, tuple)) else [found]
        weights += [w for o in outputs if isinstance(w := getattr(o, "weight", None), torch.Tensor)]
    return weights


def _describe(node: fx.Node, real: object, is_embedding: bool) -> GraphInput:
    name = _source_of(node)
    path = parse_path(name)
    is_buffer = "._buffers[" in name
    is_parameter = isinstance(node.meta.get("example_value"), nn.Parameter) or is_buffer
    last = path.below.rpartition(".")[2] if path is not None else ""
    is_attribute = "._parameters[" in name or "._buffers[" in name or name.endswith(f".{last}")
    is_view_of_parameter = isinstance(real, torch.Tensor) and isinstance(real._base, nn.Parameter)
    owner = Path(path.root, path.below.rpartition(".")[0]) if path is not None and path.below and is_attribute else path
    return GraphInput(
        path,
        owner,
        is_parameter,
        is_embedding,
        is_buffer,
        requires_grad=isinstance(real, torch.Tensor) and real.requires_grad,
        not_kept=not_kept(real) if is_parameter else None,
        stands_in=is_attribute and not is_parameter and ("._parameters[" in name or is_view_of_parameter),
    )


def _source_of(placeholder: fx.Node) -> str:
    """Dynamo's expression for an input, in the variables of the frame; "" where it has none."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)  # a method before torch 2.12
    return _GETATTR.sub(r"\1.\2", text)


def real_inputs(graph: fx.Graph) -> list[Any]:
    """The tensors that Dynamo traced the graph with, None where it kept none."""
    examples = []
    for node in graph.find_nodes(op="placeholder"):
        traced = node.meta.get("grapharg")
        examples.append(None if traced is None or traced.is_tensor is False else traced.example)
    return examples


def with_extra_inputs(
    gm: fx.GraphModule, example_inputs: list[Any], extra: Sequence[ExtraInput], device: torch.device
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of `gm` with one more placeholder per extra input, and its example inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    value, old_output = copied
    for old in gm.graph.find_nodes(op="placeholder"):
        copies[old]._dynamo_source = getattr(old, "_dynamo_source", None)
        copies[old].meta.pop("grapharg", None)  # it refers to the tensor that Dynamo traced with
    fake_mode = detect_fake_mode(example_inputs)
    examples = list(example_inputs)
    last = next(reversed(graph.find_nodes(op="placeholder")), None)
    for given in extra:
        with contextlib.nullcontext() if fake_mode is None else fake_mode:
            example = given.empty(device)
        last = _add_placeholder(graph, last, given, example)
        examples.append(example)
    graph.output(value).meta.update(old_output.meta)
    return _with_meta_of(gm, _make_graph_module(gm, graph)), examples


def _with_meta_of(gm: fx.GraphModule, copy: fx.GraphModule) -> fx.GraphModule:
    copy.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that compiling the graph does not change."""
    return with_extra_inputs(gm, [], (), torch.device("cpu"))[0]


def _add_placeholder(graph: fx.Graph, after: fx.Node | None, given: ExtraInput, example: torch.Tensor) -> fx.Node:
    where = graph.inserting_after(after) if after is not None else graph.inserting_before(next(iter(graph.nodes), None))
    with where:
        node = graph.placeholder(given.name)
    node._dynamo_source = None
    node.meta["example_value"] = node.meta["val"] = example
    if given.is_static:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def find_extra_inputs(
    graph: fx.Graph, start: int, extra: Sequence[ExtraInput], index_of: Callable[[fx.Node], int | None]
) -> dict[Hashable, fx.Node]:
    """The placeholders of a joint or inference graph by the keys of its extra inputs, the first of which is input `start` of
    Dynamo's graph; `index_of` gives a placeholder's position there. Empty where the graph lost one of them."""
    by_position = {index_of(n): n for n in graph.find_nodes(op="placeholder")}
    found = {given.key: by_position[start + i] for i, given in enumerate(extra) if start + i in by_position}
    return found if len(found) == len(extra) else {}


# -- the frames around a graph
#
# Where the Parameters among a graph's inputs do not tell layers apart, the modules do that its frame's variables lead to.


def placement_in_trace(gm: fx.GraphModule, inputs: Sequence[GraphInput], names: ModuleNames) -> Placement:
    """The placement of the instance that Dynamo traces a graph with. inputs: the graph's."""
    examples = real_inputs(gm.graph)
    held = () if names.is_told(inputs, examples) else modules_in_trace(module_variables(gm.graph, inputs))
    return names.place(inputs, examples, held)


def module_variables(graph: fx.Graph, inputs: Iterable[GraphInput]) -> tuple[Path, ...]:
    """The paths from a frame's variables to the modules that a graph's inputs and nodes are of, and to the frame's own."""
    owners = (given.owner for given in inputs if given.is_weight)
    paths = dict.fromkeys((Path("self", ""), *owners, *map(module_path, graph.nodes)))
    return tuple(path for path in paths if path is not None)


def modules_in_trace(paths: Sequence[Path]) -> Held:
    """The modules at the ends of paths from variables of the frame that Dynamo traces."""
    translator = _translator()
    return () if translator is None else _modules_at(paths, translator.output.root_tx, sys._getframe(1))


def modules_in_call(code: CodeType | None, paths: Sequence[Path]) -> Held:
    """The modules at the ends of paths from variables of the frame that calls a graph: it runs what Dynamo made of `code`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and code is not None:
        now = frame.f_code
        if (now.co_name, now.co_firstlineno, now.co_filename) == (code.co_name, code.co_firstlineno, code.co_filename):
            return _modules_at(paths, frame, frame.f_back)
        frame = frame.f_back
    return ()


def _modules_at(paths: Sequence[Path], frame: Any, outer: FrameType | None) -> Held:
    variables, values, found = frame.f_locals, dict[str, Any](), list[tuple[Path, nn.Module]]()
    for name in {path.root for path in paths}:
        if name == "self" and name not in variables:
            value = _self_of_function(frame.f_code, outer)
        else:
            value = variables.get(name, frame.f_globals.get(name))
        values[name] = value.__self__ if inspect.ismethod(value) else value
    for path in paths:
        value = values[path.root]
        for part in path.below.split(".") if path.below else ():
            value = _attribute_or_item(value, part)
        if isinstance(value, nn.Module):
            found.append((path, value))
    return tuple(found)


def _self_of_function(rest: CodeType, frame: FrameType | None) -> Any:
    """`self` of the function that code is the rest of behind a graph break, where that has it no more. No other frame is read:
    recomputations have others, and before Python 3.13 reading the locals of a frame keeps them alive."""
    function = function_name(rest.co_name)
    while frame is not None and function != rest.co_name:
        if (frame.f_code.co_name, frame.f_code.co_filename) == (function, rest.co_filename):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _attribute_or_item(value: Any, name: str) -> Any:
    """What Dynamo's path names in a value; None where there is nothing. Of user code only containers' runs."""
    if isinstance(value, nn.Module) and name in value._modules:
        return value._modules[name]
    if isinstance(value, Mapping):
        return next((item for key, item in value.items() if str(key) == name), None)
    if isinstance(value, Sequence):
        return value[int(name)] if name.isdigit() and int(name) < len(value) else None
    if inspect.ismemberdescriptor(getattr(type(value), name, None)):  # a slot
        return getattr(value, name, None)
    return getattr(value, "__dict__", {}).get(name)


def traced_code() -> CodeType | None:
    """The code of the frame whose graph Dynamo hands over, at the end of the frame or at a break."""
    translator = _translator()
    return None if translator is None else translator.f_code


def _translator() -> Any:
    """Dynamo's translator of the frame that it traces now; None where it traces none."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


# -- the model around a graph
#
# Where a frame breaks, or DDP cuts a graph into buckets, a graph is a part of the model and may return any activation.
# `rewrite/select.py` tells heads by what is around it.


def surroundings_of(gm: fx.GraphModule, root: nn.Module | None) -> Surroundings:
    """The surroundings of a graph that Dynamo is handing over. root: the compiled model, None for a function."""
    inner = _translator()
    frame = None if inner is None else inner.output.root_tx
    here = {id(real) for real in real_inputs(gm.graph)}
    tables = [] if root is None else [m.weight for m in root.modules() if isinstance(m, nn.Embedding)]
    elsewhere = tuple(dict.fromkeys(int(table.shape[0]) for table in tables if id(table) not in here))
    held = () if frame is None else frame.f_locals.values()
    roots = [root] if root is not None else [x for x in held if isinstance(x, nn.Module)]
    modules = {id(m): m for r in roots for m in r.modules()}.values()
    return Surroundings(elsewhere, _returned(gm, root, frame), frozenset(_read_by(modules)) if modules else None)


def _returned(gm: fx.GraphModule, root: nn.Module | None, frame: Any) -> frozenset[int]:
    """Positions of the graph's results that are results of the model, or of the compiled function."""
    results = _results(gm.graph)
    if frame is None:
        return frozenset(range(len(results)))
    reason = frame.output.compile_subgraph_reason
    if (reason is not None and reason.graph_break) or not _ends_model(frame, root):
        return frozenset()
    whole = {id(traced_value(x)) for x in _results(frame.output.graph)}  # of DDP's bucket, too: its nodes keep what was traced
    return frozenset(i for i, x in enumerate(results) if id(traced_value(x)) in whole)


def _read_by(modules: Iterable[nn.Module]) -> list[int]:
    """The numbers of features that modules read. Which side of a user module's matrix is read is not known: a size of
    several matrices counts; a size of one does not, as it may be a head's."""
    found: list[int] = []
    sides: Counter[int] = Counter()
    for module in modules:
        own = list(module.parameters(recurse=False))
        matrices = [p for p in own if p.dim() > 1]
        if isinstance(module, nn.Linear):
            found.append(module.in_features)
        elif isinstance(module, _ConvNd):
            found.append(module.in_channels)
        elif not matrices:  # a norm
            found += [p.numel() for p in own]
        elif not isinstance(module, nn.Embedding):
            for matrix in matrices:
                sides.update(set(matrix.shape[-2:]))
    return found + [size for size, count in sides.items() if count > 1]


def _results(graph: fx.Graph) -> list[Any]:
    nodes = graph.find_nodes(op="output")
    value: Any = nodes[0].args[0] if nodes else ()
    return list(value) if isinstance(value, (tuple, list)) else [value]


def traced_value(result: Any) -> Any:
    """The value that Dynamo traced a result of a graph with."""
    return result.meta.get("example_value") if isinstance(result, fx.Node) else result


def _ends_model(frame: Any, root: nn.Module | None) -> bool:
    """True if a frame, or what follows a break in it, returns what the model returns: a call of the model, or of a module that
    a wrapper calls, which has all of its Parameters."""
    if root is None:
        return True
    every = {id(p) for p in root.parameters()}
    held = [x for x in frame.f_locals.values() if isinstance(x, nn.Module)]
    whole = [module for module in held if every <= {id(p) for p in module.parameters()}]
    return any(function_name(frame.f_code.co_name) in _calls_of(module) for module in whole)


def _calls_of(module: nn.Module) -> set[str]:
    """The names of the functions that return what a module returns, those that decorate its `forward` among them."""
    names, function = set(_CALLS), getattr(module, "forward", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            names.add(code.co_name)
        function = getattr(function, "__wrapped__", getattr(function, "func", None))
    return names


# -- regions of `torch.compiler.nested_compile_region`
#
# torch compiles a region once for all calls. In FP8 each call has scales, names and rows of its own, so the body is copied to
# every call, under the names of the modules whose Parameters that call passes.


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """One of Dynamo's graphs without regions: itself, unchanged, where it has none, else a copy."""
    return _written(gm, {}) if _has_region(gm) else gm


def _has_region(gm: fx.GraphModule) -> bool:
    """True if a region is called, in a branch or body as well."""
    held = (_attribute(gm, node) for node in gm.graph.find_nodes(op="get_attr"))
    bodies = [x for x in held if isinstance(x, fx.GraphModule)]
    return any(_is_region(node) for node in gm.graph.nodes) or any(map(_has_region, bodies))


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph


def _attribute(gm: fx.GraphModule, node: Any) -> Any:
    return operator.attrgetter(str(node.target))(gm)


Moves = tuple[dict[Path, Path], ...]  # Maps of the places where code was traced to those where a call runs it, innermost first.


def _written(
    gm: fx.GraphModule,
    traced: dict[fx.GraphModule, list[Path | None]],
    given: Sequence[Path | None] | None = None,
    moves: Moves = (),
) -> fx.GraphModule:
    """A copy of a graph with its regions written out. traced: region -> where the arguments of its first call are in the model:
    those with which it was traced. given: where its inputs were in the model, if they do not say so."""
    graph, attributes = fx.Graph(), dict[str, Any]()

    def write(gm: fx.GraphModule, copies: dict[fx.Node, Any], places: dict[fx.Node, Path | None], moves: Moves) -> Any:
        """Copy the nodes of a graph behind its inputs, and return its results. places: of its inputs, as it was traced."""
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output") or (node.op == "get_attr" and all(map(_is_region, node.users))):
                continue
            if _is_region(node):
                name, _, *operands = node.args
                values = [copies[x] if isinstance(x, fx.Node) else x for x in operands]
                body, here = _attribute(gm, name), _places(operands, places)
                first = traced.setdefault(body, here)
                inputs = body.graph.find_nodes(op="placeholder")
                passed, there = (dict(zip(inputs, each, strict=True)) for each in (values, first))
                copies[node] = write(body, passed, there, (_moves(first, here), *moves))
            elif node.target is operator.getitem and isinstance(copies[node.args[0]], (tuple, list)):
                copies[node] = copies[node.args[0]][node.args[1]]
            else:
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
                _place(copy, moves)
                if node.op == "get_attr":
                    copy.target = f"attribute_{len(attributes)}"
                    attributes[copy.target] = _held(gm, node, traced, places, moves)
        return fx.map_arg(gm.graph.output_node().args[0], copies.__getitem__)

    placeholders = gm.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = {}
    for node in placeholders:
        copy = copies[node] = graph.node_copy(node)
        copy._dynamo_source = getattr(node, "_dynamo_source", None)
    places = dict(zip(placeholders, map(path_of, placeholders) if given is None else given, strict=True))
    result = write(gm, copies, places, moves)
    graph.output(result).meta.update(gm.graph.output_node().meta)
    return _with_meta_of(gm, _make_graph_module(attributes, graph))


def _held(
    gm: fx.GraphModule,
    node: fx.Node,
    traced: dict[fx.GraphModule, list[Path | None]],
    places: dict[fx.Node, Path | None],
    moves: Moves,
) -> Any:
    """The attribute that a node reads: a graph without regions, if it is a graph."""
    held = _attribute(gm, node)
    if not isinstance(held, fx.GraphModule) or not (moves or _has_region(held)):
        return held
    operands = [x for x in next(iter(node.users)).args if isinstance(x, fx.Node) and x.op != "get_attr"]
    num_inputs = len(held.graph.find_nodes(op="placeholder"))
    given = _places(operands, places) if len(operands) == num_inputs else [None] * num_inputs
    return _written(held, traced, given, moves)


def _places(operands: Sequence[Any], places: dict[fx.Node, Path | None]) -> list[Path | None]:
    return [places.get(x) if isinstance(x, fx.Node) else None for x in operands]


def path_of(placeholder: fx.Node) -> Path | None:
    """The place of an input in the variables of the frame; None for one that is no attribute of a module."""
    return parse_path(_source_of(placeholder))


def _moves(traced: Sequence[Path | None], given: Sequence[Path | None]) -> dict[Path, Path]:
    """Map where a region was traced to where a call runs it: the paths of its Parameters without their common end. Of tied ones
    the path is that of the first module that has them, so most decide."""
    found: dict[Path, Counter[Path]] = {}
    for before, after in zip(traced, given, strict=True):
        if before is None or after is None or before == after:
            continue
        old, new = without_common_end(before.below, after.below)
        found.setdefault(Path(before.root, old), Counter())[Path(after.root, new)] += 1
    return {old: places.most_common(1)[0][0] for old, places in found.items()}


def _place(node: fx.Node, moves: Moves) -> None:
    """Name the modules that a node's metadata is about as its call does."""
    stack = node.meta.get("nn_module_stack")
    if moves and stack:
        node.meta["nn_module_stack"] = {key: (_moved(path, moves), *rest) for key, (path, *rest) in stack.items()}


def _moved(text: str, moves: Moves) -> str:
    path = parse_path(text)
    if path is None:
        return text
    for found in moves:
        path = _moved_by(path, found)
    return joined(f"L['{path.root}']", path.below)


def _moved_by(path: Path, found: dict[Path, Path]) -> Path:
    fits = [old for old in found if old.root == path.root and begins(old.below, path.below)]
    if not fits:
        return path
    old = max(fits, key=lambda p: len(p.below))
    new, rest = found[old], path.below[len(old.below) :].lstrip(".")
    return Path(new.root, joined(new.below, rest))
