"""`last_blocks`: the last blocks of a model, found by structure."""

import pytest
from torch import nn

from fp8pass import fp8_compile, last_blocks
from fp8pass.errors import OptionError
from tests.support.cases import each
from tests.support.models import Decoder, LlamaBlock, mlp
from tests.support.moe import MoE


@each("share, kept", [(0.15, [6, 5]), (0.01, [6]), (3 / 7, [6, 5, 4])])
def test_the_number_of_blocks_is_rounded_up(share, kept):
    assert last_blocks(Decoder(7), share) == {f"layers.{i}.*": None for i in reversed(kept)}
    many = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(100))
    assert len(last_blocks(many, 0.07)) == 7  # 0.07 * 100 == 7.000000000000001


def module(found=None, **children):
    found = nn.Module() if found is None else found
    for name, child in children.items():
        found.add_module(name, child)
    return found


def small():
    return mlp(8, 8, 8)


CHAINS = {
    "siblings in the order of their numbers": (
        lambda: module(**{f"stage{i}_block": small() for i in (10, 9, 2, 1)}),
        ["stage9_block.*", "stage10_block.*"],
    ),
    "matrices of their own and inside": (lambda: nn.ModuleList(MoE(8, 8) for _ in range(2)), ["1", "1.*"]),
    # Not the repeated linears inside of a block, nor a longer chain of small modules.
    "the most parameters": (
        lambda: module(Decoder(2), extra=nn.ModuleList(nn.Linear(2, 2) for _ in range(20))),
        ["layers.1.*"],
    ),
    "norms are no blocks, and paths are the user's": (
        lambda: fp8_compile(module(Decoder(2), norms=nn.ModuleList(nn.LayerNorm(100_000) for _ in range(3))), "current"),
        ["layers.1.*"],
    ),
    "characters of globs": (lambda: module(**{"a[0]*": nn.ModuleList([small(), small()])}), ["a[[]0][*].1.*"]),
}


@each("case", CHAINS)
def test_the_chain_that_is_taken(case):
    make, expected = CHAINS[case]
    assert list(last_blocks(make(), 0.5)) == expected


def test_a_share_out_of_range_and_no_repeated_modules():
    for share in (0, -0.1, 1.01, float("nan"), True, "0.15", None):
        with pytest.raises(OptionError, match="above 0 and at most 1"):
            last_blocks(Decoder(2), share)
    for model, message in (
        (LlamaBlock(), r"LlamaBlock has no repeated modules .* attn_norm \(RMSNorm\), wq \(Linear\)"),
        (nn.Linear(8, 8), "it has no children"),
        (lambda x: x, "a function"),
    ):
        with pytest.raises(OptionError, match=message):
            last_blocks(model)
