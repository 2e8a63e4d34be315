"""Forward and backward of Llama-3 style blocks: time, peak memory and bytes saved for backward, per contestant."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from benchmarks.common import Result, device, main, milliseconds, require, sqnr
from benchmarks.peers import contestants
from tests.support.models import LlamaBlock

#: dim, ffn, heads of one block. Every head has keys and values of its own here.
_BLOCKS = {"1B": (2048, 8192, 32), "8B": (4096, 14336, 32)}


def _saved_bytes(model, x: torch.Tensor, parameters: set[int]) -> int:
    """Bytes that autograd keeps between forward and backward, without parameters and the input."""
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(sizes.values())


def _step(compiled: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    leaves = [x, *_parameters(compiled)]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(x).backward(dy)

    return step


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that one step holds at a time, with parameters and gradients."""
    gc.collect()  # what the contestant before left behind
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def run(quick: bool) -> Result:
    on = device(quick)
    blocks = {"tiny": (256, 512, 4)} if quick else _BLOCKS
    rows, checks, notes = [], [], []
    for block, (dim, ffn, heads) in blocks.items():
        for tokens in (128,) if quick else (4096, 8192, 16384, 32768):
            torch.manual_seed(0)
            model = LlamaBlock(dim, ffn, heads).to(on, torch.bfloat16)
            x = torch.randn(1, tokens, dim, device=on, dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn_like(x)
            expected = model(x).detach()
            base: dict | None = None
            for name, compile_model in contestants(("delayed", "current", "blockwise", "rowwise")).items():
                if quick and name.startswith("torchao"):
                    continue
                torch._dynamo.reset()
                compiled = compile_model(model)
                step = _step(compiled, x, dy)
                for _ in range(2):
                    step()
                error = sqnr(expected, compiled(x).detach())
                require(error >= 18, f"{block}, {tokens} tokens, {name}: SQNR of the output >= 18 dB", checks)
                held = {p.untyped_storage().data_ptr() for p in (x, *_parameters(compiled))}
                saved = _saved_bytes(compiled, x, held)
                row = {"what": f"{block} {tokens} {name}", "saved MB": saved / 1e6}
                if on.type == "cuda":
                    row["peak MB"] = _peak_bytes(step) / 1e6
                row["ms"] = milliseconds(step, on)
                base = base or row
                row["speed-up"] = base["ms"] / row["ms"]
                row["saved / bf16"] = row["saved MB"] / base["saved MB"]
                if "peak MB" in row:
                    row["peak / bf16"] = row["peak MB"] / base["peak MB"]
                rows.append(row)
    return Result(rows, "bf16 torch.compile", checks, notes)


def _parameters(compiled) -> list[torch.Tensor]:
    return list(compiled.parameters()) if hasattr(compiled, "parameters") else []


if __name__ == "__main__":
    main("train_step", run)
