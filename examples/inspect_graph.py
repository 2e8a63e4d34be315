"""Look at what fp8pass does to a Llama-style block: the table, the state, the bytes saved for backward, and the graphs.

    python examples/inspect_graph.py --recipe delayed --out out/graphs

Writes before.py, after.py, forward.py and backward.py: the joint graph as captured, rewritten, and partitioned.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

import fp8pass


class LlamaBlock(nn.Module):
    """RMSNorm, causal attention, SwiGLU; no biases."""

    def __init__(self, dim: int, ffn: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attn_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attn_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def main(argv: list[str] | None = None) -> dict[str, int]:
    """Compile, run one step, print and write; returns the bytes saved for backward in FP8 and in high precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="delayed", choices=["delayed", "current", "blockwise", "rowwise", "mxfp8"])
    parser.add_argument("--backend", default="aot_eager", choices=["aot_eager", "inductor"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/graphs"))
    args = parser.parse_args(argv)

    saved = {}
    for name, rules in (("high precision", {"*": None}), ("fp8", None)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = LlamaBlock(dim=256, ffn=704, num_heads=4).to(args.device, torch.bfloat16)
        compiled = fp8pass.fp8_compile(block, args.recipe, rules=rules, backend=args.backend)
        x = torch.randn(1, args.tokens, 256, device=args.device, dtype=torch.bfloat16, requires_grad=True)
        compiled(x).square().mean().backward()
        saved[name] = fp8pass.inspect(compiled).graphs[0].saved_bytes

    report = fp8pass.inspect(compiled)
    print(report)
    print("state tensors:", ", ".join(fp8pass.state(compiled).tensors) or "none: this recipe keeps no state")
    share = saved["fp8"] / saved["high precision"]
    print(f"saved for backward: {saved['fp8']:,} bytes in FP8, {saved['high precision']:,} in bf16 ({share:.0%})")

    graph = report.graphs[0]
    args.out.mkdir(parents=True, exist_ok=True)
    for part in ("before", "after", "forward", "backward"):
        path = args.out / f"{part}.py"
        path.write_text(getattr(graph, part).print_readable(print_output=False))
        print("wrote", path)
    return saved


if __name__ == "__main__":
    main()
