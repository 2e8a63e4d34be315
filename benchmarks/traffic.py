"""Bytes and kernels besides GEMMs of training steps, in Inductor's code for an H200 or another GPU, counted on any CPU.

    python -m benchmarks.traffic --what block weights graphs experts kernels

block: a Llama block, and where a recipe has other code on another GPU, there. weights: bytes of its weights that a microbatch
and an evaluation move. graphs: bytes that a replay of its CUDA graphs copies, by torch's own rules. experts: transformers'
code of Qwen3-30B-A3B's experts, 128 of 2048 x 768, 8 per token; "weights" are the kernels that read the experts' weights: their
bytes do not grow with the tokens, and with expert parallelism a rank holds a share of the experts and as many rows. kernels:
distinct kernels of stacks of blocks, which have to be compiled; "launches", all besides GEMMs and attention, grow with the
layers, distinct kernels should not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.common import SkipBenchmark, has_torchao, main
from benchmarks.compile_time import TINY
from benchmarks.contestants import RECIPES, contestants, steady
from benchmarks.cross_codegen import (
    H200,
    H200_CUDA_12_8,
    RTX_4090,
    RTX_5090,
    Capture,
    Event,
    Kernel,
    Report,
    capture,
    launched,
    planned_for,
    report,
)  # fmt: skip
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from fp8pass import fp8_compile, monitor

#: Compiles a model.
Compile = Callable[[nn.Module], Callable[[torch.Tensor], Any]]

#: The most that a measured step moves, of what others move.
MEASURED_STEP = 1.3


def _measured_rows(
    recipes: Sequence[str], suffix: str, megabytes_of: Callable[[Compile], float], bench: Bench
) -> Iterator[Row]:
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
        what = f"{recipe}, a measured step{suffix}"
        yield from bench.row(what, row, what, recipe)


def _beside_bf16(
    compared: Mapping[str, Any], label: Callable[[str], str], row: Callable[..., Row], bench: Bench, *keys: str
) -> Iterator[Row]:
    """A row per contestant, of `row(its label, its name, what it maps to)`, with ratios of these columns to bf16's."""
    base: Row | None = None
    for name, given in compared.items():
        for made in bench.row(label(name), row, label(name), name, given):
            base = made if name == "bf16" else base
            yield made | ({} if base is None else {f"{key} / bf16": made[key] / base[key] for key in keys})


def _ours(recipe: str) -> Compile:
    return lambda model: fp8_compile(model, steady(recipe))


# -- a Llama block

DIM, FFN, HEADS, TOKENS = 1024, 2816, 16, 2048
#: From MANY_ROWS on, copies of weights are recomputed in backward by default.
MANY_ROWS = 4096
#: What runs other code elsewhere, by name: a recipe and a GPU. Other pairs have the H200's figures (tests/test_traffic.py).
OTHER_GPUS = {
    "rowwise, CUDA 12.8": ("rowwise", H200_CUDA_12_8),
    "rowwise, RTX 4090": ("rowwise", RTX_4090),
    "blockwise, RTX 5090": ("blockwise", RTX_5090),
}


def llama_block() -> LlamaBlock:
    """The block in bfloat16."""
    torch.manual_seed(0)
    return LlamaBlock(DIM, FFN, HEADS).bfloat16()


def captured_block(compile_model: Compile, tokens: int = TOKENS, gpu: Any = H200) -> Capture:
    """The graphs of forward and backward, as they reach Inductor's code generation. Computes nothing."""
    torch._dynamo.reset()
    model = compile_model(llama_block())
    x = torch.zeros(1, tokens, DIM, dtype=torch.bfloat16, requires_grad=True)
    with planned_for(gpu), capture() as graphs:
        model(x).sum().backward()
    return graphs


def traffic_of(compile_model: Compile, tokens: int = TOKENS) -> list[Report]:
    """The generated code of forward and backward, for any way to compile the block."""
    return report(captured_block(compile_model, tokens))


def launched_by(compile_model: Compile, tokens: int = TOKENS, gpu: Any = H200) -> list[tuple[Report, list[Event]]]:
    """The generated code of forward and backward, and what each graph would launch."""
    return list(launched(captured_block(compile_model, tokens, gpu), gpu))


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step besides its GEMMs and attention."""

    megabytes: float
    """Moved by kernels, those that GEMMs launch besides themselves among them."""
    launches: int
    """An operation counts as what it launches, such as `multi_scales` as two."""
    gemms: int
    """And attention kernels."""


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
    """`quick` leaves other projects, the larger size and measured steps out."""
    bench.baseline = "bf16"
    bench.notes.append("kernels: every launch besides GEMMs and attention, on a GPU")

    def row(what: str, name: str, given: tuple[Compile, int, Any]) -> Row:
        step = counted(launched_by(*given))
        bench.require(step.gemms >= 21, f"{what}: {step.gemms} GEMMs and attention kernels in both graphs")
        return {"what": what, "MB": step.megabytes, "kernels": step.launches, "GEMMs": step.gemms}

    for tokens in (TOKENS,) if bench.quick else (TOKENS, MANY_ROWS):
        found = {name: (each, tokens, H200) for name, each in contestants(RECIPES, with_peers=not bench.quick).items()}
        if tokens == TOKENS and not bench.quick:
            found |= {name: (_ours(recipe), tokens, gpu) for name, (recipe, gpu) in OTHER_GPUS.items()}
        yield from _beside_bf16(found, lambda name, tokens=tokens: f"{name}, {tokens} rows", row, bench, "MB")  # type: ignore[misc]
    if not bench.quick:
        yield from _measured_rows(RECIPES, f", {TOKENS} rows", lambda compiled: megabytes(traffic_of(compiled)), bench)


# -- its weights

MICROBATCHES = 8


@dataclasses.dataclass(frozen=True)
class WeightTraffic:
    """Bytes of weights that the kernels of one call read."""

    casts: int
    """Moved by kernels that read a weight in high precision: with the copies that they write."""
    high_precision: int
    """Bytes of Parameters, by any kernel."""
    fp8: int
    """Bytes of FP8 copies, by GEMMs."""
    launches: int
    """Kernels of `casts`."""


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
    cast_outside: list[int] = []
    quantize, checksums = cache.quantize, cache.checksums_of
    read = [0]

    def recorded(kind: Any, weights: Any, scale: Any) -> Any:
        cast_outside.append(len(weights))
        return quantize(kind, weights, scale)

    def compared(tensors: Any) -> Any:
        read.append(sum(t.numel() * t.element_size() for t in tensors))
        return checksums(tensors)

    model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies, step="manual")
    with (
        mock.patch.object(cache, "quantize", recorded),
        mock.patch.object(cache, "checksums_of", compared),
        capture() as graphs,
    ):
        for _ in range(count):
            model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return weight_traffic(graphs), sum(cast_outside), read[-1]


def evaluation(recipe: Any, weight_copies: str = "auto") -> WeightTraffic:
    """Bytes of weights that a call under no_grad moves, once their copies are made. Computes nothing."""
    torch._dynamo.reset()
    model = fp8_compile(llama_block(), recipe, weight_copies=weight_copies)
    with capture() as graphs, torch.no_grad():
        model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16))
    return weight_traffic(graphs)


def adapters(recipe: Any, weight_copies: str = "auto") -> WeightTraffic:
    """Bytes of frozen weights that a microbatch moves, as LoRA has them, once their copies are made. Computes nothing."""
    torch._dynamo.reset()
    model = fp8_compile(llama_block().requires_grad_(False), recipe, weight_copies=weight_copies)
    with capture() as graphs:
        model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return weight_traffic(graphs)


def weights(bench: Bench) -> Iterator[Row]:
    """`quick`: one recipe."""
    bench.baseline = "auto"
    bench.notes.append(
        f"a step has {MICROBATCHES} microbatches of 2048 tokens; casts: kernels that read a weight, with what they write"
    )
    parameters = sum(p.numel() for p in llama_block().parameters() if p.dim() == 2)

    def row(name: str, copies: str) -> Row:
        one, outside, compared = microbatches(steady(name), copies, MICROBATCHES)
        bench.require((copies == "cache") == (outside == 7), f"{name}, {copies}: casts outside of graphs")
        bench.require((copies == "cache") == (compared > 0), f"{name}, {copies}: content is compared")
        evaluated, frozen = evaluation(steady(name), copies), adapters(steady(name), copies)
        return {
            "what": f"{name}, {copies}",
            "casts, MB per microbatch": one.casts / 1e6,
            "launches": one.launches,
            "weights cast outside, per step": outside,
            "a comparison of content, bytes per parameter": compared / parameters,
            # Each GEMM reads its copy once, also one that the graph makes, which is none of its inputs.
            "evaluation, bytes per parameter": evaluated.casts / parameters + 1,
            "launches of an evaluation": evaluated.launches,
            "LoRA, casts of frozen weights, bytes per parameter": frozen.casts / parameters,
            "launches with LoRA": frozen.launches,
        }

    for name in ("current",) if bench.quick else RECIPES:
        for copies in ("auto", "cache"):
            yield from bench.row(f"{name}, {copies}", row, name, copies)


# -- CUDA graphs


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A graph as torch records it with mode="reduce-overhead"."""

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

    lowered = []
    codegen = GraphLowering.codegen

    def noting(self: GraphLowering) -> Any:
        lowered.append(self)
        return codegen(self)

    with mock.patch.object(GraphLowering, "codegen", noting):
        (generated,) = report(graph, {"triton.cudagraphs": True})
    (made,) = lowered
    values = [node.meta["val"] for node in made.module.graph.find_nodes(op="placeholder")]
    copied = [v.nbytes for i, v in enumerate(values) if i not in static and isinstance(v, torch.Tensor)]
    refusals = [
        made.disable_cudagraphs_reason,
        cudagraph_utils.check_for_mutation_ignore_cuda_graph_managed_tensor(
            made.module, made.mutated_inputs, made.mutated_input_idxs, sorted(static)
        ),
        cudagraph_utils.check_multiple_devices_or_any_cpu_nodes(dict(made.device_node_mapping)),
        cudagraph_utils.get_input_storage_mutation_reason(cudagraph_utils.get_input_storage_mutation_info(made.module)),
        get_first_incompatible_cudagraph_node(made.module),
    ]
    return Recorded(generated, copied, [r for r in refusals if r is not None], len(made.partition_maps or ()))


def train(model: Callable[[torch.Tensor], Any]) -> None:
    """Forward and backward of the block."""
    model(torch.zeros(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


def num_tables(compile_model: Compile) -> int:
    """The tables of addresses that a step's launches read: a replay copies each from the host's memory again."""
    launches = [launch for _, events in launched_by(compile_model) for event in events for launch in event.launches]
    return sum(isinstance(launch.arguments.get(name), torch.Tensor) for launch in launches for name in ("table", "index"))


def graphs(bench: Bench) -> Iterator[Row]:
    """`quick`: one recipe."""
    bench.baseline = "bf16"
    bench.notes.append("copied: inputs whose addresses may change. Tables of addresses are copied from pinned memory")

    def row(what: str, compile_model: Compile) -> Row:
        torch._dynamo.reset()
        model = compile_model(llama_block())
        found = recorded(lambda: train(model))
        bench.require(not any(graph.refusals for graph in found), f"{what}: every graph is recorded")
        bench.require(all(graph.num_partitions == 1 for graph in found), f"{what}: every graph is recorded whole")
        copied = sum(size for graph in found for size in graph.copied)
        return {"what": what, "copied, MB per step": copied / 1e6, "tables": num_tables(compile_model)}

    compared = contestants(("delayed",) if bench.quick else RECIPES, with_peers=False)
    for name, compile_model in compared.items():
        yield from bench.row(name, row, name, compile_model)
    cached = "delayed, weight_copies='cache'"
    yield from bench.row(cached, row, cached, lambda model: fp8_compile(model, steady("delayed"), weight_copies="cache"))


# -- a mixture of experts

EXPERTS, TOP_K, HIDDEN, EXPERT_FFN = 128, 8, 2048, 768
#: The two stacks of weights.
STACKS = {(EXPERTS, 2 * EXPERT_FFN, HIDDEN), (EXPERTS, HIDDEN, EXPERT_FFN)}
#: Rows per expert are EXPERT_TOKENS / 16 on average.
EXPERT_TOKENS = 32768
#: Three grouped GEMMs of two batches of weights each way; the router's three run too.
EXPERT_GEMMS = 9


@dataclasses.dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that kernels besides GEMMs read and write."""

    weight_bytes: int
    """By kernels that read a stack of weights."""
    other_bytes: int
    kernels: int
    gemms: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.other_bytes


def moe_block(experts: int = EXPERTS) -> nn.Module:
    """The router and the experts of a layer in bfloat16, uninitialized."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": EXPERT_FFN, "num_experts": experts, "num_experts_per_tok": TOP_K}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        made: nn.Module = Qwen3MoeSparseMoeBlock(config).bfloat16()
    return made.to_empty(device="cpu")


def reports_of_experts(compile_model: Compile, tokens: int) -> list[Report]:
    """The generated code of forward and backward. Computes nothing."""
    torch._dynamo.reset()
    model = compile_model(moe_block())
    x = torch.zeros(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return report(graphs)


def expert_traffic(reports: list[Report]) -> ExpertTraffic:
    """The sums of some graphs."""
    kernels = elementwise_kernels(reports)
    weight_bytes = sum(k.num_bytes for k in kernels if not STACKS.isdisjoint(k.inputs.values()))
    other_bytes = sum(k.num_bytes for k in kernels) - weight_bytes
    gemms = sum(k.is_gemm for reported in reports for k in reported.kernels)
    return ExpertTraffic(weight_bytes, other_bytes, len(kernels), gemms)


@contextlib.contextmanager
def torchao_rowwise() -> Iterator[None]:
    """Inside, transformers' grouped GEMMs are those of torchao's rowwise conversion of mixtures of experts.

    The conversion wraps the weights in a tensor subclass that takes `torch._grouped_mm`; transformers calls
    `torch.nn.functional.grouped_mm`, which it does not know. So its function is called here. It registers its operations, the
    shape functions included, only where Triton has a device. Groups must be multiples of 16, which nothing here pads.
    """
    import torch.utils._triton
    import transformers.integrations.moe

    with mock.patch.object(torch.utils._triton, "has_triton", return_value=True):
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as convert

    def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return convert(input, weight, offs, torch.bfloat16, torch.float8_e4m3fn, False)

    with mock.patch.object(transformers.integrations.moe, "_grouped_mm", grouped_mm):
        yield


def experts(bench: Bench) -> Iterator[Row]:
    """`quick`: fewer tokens, bf16 and delayed scaling alone, no measured steps."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipBenchmark("needs transformers")
    tokens = 1024 if bench.quick else EXPERT_TOKENS
    bench.baseline = "bf16"
    bench.notes += [
        f"{tokens} tokens, {tokens // 16} rows per expert on average",
        "torchao's groups must be multiples of 16, which is not counted; a two-pass kernel counts what it reads once",
    ]
    ours = RECIPES[:1] if bench.quick else ("delayed", "current", "rowwise", "blockwise")
    found: dict[str, Compile] = {"bf16": torch.compile} | {recipe: _ours(recipe) for recipe in ours}
    if has_torchao() and not bench.quick:
        found["torchao rowwise"] = torch.compile

    def row(what: str, name: str, compile_model: Compile) -> Row:
        with torchao_rowwise() if name.startswith("torchao") else contextlib.nullcontext():
            traffic = expert_traffic(reports_of_experts(compile_model, tokens))
        bench.require(traffic.gemms == EXPERT_GEMMS, f"{name}: {traffic.gemms} GEMMs")
        moved = {"MB": traffic.num_bytes, "MB weights": traffic.weight_bytes, "MB without weights": traffic.other_bytes}
        counts = {"kernels": traffic.kernels, "GEMMs": traffic.gemms}
        return {"what": what} | {key: num_bytes / 1e6 for key, num_bytes in moved.items()} | counts

    yield from _beside_bf16(found, str, row, bench, "MB", "MB without weights")
    if not bench.quick:  # MXFP8's grouped GEMMs have no kernel yet; its casts are counted
        yield from _measured_rows(
            (*ours, "mxfp8"), "", lambda compiled: expert_traffic(reports_of_experts(compiled, tokens)).num_bytes / 1e6, bench
        )


# -- distinct kernels

LAYERS = (2, 8, 24)


def reports_of_stack(compile_model: Compile, layers: int, sizes: tuple[int, int, int, int]) -> list[Report]:
    """The H200 code of forward and of backward. sizes: dim, ffn, heads, tokens of a block. Computes nothing."""
    dim, ffn, heads, tokens = sizes
    torch._dynamo.reset()
    model = nn.Sequential(*(LlamaBlock(dim, ffn, heads) for _ in range(layers))).bfloat16()
    x = torch.zeros(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        compile_model(model)(x).sum().backward()
    assert len(graphs.graphs) == 2
    return report(graphs)


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
        yield from _beside_bf16(found, lambda name, n=layers: f"{n} layers {name}", row, bench, "kernels")  # type: ignore[misc]


PARTS = {"block": block, "weights": weights, "graphs": graphs, "experts": experts, "kernels": kernels}

if __name__ == "__main__":
    main("traffic", PARTS)
