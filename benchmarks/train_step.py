"""Forward and backward of Llama-3 style blocks: time, peak memory and bytes saved for backward, per contestant.

Columns: `ms`, the device's time; `back-to-back ms`, with the host's; `estimated`, the speed-up of GEMMs and attention by the
cost model (docs/what-runs-in-fp8.md). Rows with "CUDA graph": mode="reduce-overhead", compiled and timed after the plain ones.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import device, main
from benchmarks.contestants import contestants, replayed
from benchmarks.correctness import BLOCK_DB, parameters_of, require_fp8, require_step, run_step
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from benchmarks.timing import in_turns
from fp8pass import estimate
from fp8pass.cost import device_named

#: dim, ffn, heads, heads of keys and values of one block. Llama-3.2-1B's and Llama-3-8B's (their config.json).
BLOCKS = {"1B": (2048, 8192, 32, 8), "8B": (4096, 14336, 32, 8), "tiny": (256, 512, 4, 2)}
_TOKENS = (4096, 8192, 16384, 32768)
RECIPES = ("delayed", "current", "blockwise", "rowwise")
#: Of a block, forward and backward: seven linears.
GEMMS = 21
#: Tokens of the longest sequence; more are several sequences.
SEQUENCE = 8192
#: Column -> its ratio to that of bf16.
_RATIOS = {"ms": "speed-up", "back-to-back ms": "speed-up, back to back", "saved MB": "saved / bf16", "peak MB": "peak / bf16"}


def _saved_bytes(compiled: Any, x: torch.Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, without parameters and the input."""
    held = {t.untyped_storage().data_ptr() for t in (x, *parameters_of(compiled).values())}
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in held:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(x)
    return sum(sizes.values())


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that one step takes, gradients included, besides what is held between steps."""
    gc.collect()
    torch.cuda.empty_cache()
    step()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def step_of(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """A training step without an optimizer."""
    leaves = [x, *parameters_of(model).values()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(x).backward(dy)

    return step


def _block(block: str, count: int, on: torch.device, bench: Bench) -> Iterator[Row]:
    """The rows of one block and number of tokens. Nothing is timed that was not compared with the plain model."""
    dim, ffn, heads, kv_heads = BLOCKS[block]
    torch.manual_seed(0)
    what = f"{block} {count}"
    model: nn.Module = LlamaBlock(dim, ffn, heads, kv_heads).to(on, torch.bfloat16)
    sequences = max(1, count // SEQUENCE), min(count, SEQUENCE)
    x = torch.randn(*sequences, dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = bench(f"{what} eager, in bfloat16", run_step, model, x, dy)
    if expected is None:
        return
    torch._dynamo.reset()

    def ready(label: str, name: str, compile_model: Callable[[nn.Module], Any], replays: bool) -> Any:
        compiled = compile_model(model)
        call = replayed(compiled) if replays else compiled
        for _ in range(2):  # delayed scaling has its scales after one step
            run_step(call, x, dy)
        require_step(label, expected, run_step(call, x, dy), bench, residual=(x, dy), **BLOCK_DB)
        if name in RECIPES:
            require_fp8(label, compiled, GEMMS, bench)
        return call

    for mode, suffix in ((None, ""), ("reduce-overhead", ", CUDA graph")):
        compilers = contestants(RECIPES, not bench.quick, mode)
        labels = {name: f"{what} {name}{suffix}" for name in compilers}
        called = {name: bench(labels[name], ready, labels[name], name, compilers[name], mode is not None) for name in labels}
        steps = {name: step_of(call, x, dy) for name, call in called.items() if call is not None}
        base: Row = {}
        for name, timing in in_turns(steps, on, bench, labels.__getitem__, repeat=10).items():
            row: Row = {"ms": timing.ms, "back-to-back ms": timing.back_to_back_ms}
            if mode is None:
                row |= bench(f"{labels[name]}, memory", _memory, called[name], steps[name], x) or {}
            base = row if name == "bf16" else base
            for key, ratio in _RATIOS.items():
                if key in row and key in base:
                    row[ratio] = row[key] / base[key] if "bf16" in ratio else base[key] / row[key]
            if name in RECIPES and on.type == "cuda":
                row |= bench(f"{labels[name]}, estimate", _estimated, model, x, name) or {}
            yield {"what": labels[name], **row}


def _memory(call: Any, step: Callable[[], None], x: torch.Tensor) -> dict[str, float]:
    saved = {"saved MB": _saved_bytes(call, x) / 1e6}
    return saved | ({"peak MB": _peak_bytes(step) / 1e6} if x.is_cuda else {})


def _estimated(model: nn.Module, x: torch.Tensor, recipe: str) -> dict[str, float | None]:
    of_gpu = device_named(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    if of_gpu.note:  # nothing is known of it
        return {}
    return {"estimated": estimate(model, x, device=of_gpu, recipe=recipe).recipes[recipe].speedup_with_attention}


def run(bench: Bench, blocks: list[str], tokens: list[int]) -> Iterator[Row]:
    """`quick`: a tiny block with 128 tokens at most."""
    on = device(bench.quick)
    bench.baseline = "bf16 torch.compile"
    bench.notes += [
        "peak MB: beyond what is held between steps",
        "CUDA graph: mode='reduce-overhead', beside bf16 with the same mode",
    ]
    for block in ["tiny"] if bench.quick else blocks:
        for count in [min(tokens[0], 128)] if bench.quick else tokens:
            yield from _block(block, count, on, bench)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=["1B", "8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(_TOKENS))


if __name__ == "__main__":
    main("train_step", run, _options)
