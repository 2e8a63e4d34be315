"""GEMMs that stay in high precision by default: routers and heads, found by structure, and thin ones; rules overrule that."""

import functools
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.cases import each, rest
from tests.support.models import LlamaBlock, Net, Stack, mlp
from tests.support.selection import (
    BYTES,
    EXPERTS,
    FORMS_OF_BYTES,
    POSITIONS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Bytes,
    Mixture,
    NanoGPT,
    decisions,
    grouped_sigmoid,
    kinds,
    sentence,
    softmax_topk,
    tokens_in,
)

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


# -- routers


def linears(*names, **sizes):
    return {name: nn.Linear(WIDTH, sizes.get(name, WIDTH)) for name in (*names, *sizes)}


def gathered_rows(logits, h, experts):
    """A mixture of depths: the best tokens go through the layer."""
    rows = logits.amax(-1).topk(16).indices[:, None].expand(-1, WIDTH)
    return h.scatter_add(0, rows, torch.tanh(h.gather(0, rows) * experts[0]))


def mixed(h, experts, weights, chosen):
    """The two best experts of each row."""
    return (h[:, None] * experts[chosen] * weights[..., None]).sum(1)


def two_argmaxes(logits, h, experts):
    """GShard's: the second expert is the best one but the first."""
    first = F.one_hot(logits.argmax(-1), EXPERTS)
    second = F.one_hot(logits.masked_fill(first.bool(), -torch.inf).argmax(-1), EXPERTS)
    return h * ((first + second).to(h.dtype) @ experts)


def expert_choice(logits, h, experts):
    """Experts choose their tokens."""
    weights, tokens = logits.softmax(-1).t().topk(4)
    chosen = h[tokens] * experts[:, None] * weights[..., None]
    return torch.zeros_like(h).index_add(0, tokens.flatten(), chosen.flatten(0, 1))


def masked_loop(logits, h, experts):
    """Every expert runs on every token; where it was not chosen, its weight is 0."""
    weights, chosen = logits.softmax(-1).topk(2)
    return sum((weights * (chosen == i)).sum(-1, keepdim=True) * torch.tanh(h * experts[i]) for i in range(4))


def where_loop(logits, h, experts):
    chosen, out = logits.argmax(-1, keepdim=True), torch.zeros_like(h)
    for i in range(4):
        out = torch.where(chosen == i, h * experts[i], out)
    return out


def below_the_second(logits, h, experts):
    """The two best experts are those whose scores are no smaller than the second best."""
    scores = logits.masked_fill(logits < logits.topk(2)[0][:, -1:], -torch.inf).softmax(-1)
    return sum(scores[:, i : i + 1] * torch.tanh(h * experts[i]) for i in range(4))


def where_largest(logits, h, experts):
    return h * (((logits == logits.amax(-1, keepdim=True)).to(h.dtype) * logits) @ experts)


def bags(logits, h, experts):
    """Product keys: the best rows of a table, summed."""
    weights, chosen = logits.topk(2)
    return h * F.embedding_bag(chosen, experts, per_sample_weights=weights.softmax(-1), mode="sum")


def kth_best(logits, h, experts):
    return h * experts[logits.kthvalue(EXPERTS, -1)[1]]


def clustered(operation):
    """The mean of the rows that chose an expert, or one of them."""

    def form(logits, h, experts):
        best, table, rows = logits.argmax(-1), torch.zeros(EXPERTS, WIDTH), h * experts[0]
        if operation == "scatter_reduce":
            return h * table.scatter_reduce(0, best[:, None].expand(-1, WIDTH), rows, "mean").sum(0)
        return h * table.index_copy(0, best, rows).sum(0)

    return form


ROUTERS = {  # of logits, rows and experts
    "softmax, topk": softmax_topk,
    "topk, softmax": lambda y, h, e: mixed(h, e, y.topk(2)[0].softmax(-1), y.topk(2)[1]),
    "argmax": lambda y, h, e: h * ((F.one_hot((s := y.sigmoid()).argmax(-1), EXPERTS).to(h.dtype) * s) @ e),
    "sort": lambda y, h, e: h * e[(order := y.softmax(-1).sort(descending=True))[1][:, 0]] * order[0][:, :1],
    "argsort": lambda y, h, e: h * e.index_select(0, y.softmax(-1).argsort(-1, descending=True)[:, 0]),
    "multinomial": lambda y, h, e: h * e[torch.multinomial(y.softmax(-1), 1)[:, 0]],
    "max": lambda y, h, e: h * F.embedding((best := y.softmax(-1).max(-1))[1], e) * best[0][:, None],
    "scatter": lambda y, h, e: h * (torch.zeros_like(y).scatter(1, (best := y.softmax(-1).topk(2))[1], best[0]) @ e),
    **{f.__name__: f for f in (two_argmaxes, expert_choice, grouped_sigmoid, masked_loop, where_loop, gathered_rows)},
    **{f.__name__: f for f in (below_the_second, where_largest, bags, kth_best)},
    "scatter_reduce": clustered("scatter_reduce"),
    "index_copy": clustered("index_copy"),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_is_found_with_its_gradients_in_inference_and_in_inductors_graphs(kind):
    model, x = Mixture(ROUTERS[kind]), tokens_in()
    found = decisions(model, x)
    assert set(found["gate"].values()) == {"routing"}
    assert "output" in found["gate"]
    assert found["inner"] == dict.fromkeys(("output", "grad_input", "grad_weight"), "fp8")
    if kind in ("grouped_sigmoid", "argmax", "masked_loop"):
        with torch.no_grad():
            inference = kinds(model, x, backward=False)
        for found in (inference, kinds(model, x, backend="inductor", backward=False)):
            assert (found["gate"], found["inner"]) == ("routing", "fp8")


def broken_after_topk(m, x):
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    h = m.inner(x)
    torch._dynamo.graph_break()
    return mixed(h, m.experts, weights, chosen)


def broken_after_one_hot(m, x):
    mask, h = F.one_hot(m.gate(x).argmax(-1), EXPERTS), m.inner(x)
    mask = mask * (mask.cumsum(0) <= TOKENS // 2)  # an expert takes so many tokens
    torch._dynamo.graph_break()
    return h * (mask.to(h.dtype) @ m.experts)


def broken_by_nonzero(m, x):
    """The first graph returns the mask of the first expert."""
    h = m.inner(x)
    rows = (m.gate(x).argmax(-1) == 0).nonzero().flatten()
    return h.index_add(0, rows, h[rows])


def broken_after_padding(m, x):
    """Tokens that are zero are padding, which no expert gets, as in NLLB-MoE."""
    logits, h = m.gate(x), m.inner(x)
    padding = (x == 0).all(-1)
    scores = logits.softmax(-1) * (F.one_hot(logits.argmax(-1), EXPERTS) * (~padding).unsqueeze(-1))
    torch._dynamo.graph_break()
    return sum(scores[..., i : i + 1] * (h * i) for i in range(EXPERTS))


@pytest.mark.parametrize("forward", [broken_after_topk, broken_after_one_hot, broken_after_padding, broken_by_nonzero])
def test_a_router_whose_rows_the_next_graph_takes(forward):
    experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 8)
    found = kinds(Net(forward, experts=experts, **linears("inner", gate=EXPERTS)), tokens_in())
    assert (found["gate"], found["inner"]) == ("routing", "fp8")


def test_all_gemms_that_decide_together_are_routers():
    """Shazeer et al., 2017."""

    def noisy(m, x):
        logits = m.gate(x) + torch.randn(TOKENS, EXPERTS) * F.softplus(m.noise(x))
        return m.up(x) * softmax_topk(logits, torch.ones(TOKENS, EXPERTS), m.experts)

    experts = nn.Parameter(torch.randn(EXPERTS, EXPERTS))
    model = Net(noisy, experts=experts, **linears(gate=EXPERTS, noise=EXPERTS, up=EXPERTS))
    assert kinds(model, tokens_in()) == {"gate": "routing", "noise": "routing", "up": "fp8"}


# -- what is no router


def classifier(after):
    """A classifier whose logits `after` turns into what it returns."""

    def forward(m, x, labels):
        logits = m.out(torch.tanh(m.inner(x)))
        return logits, after(logits, labels)

    return Net(forward, **linears("inner", out=EXPERTS))


def confidence(logits, labels):
    probabilities = logits.softmax(-1)
    return probabilities.gather(1, probabilities.argmax(-1, keepdim=True)).mean()


def macro_f1(logits, labels):
    predicted, actual = F.one_hot(logits.argmax(-1), EXPERTS), F.one_hot(labels, EXPERTS)
    return ((predicted * actual).sum(0) / (predicted + actual).sum(0).clamp(min=1)).mean()


#: Metrics and predictions; pooling takes values, not rows.
NO_ROUTERS = {
    "accuracy": lambda y, labels: (y.argmax(-1) == labels).float().mean(),
    "top-5 accuracy": lambda y, labels: (y.topk(5).indices == labels[:, None]).any(-1).float().mean(),
    "accuracy by rank": lambda y, labels: (y.argsort(-1, descending=True) == labels[:, None]).float().argmax(-1),
    "predictions": lambda y, labels: y.argmax(-1),
    "confidence": confidence,
    "recall": lambda y, labels: ((y.argmax(-1) == 1) & (labels == 1)).sum() / (labels == 1).sum(),
    "macro F1": macro_f1,
    "confusion": lambda y, labels: torch.bincount(y.argmax(-1) * EXPERTS + labels, minlength=EXPERTS**2),
    "matches of a batch": lambda y, labels: (y.argmax(-1) == torch.arange(TOKENS)).float().mean(),
    "pooling": lambda y, labels: y.max(0).values.sum() + y.topk(3, dim=0).values.sum() + y.sort(-1).values[:, 0].sum(),
}


@pytest.mark.parametrize("after", NO_ROUTERS.values(), ids=NO_ROUTERS)
def test_metrics_and_predictions_make_no_router(after):
    assert kinds(classifier(after), tokens_in(), torch.randint(EXPERTS, (TOKENS,))) == {"inner": "fp8", "out": "fp8"}


def hard_examples(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses[losses.topk(8).indices].mean()


def pseudo_labels(logits, labels):
    """A model's predictions as labels of other rows."""
    half = TOKENS // 2
    return F.cross_entropy(logits[half:], logits[:half].detach().argmax(-1))


@BACKENDS
@pytest.mark.parametrize("loss", [hard_examples, pseudo_labels], ids=lambda f: f.__name__)
def test_a_losss_gemm_is_a_head_and_no_router(loss, backend):
    found = kinds(classifier(loss), tokens_in(), torch.randint(EXPERTS, (TOKENS,)), backend=backend, backward=False)
    assert found == {"inner": "fp8", "out": "head"}


def attention(m, x):
    """By hand to the best positions only, of a single head in a single sequence: its products are plain GEMMs."""
    scores = m.q(x) @ m.k(x).t() / 8
    mask = torch.full_like(scores, -torch.inf).scatter(-1, scores.topk(8).indices, 0.0)
    return m.o((scores + mask).softmax(-1) @ m.v(x))


@BACKENDS
def test_a_contrastive_loss_has_no_router(backend):
    def contrastive(m, x, y):
        logits = F.normalize(m.left(x), dim=-1) @ F.normalize(m.right(y), dim=-1).t()
        here = torch.arange(TOKENS)
        loss = F.cross_entropy(logits, here) + F.cross_entropy(logits.t(), here)
        return loss, (logits.argmax(-1) == here).float().mean()

    found = kinds(Net(contrastive, **linears("left", "right")), tokens_in(), tokens_in(), backend=backend, backward=False)
    assert found.pop("left") == found.pop("right") == "fp8"
    assert "routing" not in found.values()


def read_as_activation(m, x):
    """An embedding: learned queries, for each sequence, and a mixture of an embedding's rows."""
    return m.inner(m.queries.weight.expand(2, -1, -1)) + m.mix(x).softmax(-1) @ m.queries.weight


def autoencoded(m, x):
    """By a codebook, whose index is computed in the graph."""
    return m.decode(m.book(torch.cdist(m.encode(x)[None], m.book.weight[None])[0].argmin(-1)))


def clipped(m, x):
    """Rows are scaled where the largest feature of all exceeds a limit: a choice of no rows."""
    h = m.one(x)
    return m.two(h * torch.where(h.abs().amax() > m.limit, 0.5, 1.0))


def largest_in_time(m, x):
    h = m.one(x)
    return m.two(h * (h == h.amax(0, keepdim=True)))


def largest_of_all(m, x):
    h = m.one(x)
    return m.two(h * (h == h.amax()) + h * (h == h.max()) + h.mean().amax())


def gated_logarithm(m, x):
    return (m.one(x).exp() * m.two(x).softmax(-1) + 1).log()


#: Models all of whose GEMMs are in FP8, with their inputs; a second block as one that is compiled by itself.
ALL_IN_FP8 = {
    "attention": (lambda: LlamaBlock(WIDTH, 2 * WIDTH), (2, TOKENS, WIDTH)),
    "attention by hand": (lambda: Net(attention, **linears("q", "k", "v", "o")), (TOKENS, WIDTH)),
    "an embedding read as an activation": (
        lambda: Net(read_as_activation, queries=nn.Embedding(TOKENS, WIDTH), **linears("inner", mix=TOKENS)),
        (TOKENS, WIDTH),
    ),
    **{
        f.__name__: (
            functools.partial(lambda f: Net(f, limit=nn.Parameter(torch.ones(())), **linears("one", "two")), f),
            (TOKENS, WIDTH),
        )
        for f in (clipped, largest_in_time, largest_of_all, gated_logarithm)
    },
    "few rows": (lambda: nn.Linear(WIDTH, WIDTH), (4, WIDTH)),
    "an autoencoder": (lambda: mlp(VOCABULARY, WIDTH, VOCABULARY), (TOKENS, VOCABULARY)),
}


@pytest.mark.parametrize(("make", "shape"), ALL_IN_FP8.values(), ids=ALL_IN_FP8)
def test_neither_routers_nor_heads(make, shape):
    found = kinds(make(), torch.randn(shape, requires_grad=True))
    assert set(found.values()) == {"fp8"}
    assert len(found) >= sum(isinstance(m, nn.Linear) for m in make().modules())


def pooled(m, x):
    """Attention of learned queries, which are the same for every input."""
    q, k, v = m.q(m.queries.expand(len(x), -1, -1)), m.k(x), m.v(x)
    return (q @ k.mT / 8).softmax(-1) @ v


def merged(m, x):
    """Experts with adapters that are merged."""
    return x @ (m.experts + m.down @ m.up)


def factorized(m, x):
    """Experts of two factors."""
    return x @ (m.down @ m.up)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: Net(factorized, down=nn.Parameter(torch.randn(4, WIDTH, 16)), up=nn.Parameter(torch.randn(4, 16, WIDTH))),
            True,
        ),
        (lambda: Net(pooled, queries=nn.Parameter(torch.randn(1, 32, WIDTH)), **linears("q", "k", "v")), False),
        (
            lambda: Net(
                merged,
                experts=nn.Parameter(torch.randn(4, WIDTH, WIDTH)),
                down=nn.Parameter(torch.randn(4, WIDTH, 16)),
                up=nn.Parameter(torch.randn(4, 16, WIDTH)),
            ),
            True,
        ),
    ],
    ids=["factorized experts", "learned queries", "merged experts"],
)
def test_a_product_of_parameters_alone_is_no_experts_weight_and_a_sum_with_it_is(make, expected):
    compiled = fp8_compile(make(), "rowwise", select="all", backend="aot_eager")
    compiled(torch.randn(4, TOKENS, WIDTH)).sum().backward()
    assert {g.quantized for g in inspect(compiled).gemms if g.module == "matmul"} == {expected}


def test_a_codebook_makes_no_head():
    model = Net(autoencoded, book=nn.Embedding(VOCABULARY, WIDTH), **linears("encode", decode=VOCABULARY))
    found = kinds(model, torch.randn(TOKENS, WIDTH))
    assert found["encode"] == found["decode"] == "fp8"


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

    def hidden(self, tokens):
        return torch.tanh(self.inner(self.tokens(tokens)))

    def forward(self, tokens):
        logits = self.projection(self.hidden(tokens))
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
        return self.hidden(tokens) @ self.tokens.weight.t()


class Padded(Language):
    """The embedding has more rows than there are tokens; logits are scaled."""

    def forward(self, tokens):
        return F.linear(self.hidden(tokens), self.tokens.weight[: VOCABULARY - 5] * 0.125)


def squares(logits, tokens):
    return F.mse_loss(logits, torch.ones_like(logits))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Language(tie=True), ["fp8", "head"]),
        (Language, ["fp8", "head"]),  # more below
        (lambda: WithGetter(loss=squares), ["fp8", "head"]),
        (lambda: nn.Sequential(WithGetter(loss=squares)), ["fp8", "head"]),
        (lambda: WithoutOutput(loss=squares), ["fp8", "fp8"]),
        (Functional, ["fp8", "head"]),
        (Padded, ["fp8", "head"]),
    ],
    ids=["tied", "logits returned", "named by the model", "named by a model within", "not named", "functional", "padded"],
)
def test_tied_weights_and_what_the_model_names_are_heads(make, expected):
    found = kinds(make(), sentence())
    assert [found.pop(next(name for name in found if name.endswith("inner"))), *found.values()] == expected


def in_chunks(logits, tokens):
    pairs = zip(logits.flatten(0, 1).chunk(4), tokens.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(part, target, reduction="sum") for part, target in pairs)


LOSSES = {  # with what they make of the GEMM of the logits
    "flat": (lambda y, t: F.cross_entropy(y.flatten(0, 1).float(), t.flatten()), "head"),
    "shifted": (lambda y, t: F.cross_entropy(y[:, :-1].contiguous().view(-1, y.shape[-1]).float(), t[:, 1:].flatten()), "head"),
    "classes second": (lambda y, t: F.cross_entropy(y.transpose(1, 2), t), "head"),  # as nn.CrossEntropyLoss wants it
    "log probabilities": (lambda y, t: -y.log_softmax(-1).gather(-1, t[..., None]).mean(), "head"),
    "capped": (
        lambda y, t: F.cross_entropy((30 * torch.tanh(y / 30)).view(-1, y.shape[-1]), t.flatten(), label_smoothing=0.1),
        "head",
    ),
    "logsumexp": (lambda y, t: (y.logsumexp(-1) - y.gather(-1, t[..., None])[..., 0]).mean(), "head"),
    "in chunks": (in_chunks, "head"),
    "logarithm": (lambda y, t: F.nll_loss(y.softmax(-1).log().flatten(0, 1), t.flatten()), "head"),
    "logarithm of some": (lambda y, t: -(y.softmax(-1).gather(-1, t[..., None]) + 1e-9).log().mean(), "head"),
    "quotient": (lambda y, t: -(y.exp().gather(-1, t[..., None]) / y.exp().sum(-1, keepdim=True)).log().mean(), "head"),
    "probabilities": (lambda y, t: y.softmax(-1).gather(-1, t[..., None]).mean(), "fp8"),
    "over positions": (lambda y, t: y.log_softmax(1).mean(), "fp8"),  # not over the GEMM's columns
    "squares": (squares, "fp8"),
    "binary": (lambda y, t: F.binary_cross_entropy_with_logits(y, torch.ones_like(y)), "fp8"),
}


@BACKENDS
@pytest.mark.parametrize(("loss", "kind"), LOSSES.values(), ids=LOSSES)
def test_cross_entropy_in_the_graph_makes_a_head(loss, kind, backend):
    found = kinds(Language(loss=loss), sentence(), backend=backend, backward=False)
    assert found == {"inner": "fp8", "projection": kind}


# -- heads whose loss is outside of the model: by what becomes of their result, and by the embedding they match


def heads(model, *args, **options):
    return {module for module, kind in kinds(model, *args, **options).items() if kind == "head"}


@BACKENDS
def test_an_untied_head_is_found_with_the_loss_outside(backend):
    found = kinds(NanoGPT(), sentence(), backend=backend, backward=backend == "aot_eager")
    assert found == {f"h.{i}.{name}": "fp8" for i in (0, 1) for name in ("up", "down")} | {"lm_head": "head"}


def printing(model, tokens):
    """No module reads as many features as it has columns."""
    logits = model.lm_head(model.hidden(tokens))
    torch._dynamo.graph_break()
    return logits.float()


def by_a_helper(model, tokens):
    logits = printing(model, tokens)
    torch._dynamo.graph_break()
    return 2 * logits


def by_cumsum(model, tokens):
    mask = (tokens != 0).int()
    return model.wte(tokens) + model.wpe((torch.cumsum(mask, 1) * mask).long())


def encoded(model, tokens):
    x = model.wte(tokens)
    for block in model.h:
        x = block(x)
    return x


WIDE = {"vocabulary": POSITIONS, "rows": VOCABULARY}  # results are as wide as the table of positions is long
SINUSOIDS = torch.randn(POSITIONS, WIDTH)
ALL_BUT_LAST = VOCABULARY - 1

FORMS = {  # of the output: 1 head
    "last token": lambda m, t: m.lm_head(m.hidden(t)[:, [-1], :]),
    "sliced": lambda m, t: m.lm_head(m.hidden(t))[:, -1].float(),
    "capped": lambda m, t: 30 * torch.tanh(m.lm_head(m.hidden(t)) / 30),
    "masked": lambda m, t: m.lm_head(m.hidden(t)).masked_fill((t == 0)[..., None], float("-inf")),  # by the caller's tokens
    "gated": lambda m, t: (y := m.lm_head(m.hidden(t))) * torch.sigmoid(y),
    "classes first": lambda m, t: m.lm_head(m.hidden(t)).transpose(1, 2).contiguous(),
    "among others": lambda m, t: {"hidden": (h := m.hidden(t)), "logits": m.lm_head(h).bfloat16(), "tokens": t + 1},
    "weight first": lambda m, t: (m.lm_head.weight @ m.hidden(t).flatten(0, 1).t()).t(),  # columns are the result's rows
}
LOOK_UPS = {  # of the caller's integers: 1 head
    "shifted": lambda m, t: m.wte((t - 5).clamp(0, ALL_BUT_LAST).to(torch.int64)),
    "replaced": lambda m, t: m.wte(torch.where(t < 0, 0, t.flatten()[: t.numel()].view_as(t))),
    "indexed": lambda m, t: m.wte.weight[t],
    "selected": lambda m, t: m.wte.weight.index_select(0, t.flatten()).view(*t.shape, -1),
    "scaled, as Gemma's": lambda m, t: F.embedding(t, m.wte.weight * 8.0) * 0.5,
}
NONE = {
    "a norm": {"form": lambda m, t: F.layer_norm(m.lm_head(m.hidden(t)), (VOCABULARY,))},
    "a sum": {"form": lambda m, t: m.lm_head(m.hidden(t)).sum(-1)},
    "a squared error": {"form": lambda m, t: F.mse_loss(m.lm_head(m.hidden(t)), torch.ones(2, TOKENS, VOCABULARY))},
    "another width": {"vocabulary": 80, "rows": VOCABULARY},
    "a residual stream": {"width": VOCABULARY, "form": encoded},
}
POSITIONS_DO_NOT_COUNT = {
    "by arange": WIDE,
    "by cumsum": {"look_up": by_cumsum, **WIDE},
    "a buffer": {"look_up": lambda m, t: m.wte(t) + m.sinusoids[t.clamp(0, POSITIONS - 1)], **WIDE},
    "classes of tokens": {"look_up": lambda m, t: m.wte(t) + m.wpe((t > 5).long()), **WIDE},
}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        *((options, 0) for options in NONE.values()),
        ({"form": printing}, 1),
        ({"form": by_a_helper}, 1),
        *rest((options, 0) for options in POSITIONS_DO_NOT_COUNT.values()),
        *rest(({"form": form}, 1) for form in FORMS.values()),
        *rest(({"look_up": look_up}, 1) for look_up in LOOK_UPS.values()),
    ],
    ids=[*NONE, "printing", "by a helper", *POSITIONS_DO_NOT_COUNT, *FORMS, *LOOK_UPS],
)
def test_heads_of_a_gpt(options, count):
    model = NanoGPT(**options)
    model.register_buffer("sinusoids", SINUSOIDS)
    assert len(heads(model, sentence(), backward=False)) == count
    if "look_up" in options:
        assert len(heads(model, sentence().int())) == count


WIDTHS = [(BYTES, BYTES), (BYTES, 32), (32, BYTES)]


def marked(model):
    compiled = fp8_compile(model, "current", backend="aot_eager")
    compiled(sentence(BYTES)).sum().backward()
    gemms = inspect(compiled).gemms
    return {g.module for g in gemms if g.looks_like_head}, {g.module for g in gemms}


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("form", FORMS_OF_BYTES)
@each("widths", WIDTHS)
def test_a_layer_as_wide_as_the_vocabulary_is_no_head(widths, form):
    """Every graph between two breaks returns activations of that width."""
    found, every = marked(Bytes(*widths, **FORMS_OF_BYTES[form]))
    assert found == {"head"}
    assert len(every) == 4


@each("widths", WIDTHS)
def test_a_byte_model_without_a_head_has_none_between_breaks(widths):
    found, _ = marked(Bytes(*widths, after=torch._dynamo.graph_break, is_residual=False, has_head=False))
    assert not found - {"last"}  # which ends the model and may be its head, for all that anyone can tell


def test_blocks_compiled_one_by_one_have_no_heads():
    model = Bytes(BYTES, BYTES)
    for module in (model.up, model.down, model.last):
        fp8_compile(module, "current", backend="aot_eager", in_place=True)
    model(sentence(BYTES)).sum().backward()
    assert not [g.module for g in inspect(model).gemms if g.looks_like_head]


def test_an_output_that_another_weight_reads_is_no_head():
    """Values for later calls are outputs as well: keys as wide as the vocabulary, and every hidden state."""

    def caching(m, tokens):
        x = m.embedding(tokens)
        key, value = m.key(x), m.value(x)
        hidden = m.out(F.scaled_dot_product_attention(key, key, value))
        return m.head(F.relu(hidden)), hidden, key.view(2, TOKENS, 4, -1).transpose(1, 2), value

    wide = {name: nn.Linear(BYTES, BYTES) for name in ("out", "head")}
    narrow = {name: nn.Linear(32, BYTES) for name in ("key", "value")}
    assert heads(Net(caching, embedding=nn.Embedding(BYTES, 32), **narrow, **wide), sentence(BYTES)) == {"head"}


def test_what_looks_like_a_head_is_marked_whoever_decides():
    def behind_a_break(model, tokens):
        hidden = model.hidden(tokens)
        torch._dynamo.graph_break()
        return model.lm_head(hidden)

    compiled = fp8_compile(NanoGPT(form=behind_a_break), "current", backend="aot_eager")
    with pytest.warns(UserWarning, match="lm_head"):
        compiled(sentence()).sum().backward()
    assert {(g.module, g.quantized) for g in inspect(compiled).gemms if g.looks_like_head} == {("lm_head", True)}
    for options in ({}, {"select": "all"}, {"rules": {"lm_head": "current"}}, {"rules": {"lm_head": None}}):
        compiled = fp8_compile(NanoGPT(), "current", backend="aot_eager", **options)
        with torch.no_grad():
            compiled(sentence())
        assert {g.module for g in inspect(compiled).gemms if g.looks_like_head} == {"lm_head"}, options


# -- thin GEMMs


def lora(rank):
    down, up = nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)
    return Net(lambda m, x: m.base(x) + m.up(m.down(x)), base=nn.Linear(WIDTH, WIDTH), down=down, up=up)


@pytest.mark.parametrize(("rank", "kind"), [(8, "thin"), (31, "thin"), (32, "fp8")])
def test_adapters_are_thin_below_32(rank, kind):
    assert kinds(lora(rank), tokens_in()) == {"base": "fp8", "down": kind, "up": kind}
    assert decisions(NanoGPT(vocabulary=rank), sentence(rank))["lm_head"]["output"] == ("thin" if kind == "thin" else "head")


# -- GEMMs of no data, and of gradients of linear algebra


def adapted(m, x):
    """An adapter that is merged, and a penalty."""
    return F.linear(x, m.inner.weight + m.up @ m.down) + (m.inner.weight @ m.inner.weight.mT).square().mean()


def positions(m, x):
    """Relative positions, learned and sine ones, by linears whose results are added: no weights."""
    return m.inner(x) + m.two(m.table[: len(x)])


def computed_alone(m):
    """A grid of coordinates, which a model without inputs encodes: its only data."""
    return m.two(torch.sin(m.one(m.grid)))


def factors():
    return {name: nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for name in ("up", "down")}


def orthogonal(orthogonal_map):
    return nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map=orthogonal_map)


@pytest.mark.parametrize(
    ("make", "no_data"),
    [
        (lambda: Net(adapted, **factors(), **linears("inner")), {"self", "inner"}),
        *((functools.partial(orthogonal, name), {"parametrizations.weight.0"}) for name in ("matrix_exp", "cayley")),
    ],
    ids=["adapters and penalties", "exponentials", "solutions"],
)
def test_gemms_of_parameters_alone_stay_in_high_precision(make, no_data):
    x = tokens_in()
    compiled = fp8_compile(make(), "current", backend="aot_eager")
    compiled(x).sum().backward()
    found = {(g.module, None if g.reason is None else g.reason.partition(":")[0]) for g in inspect(compiled).gemms}
    assert found == {
        *((module, "no data") for module in no_data),
        ("matmul" if "inner" in no_data else "self", None),
    }
    assert set(kinds(make(), x, select="all").values()) == {"fp8"}


def inverted(m, x):
    """A whitening, whose covariance is inverted."""
    h = m.inner(x)
    return h @ torch.linalg.inv(h.mT @ h + torch.eye(WIDTH))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_products_that_are_inverted_and_gradients_of_inverses_stay_in_high_precision(backend):
    model, x = Net(inverted, **linears("inner")), tokens_in()
    compiled = fp8_compile(model, "current", backend=backend)
    compiled(x.requires_grad_()).sum().backward()
    reasons = Counter(g.reason and g.reason.partition(";")[0] for g in inspect(compiled).gemms)
    assert reasons == {
        None: 6,
        "linear algebra: the result is solved, inverted or decomposed": 3,
        "gradient formula: it is part of the gradient of linalg_inv_ex, and belongs to no forward GEMM": 2,
    }


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: Net(computed_alone, grid=nn.Parameter(torch.randn(TOKENS, WIDTH)), **linears("one", "two")), ()),
        (lambda: Net(lambda m: m.inner(torch.randn(TOKENS, WIDTH)) @ m.up, up=factors()["up"], **linears("inner")), ()),
        (lambda: Net(positions, table=nn.Parameter(torch.randn(TOKENS, WIDTH)), **linears("inner", "two")), (tokens_in(),)),
        (
            lambda: Net(
                lambda m, x: F.scaled_dot_product_attention(m.q(m.table).repeat(2, 1, 1), m.k(x), x),
                table=nn.Parameter(torch.randn(TOKENS, WIDTH)),
                **linears("q", "k"),
            ),
            (torch.randn(2, TOKENS, WIDTH),),
        ),
    ],
    ids=["a model without inputs", "noise", "positions", "queries"],
)
def test_what_has_no_data_and_is_no_weight_is_rewritten(make, inputs):
    found = kinds(make(), *inputs)
    assert set(found.values()) - {"unsupported op"} == {"fp8"}


# -- the order of things: rules, then structure


def test_rules_decide_where_they_match_and_nowhere_else():
    model, text = Language(tie=True), sentence()
    assert kinds(model, text, rules={"projection": "current"}) == {"inner": "fp8", "projection": "fp8"}
    assert kinds(model, text, rules={"*": "delayed"}, recipe="blockwise") == {"inner": "fp8", "projection": "fp8"}
    assert kinds(model, text, rules={"inner": None}) == {"inner": "rule", "projection": "head"}
    found = decisions(model, text, rules={"projection:grad_weight": "current"})
    assert found["projection"] == {"output": "head", "grad_input": "head", "grad_weight": "fp8"}


@pytest.mark.parametrize(
    ("make", "argument", "module"),
    [
        (lambda: Mixture(softmax_topk), tokens_in, "gate"),
        (lambda: Language(tie=True), sentence, "projection"),
        (NanoGPT, sentence, "lm_head"),
        (lambda: nn.Sequential(lora(8), lora(8)), tokens_in, "1.down"),
    ],
)
def test_the_reason_says_how_to_overrule_it_and_that_works(make, argument, module):
    compiled = fp8_compile(make(), "current", backend="aot_eager")
    compiled(argument()).sum().backward()
    reasons = {g.role: g.reason for g in inspect(compiled).gemms if g.module == module}
    assert len(reasons) == 3
    patterns = {re.search(r"rules=\{'([^']*)': recipe\} or select='all'$", reason)[1] for reason in reasons.values()}
    assert len(patterns) == 1
    assert module != "lm_head" or all("output of the graph" in reason for reason in reasons.values())
    assert kinds(make(), argument(), rules=dict.fromkeys(patterns, "current"))[module] == "fp8"


def test_the_rule_that_a_reason_proposes_matches_equal_layers_and_not_every_module():
    def block():
        return nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64))

    for model, proposed in (
        (block(), {"rules={'0': recipe}", "rules={'1': recipe}"}),
        (Stack(block() for _ in range(2)), {"rules={'layers.*.*': recipe}"}),
    ):
        compiled = fp8_compile(model, "current", backend="aot_eager")
        with torch.no_grad():
            compiled(torch.randn(32, 64))
        assert {re.search(r"rules=\{.*?\}", gemm.reason)[0] for gemm in inspect(compiled).gemms} == proposed
