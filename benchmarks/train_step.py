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

from benchmarks.common import Result, device, main
from benchmarks.contestants import Replayed, contestants
from benchmarks.correctness import Step, parameters_of, require_fp8, require_step, run_step
from benchmarks.isolation import Attempts
from benchmarks.models import LlamaBlock
from benchmarks.timing import Timing, in_turns

#: dim, ffn, heads, heads of keys and values of one block. Llama-3.2-1B's and Llama-3-8B's (their config.json); "wide": every
#: head has keys and values of its own, which is 12 % more arithmetic in the linears.
BLOCKS = {"1B": (2048, 8192, 32, 8), "8B": (4096, 14336, 32, 8), "8B-wide": (4096, 14336, 32, 32), "tiny": (256, 512, 4, 2)}
_TOKENS = (4096, 8192, 16384, 32768)
RECIPES = ("delayed", "current", "blockwise", "rowwise")
#: dB. Noise of seven GEMMs, the gradients' operands in E5M2 (tests/tolerances.py).
_OUTPUT_DB, _GRADIENT_DB = 18.0, 12.0
#: Of a block, forward and backward: seven linears.
GEMMS = 21
#: Tokens of the longest sequence; more are several sequences.
SEQUENCE = 8192


def sequences(tokens: int) -> tuple[int, int]:
    """How many sequences of how many tokens."""
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


def step_of(compiled: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """A training step without an optimizer."""
    leaves = [x, *parameters_of(compiled).values()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(x).backward(dy)

    return step


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that one step takes, gradients included, besides what is held between steps."""
    gc.collect()
    torch.cuda.empty_cache()
    step()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def _ready(compiled: Any, what: str, recipe: str, expected: Step, x: torch.Tensor, dy: torch.Tensor, checks: list[str]) -> Any:
    """Compile, and pass the gates: delayed scaling has its scales after one step."""
    for _ in range(2):
        run_step(compiled, x, dy)
    found = run_step(compiled, x, dy)
    require_step(what, expected, found, checks, output_db=_OUTPUT_DB, gradient_db=_GRADIENT_DB, residual=(x, dy))
    if recipe in RECIPES:
        require_fp8(what, compiled.compiled if isinstance(compiled, Replayed) else compiled, GEMMS, checks)
    return compiled


def _block(
    block: str, count: int, on: torch.device, with_peers: bool, checks: list[str], attempts: Attempts
) -> Iterator[dict[str, Any]]:
    """The rows of one block and number of tokens; plain runs are timed before anything is compiled for CUDA graphs."""
    dim, ffn, heads, kv_heads = BLOCKS[block]
    torch.manual_seed(0)
    what = f"{block} {count}"
    model: nn.Module = LlamaBlock(dim, ffn, heads, kv_heads).to(on, torch.bfloat16)
    x = torch.randn(*sequences(count), dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = attempts(f"{what} eager, in bfloat16", lambda: run_step(model, x, dy))
    if expected is None:  # nothing to compare with, and nothing is timed that was not compared
        return
    torch._dynamo.reset()

    def ready(mode: str | None, label: Callable[[str], str]) -> dict[str, Any]:
        """The contestants that compute what the model does."""
        found = {}
        for name, compile_model in contestants(RECIPES, with_peers, mode).items():

            def prepare(name: str = name, compile_model: Callable[[nn.Module], Any] = compile_model) -> Any:
                compiled = compile_model(model)
                compiled = compiled if mode is None else Replayed(compiled)
                return _ready(compiled, label(name), name, expected, x, dy, checks)

            compiled = attempts(label(name), prepare)
            if compiled is not None:
                found[name] = compiled
        return found

    plain = ready(None, lambda name: f"{what} {name}")
    steps = {name: step_of(compiled, x, dy) for name, compiled in plain.items()}
    times = in_turns(steps, on, attempts, lambda name: f"{what} {name}", repeat=10)
    rows = {name: _row(f"{what} {name}", timing) for name, timing in times.items()}
    for name, row in rows.items():
        sizes = attempts(f"{row['what']}, memory", lambda name=name: _memory(plain[name], steps[name], x))  # type: ignore[misc]
        row |= sizes or {}
        _add_ratios(row, rows.get("bf16"))
        yield row
    graphs = ready("reduce-overhead", lambda name: f"{what} {name}, CUDA graph")
    steps = {name: step_of(compiled, x, dy) for name, compiled in graphs.items()}
    times = in_turns(steps, on, attempts, lambda name: f"{what} {name}, CUDA graph", repeat=10)
    rows = {name: _row(f"{what} {name}, CUDA graph", timing) for name, timing in times.items()}
    for row in rows.values():
        _add_ratios(row, rows.get("bf16"))
        yield row


def _row(what: str, timing: Timing) -> dict[str, Any]:
    return {"what": what, "ms": timing.ms, "back-to-back ms": timing.back_to_back_ms, **timing.clocks}


def _memory(compiled: Any, step: Callable[[], None], x: torch.Tensor) -> dict[str, float]:
    sizes = {"saved MB": _saved_bytes(compiled, x) / 1e6}
    return sizes | ({"peak MB": _peak_bytes(step) / 1e6} if x.is_cuda else {})


def _add_ratios(row: dict[str, Any], base: dict[str, Any] | None) -> None:
    """What a row is to that of bf16, as far as there is one."""
    if base is None:
        return
    row["speed-up"] = base["ms"] / row["ms"]
    row["speed-up, back to back"] = base["back-to-back ms"] / row["back-to-back ms"]
    for key in ("saved", "peak"):
        if f"{key} MB" in row and f"{key} MB" in base:
            row[f"{key} / bf16"] = row[f"{key} MB"] / base[f"{key} MB"]


def run(quick: bool, blocks: list[str] | None = None, tokens: list[int] | None = None) -> Result:
    on = device(quick)
    checks: list[str] = []
    attempts = Attempts()
    notes = ["peak MB: beyond what is held between steps", "CUDA graph: mode='reduce-overhead', beside bf16 with the same mode"]
    chosen = blocks or (["tiny"] if quick else ["1B", "8B"])
    counts = tokens or ([128] if quick else list(_TOKENS))
    rows = (row for block in chosen for count in counts for row in _block(block, count, on, not quick, checks, attempts))
    return Result(rows, "bf16 torch.compile", checks, attempts, notes)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), help="default: 1B 8B")
    parser.add_argument("--tokens", nargs="+", type=int, help=f"default: {' '.join(map(str, _TOKENS))}")


if __name__ == "__main__":
    main("train_step", run, _options)
