"""The model around one of Dynamo's graphs: what `rewrite/heads.py` tells heads by.

Where a frame breaks, or DDP cuts a graph into buckets, a graph is a part of the model and may return any activation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from fp8pass.graph.sites import Surroundings
from fp8pass.runtime.instances import real_inputs

#: The functions of a module that return what the module returns; "inner" is the part of `_call_impl` that runs hooks.
_CALLS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "inner"})


def surroundings_of(gm: fx.GraphModule, root: nn.Module | None) -> Surroundings:
    """Of a graph that Dynamo is handing over. root: the compiled model, None for a function."""
    frame = _frame()
    here = {id(real) for real in real_inputs(gm.graph)}
    tables = [] if root is None else [m.weight for m in root.modules() if isinstance(m, nn.Embedding)]
    elsewhere = tuple(dict.fromkeys(int(table.shape[0]) for table in tables if id(table) not in here))
    return Surroundings(elsewhere, _returned(gm, root, frame), _read_widths(root, frame))


def _returned(gm: fx.GraphModule, root: nn.Module | None, frame: Any) -> frozenset[int]:
    """Positions of the graph's results that are results of the model, or of the compiled function."""
    results = _results(gm.graph)
    if frame is None:
        return frozenset(range(len(results)))
    reason = frame.output.compile_subgraph_reason
    if (reason is not None and reason.graph_break) or not _ends_model(frame, root):
        return frozenset()
    whole = {id(_traced(x)) for x in _results(frame.output.graph)}  # of DDP's bucket, too: its nodes keep what was traced
    return frozenset(i for i, x in enumerate(results) if id(_traced(x)) in whole)


def _read_widths(root: nn.Module | None, frame: Any) -> frozenset[int] | None:
    """The numbers of features that modules of the model read; of a function's, of those that its frame holds."""
    held = () if frame is None else frame.f_locals.values()
    roots = [root] if root is not None else [x for x in held if isinstance(x, nn.Module)]
    modules = {id(m): m for r in roots for m in r.modules()}.values()
    return frozenset(_read_by(modules)) if modules else None


def _read_by(modules: Iterable[nn.Module]) -> list[int]:
    """Of a matrix that no module of torch's has, which side is read is not known. A width of several is taken for one that is;
    one alone may be that of a head."""
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


def _traced(result: Any) -> Any:
    return result.meta.get("example_value") if isinstance(result, fx.Node) else result


def _frame() -> Any:
    """Dynamo's translator of the frame that it is compiling; None where it compiles none."""
    from torch._dynamo.symbolic_convert import tls

    inner = getattr(tls, "current_tx", None)
    return None if inner is None else inner.output.root_tx


def _ends_model(frame: Any, root: nn.Module | None) -> bool:
    """Whether a frame, or what follows a break in it, returns what the model returns: a call of the model, or of a module that
    a wrapper calls, which has all of its Parameters."""
    if root is None:
        return True
    every = {id(p) for p in root.parameters()}
    held = [x for x in frame.f_locals.values() if isinstance(x, nn.Module)]
    whole = [module for module in held if every <= {id(p) for p in module.parameters()}]
    function = frame.f_code.co_name
    return any(function == name or f"_in_{name}_at_" in function for module in whole for name in _calls_of(module))


def _calls_of(module: nn.Module) -> set[str]:
    """The names of the functions that return what a module returns, those that decorate its `forward` among them."""
    names, function = set(_CALLS), getattr(module, "forward", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            names.add(code.co_name)
        function = getattr(function, "__wrapped__", getattr(function, "func", None))
    return names
