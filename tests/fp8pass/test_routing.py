"""Routers are found by structure, and nothing else is taken for one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.models import LlamaBlock
from tests.support.selection import EXPERTS, TOKENS, WIDTH, Mixture, decisions, grouped_sigmoid, kinds, softmax_topk, tokens_in


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


@pytest.mark.parametrize("choose", ROUTERS, ids=lambda f: f.__name__)
def test_a_router_is_found_with_its_gradients(choose):
    found = decisions(Mixture(choose), tokens_in())
    assert set(found["gate"].values()) == {"routing"}
    assert set(found["inner"].values()) == {"fp8"}
    assert set(found["inner"]) == {"output", "grad_input", "grad_weight"}
    assert set(found["gate"]) >= {"output"}


@pytest.mark.parametrize("choose", [grouped_sigmoid, sigmoid_argmax, masked_loop], ids=lambda f: f.__name__)
def test_a_router_is_found_in_inference_and_in_inductors_graphs(choose):
    model, x = Mixture(choose), tokens_in()
    with torch.no_grad():
        inference = kinds(model, x, backward=False)
    torch._dynamo.reset()
    for found in (inference, kinds(model, x, backend="inductor", backward=False)):
        assert found["gate"] == "routing"
        assert found["inner"] == "fp8"


class BrokenAfterTopK(Mixture):
    """A graph break after which the next graph takes the rows."""

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        h = self.inner(x)
        torch._dynamo.graph_break()
        return (h[:, None] * self.experts[chosen] * weights[..., None]).sum(1)


class BrokenAfterOneHot(Mixture):
    def forward(self, x):
        mask, h = F.one_hot(self.gate(x).argmax(-1), EXPERTS), self.inner(x)
        mask = mask * (mask.cumsum(0) <= TOKENS // 2)  # an expert takes so many tokens
        torch._dynamo.graph_break()
        return h * (mask.to(h.dtype) @ self.experts)


class BrokenByNonzero(Mixture):
    """The first graph returns the mask of the first expert."""

    def forward(self, x):
        h = self.inner(x)
        rows = (self.gate(x).argmax(-1) == 0).nonzero().flatten()
        return h.index_add(0, rows, h[rows])


@pytest.mark.parametrize("model_class", [BrokenAfterTopK, BrokenAfterOneHot, BrokenByNonzero])
def test_a_router_whose_rows_the_next_graph_takes(model_class):
    found = kinds(model_class(None), tokens_in())
    assert found["gate"] == "routing"
    assert found["inner"] == "fp8"


class NoisyTopK(nn.Module):
    """Two GEMMs decide together (Shazeer et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.gate, self.noise, self.up = (nn.Linear(WIDTH, EXPERTS) for _ in range(3))
        self.experts = nn.Parameter(torch.randn(EXPERTS, EXPERTS))

    def forward(self, x):
        logits = self.gate(x) + torch.randn(TOKENS, EXPERTS) * F.softplus(self.noise(x))
        weights, chosen = logits.topk(2)
        return self.up(x) * (self.experts[chosen] * weights.softmax(-1)[..., None]).sum(1)


def test_all_gemms_that_decide_together_are_routers():
    assert kinds(NoisyTopK(), tokens_in()) == {"gate": "routing", "noise": "routing", "up": "fp8"}


# -- what is no router


class Classifier(nn.Module):
    """A classifier whose logits `after` turns into what it returns."""

    def __init__(self, after):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.after = after

    def forward(self, x, labels):
        logits = self.out(torch.tanh(self.inner(x)))
        return logits, self.after(logits, labels)


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).float().mean()


def top_five_accuracy(logits, labels):
    return (logits.topk(5).indices == labels[:, None]).any(-1).float().mean()


def accuracy_by_rank(logits, labels):
    return (logits.argsort(-1, descending=True) == labels[:, None]).float().argmax(-1)


def predictions(logits, labels):
    return logits.argmax(-1)


def confidence(logits, labels):
    probabilities = logits.softmax(-1)
    return probabilities.gather(1, probabilities.argmax(-1, keepdim=True)).mean()


def recall(logits, labels):
    found = logits.argmax(-1) == 1
    return (found & (labels == 1)).sum() / (labels == 1).sum()


def macro_f1(logits, labels):
    predicted, actual = F.one_hot(logits.argmax(-1), EXPERTS), F.one_hot(labels, EXPERTS)
    return ((predicted * actual).sum(0) / (predicted + actual).sum(0).clamp(min=1)).mean()


def confusion(logits, labels):
    return torch.bincount(logits.argmax(-1) * EXPERTS + labels, minlength=EXPERTS**2)


def matches_of_a_batch(logits, labels):
    """Row i belongs to column i."""
    return (logits.argmax(-1) == torch.arange(TOKENS)).float().mean()


def largest_values(logits, labels):
    """Pooling takes values, not rows."""
    return logits.max(0).values.sum() + logits.topk(3, dim=0).values.sum() + logits.sort(-1).values[:, 0].sum()


@pytest.mark.parametrize(
    "after",
    [
        accuracy,
        top_five_accuracy,
        accuracy_by_rank,
        predictions,
        confidence,
        recall,
        macro_f1,
        confusion,
        matches_of_a_batch,
        largest_values,
    ],
    ids=lambda f: f.__name__,
)
def test_metrics_and_predictions_make_no_router(after):
    assert kinds(Classifier(after), tokens_in(), torch.randint(EXPERTS, (TOKENS,))) == {"inner": "fp8", "out": "fp8"}


def hard_examples(logits, labels):
    """The losses of the worst examples."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses[losses.topk(8).indices].mean()


def pseudo_labels(logits, labels):
    """A model's predictions as labels of other rows."""
    half = TOKENS // 2
    return F.cross_entropy(logits[half:], logits[:half].detach().argmax(-1))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("loss", [hard_examples, pseudo_labels], ids=lambda f: f.__name__)
def test_a_losss_gemm_is_a_head_and_no_router(loss, backend):
    found = kinds(Classifier(loss), tokens_in(), torch.randint(EXPERTS, (TOKENS,)), backend=backend, backward=False)
    assert found == {"inner": "fp8", "out": "head"}


class Attention(nn.Module):
    """Attention by hand, of a single head in a single sequence: its products are plain GEMMs."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).t() / 8
        kept = scores.topk(8).indices  # attention to the best positions only
        mask = torch.full_like(scores, -torch.inf).scatter(-1, kept, 0.0)
        return self.o((scores + mask).softmax(-1) @ self.v(x))


def test_attention_is_no_router():
    found = kinds(LlamaBlock(WIDTH, 2 * WIDTH), torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    assert set(found.values()) == {"fp8"}
    assert len(found) == 7
    assert set(kinds(Attention(), tokens_in()).values()) == {"fp8"}


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        logits = F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(y), dim=-1).t()
        here = torch.arange(TOKENS)
        loss = F.cross_entropy(logits, here) + F.cross_entropy(logits.t(), here)
        return loss, (logits.argmax(-1) == here).float().mean()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_contrastive_loss_has_no_router(backend):
    found = kinds(Contrastive(), tokens_in(), tokens_in(), backend=backend, backward=False)
    assert found.pop("left") == found.pop("right") == "fp8"
    assert "routing" not in found.values()
