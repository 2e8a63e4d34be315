"""`last_blocks`: the last blocks of a model, found by structure."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect, last_blocks
from fp8pass.errors import OptionError
from tests.support.models import Decoder, LlamaBlock, mlp


@pytest.mark.parametrize(
    ("share", "kept"), [(0.15, [6, 5]), (1 / 7, [6]), (0.01, [6]), (3 / 7, [6, 5, 4]), (1, [6, 5, 4, 3, 2, 1, 0])]
)
def test_the_number_of_blocks_is_rounded_up(share, kept):
    assert last_blocks(Decoder(7), share) == {f"layers.{i}.*": None for i in reversed(kept)}


def test_a_share_that_float_arithmetic_puts_above_a_whole_number():
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(100))
    assert len(last_blocks(model, 0.07)) == 7  # 0.07 * 100 == 7.000000000000001


def test_the_rules_decide_these_blocks_and_nothing_else():
    compiled = fp8_compile(Decoder(3), "current", backend="aot_eager", rules=last_blocks(Decoder(3), 0.5))
    compiled(torch.randint(64, (2, 16))).sum().backward()
    report = inspect(compiled)
    assert report.unmatched_rules == []
    inside = {g.module for g in report.gemms if g.reason and g.reason.startswith("rule")}
    assert {m.rpartition(".")[0] for m in inside} == {"layers.1", "layers.2"}
    assert len(inside) == 14


def test_numbered_siblings_in_the_order_of_their_numbers():
    model = nn.Module()
    for i in (10, 9, 2, 1):
        model.add_module(f"stage{i}_block", mlp(8, 8, 8))
    assert list(last_blocks(model, 0.5)) == ["stage9_block.*", "stage10_block.*"]


def test_a_module_dict_of_numbers():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): mlp(8, 8, 8) for i in range(4)})
    assert list(last_blocks(model, 0.25)) == ["layers.3.*"]


def test_a_sequential_with_names_in_the_order_of_its_children():
    model = nn.Sequential(OrderedDict([("stem", nn.Linear(8, 8)), ("b", mlp(8, 8, 8)), ("a", mlp(8, 8, 8))]))
    assert list(last_blocks(model, 0.5)) == ["a.*"]


def test_blocks_that_are_matrices_themselves():
    assert list(last_blocks(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 0.5)) == ["2"]


def test_a_block_with_matrices_of_its_own_and_inside():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(4, 8, 8))
            self.scale = nn.Parameter(torch.ones(1, 1, 8))  # not a matrix
            self.router = nn.Linear(8, 4)

    assert list(last_blocks(nn.ModuleList(Experts() for _ in range(2)), 0.5)) == ["1", "1.*"]


def test_the_chain_with_the_most_parameters_is_taken():
    """Not the repeated linears inside of a block, nor a longer chain of small modules."""
    model = Decoder(2)
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))
    assert list(last_blocks(model, 0.5)) == ["layers.1.*"]


def test_shared_blocks_count_once():
    model = nn.Module()
    shared = nn.Linear(16, 16, bias=False)
    model.many = nn.ModuleList([shared] * 9)
    model.two = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
    assert list(last_blocks(model, 0.5)) == ["two.1"]


def test_norms_are_no_blocks_and_paths_are_those_of_the_users_model():
    model = Decoder(2)
    model.norms = nn.ModuleList(nn.LayerNorm(100_000) for _ in range(3))
    assert list(last_blocks(fp8_compile(model, "current"), 0.5)) == ["layers.1.*"]


def test_characters_that_mean_something_in_a_glob():
    model = nn.Module()
    model.add_module("a[0]*", nn.ModuleList(mlp(8, 8, 8) for _ in range(2)))
    (pattern,) = last_blocks(model, 0.5)
    assert pattern == "a[[]0][*].1.*"


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), True, "0.15", None])
def test_a_share_out_of_range(share):
    with pytest.raises(OptionError, match="above 0 and at most 1"):
        last_blocks(Decoder(2), share)


def test_no_repeated_modules():
    with pytest.raises(OptionError, match=r"LlamaBlock has no repeated modules .* attn_norm \(RMSNorm\), wq \(Linear\)"):
        last_blocks(LlamaBlock())
    with pytest.raises(OptionError, match="it has no children"):
        last_blocks(nn.Linear(8, 8))
    with pytest.raises(OptionError, match="a function"):
        last_blocks(lambda x: x)
