"""The models that benchmarks compare: plain PyTorch, as a user would write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LlamaBlock(nn.Module):
    """RMSNorm, attention through scaled_dot_product_attention, SwiGLU, no biases: 7 linears.

    num_kv_heads: heads of keys and values, each of which serves as many heads of queries; None: as many as those.
    """

    def __init__(self, dim: int = 128, ffn: int = 256, num_heads: int = 4, num_kv_heads: int | None = None):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        kv_dim = dim // self.num_heads * self.num_kv_heads
        self.attn_norm = nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, outputs, bias=False) for outputs in (dim, kv_dim, kv_dim, dim))
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        h = self.attn_norm(x)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        linears = zip((self.wq, self.wk, self.wv), heads, strict=True)
        q, k, v = (w(h).view(batch, tokens, n, -1).transpose(1, 2) for w, n in linears)
        if self.num_kv_heads != self.num_heads:
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).reshape(batch, tokens, dim))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def block(dim: int, ffn: int, heads: int, batch: int, tokens: int) -> tuple[LlamaBlock, torch.Tensor]:
    """A block and its input [batch, tokens, dim], bfloat16, uninitialized."""
    x = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        model = LlamaBlock(dim, ffn, heads).bfloat16()
    return model.to_empty(device="cpu"), x


class Experts(nn.Module):
    """A linear per expert, as transformers' mixtures compute it: one grouped GEMM. Groups differ by up to a third."""

    offs: torch.Tensor

    def __init__(self, experts: int, inputs: int, outputs: int, rows: int, on: torch.device):
        super().__init__()
        weight = torch.randn(experts, outputs, inputs, device=on, dtype=torch.bfloat16) * inputs**-0.5
        self.weight = nn.Parameter(weight)
        shares = torch.linspace(0.75, 1.25, experts).cumsum(0)
        self.register_buffer("offs", (shares / shares[-1] * rows).to(on, torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offs)
