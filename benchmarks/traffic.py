"""Bytes and kernels besides GEMMs of training steps, in Inductor's code for an H200, counted on any CPU.

    python -m benchmarks.traffic --what block weights experts kernels

block: a Llama block. weights: bytes of its weights that a microbatch and an evaluation move. experts: transformers' code of
Qwen3-30B-A3B's experts, 128 of 2048 x 768, 8 per token; "weights" are the kernels that read the experts' weights: their bytes
do not grow with the tokens, and with expert parallelism a rank holds a share of the experts and as many rows. kernels: distinct
kernels of stacks of blocks, which have to be compiled; "launches", all besides GEMMs and attention, grow with the layers,
distinct kernels should not.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks.common import SkipBenchmark, main
from benchmarks.compile_time import TINY
from benchmarks.contestants import RECIPES, contestants, steady
from benchmarks.cross_codegen import H200, Capture, Event, Kernel, Report, capture, launched, planned_for, report
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from fp8pass import fp8_compile, monitor

#: Compiles a model.
Compile = Callable[[nn.Module], Callable[[torch.Tensor], Any]]

#: The most that a measured step moves, of what others move.
MEASURED_STEP = 1.3


def _ours(recipe: str) -> Compile:
    return lambda model: fp8_compile(model, steady(recipe))


def _beside_bf16(compared: Mapping[str, Any], suffix: str, row: Callable[..., Row], bench: Bench, *keys: str) -> Iterator[Row]:
    """A row per contestant, of `row(its label, its name, what it maps to)`, with ratios of these columns to bf16's."""
    base: Row | None = None
    for name, given in compared.items():
        for made in bench.row(name + suffix, row, name + suffix, name, given):
            base = made if name == "bf16" else base
            yield made | ({} if base is None else {f"{key} / bf16": made[key] / base[key] for key in keys})


def _measured_rows(recipes: Sequence[str], megabytes_of: Callable[[Compile], float], bench: Bench) -> Iterator[Row]:
    """Steps that a monitor measures, beside others."""

    def row(what: str, recipe: str) -> Row:
        def measured(model: nn.Module) -> Any:
            compiled = fp8_compile(model, steady(recipe))
            monitor(compiled, every=1)
            return compiled

        moved, usual = megabytes_of(measured), megabytes_of(_ours(recipe))
        bench.require(moved <= MEASURED_STEP * usual, f"{recipe}, a measured step: {moved / usual:.2f} of other steps")
        return {"what": what, "MB": moved, "MB / other steps": moved / usual}

    for recipe in recipes:
        what = f"{recipe}, a measured step"
        yield from bench.row(what, row, what, recipe)


# -- a Llama block

DIM, FFN, HEADS, TOKENS = 1024, 2816, 16, 2048


def llama_block() -> LlamaBlock:
    """The block in bfloat16."""
    torch.manual_seed(0)
    return LlamaBlock(DIM, FFN, HEADS).bfloat16()


def train(model: Callable[[torch.Tensor], Any], tokens: int = TOKENS, dim: int = DIM) -> None:
    """Forward and backward of a block, or of what has an output like one."""
    out = model(torch.zeros(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True))
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def captured_step(model: nn.Module, compile_model: Compile, tokens: int, dim: int, gpu: Any = H200) -> Capture:
    """The graphs of forward and backward, as they reach Inductor's code generation. Computes nothing."""
    torch._dynamo.reset()
    compiled = compile_model(model)
    with planned_for(gpu), capture() as graphs:
        train(compiled, tokens, dim)
    return graphs


def traffic_of(compile_model: Compile, tokens: int = TOKENS) -> list[Report]:
    """The generated code of forward and backward, for any way to compile the block."""
    return report(captured_step(llama_block(), compile_model, tokens, DIM))


def launched_by(compile_model: Compile, tokens: int = TOKENS, gpu: Any = H200) -> list[tuple[Report, list[Event]]]:
    """The generated code of forward and backward, and what each graph would launch."""
    return list(launched(captured_step(llama_block(), compile_model, tokens, DIM, gpu), gpu))


class Step(NamedTuple):
    """A training step besides its GEMMs and attention, which are counted: megabytes moved, and launches, both with what GEMMs
    launch besides themselves. An operation counts as what it launches, such as `multi_scales` as two."""

    megabytes: float
    launches: int
    gemms: int


def counted(graphs: list[tuple[Report, list[Event]]]) -> Step:
    """Count the launches and the bytes of graphs."""
    reports, events = [generated for generated, _ in graphs], [event for _, found in graphs for event in found]
    more = sum(len(event.launches) - 1 for event in events if event.launches)
    of_gemms = sum(max(len(inner.launches), 1) for event in events for inner in event.inner)
    bytes_of_gemms = sum(event.inner_bytes for event in events)
    gemms = sum(k.is_gemm for r in reports for k in r.kernels)
    return Step(megabytes(reports) + bytes_of_gemms / 1e6, len(elementwise_kernels(reports)) + more + of_gemms, gemms)


def elementwise_kernels(reports: list[Report]) -> list[Kernel]:
    """All kernels that are neither GEMM nor attention."""
    return [k for r in reports for k in r.elementwise]


def megabytes(reports: list[Report]) -> float:
    """Read and written by them."""
    return sum(k.num_bytes for k in elementwise_kernels(reports)) / 1e6


def block(bench: Bench) -> Iterator[Row]:
    """`quick` leaves other projects and measured steps out."""
    bench.baseline = "bf16"
    bench.notes.append("kernels: every launch besides GEMMs and attention, on a GPU")

    def row(what: str, name: str, compile_model: Compile) -> Row:
        step = counted(launched_by(compile_model))
        bench.require(step.gemms >= 21, f"{what}: {step.gemms} GEMMs and attention kernels in both graphs")
        return {"what": what, "MB": step.megabytes, "kernels": step.launches, "GEMMs": step.gemms}

    yield from _beside_bf16(contestants(RECIPES, with_peers=not bench.quick), "", row, bench, "MB")
    if not bench.quick:
        yield from _measured_rows(RECIPES, lambda compiled: megabytes(traffic_of(compiled)), bench)


# -- its weights

MICROBATCHES = 8


class WeightTraffic(NamedTuple):
    """Bytes of weights that the kernels of one call move: those that read a weight in high precision, with the copies that they
    write, in so many launches; of Parameters, by any kernel; of FP8 copies, by GEMMs."""

    casts: int
    high_precision: int
    fp8: int
    launches: int


def weight_traffic(captured: Capture) -> WeightTraffic:
    """Count the bytes of the block's 7 weights in forward and backward, or in inference; a copy once per GEMM that reads it."""
    weights = {tuple(p.shape) for p in llama_block().parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    casts = high = low = launches = 0
    for (_, graph, _), generated in zip(captured.graphs, report(captured), strict=True):
        inputs = {n.name: n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")}
        for kernel in generated.kernels:
            read = [inputs[name] for name in kernel.inputs if name in inputs and tuple(kernel.inputs[name]) in weights]
            wide = sum(x.numel() * x.element_size() for x in read if x.element_size() > 1)
            high += wide
            low += sum(x.numel() for x in read if x.element_size() == 1) if kernel.is_gemm else 0
            if wide and not kernel.is_gemm:
                casts, launches = casts + kernel.num_bytes, launches + 1
    return WeightTraffic(casts, high, low, launches)


def microbatches(recipe: Any, weight_copies: str, count: int = MICROBATCHES) -> tuple[WeightTraffic, int, int]:
    """Bytes of weights that a microbatch moves, how many weights are cast outside of the graphs in a step of `count` of them,
    and how many bytes one comparison of their content reads. Computes nothing."""
    from fp8pass.weights import cache

    torch._dynamo.reset()
    with (
        mock.patch.object(cache, "quantize", side_effect=cache.quantize) as quantize,
        mock.patch.object(cache, "checksums_of", side_effect=cache.checksums_of) as checksums,
        capture() as graphs,
    ):
        model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies, step="manual")
        for _ in range(count):
            train(model)
    cast_outside = sum(len(call.args[1]) for call in quantize.call_args_list)
    compared = sum(t.nbytes for t in checksums.call_args.args[0]) if checksums.called else 0
    return weight_traffic(graphs), cast_outside, compared


def evaluation(recipe: Any, weight_copies: str = "auto") -> WeightTraffic:
    """Bytes of weights that a call under no_grad moves, once their copies are made. Computes nothing."""
    torch._dynamo.reset()
    model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies)
    with capture() as graphs, torch.no_grad():
        model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16))
    return weight_traffic(graphs)


def weights(bench: Bench) -> Iterator[Row]:
    """`quick`: one recipe."""
    bench.baseline = "auto"
    bench.notes.append(
        f"a step has {MICROBATCHES} microbatches of 2048 tokens; casts: kernels that read a weight, with what they write"
    )
    parameters = sum(p.numel() for p in llama_block().parameters() if p.dim() == 2)

    def row(what: str, name: str, copies: Any) -> Row:
        one, outside, compared = microbatches(steady(name), copies)
        bench.require((copies == "cache") == (outside == 7), f"{what}: casts outside of graphs")
        bench.require((copies == "cache") == (compared > 0), f"{what}: content is compared")
        evaluated, lora = evaluation(steady(name), copies), llama_block().requires_grad_(False)
        compile_lora: Compile = lambda model: fp8_compile(model, steady(name), weight_copies=copies)  # noqa: E731
        frozen = weight_traffic(captured_step(lora, compile_lora, TOKENS, DIM))
        return {
            "what": what,
            "casts, MB per microbatch": one.casts / 1e6,
            "launches": one.launches,
            "a comparison of content, bytes per parameter": compared / parameters,
            # Each GEMM reads its copy once, also one that the graph makes, which is none of its inputs.
            "evaluation, bytes per parameter": evaluated.casts / parameters + 1,
            "LoRA, casts of frozen weights, bytes per parameter": frozen.casts / parameters,
            "launches with LoRA": frozen.launches,
        }

    for name in ("current",) if bench.quick else RECIPES:
        for copies in ("auto", "cache"):
            yield from bench.row(f"{name}, {copies}", row, f"{name}, {copies}", name, copies)


# -- a mixture of experts

EXPERTS, TOP_K, HIDDEN, EXPERT_FFN = 128, 8, 2048, 768
#: Rows per expert are EXPERT_TOKENS / 16 on average.
EXPERT_TOKENS = 32768


class ExpertTraffic(NamedTuple):
    """Bytes that kernels besides GEMMs read and write: those that read a stack of weights, and others."""

    weight_bytes: int
    other_bytes: int
    kernels: int
    gemms: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.other_bytes


def reports_of_experts(compile_model: Compile, tokens: int) -> list[Report]:
    """The generated code of forward and backward of the router and the experts of a layer. Computes nothing."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": EXPERT_FFN, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        made: nn.Module = Qwen3MoeSparseMoeBlock(config).bfloat16()
    return report(captured_step(made.to_empty(device="cpu"), compile_model, tokens, HIDDEN))


def expert_traffic(reports: list[Report]) -> ExpertTraffic:
    """The sums of some graphs."""
    stacks = {(EXPERTS, 2 * EXPERT_FFN, HIDDEN), (EXPERTS, HIDDEN, EXPERT_FFN)}
    kernels = elementwise_kernels(reports)
    weight_bytes = sum(k.num_bytes for k in kernels if not stacks.isdisjoint(k.inputs.values()))
    other_bytes = sum(k.num_bytes for k in kernels) - weight_bytes
    gemms = sum(k.is_gemm for reported in reports for k in reported.kernels)
    return ExpertTraffic(weight_bytes, other_bytes, len(kernels), gemms)


def experts(bench: Bench) -> Iterator[Row]:
    """`quick`: fewer tokens, bf16 and delayed scaling alone, no measured steps."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipBenchmark("needs transformers")
    tokens = 1024 if bench.quick else EXPERT_TOKENS
    bench.baseline = "bf16"
    bench.notes.append(
        f"{tokens} tokens, {tokens // 16} rows per expert on average; a two-pass kernel counts what it reads once"
    )
    ours = RECIPES[:1] if bench.quick else ("delayed", "current", "rowwise", "blockwise")
    found: dict[str, Compile] = {"bf16": torch.compile} | {recipe: _ours(recipe) for recipe in ours}

    def row(what: str, name: str, compile_model: Compile) -> Row:
        traffic = expert_traffic(reports_of_experts(compile_model, tokens))
        bench.require(traffic.gemms == 9, f"{name}: {traffic.gemms} GEMMs, three of them the router's")
        moved = {"MB": traffic.num_bytes, "MB weights": traffic.weight_bytes, "MB without weights": traffic.other_bytes}
        counts = {"kernels": traffic.kernels, "GEMMs": traffic.gemms}
        return {"what": what} | {key: num_bytes / 1e6 for key, num_bytes in moved.items()} | counts

    yield from _beside_bf16(found, "", row, bench, "MB", "MB without weights")
    if not bench.quick:  # MXFP8's grouped GEMMs have no kernel yet; its casts are counted
        yield from _measured_rows((*ours, "mxfp8"), lambda made: megabytes(reports_of_experts(made, tokens)), bench)


# -- distinct kernels

LAYERS = (2, 8, 24)


def reports_of_stack(compile_model: Compile, layers: int, sizes: tuple[int, int, int, int]) -> list[Report]:
    """The H200 code of forward and of backward. sizes: dim, ffn, heads, tokens of a block. Computes nothing."""
    dim, ffn, heads, tokens = sizes
    model = nn.Sequential(*(LlamaBlock(dim, ffn, heads) for _ in range(layers))).bfloat16()
    reports = report(captured_step(model, compile_model, tokens, dim))
    assert len(reports) == 2
    return reports


def distinct(code: str) -> int:
    """Kernels that Inductor wrote into the code of a graph, equal ones once; hand-written ones do not count."""
    return len(set(re.findall(r"^def (triton_\w+)\(", code, re.MULTILINE)))


def kernels(bench: Bench) -> Iterator[Row]:
    """`quick`: 2 and 3 layers, bf16 and delayed scaling alone."""
    dim, ffn, tokens = TINY
    bench.baseline = "bf16"
    bench.notes.append(f"layers are of dim, ffn, tokens {TINY}; hand-written kernels are launches, but no distinct kernels")

    for layers in (2, 3) if bench.quick else LAYERS:

        def row(what: str, name: str, compile_model: Compile, layers: int = layers) -> Row:
            forward, backward = reports_of_stack(compile_model, layers, (dim, ffn, dim // 64, tokens))
            launches = [kernel for graph in (forward, backward) for kernel in graph.kernels]
            gemms = [kernel.name for kernel in launches if kernel.is_gemm and "attention" not in kernel.name]
            in_fp8 = sum("scaled_mm" in gemm for gemm in gemms)
            expected = 21 * layers, 0 if name == "bf16" else 21 * layers
            bench.require((len(gemms), in_fp8) == expected, f"{what}: {len(gemms)} GEMMs in both graphs, {in_fp8} in FP8")
            counts = {"forward": distinct(forward.code), "backward": distinct(backward.code)}
            others = sum(not kernel.is_gemm for kernel in launches)
            return {"what": what, **counts, "kernels": sum(counts.values()), "launches": others}

        found = contestants(("delayed",) if bench.quick else RECIPES, with_peers=False)
        yield from _beside_bf16(found, f", {layers} layers", row, bench, "kernels")


PARTS = {"block": block, "weights": weights, "experts": experts, "kernels": kernels}

if __name__ == "__main__":
    main("traffic", PARTS)
