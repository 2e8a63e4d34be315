"""What stays in high precision by default: routers, heads and thin GEMMs, by structure alone. Models are written by hand."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn

from fp8pass import fp8_compile, inspect
from fp8pass.errors import OptionError
from tests.support.models import LlamaBlock

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
    """What follows a graph break: the next graph takes the rows."""

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
    """What the first graph returns is the mask of the first expert."""

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


# -- heads


class Language(nn.Module):
    """An embedding, a layer, a head; tied or not."""

    def __init__(self, tie=False, loss=None, vocabulary=VOCABULARY):
        super().__init__()
        self.tokens, self.inner = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, vocabulary, bias=False)
        if tie:
            self.projection.weight = self.tokens.weight
        self.loss = loss

    def forward(self, tokens):
        logits = self.projection(torch.tanh(self.inner(self.tokens(tokens))))
        return logits if self.loss is None else self.loss(logits, tokens)


class WithGetter(Language):
    def get_output_embeddings(self):
        return self.projection


class WithoutOutput(Language):
    def get_output_embeddings(self):
        raise NotImplementedError


class Functional(Language):
    """No module of its own for the head."""

    def forward(self, tokens):
        return torch.tanh(self.inner(self.tokens(tokens))) @ self.tokens.weight.t()


class Padded(Language):
    """The embedding has more rows than there are tokens; logits are scaled."""

    def forward(self, tokens):
        return F.linear(torch.tanh(self.inner(self.tokens(tokens))), self.tokens.weight[: VOCABULARY - 5] * 0.125)


def sentence():
    return torch.randint(VOCABULARY - 5, (2, TOKENS))


def test_a_tied_weight_is_a_head():
    assert kinds(Language(tie=True), sentence()) == {"inner": "fp8", "projection": "head"}


def test_an_untied_one_is_not_unless_the_model_says_so():
    assert kinds(Language(), sentence()) == {"inner": "fp8", "projection": "fp8"}
    assert kinds(WithGetter(), sentence()) == {"inner": "fp8", "projection": "head"}
    assert kinds(WithoutOutput(), sentence()) == {"inner": "fp8", "projection": "fp8"}


@pytest.mark.parametrize("model_class", [Functional, Padded])
def test_an_embeddings_weight_that_no_module_multiplies_with(model_class):
    found = kinds(model_class(), sentence())
    assert found.pop("inner") == "fp8"
    assert list(found.values()) == ["head"]


def test_a_model_within_a_model_is_asked_for_its_head():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = WithGetter()

        def forward(self, tokens):
            return self.model(tokens)

    assert kinds(Outer(), sentence()) == {"model.inner": "fp8", "model.projection": "head"}


def flat(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shifted(logits, tokens):
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, logits.shape[-1]).float(), tokens[:, 1:].flatten())


def classes_second(logits, tokens):
    """As nn.CrossEntropyLoss wants it: [batch, classes, positions]."""
    return F.cross_entropy(logits.transpose(1, 2), tokens)


def log_probabilities(logits, tokens):
    return -logits.log_softmax(-1).gather(-1, tokens[..., None]).mean()


def capped(logits, tokens):
    return F.cross_entropy((30 * torch.tanh(logits / 30)).view(-1, logits.shape[-1]), tokens.flatten(), label_smoothing=0.1)


def by_logsumexp(logits, tokens):
    return (logits.logsumexp(-1) - logits.gather(-1, tokens[..., None])[..., 0]).mean()


def in_chunks(logits, tokens):
    pairs = zip(logits.flatten(0, 1).chunk(4), tokens.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(part, target, reduction="sum") for part, target in pairs)


LOSSES = [flat, shifted, classes_second, log_probabilities, capped, by_logsumexp, in_chunks]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_cross_entropy_in_the_graph_makes_a_head(loss, backend):
    found = kinds(Language(loss=loss), sentence(), backend=backend, backward=False)
    assert found == {"inner": "fp8", "projection": "head"}


def over_positions(logits, tokens):
    """A distribution over positions, not over the GEMM's columns."""
    return logits.log_softmax(1).mean()


def probabilities(logits, tokens):
    return logits.softmax(-1).square().mean()


def squares(logits, tokens):
    return F.mse_loss(logits, torch.ones_like(logits))


def binary(logits, tokens):
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("loss", [over_positions, probabilities, squares, binary], ids=lambda f: f.__name__)
def test_other_losses_make_none(loss, backend):
    found = kinds(Language(loss=loss), sentence(), backend=backend, backward=False)
    assert found == {"inner": "fp8", "projection": "fp8"}


class TableAsInput(nn.Module):
    """Embeddings that GEMMs read as activations: learned queries, and a mixture of an embedding's rows."""

    def __init__(self):
        super().__init__()
        self.queries, self.inner, self.mix = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        q = self.inner(self.queries.weight)
        return q + self.mix(x).softmax(-1) @ self.queries.weight


def test_an_embedding_that_is_read_as_an_activation_makes_no_head():
    assert set(kinds(TableAsInput(), tokens_in()).values()) == {"fp8"}


def test_nothing_changes_for_blocks_compiled_one_by_one():
    model = nn.ModuleList(LlamaBlock(WIDTH, 2 * WIDTH) for _ in range(2))
    for block in model:
        found = kinds(block, torch.randn(2, TOKENS, WIDTH, requires_grad=True))
        assert len(found) == 7
        assert set(found.values()) == {"fp8"}


# -- thin GEMMs


class LoRA(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(("rank", "kind"), [(8, "thin"), (31, "thin"), (32, "fp8")])
def test_adapters_are_thin_below_32(rank, kind):
    assert kinds(LoRA(rank), tokens_in()) == {"base": "fp8", "down": kind, "up": kind}


def test_few_rows_are_not_thin():
    assert kinds(nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH, requires_grad=True)) == {"0": "fp8"}


# -- the order of things: rules, then structure


def test_rules_decide_where_they_match_and_nowhere_else():
    model, text = Language(tie=True), sentence()
    assert kinds(model, text, rules={"projection": "current"}) == {"inner": "fp8", "projection": "fp8"}
    assert kinds(model, text, rules={"*": "delayed"}, recipe="blockwise") == {"inner": "fp8", "projection": "fp8"}
    assert kinds(model, text, rules={"inner": None}) == {"inner": "rule", "projection": "head"}
    found = decisions(model, text, rules={"projection:grad_weight": "current"})
    assert found["projection"] == {"output": "head", "grad_input": "head", "grad_weight": "fp8"}


def test_all_selects_everything():
    assert set(kinds(Mixture(softmax_topk), tokens_in(), select="all").values()) == {"fp8"}
    assert set(kinds(Language(tie=True, loss=flat), sentence(), select="all").values()) == {"fp8"}
    assert set(kinds(LoRA(8), tokens_in(), select="all").values()) == {"fp8"}


def test_another_value_is_refused():
    with pytest.raises(OptionError, match=r"select is 'al'\. Did you mean 'all'"):
        fp8_compile(LoRA(8), "current", select="al")


@pytest.mark.parametrize(
    ("make", "argument", "module"),
    [
        (lambda: Mixture(softmax_topk), tokens_in, "gate"),
        (lambda: Language(tie=True), sentence, "projection"),
        (lambda: nn.Sequential(LoRA(8), LoRA(8)), tokens_in, "1.down"),
    ],
)
def test_the_reason_says_how_to_overrule_it_and_that_works(make, argument, module):
    compiled = fp8_compile(make(), "current", backend="aot_eager")
    compiled(argument())
    reason = next(g.reason for g in inspect(compiled).gemms if g.module == module)
    pattern = re.search(r"rules=\{'([^']*)': recipe\} or select='all'$", reason)
    assert pattern is not None, reason
    assert kinds(make(), argument(), rules={pattern[1]: "current"})[module] == "fp8"


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_every_recipe_leaves_the_same(recipe):
    assert kinds(Mixture(grouped_sigmoid), tokens_in(), recipe=recipe) == {"gate": "routing", "inner": "fp8"}
    assert kinds(Language(tie=True), sentence(), recipe=recipe) == {"inner": "fp8", "projection": "head"}
