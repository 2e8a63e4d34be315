"""What torch would record with mode="reduce-overhead", by its own rules, of code generated for an H200 without a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.cross_codegen import Capture, Report, capture, report


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A graph as torch records it."""

    report: Report
    copied: list[int]
    """Sizes in bytes of the inputs that each replay copies into the graph's own memory."""
    refusals: list[Any]
    """Reasons not to record it."""
    num_partitions: int
    """Parts that are recorded each; what lies between them runs eagerly."""


def recorded(run: Callable[[], object]) -> list[Recorded]:
    """The graphs that `run` compiles, for an H200. Computes nothing."""
    static: list[set[int]] = []
    compile_inner = Capture.compile_inner

    def noting(self: Capture, gm: Any, inputs: list[Any], **options: Any) -> Any:
        static.append(set(options["static_input_idxs"]))
        return compile_inner(self, gm, inputs, **options)

    with mock.patch.object(Capture, "compile_inner", noting), capture() as graphs:
        run()
    return [_recorded(Capture([graph]), indices) for graph, indices in zip(graphs.graphs, static, strict=True)]


def _recorded(graph: Capture, static: set[int]) -> Recorded:
    from torch._inductor import cudagraph_utils
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    codegen = GraphLowering.codegen
    with mock.patch.object(GraphLowering, "codegen", autospec=True, side_effect=codegen) as lowered:
        (generated,) = report(graph, {"triton.cudagraphs": True})
    ((made,),) = (call.args for call in lowered.call_args_list)
    values = [node.meta["val"] for node in made.module.graph.find_nodes(op="placeholder")]
    copied = [v.nbytes for i, v in enumerate(values) if i not in static and isinstance(v, torch.Tensor)]
    refusals = [
        made.disable_cudagraphs_reason,
        cudagraph_utils.check_for_mutation_ignore_cuda_graph_managed_tensor(
            made.module, made.mutated_inputs, made.mutated_input_idxs, sorted(static)
        ),
        cudagraph_utils.check_multiple_devices_or_any_cpu_nodes(dict(made.device_node_mapping)),
        get_first_incompatible_cudagraph_node(made.module),
    ]
    if hasattr(cudagraph_utils, "get_input_storage_mutation_info"):  # since torch 2.13
        changed = cudagraph_utils.get_input_storage_mutation_info(made.module)
        refusals.append(cudagraph_utils.get_input_storage_mutation_reason(changed))
    return Recorded(generated, copied, [r for r in refusals if r is not None], len(made.partition_maps or ()))
