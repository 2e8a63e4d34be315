"""Heads whose loss is outside of the compiled model: found by what becomes of their result, and by the embedding it matches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import fp8_compile, inspect
from tests.support.cases import each
from tests.support.selection import WIDTH, decisions, kinds

VOCABULARY, POSITIONS, TOKENS = 96, 48, 40


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NanoGPT(nn.Module):
    """nanoGPT's model without attention: token and position embeddings, blocks, an untied head, logits."""

    def __init__(self, vocabulary=VOCABULARY, width=WIDTH, positions=POSITIONS, rows=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows or vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens):
        x = self.look_up(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def look_up(self, tokens):
        return self.wte(tokens)

    def forward(self, tokens):
        return self.lm_head(self.hidden(tokens))


def sentence(size=VOCABULARY):
    return torch.randint(size, (2, TOKENS))


def heads(model, *args, **options):
    torch._dynamo.reset()  # models of one code share Dynamo's recompile limit
    return {module for module, kind in kinds(model, *args, **options).items() if kind == "head"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_untied_head_is_found_with_the_loss_outside(backend):
    found = kinds(NanoGPT(), sentence(), backend=backend, backward=backend == "aot_eager")
    assert found.pop("lm_head") == "head"
    assert found == {f"h.{i}.{name}": "fp8" for i in (0, 1) for name in ("up", "down")}


def test_the_reason_names_structure_and_the_rule_that_overrules_it():
    compiled = fp8_compile(NanoGPT(), "current", backend="aot_eager")
    compiled(sentence()).sum().backward()
    reasons = {g.role: g.reason for g in inspect(compiled).gemms if g.module == "lm_head"}
    assert len(reasons) == 3
    assert all("output of the graph" in r and "rules={'lm_head': recipe}" in r for r in reasons.values())
    assert heads(NanoGPT(), sentence(), rules={"lm_head": "current"}) == set()


# -- what may lie between the head and the output


def last_token(model, tokens):
    return model.lm_head(model.hidden(tokens)[:, [-1], :])


def sliced(model, tokens):
    return model.lm_head(model.hidden(tokens))[:, -1].float()


def capped(model, tokens):
    return 30 * torch.tanh(model.lm_head(model.hidden(tokens)) / 30)


def masked(model, tokens):
    """Padded tokens are not predicted: the mask is the caller's, too."""
    return model.lm_head(model.hidden(tokens)).masked_fill((tokens == 0)[..., None], float("-inf"))


def gated(model, tokens):
    logits = model.lm_head(model.hidden(tokens))
    return logits * torch.sigmoid(logits)


def classes_first(model, tokens):
    return model.lm_head(model.hidden(tokens)).transpose(1, 2).contiguous()


def among_others(model, tokens):
    hidden = model.hidden(tokens)
    return {"hidden": hidden, "logits": model.lm_head(hidden).bfloat16(), "tokens": tokens + 1}


def weight_first(model, tokens):
    """The GEMM computes the transpose: the head's columns are its rows."""
    return (model.lm_head.weight @ model.hidden(tokens).flatten(0, 1).t()).t()


@each("form", [last_token, sliced, capped, masked, gated, classes_first, among_others, weight_first])
def test_logits_reach_the_output_through_views_and_pointwise_code(form):
    model = NanoGPT()
    found = heads(Called(model, form), sentence(), backward=False)
    assert len(found) == 1, found


class Called(nn.Module):
    def __init__(self, model, form):
        super().__init__()
        self.model, self.form = model, form

    def forward(self, *args):
        return self.form(self.model, *args)


# -- how a caller's integers may reach the table


class Shifted(NanoGPT):
    def look_up(self, tokens):
        return self.wte((tokens - 5).clamp(0, VOCABULARY - 1).to(torch.int64))


class Replaced(NanoGPT):
    def look_up(self, tokens):
        return self.wte(torch.where(tokens < 0, 0, tokens.flatten()[: tokens.numel()].view_as(tokens)))


class Indexed(NanoGPT):
    def look_up(self, tokens):
        return self.wte.weight[tokens]


class Selected(NanoGPT):
    def look_up(self, tokens):
        return self.wte.weight.index_select(0, tokens.flatten()).view(*tokens.shape, -1)


class Scaled(NanoGPT):
    """As Gemma's: the looked-up rows, or the table, are scaled."""

    def look_up(self, tokens):
        return F.embedding(tokens, self.wte.weight * 8.0) * 0.5


@each("model_class", [Shifted, Replaced, Indexed, Selected, Scaled])
def test_tables_are_indexed_by_the_callers_integers_in_many_ways(model_class):
    assert heads(model_class(), sentence()) == {"lm_head"}
    assert heads(model_class(), sentence().int()) == {"lm_head"}


# -- what is not a head


def test_tables_of_positions_do_not_count():
    """A result as wide as the table of positions is long: positions by arange, by cumsum and as a buffer."""

    class ByCumsum(NanoGPT):
        def look_up(self, tokens):
            mask = (tokens != 0).int()
            return self.wte(tokens) + self.wpe((torch.cumsum(mask, 1) * mask).long())

    class Fixed(NanoGPT):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            self.register_buffer("sinusoids", torch.randn(POSITIONS, WIDTH))

        def look_up(self, tokens):
            return self.wte(tokens) + self.sinusoids[tokens.clamp(0, POSITIONS - 1)]

    class Kinds(NanoGPT):
        """Integers that the model itself makes of tokens, such as classes, is no vocabulary of the caller's."""

        def look_up(self, tokens):
            return self.wte(tokens) + self.wpe((tokens > 5).long())

    for model_class in (NanoGPT, ByCumsum, Fixed, Kinds):
        assert heads(model_class(vocabulary=POSITIONS, rows=VOCABULARY), sentence()) == set(), model_class


def test_a_width_that_equals_the_vocabulary_makes_no_head_of_a_residual_stream():
    class Encoder(NanoGPT):
        def forward(self, tokens):
            x = self.look_up(tokens)
            for block in self.h:
                x = block(x)
            return x

    assert heads(Encoder(width=VOCABULARY), sentence()) == set()


def normed(model, tokens):
    return F.layer_norm(model.lm_head(model.hidden(tokens)), (VOCABULARY,))


def summed(model, tokens):
    return model.lm_head(model.hidden(tokens)).sum(-1)


def squared_error(model, tokens):
    return F.mse_loss(model.lm_head(model.hidden(tokens)), torch.ones(2, TOKENS, VOCABULARY))


@each("form", [normed, summed, squared_error])
def test_a_norm_or_a_reduction_behind_the_gemm_ends_the_way(form):
    assert heads(Called(NanoGPT(), form), sentence()) == set()


def test_other_widths_and_few_classes_make_none():
    assert heads(NanoGPT(vocabulary=80, rows=VOCABULARY), sentence()) == set()
    thin = decisions(NanoGPT(vocabulary=16), sentence(16))
    assert thin["lm_head"]["output"] == "thin"


class Quantizer(nn.Module):
    """A VQ autoencoder: the codebook's index is computed in the graph."""

    def __init__(self):
        super().__init__()
        self.encode, self.book, self.decode = (
            nn.Linear(64, WIDTH),
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x):
        z = self.encode(x)
        return self.decode(self.book(torch.cdist(z[None], self.book.weight[None])[0].argmin(-1)))


def test_a_codebook_makes_none():
    found = kinds(Quantizer(), torch.randn(TOKENS, 64))
    assert found["encode"] == found["decode"] == "fp8"


def test_vision_models_and_autoencoders_without_integers_have_none():
    autoencoder = nn.Sequential(nn.Linear(VOCABULARY, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
    assert heads(autoencoder, torch.randn(TOKENS, VOCABULARY)) == set()


# -- bytes: a vocabulary as wide as the model, or as its inner layers

BYTES = 64


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


WIDTHS = [(BYTES, BYTES), (BYTES, 32), (32, BYTES)]
FORMS = {
    "whole": {},
    "not residual": {"is_residual": False},
    "checkpointed": {"checkpoints": True},
    "breaks": {"after": torch._dynamo.graph_break},
    "breaks, not residual": {"after": torch._dynamo.graph_break, "is_residual": False},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("form", FORMS)
@each("widths", WIDTHS)
def test_a_layer_as_wide_as_the_vocabulary_is_no_head(widths, form):
    """Every graph between two breaks returns activations of that width."""
    compiled = fp8_compile(Bytes(*widths, **FORMS[form]), "current", backend="aot_eager")
    compiled(sentence(BYTES)).sum().backward()
    assert {g.module for g in inspect(compiled).gemms if g.looks_like_head} == {"head"}
    assert len({g.module for g in inspect(compiled).gemms}) == 4


@each("widths", WIDTHS)
def test_a_byte_model_without_a_head_has_none_between_breaks(widths):
    model = Bytes(*widths, after=torch._dynamo.graph_break, is_residual=False, has_head=False)
    compiled = fp8_compile(model, "current", backend="aot_eager")
    compiled(sentence(BYTES)).sum().backward()
    marked = {g.module for g in inspect(compiled).gemms if g.looks_like_head}
    assert not marked - {"last"}  # which ends the model and may be its head, for all that anyone can tell


def test_blocks_compiled_one_by_one_have_none():
    model = Bytes(BYTES, BYTES)
    for module in (model.up, model.down, model.last):
        fp8_compile(module, "current", backend="aot_eager", in_place=True)
    model(sentence(BYTES)).sum().backward()
    assert not [g.module for g in inspect(model).gemms if g.looks_like_head]


class Caching(nn.Module):
    """Values for later calls are outputs as well: keys as wide as the vocabulary, and every hidden state."""

    def __init__(self):
        super().__init__()
        self.embedding, self.key, self.value = nn.Embedding(BYTES, 32), nn.Linear(32, BYTES), nn.Linear(32, BYTES)
        self.out, self.head = nn.Linear(BYTES, BYTES), nn.Linear(BYTES, BYTES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        key, value = self.key(x), self.value(x)
        hidden = self.out(F.scaled_dot_product_attention(key, key, value))
        return self.head(F.relu(hidden)), hidden, key.view(2, TOKENS, 4, -1).transpose(1, 2), value


def test_an_output_that_another_weight_reads_is_none():
    assert heads(Caching(), sentence(BYTES)) == {"head"}


@each("after", ["print", "helper"])
def test_a_head_that_a_break_follows_is_found(after):
    """No module reads as many features as it has columns."""

    class Printing(NanoGPT):
        def forward(self, tokens):
            logits = self.lm_head(self.hidden(tokens))
            torch._dynamo.graph_break()
            return logits.float() if after == "print" else self.scaled(logits)

        def scaled(self, logits):
            torch._dynamo.graph_break()
            return 2 * logits

    assert heads(Printing(), sentence()) == {"lm_head"}


# -- what looks like a head, and is left to the user


def test_a_head_behind_a_graph_break_is_marked():
    class Broken(NanoGPT):
        def forward(self, tokens):
            hidden = self.hidden(tokens)
            torch._dynamo.graph_break()
            return self.lm_head(hidden)

    compiled = fp8_compile(Broken(), "current", backend="aot_eager")
    with pytest.warns(UserWarning, match="lm_head"):
        compiled(sentence()).sum().backward()
    marked = {(g.module, g.quantized) for g in inspect(compiled).gemms if g.looks_like_head}
    assert marked == {("lm_head", True)}


def test_heads_are_marked_whoever_decides():
    for options in ({}, {"select": "all"}, {"rules": {"lm_head": "current"}}, {"rules": {"lm_head": None}}):
        compiled = fp8_compile(NanoGPT(), "current", backend="aot_eager", **options)
        with torch.no_grad():
            compiled(sentence())
        assert {g.module for g in inspect(compiled).gemms if g.looks_like_head} == {"lm_head"}, options
