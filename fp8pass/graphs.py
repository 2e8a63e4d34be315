"""`rewrite_graph`: the passes for frameworks that trace models themselves and own the graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8pass.recipes import Recipe, RecipeName

if TYPE_CHECKING:  # NOTE [a lean import] in `fp8pass.api`
    import torch.distributed as dist
    from torch import fx

    from fp8pass.rules import Select
    from fp8pass.runtime.external_graphs import RewrittenGraph


def rewrite_graph(
    graph: fx.GraphModule,
    recipe: Recipe | RecipeName = "delayed",
    *,
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    inputs: Sequence[str | None] | None = None,
    select: Select = "auto",
    min_speedup: float | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> RewrittenGraph:
    """Rewrite the GEMMs of a graph that you traced into FP8, without torch.compile.

    The graph is a trace by make_fx of forward, loss and `torch.autograd.grad`, or one of AOTAutograd's joint graphs that is not
    partitioned yet: its primals and tangents become flat inputs. It consists of ATen operations with fake values in
    `meta["val"]`, and changes nothing in place that a GEMM reads. A GEMM belongs to the module in `meta["nn_module_stack"]` or
    `meta["custom"]["module_fqn"]`, else to the one that owns the Parameter that it reads; what has none is called "matmul".

    Args:
        graph: it is not changed.
        recipe: as in `fp8_compile`.
        rules: as in `fp8_compile`.
        inputs: for each of the graph's first inputs the name of the Parameter or buffer that it holds, such as
            "layers.0.wq.weight"; None for an input that holds none, as for those beyond the sequence. None: what AOTAutograd's
            descriptors say.
        select: as in `fp8_compile`.
        min_speedup: as in `fp8_compile`.
        amax_reduction_group: as in `fp8_compile`.

    Returns:
        The rewritten graph, its table of GEMMs, and the state of delayed scaling as further inputs.

    Raises:
        RecipeError, RuleError: as in `fp8_compile`.
        OptionError: the graph is not one that can be rewritten, or `inputs` does not fit it; the text says why.
    """
    from fp8pass.runtime.external_graphs import rewritten

    return rewritten(
        graph,
        inputs=inputs,
        recipe=recipe,
        rules=rules,
        select=select,
        min_speedup=min_speedup,
        amax_reduction_group=amax_reduction_group,
    )
