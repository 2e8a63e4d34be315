"""Forward and backward of Llama-3 style blocks: time, peak memory and bytes saved for backward, per contestant.

Columns: `ms`, the device's time; `back-to-back ms`, with the host's. Rows with "CUDA graph": mode="reduce-overhead".
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import device, main
from benchmarks.contestants import contestants
from benchmarks.correctness import parameters_of, ready, run_step, step_of
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from benchmarks.timing import Timing, in_turns

#: dim, ffn, heads, heads of keys and values of one block. Llama-3.2-1B's and Llama-3-8B's (their config.json).
BLOCKS = {"1B": (2048, 8192, 32, 8), "8B": (4096, 14336, 32, 8), "tiny": (256, 512, 4, 2)}
_TOKENS = (4096, 8192, 16384, 32768)
RECIPES = ("delayed", "current", "blockwise", "rowwise")
#: dB. Noise of seven GEMMs, the gradients' operands in E5M2 (tests/tolerances.py).
_OUTPUT_DB, _GRADIENT_DB = 18.0, 12.0
#: Of a block, forward and backward: seven linears.
GEMMS = 21
#: Tokens of the longest sequence; more are several sequences.
SEQUENCE = 8192


def sequences(tokens: int) -> tuple[int, int]:
    """The number of sequences, and of tokens in each."""
    return max(1, tokens // SEQUENCE), min(tokens, SEQUENCE)


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


def _block(block: str, count: int, on: torch.device, bench: Bench) -> Iterator[Row]:
    """The rows of one block and number of tokens; plain runs are timed before anything is compiled for CUDA graphs."""
    dim, ffn, heads, kv_heads = BLOCKS[block]
    torch.manual_seed(0)
    what = f"{block} {count}"
    model: nn.Module = LlamaBlock(dim, ffn, heads, kv_heads).to(on, torch.bfloat16)
    x = torch.randn(*sequences(count), dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = bench(f"{what} eager, in bfloat16", run_step, model, x, dy)
    if expected is None:  # nothing to compare with, and nothing is timed that was not compared
        return
    torch._dynamo.reset()
    for mode, suffix in ((None, ""), ("reduce-overhead", ", CUDA graph")):

        def label(name: str, suffix: str = suffix) -> str:
            return f"{what} {name}{suffix}"

        found = contestants(RECIPES, not bench.quick, mode)
        bounds = {"output_db": _OUTPUT_DB, "gradient_db": _GRADIENT_DB, "residual": (x, dy)}
        made = ready(found, model, label, expected, x, dy, bench, num_gemms=GEMMS, replayed=mode is not None, **bounds)
        steps = {name: step_of(compiled, x, dy) for name, compiled in made.items()}
        times = in_turns(steps, on, bench, label, repeat=10)
        rows = {name: _row(label(name), timing) for name, timing in times.items()}
        for name, row in rows.items():
            if mode is None:
                row |= bench(f"{row['what']}, memory", _memory, made[name], steps[name], x) or {}
            _add_ratios(row, rows.get("bf16"))
            yield row


def _row(what: str, timing: Timing) -> dict[str, Any]:
    return {"what": what, "ms": timing.ms, "back-to-back ms": timing.back_to_back_ms, **timing.clocks}


def _memory(compiled: Any, step: Callable[[], None], x: torch.Tensor) -> dict[str, float]:
    sizes = {"saved MB": _saved_bytes(compiled, x) / 1e6}
    return sizes | ({"peak MB": _peak_bytes(step) / 1e6} if x.is_cuda else {})


def _add_ratios(row: dict[str, Any], base: dict[str, Any] | None) -> None:
    """Add a row's ratios to that of bf16, if there is one."""
    if base is None:
        return
    row["speed-up"] = base["ms"] / row["ms"]
    row["speed-up, back to back"] = base["back-to-back ms"] / row["back-to-back ms"]
    for key in ("saved", "peak"):
        if f"{key} MB" in row and f"{key} MB" in base:
            row[f"{key} / bf16"] = row[f"{key} MB"] / base[f"{key} MB"]


def run(bench: Bench, blocks: list[str] | None = None, tokens: list[int] | None = None) -> Iterator[Row]:
    on = device(bench.quick)
    bench.baseline = "bf16 torch.compile"
    bench.notes += [
        "peak MB: beyond what is held between steps",
        "CUDA graph: mode='reduce-overhead', beside bf16 with the same mode",
    ]
    for block in blocks or (["tiny"] if bench.quick else ["1B", "8B"]):
        for count in tokens or ([128] if bench.quick else _TOKENS):
            yield from _block(block, count, on, bench)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), help="default: 1B 8B")
    parser.add_argument("--tokens", nargs="+", type=int, help=f"default: {' '.join(map(str, _TOKENS))}")


if __name__ == "__main__":
    main("train_step", run, _options)
