"""Partitioned graphs that run as they are, without generated code, in a form that AOTAutograd's cache keeps whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen

from fp8pass.errors import UnsupportedError


@dataclasses.dataclass
class EagerCode(OutputCode):
    """A forward, a backward or an inference graph, called with a list of its arguments, which it may empty."""

    graph: fx.GraphModule | None
    is_backward: bool = False
    stored: bytes | None = None  # The graph in an entry of the cache.

    def __post_init__(self) -> None:
        self._boxed_call = True
        self._take_lists()

    def _take_lists(self) -> None:
        assert self.graph is not None
        self.graph.graph.set_codegen(_BoxedCodeGen())
        self.graph.recompile()

    def __call__(self, inputs: Any) -> Any:
        assert self.graph is not None
        if self.is_backward:
            refuse_batches(inputs)
        return self.graph.forward(inputs)

    def prepare_for_serialization(self) -> None:
        """Store the graph. Torch calls it on a copy."""
        assert self.graph is not None
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.graph.graph, {}))
        for node in copy.nodes:
            node.meta = {}
        try:
            self.stored = GraphPickler.dumps(fx.GraphModule(self.graph, copy), Options(ops_filter=None))
        except Exception as error:
            raise BypassAOTAutogradCache(f"a graph without code cannot be pickled: {error}") from error
        self.graph = None

    def post_compile(self, *args: Any, **options: Any) -> None:
        """Restore the graph, where it comes from the cache."""
        if self.graph is None:
            assert self.stored is not None
            loaded = GraphPickler.loads(self.stored, FakeTensorMode(shape_env=ShapeEnv()))
            assert isinstance(loaded, fx.GraphModule)
            self.graph, self.stored = loaded, None
            self._take_lists()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing was generated."""


def refuse_batches(args: Iterable[Any]) -> None:
    """Raise UnsupportedError where a gradient is a batch of gradients, under vmap."""
    functorch = torch._C._functorch
    is_batch = getattr(functorch, "is_legacy_batchedtensor", functorch.is_batchedtensor)
    if any(type(a) is torch.Tensor and is_batch(a) for a in args):
        raise UnsupportedError(
            "a compiled backward cannot run for a batch of gradients at once, as torch.autograd.grad(is_grads_batched=True)"
            " and torch.autograd.functional.jacobian(vectorize=True) ask for it. Call the compiled model and"
            " torch.autograd.grad once per gradient, or use the model that was given to fp8_compile"
        )
