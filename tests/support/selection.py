"""Helpers of tests of selection: models by hand, and their GEMMs that stay in high precision."""

from unittest import mock

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import fp8_compile, inspect

WIDTH, EXPERTS, TOKENS = 64, 48, 40  # as many experts that a router is not thin
VOCABULARY, POSITIONS = 96, 48
BYTES = 64  # a vocabulary as wide as the model, or as its inner layers


def run_as_it_is(graph, inputs, **options):
    """In place of Inductor's code generation: only the decompositions before the pass matter here."""
    return make_boxed_func(graph.forward)


def decisions(model, *args, recipe="current", backend="aot_eager", backward=True, **options):
    """Module -> role -> the reason's kind, or "fp8". GEMMs that have no FP8 counterpart are left out."""
    torch._dynamo.reset()  # models of one code share Dynamo's recompile limit
    compiled = fp8_compile(model, recipe, backend=backend, **options)
    with mock.patch("torch._inductor.compile_fx.compile_fx_inner", run_as_it_is):
        out = compiled(*args)
    if backward:
        outputs = out if isinstance(out, tuple) else (out,)
        sum(o.float().sum() for o in outputs if o.requires_grad).backward()
    found: dict[str, dict[str, str]] = {}
    for g in inspect(compiled).gemms:
        kind = "fp8" if g.reason is None else g.reason.partition(":")[0]
        if kind != "unsupported op":
            found.setdefault(g.module, {})[g.role] = kind
    return found


def kinds(model, *args, **options):
    """Module -> the kind of its forward GEMM; all its GEMMs have the same."""
    found = decisions(model, *args, **options)
    for module, roles in found.items():
        assert len(set(roles.values())) == 1, (module, roles)
    return {module: roles["output"] for module, roles in found.items()}


def tokens_in():
    return torch.randn(TOKENS, WIDTH, requires_grad=True)


def sentence(size=VOCABULARY):
    return torch.randint(size, (2, TOKENS))


class Mixture(nn.Module):
    """A router and experts as one tensor; `choose` makes of the router's logits (rows, weights) or a mask."""

    def __init__(self, choose, num_experts: int = EXPERTS):
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(num_experts, WIDTH) / 8)
        self.choose = choose

    def forward(self, x):
        return self.choose(self.gate(x), self.inner(x), self.experts)


def softmax_topk(logits, h, experts):
    weights, chosen = logits.softmax(-1).topk(2)
    return (h[:, None] * experts[chosen] * weights[..., None]).sum(1)


def grouped_sigmoid(logits, h, experts):
    """DeepSeek-V3's: the best groups by the sum of their two best scores, then the best experts of these groups."""
    scores = logits.sigmoid()
    biased = scores + torch.linspace(0, 0.1, logits.shape[-1])
    groups = biased.view(len(scores), 8, -1)
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(3, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(scores), 8).scatter_(1, best, 1)
    allowed = mask[:, :, None].expand_as(groups).reshape(len(scores), -1).bool()
    chosen = biased.masked_fill(~allowed, 0.0).topk(4, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (h[:, None] * experts[chosen] * weights[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NanoGPT(nn.Module):
    """nanoGPT's model without attention: token and position embeddings, blocks, an untied head, logits.

    look_up: makes vectors of the model and tokens. form: makes the output of the model and tokens.
    """

    def __init__(self, vocabulary=VOCABULARY, width=WIDTH, positions=POSITIONS, rows=None, look_up=None, form=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows or vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.look_up, self.form = look_up, form

    def hidden(self, tokens):
        x = self.wte(tokens) if self.look_up is None else self.look_up(self, tokens)
        x = x + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def forward(self, tokens):
        return self.lm_head(self.hidden(tokens)) if self.form is None else self.form(self, tokens)


class Bytes(nn.Module):
    """An embedding of bytes, two layers and a head. after: what follows every module, such as a graph break."""

    def __init__(self, width, inner, *, after=lambda: None, is_residual=True, has_head=True, checkpoints=False):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.last = nn.Linear(width, width)
        self.head = nn.Linear(width, BYTES) if has_head else nn.Identity()
        self.after, self.is_residual, self.checkpoints = after, is_residual, checkpoints

    def layer(self, x):
        h = self.up(x)
        self.after()
        h = self.down(F.relu(h))
        self.after()
        return x + h if self.is_residual else h

    def forward(self, tokens):
        x = self.embedding(tokens)
        self.after()
        x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpoints else self.layer(x)
        x = F.relu(self.last(x))
        self.after()
        return self.head(x)


FORMS_OF_BYTES = {
    "whole": {},
    "not residual": {"is_residual": False},
    "checkpointed": {"checkpoints": True},
    "breaks": {"after": torch._dynamo.graph_break},
    "breaks, not residual": {"after": torch._dynamo.graph_break, "is_residual": False},
}
