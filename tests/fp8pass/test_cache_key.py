"""The key of a graph in AOTAutograd's cache: every setting that decides a rewrite changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8pass
from fp8pass.graph.gemms import Sharded
from fp8pass.inputs import USUAL
from fp8pass.options import CompileOptions
from fp8pass.recipes import PRESETS
from fp8pass.rewrite.runner import without
from fp8pass.runtime import cache_key
from fp8pass.runtime.cache_key import fingerprint, key_of
from fp8pass.runtime.recompute import GraphKey
from fp8pass.runtime.words import Uncacheable
from fp8pass.runtime.wrap import session_of
from tests.support.models import mlp


@functools.cache
def base():
    """The record of the only graph of a compiled model."""
    compiled = fp8pass.fp8_compile(mlp(32, 32, 32), backend="aot_eager")
    compiled(torch.zeros(16, 32))
    (graph,) = session_of(compiled).graphs
    return graph


def key(graph=None, variants=USUAL, may_ask=False, **options):
    options = CompileOptions(**options)
    graph = dataclasses.replace(graph or base(), key=GraphKey(options.first_rules))
    return key_of(graph, options, frozenset(variants), may_ask)


def assert_different(*keys):
    assert len(set(keys)) == len(keys)


CHANGES = {
    fp8pass.DelayedScaling: {
        "margin": 1, "amax_history_len": 16, "fp8_format": fp8pass.Format.E4M3, "amax_compute_algo": "most_recent",
        "initial_scale": "one", "reduce_amax": False, "fast_accum_output": False,
    },
    fp8pass.Float8CurrentScaling: {"amax_epsilon": 1e-6, "use_power_2_scales": True, "backward_override": "high_precision"},
    fp8pass.Float8BlockScaling: {"use_f32_scales": True, "w_block_scaling_dim": 1},
    fp8pass.MXFP8BlockScaling: {"backward_override": "dequantized"},
}  # fmt: skip
RECIPES = [name for name in PRESETS if name != "delayed"]
RECIPES += [make(**{name: value}) for make, changes in CHANGES.items() for name, value in changes.items()]
RULES = [{"0": None}, {"0:output": None}, {"0": "current"}, {"0": None, "*": "current"}, {"*": "current", "0": None}]
OPTIONS = [
    *({"recipe": recipe} for recipe in RECIPES),
    *({"rules": rules} for rules in RULES),
    *({"select": "all"}, {"min_speedup": 1.5}, {"weight_copies": "save"}, {"weight_copies": "cache"}, {"backend": "aot_eager"}),
    *({"release_frozen": True}, {"fsdp_gather": "fp8"}, {"recipe": "rowwise", "match": "vllm"}),
]
NO_DECISIONS = {"strict": True, "step": "manual", "dynamic": False, "schedule": {5: {"*": None}}}


def test_every_option_that_decides_changes_the_key_and_no_other_does():
    """A new option needs a line above: it decides about graphs, or it does not."""
    assert_different(key(), *(key(**options) for options in OPTIONS))
    assert {key(**{name: value}) for name, value in NO_DECISIONS.items()} == {key()} == {key(recipe=fp8pass.DelayedScaling())}
    fields = {f.name for f in dataclasses.fields(CompileOptions) if f.init}
    tested = {name for options in OPTIONS for name in options} | NO_DECISIONS.keys()
    # Inductor's, which are in torch's own key; the group, whose ranks a test of its own changes.
    assert fields - tested <= {"mode", "options", "amax_reduction_group"} | {"saved_activations"}


def test_every_fact_about_the_model_around_the_graph_changes_the_key():
    """As do variants, what may be asked, and what is measured."""
    graph = base()
    weight = next(i for i, given in enumerate(graph.inputs) if given.is_parameter)
    shard = dataclasses.replace(graph.inputs[weight], sharded=Sharded(2, 8, 256, None, None))
    (first, *others), *rest = graph.extra

    def changes_of(record):
        """The record, with one field after the other changed."""
        return [dataclasses.replace(record, **{field.name: "other"}) for field in dataclasses.fields(record)]

    inputs = [*changes_of(shard), shard, *(dataclasses.replace(shard, sharded=made) for made in changes_of(shard.sharded))]
    facts = [{"inputs": (*graph.inputs[:weight], given, *graph.inputs[weight + 1 :])} for given in inputs]
    facts += [{"extra": ((extra, *others), *rest)} for extra in changes_of(first)]
    facts += [{name: made} for name in ("surroundings", "placement") for made in changes_of(getattr(graph, name))]
    facts += [{"extra_start": 9}, {"device": torch.device("meta")}]
    around = [key(dataclasses.replace(graph, **fact)) for fact in facts]
    assert_different(key(), key(variants={"first_step"}), key(may_ask=True), *around)
    measured = (GraphKey(CompileOptions().first_rules, watch) for watch in (None, "tensors", "products"))
    assert_different(*(key_of(dataclasses.replace(graph, key=each), CompileOptions(), USUAL, False) for each in measured))


def test_the_ranks_of_the_amax_reduction_group_change_the_key():
    """Groups are named by number, so that other ranks have the same name in another run."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    keys = [key()]
    for ranks in ([0, 1], [0, 2], [0, 1, 2]):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            keys.append(key(amax_reduction_group=dist.new_group(ranks)))
        finally:
            dist.destroy_process_group()
    assert_different(*keys)


def test_sources_versions_environment_and_passes_left_out_change_the_key(monkeypatch):
    changes = [
        lambda m: m.setattr(cache_key, "source_digest", lambda: "other sources"),
        lambda m: m.setattr(torch, "__version__", "9.9"),
        lambda m: m.setattr(cache_key.deep_gemm, "is_installed", lambda: True),
        *(lambda m, name=name: m.setenv(name, "/elsewhere") for name in cache_key.ENVIRONMENT),
    ]
    keys = [key()]
    for change in changes:
        with monkeypatch.context() as m:
            change(m)
            keys.append(key())
    for name in ("merge gathers", "verify", "fold elements"):
        with without(name):
            keys.append(key())
    assert_different(*keys)
    assert key() == keys[0]


def test_names_lines_and_annotations_of_nodes_change_the_fingerprint():
    def print_of(change):
        gm = torch.fx.GraphModule(base().source, torch.fx.Graph())
        gm.graph.output(gm.graph.graph_copy(base().source.graph, {}))
        change(next(n for n in gm.graph.nodes if n.op == "call_function"))
        gm.recompile()
        return fingerprint(gm)

    changes = [
        {},
        {"nn_module_stack": {"k": ("L['self']._modules['9']", nn.Linear)}},
        {"stack_trace": '  File "/model.py", line 7, in forward\n'},
        {"custom": {"module_fqn": "x"}},
        {"recompute": 1},
    ]
    prints = [print_of(lambda node, change=change: node.meta.update(change)) for change in changes]
    assert_different(*prints, print_of(lambda node: setattr(node, "args", node.args[::-1])))
    assert print_of(lambda node: node.meta.update({"unread": object()})) == prints[0]


OWN = """
import dataclasses, functools, math, os, torch
from fp8pass.recipes import Granularity, Quantization, Recipe
from lowering.formats import E4M3

LIMIT = 3
ROLES = {"output": 1}
CHANCE = object()

def helper(role):
    return len(role) > LIMIT

class Base:
    attribute = 1
    __slots__ = ("held",)
    bound, wide, late = classmethod(helper), property(helper), functools.cached_property(helper)

PART, BOUND, JOIN = functools.partial(helper, "x"), Base.bound, "".join

@dataclasses.dataclass(frozen=True)
class Own(Base, Recipe):
    name = "own"
    option: int = 2

    def quantization(self, operand, role):
        helper(role)
        return Quantization(E4M3, Granularity.ROW_WISE)

recipe = Own(option=5)
"""
CALL = "        helper(role)\n"


def own(old=CALL, new=CALL):
    """The recipe, with a piece of its code replaced."""
    namespace = {"__name__": "own_recipe"}
    exec(compile(OWN.replace(old, new), "<string>", "exec", dont_inherit=True), namespace)
    return namespace["recipe"]


def calling(text):
    """The recipe that calls this."""
    return own(CALL, f"        {text}\n")


def test_the_code_of_a_users_recipe_and_all_that_it_calls_changes_the_key():
    calls = [f"helper(role), math.sqrt({number})" for number in (2, 3)] + ["torch.float8_e4m3fn", "(lambda: LIMIT)()"]
    calls += [f"[helper(r) for r in {roles}]" for roles in ("ROLES", "set(ROLES)")]
    calls += ["PART", "BOUND", "JOIN", "torch.ops.aten.mm"]
    changes = {"LIMIT = 3": "LIMIT = 4", " > LIMIT": " >= LIMIT", "attribute = 1": "attribute = 2", "int = 2": "int = 3"}
    changes |= {"Base, Recipe": "Recipe, Base", "ROW_WISE": "TENSOR_WISE", "option=5": "option=6", " property(helper)": " 1"}
    recipes = [own(), *map(calling, calls), *(own(*change) for change in changes.items())]
    before = [key(recipe=recipe) for recipe in recipes]
    assert_different(*before)
    assert key(recipe=own()) == before[0]
    type(recipes[0]).quantization = own("ROW_WISE", "TENSOR_WISE").quantization.__func__
    assert key(recipe=recipes[0]) != before[0]


def test_a_recipe_that_may_decide_otherwise_in_another_process_has_no_key():
    for body, reason in (
        ("torch.cuda.is_available()", "torch.cuda.is_available, which it calls, may return something else"),
        ("CHANCE", "an object of builtins.object"),
        *(("torch.rand(())", "rand, which it calls, may return something else"), ("helper(math)", "passes the module math on")),
        ("from os import environ", "imports os when it runs"),
    ):
        with pytest.raises(Uncacheable, match=reason):
            key(recipe=calling(body))
    with pytest.raises(Uncacheable, match=r"the joint_custom_pre_pass function has no uuid\(\)"):
        key(options={"joint_custom_pre_pass": own})
