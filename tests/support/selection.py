"""What `select="auto"` decided, and mixtures of experts with every kind of router, written by hand."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn

from fp8pass import fp8_compile, inspect

WIDTH, EXPERTS, TOKENS, VOCABULARY = 64, 48, 40, 96  # as many experts that a router is not thin


def run_as_it_is(graph, inputs, **options):
    """In place of Inductor's code generation: only the decompositions before the pass matter here."""
    return make_boxed_func(graph.forward)


def decisions(model, *args, recipe="current", backend="aot_eager", backward=True, **options):
    """Module -> role -> the reason's kind, or "fp8". GEMMs that have no FP8 counterpart are left out."""
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


def topk_softmax(logits, h, experts):
    weights, chosen = logits.topk(2)
    return (h[:, None] * experts[chosen] * weights.softmax(-1)[..., None]).sum(1)


def sigmoid_argmax(logits, h, experts):
    scores = logits.float().sigmoid()
    mask = F.one_hot(scores.argmax(-1), logits.shape[-1]).to(h.dtype)
    return h * torch.einsum("te,ed->td", mask * scores, experts)


def sort(logits, h, experts):
    weights, order = torch.sort(logits.softmax(-1), descending=True)
    return h * experts[order[:, 0]] * weights[:, :1]


def argsort(logits, h, experts):
    order = torch.argsort(logits.softmax(-1), dim=-1, descending=True)
    return h * experts.index_select(0, order[:, 0])


def multinomial(logits, h, experts):
    return h * experts[torch.multinomial(logits.softmax(-1), 1)[:, 0]]


def max_with_indices(logits, h, experts):
    weights, chosen = logits.softmax(-1).max(-1)
    return h * F.embedding(chosen, experts) * weights[:, None]


def dense_gates(logits, h, experts):
    weights, chosen = logits.softmax(-1).topk(2)
    gates = torch.zeros_like(logits).scatter(1, chosen, weights)
    return (gates[:, :, None] * (h[:, None] * experts)).sum(1)


def two_argmaxes(logits, h, experts):
    """GShard's: the second expert is the best one but the first."""
    num_experts = logits.shape[-1]
    first = F.one_hot(logits.argmax(-1), num_experts)
    second = F.one_hot(logits.masked_fill(first.bool(), -torch.inf).argmax(-1), num_experts)
    return h * ((first + second).to(h.dtype) @ experts)


def expert_choice(logits, h, experts):
    """Experts choose their tokens."""
    weights, tokens = logits.softmax(-1).t().topk(4)
    chosen = h[tokens] * experts[:, None] * weights[..., None]
    return torch.zeros_like(h).index_add(0, tokens.flatten(), chosen.flatten(0, 1))


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


def masked_loop(logits, h, experts):
    """Every expert runs on every token; where it was not chosen, its weight is 0."""
    weights, chosen = logits.softmax(-1).topk(2)
    out = torch.zeros_like(h)
    for i in range(4):
        weight = (weights * (chosen == i)).sum(-1, keepdim=True)
        out = out + weight * torch.tanh(h * experts[i])
    return out


def where_loop(logits, h, experts):
    chosen = logits.argmax(-1, keepdim=True)
    out = torch.zeros_like(h)
    for i in range(4):
        out = torch.where(chosen == i, h * experts[i], out)
    return out


def gathered_rows(logits, h, experts):
    """A mixture of depths: the best tokens go through the layer."""
    rows = logits.amax(-1).topk(16).indices
    chosen = h.gather(0, rows[:, None].expand(-1, WIDTH))
    return h.scatter_add(0, rows[:, None].expand(-1, WIDTH), torch.tanh(chosen * experts[0]))


ROUTERS = [
    softmax_topk,
    topk_softmax,
    sigmoid_argmax,
    sort,
    argsort,
    multinomial,
    max_with_indices,
    dense_gates,
    two_argmaxes,
    expert_choice,
    grouped_sigmoid,
    masked_loop,
    where_loop,
    gathered_rows,
]
