"""Training steps of a whole model that we did not write: transformers' Llama, from its embedding to AdamW.

Columns: `ms`, of a step with its optimizer, the host's time included, median of the last three quarters of the steps; `first
two steps s`, which compile; the last loss. Tokens are the same for every contestant.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common import SkipBenchmark, device, main
from benchmarks.isolation import Bench, Row
from fp8pass import fp8_compile, inspect

RECIPES = ("delayed", "current", "rowwise", "blockwise")
#: Largest difference between the last losses in FP8 and in bfloat16, relative.
_LOSS_ERROR = 0.01
#: Words that may follow a word, and words that occur.
_BRANCHES, _STATES = 4, 512


def _config(quick: bool) -> Any:
    """Eight layers of Llama-3.2-1B's width; 0.62 billion parameters."""
    from transformers import LlamaConfig

    hidden, ffn, heads, kv_heads, words, layers = (64, 128, 4, 2, 256, 2) if quick else (2048, 8192, 32, 8, 32000, 8)
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    return LlamaConfig(vocab_size=words, hidden_size=hidden, intermediate_size=ffn, use_cache=False, **of_heads)


def _batches(words: int, steps: int, size: tuple[int, int], on: torch.device) -> list[torch.Tensor]:
    """Every word is followed by one of a few."""
    generator = torch.Generator().manual_seed(1)
    steps_on = 1 + torch.randint(0, _BRANCHES, (steps, *size), generator=generator)
    return list((steps_on.cumsum(2) % min(_STATES, words)).to(on))


def _train(compiled: Any, batches: list[torch.Tensor], on: torch.device) -> Row:
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-4, fused=True)
    times, losses = [], []
    for tokens in batches:
        start = time.perf_counter()
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return {"ms": 1e3 * statistics.median(times[len(times) // 4 :]), "first two steps s": sum(times[:2]), "loss": losses[-1]}


def _row(name: str, config: Any, batches: list[torch.Tensor], on: torch.device, base: Row | None, bench: Bench) -> Row:
    """The row of a recipe, or of bfloat16, which the others are compared with."""
    from transformers import LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(on, torch.bfloat16)
    compiled: Any = torch.compile(model) if base is None else fp8_compile(model, name)
    if on.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"what": name, **_train(compiled, batches, on)}
    if on.type == "cuda":
        row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    if base is not None:
        error, gemms = abs(row["loss"] / base["loss"] - 1), inspect(compiled).gemms
        bench.require(error <= _LOSS_ERROR, f"{name}: last loss within {error:.1e} <= {_LOSS_ERROR:g} of bfloat16's")
        row["GEMMs in FP8"] = f"{sum(gemm.quantized for gemm in gemms)} of {len(gemms)}"
    return row | {"speed-up": (base or row)["ms"] / row["ms"]}


def run(bench: Bench) -> Iterator[Row]:
    """`quick`: a tiny model, four steps."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipBenchmark("transformers is not installed")
    on, config = device(bench.quick), _config(bench.quick)
    bench.baseline = "bf16 torch.compile"
    batches = _batches(config.vocab_size, 4 if bench.quick else 40, (2, 32) if bench.quick else (4, 2048), on)
    base: Row | None = None
    for name in ("bf16", *RECIPES):
        for row in bench.row(name, _row, name, config, batches, on, base, bench):
            base = base or row
            yield row
        if base is None:  # nothing to compare with
            return


if __name__ == "__main__":
    main("whole_model", run)
