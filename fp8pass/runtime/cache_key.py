"""The key of a compiled graph in AOTAutograd's cache: all that decides a rewrite besides what torch's own key holds.

Torch's key has the operations of Dynamo's graph, its example inputs, the settings of Inductor and AOTAutograd, the GPU, and the
versions of torch and Triton. Ours has the rest: rules and recipes with their code, options, the model around the graph, modules
and source lines of its nodes, extra inputs, process groups, our sources, and the environment that lowerings read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fp8pass.graph.origin import source_line
from fp8pass.options import CompileOptions
from fp8pass.rewrite.runner import left_out
from fp8pass.runtime.session import CompiledGraph
from fp8pass.runtime.snapshots import modes_now
from fp8pass.runtime.words import Uncacheable, words
from lowering import deep_gemm
from lowering.hardware import cuda_capability, cuda_version, triton_available

#: The environment that lowerings, and the trials of what they call, read.
ENVIRONMENT = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_INTERPRET")
#: Metadata of Dynamo's nodes that reaches the nodes of the joint graph, where passes read it.
_READ = ("nn_module_stack", "fwd_nn_module_stack", "custom", "recompute", "ac_graph_id", "partitioner_tag")


@functools.cache
def source_digest() -> str:
    """Digest of every source file of both packages: a changed pass or lowering never meets a stale cache."""
    import fp8pass
    import lowering

    digest = hashlib.sha256()
    for package in (fp8pass, lowering):
        for file in sorted(pathlib.Path(package.__path__[0]).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def digest_of(value: object) -> str:
    """A digest of a value's text. Raises Uncacheable."""
    return hashlib.sha256(words(value).encode()).hexdigest()


_fingerprints: weakref.WeakKeyDictionary[fx.GraphModule, str] = weakref.WeakKeyDictionary()


def fingerprint(gm: fx.GraphModule) -> str:
    """A digest of a graph of Dynamo's, which must not change any more, as passes see it: every node with its module, source
    line and annotations, of its branches and bodies as well. Raises Uncacheable."""
    if gm in _fingerprints:
        return _fingerprints[gm]
    found = []
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            found.append((name, [_read_of(node) for node in module.graph.nodes]))
    _fingerprints[gm] = digest_of(found)
    return _fingerprints[gm]


def _read_of(node: fx.Node) -> list[Any]:
    """A node as passes read it. Its text is a tenth of the cost of generating the graph's code."""
    call = (node.op, node.name, node._pretty_print_target(node.target), node.args, node.kwargs, source_line(node))
    return [repr(call), *((key, _meta(key, node.meta[key])) for key in _READ if node.meta.get(key) is not None)]


def _meta(key: str, value: Any) -> Any:
    """Metadata of a node; of a stack of modules the paths, which alone are read."""
    return str([str(path) for path, *_ in value.values()]) if key.endswith("stack") else value


def lowered_by() -> object:
    """Facts that decide how operations are lowered, besides the graph and what torch's keys have."""
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    return source_digest(), environment, triton_available(), deep_gemm.is_installed()


def earlier_passes(patches: dict[str, Any]) -> list[Any]:
    """The passes that were set instead of ours. patches: the options that Inductor compiles with."""
    from torch._inductor import config

    given = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def key_of(graph: CompiledGraph, options: CompileOptions, variants: Set[str], may_ask: bool) -> str:
    """The key of a graph that code is generated for, of the rewrite's arguments. Raises Uncacheable, with the reason."""
    about = (graph.inputs, graph.placement, graph.surroundings, graph.extra, graph.extra_start, str(graph.device))
    decided = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.repr}
    return digest_of(
        [
            [lowered_by(), str(torch.__version__), sys.version_info[:3], _gpu(graph.device), left_out()],
            [graph.source and fingerprint(graph.source), about, graph.key, graph.in_training, frozenset(variants), may_ask],
            [decided, _groups(options.amax_reduction_group), [_uuid_of(each) for each in earlier_passes(options.patches)]],
        ]
    )


def request_key(graph: CompiledGraph, options: CompileOptions, examples: Sequence[Any]) -> str:
    """The key of what a graph asks for when it is compiled. graph: as it is when nothing has been asked for. examples: the
    inputs it is traced with. Raises Uncacheable."""
    inputs = [_example(x) for x in examples]
    return digest_of([key_of(graph, options, frozenset(), True), inputs, modes_now()])


def _example(x: Any) -> object:
    if not isinstance(x, torch.Tensor):
        return str(x)
    placements = str(getattr(x, "_spec", ""))
    strides = () if x.layout is not torch.strided else tuple(map(str, x.stride()))
    return str(type(x)), tuple(map(str, x.shape)), strides, str(x.dtype), str(x.device), x.requires_grad, placements


def _uuid_of(earlier: Any) -> object:
    uuid = earlier.uuid() if hasattr(earlier, "uuid") else None
    if uuid is None:
        raise Uncacheable(f"the joint_custom_pre_pass {type(earlier).__qualname__} has no uuid(), which tells when it changes")
    return uuid


def _gpu(device: torch.device) -> object:
    capability = cuda_capability(device)
    return None if capability is None else (capability, torch.cuda.get_device_name(device), cuda_version())


def _groups(amax_group: dist.ProcessGroup | None) -> object:
    """The ranks of the amax reduction, and those of every process group that it may cover, by their names in graphs."""
    if amax_group is None:
        return None
    return amax_group, {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}
