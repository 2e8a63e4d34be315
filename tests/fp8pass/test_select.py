"""GEMMs that stay in high precision by default: routers and heads, found by structure, and thin ones; rules overrule that."""

import functools
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.cases import each
from tests.support.models import Net
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


def masked_loop(logits, h, experts):
    """Every expert runs on every token; where it was not chosen, its weight is 0."""
    weights, chosen = logits.softmax(-1).topk(2)
    return sum((weights * (chosen == i)).sum(-1, keepdim=True) * torch.tanh(h * experts[i]) for i in range(4))


ROUTERS = {  # of logits, rows and experts
    "softmax, topk": softmax_topk,
    "argmax": lambda y, h, e: h * ((F.one_hot((s := y.sigmoid()).argmax(-1), EXPERTS).to(h.dtype) * s) @ e),
    "scatter": lambda y, h, e: h * (torch.zeros_like(y).scatter(1, (best := y.softmax(-1).topk(2))[1], best[0]) @ e),
    **{f.__name__: f for f in (grouped_sigmoid, masked_loop)},
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_is_found_with_its_gradients_in_inference_and_in_inductors_graphs(kind):
    model, x = Mixture(ROUTERS[kind]), tokens_in()
    found = decisions(model, x)
    assert set(found["gate"].values()) == {"routing"}
    assert "output" in found["gate"]
    assert found["inner"] == dict.fromkeys(("output", "grad_input", "grad_weight"), "fp8")
    if kind in ("grouped_sigmoid", "masked_loop"):
        with torch.no_grad():
            inference = kinds(model, x, backward=False)
        for found in (inference, kinds(model, x, backend="inductor", backward=False)):
            assert (found["gate"], found["inner"]) == ("routing", "fp8")


def broken_after_topk(m, x):
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    h = m.inner(x)
    torch._dynamo.graph_break()
    return (h[:, None] * m.experts[chosen] * weights[..., None]).sum(1)


def test_a_router_whose_rows_the_next_graph_takes():
    experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 8)
    found = kinds(Net(broken_after_topk, experts=experts, **linears("inner", gate=EXPERTS)), tokens_in())
    assert (found["gate"], found["inner"]) == ("routing", "fp8")


# -- what is no router


NO_ROUTERS = {
    "accuracy by rank": lambda y, labels: (y.argsort(-1, descending=True) == labels[:, None]).float().argmax(-1),
    "recall": lambda y, labels: (F.one_hot(y.argmax(-1), EXPERTS) * F.one_hot(labels, EXPERTS)).sum(0),
    "hard examples": lambda y, labels: (h := (y - F.one_hot(labels, EXPERTS)).abs().sum(-1))[h.topk(8).indices].mean(),
}


@pytest.mark.parametrize("after", NO_ROUTERS.values(), ids=NO_ROUTERS)
def test_metrics_and_predictions_make_no_router(after):
    def forward(m, x, labels):
        logits = m.out(torch.tanh(m.inner(x)))
        return logits, after(logits, labels)

    model, labels = Net(forward, **linears("inner", out=EXPERTS)), torch.randint(EXPERTS, (TOKENS,))
    assert kinds(model, tokens_in(), labels, backward=False) == {"inner": "fp8", "out": "fp8"}


# -- heads


def language(loss=None):
    """A model with the loss of its logits and tokens, if there is one, inside."""
    return NanoGPT(form=None if loss is None else lambda m, tokens: loss(m.lm_head(m.hidden(tokens)), tokens))


def tied(model):
    model.lm_head.weight = model.wte.weight
    return model


def in_chunks(logits, tokens):
    pairs = zip(logits.flatten(0, 1).chunk(4), tokens.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(part, target, reduction="sum") for part, target in pairs)


LOSSES = {  # with what they make of the GEMM of the logits
    "flat": (lambda y, t: F.cross_entropy(y.flatten(0, 1).float(), t.flatten()), "head"),
    "log probabilities": (lambda y, t: -y.log_softmax(-1).gather(-1, t[..., None]).mean(), "head"),
    "capped": (lambda y, t: F.cross_entropy((30 * torch.tanh(y / 30)).flatten(0, 1), t.flatten(), label_smoothing=0.1), "head"),
    "in chunks": (in_chunks, "head"),
    "turned": (lambda y, t: F.cross_entropy(y.mT[0, :, 1:][None], t[:1, 1:]), "head"),
    "quotient": (lambda y, t: -(y.exp().gather(-1, t[..., None]) / y.exp().sum(-1, keepdim=True)).log().mean(), "head"),
    "probabilities": (lambda y, t: y.softmax(-1).gather(-1, t[..., None]).mean(), "fp8"),
    "over positions": (lambda y, t: y.log_softmax(1).mean(), "fp8"),  # not over the GEMM's columns
}


@BACKENDS
@pytest.mark.parametrize(("loss", "kind"), LOSSES.values(), ids=LOSSES)
def test_cross_entropy_in_the_graph_makes_a_head(loss, kind, backend):
    found = kinds(language(loss), sentence(), backend=backend, backward=False)
    assert found.pop("lm_head") == kind
    assert set(found.values()) == {"fp8"}


# -- heads whose loss is outside of the model: by what becomes of their result, and by the embedding they match


def heads(model, *args, **options):
    return {module for module, kind in kinds(model, *args, **options).items() if kind == "head"}


HEADS = {  # how many heads there are, by the output and by the width
    "another width": (0, {"vocabulary": 80, "rows": VOCABULARY}),
    "a residual stream": (0, {"width": VOCABULARY, "form": lambda m, t: m.h[1](m.h[0](m.wte(t)))}),
    "by arange": (0, {"vocabulary": POSITIONS, "rows": VOCABULARY}),  # as wide as the table of positions is long
    "padded": (1, {"form": lambda m, t: F.linear(m.hidden(t), m.wte.weight[: VOCABULARY - 5] * 0.125)}),  # rows without tokens
    "logits": (1, {}),
}


@pytest.mark.parametrize(("count", "options"), HEADS.values(), ids=HEADS)
def test_heads_of_a_gpt(count, options):
    model = NanoGPT(**options)
    assert len(heads(model, sentence(), backward=False)) == count


def marked(model):
    compiled = fp8_compile(model, "current", backend="aot_eager")
    compiled(sentence(BYTES)).sum().backward()
    gemms = inspect(compiled).gemms
    return {g.module for g in gemms if g.looks_like_head}, {g.module for g in gemms}


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("widths, form", [((BYTES, BYTES), form) for form in FORMS_OF_BYTES] + [((32, BYTES), "breaks, not residual")])
def test_a_layer_as_wide_as_the_vocabulary_is_no_head(widths, form):
    """Every graph between two breaks returns activations of that width."""
    found, every = marked(Bytes(*widths, **FORMS_OF_BYTES[form]))
    assert found == {"head"}
    assert len(every) == 4


# -- thin GEMMs


def lora(rank):
    down, up = nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)
    return Net(lambda m, x: m.base(x) + m.up(m.down(x)), base=nn.Linear(WIDTH, WIDTH), down=down, up=up)


@pytest.mark.parametrize(("rank", "kind"), [(31, "thin"), (32, "fp8")])
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


def adapter():
    factors = {name: nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for name in ("up", "down")}
    return Net(adapted, **factors, **linears("inner"))


def orthogonal(orthogonal_map):
    return nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map=orthogonal_map)


@pytest.mark.parametrize(
    ("make", "no_data"),
    [
        (adapter, {"self", "inner"}),
        *((functools.partial(orthogonal, name), {"parametrizations.weight.0"}) for name in ("matrix_exp", "cayley")),
    ],
    ids=["adapters and penalties", "exponentials", "solutions"],
)
def test_gemms_of_parameters_alone_stay_in_high_precision(make, no_data):
    x = tokens_in()
    compiled = fp8_compile(make(), "current", backend="aot_eager")
    compiled(x).sum().backward()
    found = {(g.module, g.reason and g.reason.partition(":")[0]) for g in inspect(compiled).gemms}
    assert found == {*((module, "no data") for module in no_data), ("matmul" if "inner" in no_data else "self", None)}
    assert set(kinds(make(), x, select="all").values()) == {"fp8"}


def inverted(m, x):
    """A whitening, whose covariance is inverted."""
    h = m.inner(x)
    return h @ torch.linalg.inv(h.mT @ h + torch.eye(WIDTH))


@BACKENDS
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


def test_what_has_no_data_and_is_no_weight_is_rewritten():
    model = Net(positions, table=nn.Parameter(torch.randn(TOKENS, WIDTH)), **linears("inner", "two"))
    assert set(kinds(model, tokens_in()).values()) == {"fp8"}


# -- the order of things: rules, then structure


def test_rules_decide_where_they_match_and_nowhere_else():
    model, text = tied(language()), sentence()
    for rules, layers, head in (
        ({"lm_head": "current"}, "fp8", "fp8"),
        ({"*": "delayed"}, "fp8", "fp8"),
        ({"h.*": None}, "rule", "head"),
    ):
        found = kinds(model, text, rules=rules, recipe="blockwise")
        assert (found.pop("lm_head"), set(found.values())) == (head, {layers})
    found = decisions(model, text, rules={"lm_head:grad_weight": "current"})
    assert found["lm_head"] == {"output": "head", "grad_input": "head", "grad_weight": "fp8"}


@pytest.mark.parametrize(
    ("make", "argument", "module"),
    [
        (lambda: Mixture(softmax_topk), tokens_in, "gate"),
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
    assert len(patterns - {"*"}) == 1
    assert kinds(make(), argument(), rules=dict.fromkeys(patterns, "current"))[module] == "fp8"
