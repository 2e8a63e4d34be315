"""Memory traffic besides GEMMs of the Llama block that everyone is compared with: forward and backward on a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.contestants import steady
from benchmarks.cross_codegen import H200, Capture, Event, Kernel, Report, capture, launched, planned_for, report
from fp8pass import fp8_compile
from tests.support.models import LlamaBlock

DIM, FFN, HEADS, TOKENS = 1024, 2816, 16, 2048


def llama_block() -> LlamaBlock:
    """The block in bfloat16."""
    torch.manual_seed(0)
    return LlamaBlock(DIM, FFN, HEADS).bfloat16()


def traffic_of(
    compile_model: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], tokens: int = TOKENS
) -> list[Report]:
    """The generated code of forward and backward, for any way to compile the block. Computes nothing."""
    return report(captured_block(compile_model, tokens))


def captured_block(
    compile_model: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], tokens: int = TOKENS, gpu: Any = H200
) -> Capture:
    """The graphs of forward and backward, as they reach Inductor's code generation. Computes nothing."""
    torch._dynamo.reset()
    model = compile_model(llama_block())
    x = torch.zeros(1, tokens, DIM, dtype=torch.bfloat16, requires_grad=True)
    with planned_for(gpu), capture() as graphs:
        model(x).sum().backward()
    return graphs


def launched_by(
    compile_model: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], tokens: int = TOKENS, gpu: Any = H200
) -> list[tuple[Report, list[Event]]]:
    """The same, and what each graph would launch."""
    with tempfile.TemporaryDirectory() as folder:
        return list(launched(captured_block(compile_model, tokens, gpu), pathlib.Path(folder), gpu))


def num_launches(graphs: list[tuple[Report, list[Event]]]) -> int:
    """Launches besides GEMMs and attention. An operation counts as what it launches, such as `multi_scales` as two."""
    reports, events = [generated for generated, _ in graphs], [event for _, found in graphs for event in found]
    more = sum(len(event.launches) - 1 for event in events if event.launches)
    of_gemms = sum(max(len(inner.launches), 1) for event in events for inner in event.inner)
    return len(elementwise_kernels(reports)) + more + of_gemms


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step besides its GEMMs and attention."""

    megabytes: float
    """Moved by kernels, those that GEMMs launch besides themselves among them."""
    launches: int
    gemms: int
    """And attention kernels."""


def step_of(
    compile_model: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]], tokens: int = TOKENS, gpu: Any = H200
) -> Step:
    """Forward and backward of the block on a GPU."""
    return counted(launched_by(compile_model, tokens, gpu))


def counted(graphs: list[tuple[Report, list[Event]]]) -> Step:
    """What graphs launch and move."""
    reports = [generated for generated, _ in graphs]
    of_gemms = sum(event.inner_bytes for _, events in graphs for event in events) / 1e6
    gemms = sum(k.is_gemm for r in reports for k in r.kernels)
    return Step(megabytes(reports) + of_gemms, num_launches(graphs), gemms)


def traffic_of_recipe(recipe: str | None, tokens: int = TOKENS) -> list[Report]:
    """The generated code for a recipe of ours; None is plain torch.compile."""
    return traffic_of(torch.compile if recipe is None else lambda model: fp8_compile(model, steady(recipe)), tokens)


def elementwise_kernels(reports: list[Report]) -> list[Kernel]:
    """All kernels that are neither GEMM nor attention."""
    return [k for r in reports for k in r.elementwise]


def megabytes(reports: list[Report]) -> float:
    """What they read and write."""
    return sum(k.num_bytes for k in elementwise_kernels(reports)) / 1e6


@dataclasses.dataclass(frozen=True)
class WeightTraffic:
    """Bytes of weights that the kernels of one call read."""

    casts: int
    """What kernels move that read a weight in high precision: with the copies that they write."""
    high_precision: int
    """Of Parameters, by any kernel."""
    fp8: int
    """Of FP8 copies, by GEMMs."""


def weight_traffic(captured: Capture) -> WeightTraffic:
    """Of the block's 7 weights in forward and backward, or in inference; a copy counts once per GEMM that reads it."""
    weights = {tuple(p.shape) for p in llama_block().parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    casts = high = low = 0
    for (_, graph, _), generated in zip(captured.graphs, report(captured), strict=True):
        inputs = {n.name: n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")}
        for kernel in generated.kernels:
            read = [inputs[name] for name in kernel.inputs if name in inputs and tuple(kernel.inputs[name]) in weights]
            wide = sum(x.numel() * x.element_size() for x in read if x.element_size() > 1)
            high += wide
            low += sum(x.numel() for x in read if x.element_size() == 1) if kernel.is_gemm else 0
            casts += kernel.num_bytes if wide and not kernel.is_gemm else 0
    return WeightTraffic(casts, high, low)


def microbatches(recipe: Any, weight_copies: str, count: int = 8) -> tuple[WeightTraffic, int, int]:
    """What a microbatch moves of weights, how many weights are cast outside of the graphs in a step of `count` of them, and
    how many bytes one comparison of their content reads. Computes nothing."""
    from fp8pass.weights import cache

    torch._dynamo.reset()
    cast_outside: list[int] = []
    quantize = cache.quantize

    def recorded(kind: Any, weights: Any, scale: Any) -> Any:
        cast_outside.append(len(weights))
        return quantize(kind, weights, scale)

    read = [0]
    checksums = cache.checksums_of

    def counted(tensors: Any) -> Any:
        read.append(sum(t.numel() * t.element_size() for t in tensors))
        return checksums(tensors)

    model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies, step="manual")
    with (
        mock.patch.object(cache, "quantize", recorded),
        mock.patch.object(cache, "checksums_of", counted),
        capture() as graphs,
    ):
        for _ in range(count):
            model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return weight_traffic(graphs), sum(cast_outside), read[-1]


def evaluation(recipe: Any, weight_copies: str = "auto") -> WeightTraffic:
    """What a call under no_grad moves of weights, once their copies are made. Computes nothing."""
    torch._dynamo.reset()
    model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies)
    with capture() as graphs, torch.no_grad():
        model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16))
    return weight_traffic(graphs)
