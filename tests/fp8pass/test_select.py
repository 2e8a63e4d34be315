"""Heads and thin GEMMs stay in high precision by default, as routers do (`test_routing.py`); rules overrule that."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import fp8_compile, inspect
from fp8pass.errors import OptionError
from tests.support.models import LlamaBlock, Stack
from tests.support.selection import TOKENS, WIDTH, Mixture, decisions, grouped_sigmoid, kinds, softmax_topk, tokens_in

VOCABULARY = 96


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


def test_an_untied_one_is_where_the_model_says_so_or_returns_its_logits():
    assert kinds(Language(), sentence()) == {"inner": "fp8", "projection": "head"}  # more in test_heads.py
    assert kinds(WithGetter(loss=squares), sentence()) == {"inner": "fp8", "projection": "head"}
    assert kinds(WithoutOutput(loss=squares), sentence()) == {"inner": "fp8", "projection": "fp8"}


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
