"""Forward and backward of Llama-3 style blocks: time, peak memory and bytes saved for backward, per contestant.

Columns: `ms`, the device's time; `back-to-back ms`, with the host's; `graph ms`, the device's with mode="reduce-overhead".
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, device, main
from benchmarks.gates import Step, parameters_of, require_fp8, require_step, run_step
from benchmarks.peers import Replayed, contestants, replayed
from benchmarks.timing import in_turns
from tests.support.models import LlamaBlock

#: dim, ffn, heads of one block. Every head has keys and values of its own here.
BLOCKS = {"1B": (2048, 8192, 32), "8B": (4096, 14336, 32), "tiny": (256, 512, 4)}
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


def _ready(compiled: Any, what: str, recipe: str, expected: Step, x: torch.Tensor, dy: torch.Tensor, checks: list[str]) -> None:
    """Compile, and pass the gates: delayed scaling has its scales after one step."""
    for _ in range(2):
        run_step(compiled, x, dy)
    found = run_step(compiled, x, dy)
    require_step(what, expected, found, checks, output_db=_OUTPUT_DB, gradient_db=_GRADIENT_DB, residual=(x, dy))
    if recipe in RECIPES:
        require_fp8(what, compiled.compiled if isinstance(compiled, Replayed) else compiled, GEMMS, checks)


def _block(
    block: str, count: int, on: torch.device, quick: bool, checks: list[str], notes: list[str]
) -> Iterator[dict[str, Any]]:
    """The rows of one block and number of tokens."""
    dim, ffn, heads = BLOCKS[block]
    torch.manual_seed(0)
    model: nn.Module = LlamaBlock(dim, ffn, heads).to(on, torch.bfloat16)
    x = torch.randn(*sequences(count), dim, device=on, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = run_step(model, x, dy)
    what = f"{block}, {count} tokens"
    torch._dynamo.reset()
    ready: dict[str, Any] = {}
    for name, compile_model in contestants(RECIPES, with_peers=not quick).items():
        ready[name] = compile_model(model)
        _ready(ready[name], f"{what}, {name}", name, expected, x, dy, checks)
    graphs = {}
    if on.type == "cuda":
        graphs = replayed(model, RECIPES, lambda c, n: _ready(c, f"{what}, {n}, CUDA graph", n, expected, x, dy, checks), notes)
    yield from _measured(f"{block} {count}", ready, graphs, x, dy, on)


def _measured(
    what: str, ready: dict[str, Any], graphs: dict[str, Any], x: torch.Tensor, dy: torch.Tensor, on: torch.device
) -> Iterator[dict[str, Any]]:
    steps = {name: step_of(compiled, x, dy) for name, compiled in ready.items()}
    times = in_turns(steps, on, repeat=10)
    with_graphs = in_turns({name: step_of(c, x, dy) for name, c in graphs.items()}, on, repeat=10)
    base: dict[str, Any] | None = None
    for name, compiled in ready.items():
        row: dict[str, Any] = {"what": f"{what} {name}", "ms": times[name].ms, "back-to-back ms": times[name].back_to_back_ms}
        if name in with_graphs:
            row["graph ms"] = with_graphs[name].ms
        row["saved MB"] = _saved_bytes(compiled, x) / 1e6
        if on.type == "cuda":
            row["peak MB"] = _peak_bytes(steps[name]) / 1e6
        base = base or row
        for key, ratio in (("ms", "speed-up"), ("back-to-back ms", "speed-up, back to back"), ("graph ms", "speed-up, graph")):
            if key in row and key in base:
                row[ratio] = base[key] / row[key]
        for key in ("saved", "peak"):
            if f"{key} MB" in row:
                row[f"{key} / bf16"] = row[f"{key} MB"] / base[f"{key} MB"]
        yield row


def run(quick: bool, blocks: list[str] | None = None, tokens: list[int] | None = None) -> Result:
    on = device(quick)
    checks: list[str] = []
    notes = ["peak MB: beyond what is held between steps"]
    chosen = blocks or (["tiny"] if quick else ["1B", "8B"])
    counts = tokens or ([128] if quick else list(_TOKENS))
    rows = (row for block in chosen for count in counts for row in _block(block, count, on, quick, checks, notes))
    return Result(rows, "bf16 torch.compile", checks, notes)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), help="default: 1B 8B")
    parser.add_argument("--tokens", nargs="+", type=int, help=f"default: {' '.join(map(str, _TOKENS))}")


if __name__ == "__main__":
    main("train_step", run, _options)
