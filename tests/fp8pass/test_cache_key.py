"""The key of a graph in AOTAutograd's cache: every setting that decides a rewrite changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools
import types

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
from fp8pass.runtime.words import Uncacheable, words
from fp8pass.runtime.wrap import session_of
from tests.support.cases import each
from tests.support.models import mlp

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

EAGER = {"backend": "aot_eager"}


def graph_of(model=None, x=None, **options):
    """The record of the only graph of a compiled model, and its options."""
    compiled = fp8pass.fp8_compile(mlp(32, 32, 32) if model is None else model, **EAGER, **options)
    compiled(torch.zeros(16, 32) if x is None else x)
    session = session_of(compiled)
    (graph,) = session.graphs
    return graph, session.options


@functools.cache
def base():
    return graph_of()[0]


def key(graph=None, variants=USUAL, may_ask=False, **options):
    options = CompileOptions(**options)
    graph = dataclasses.replace(graph or base(), key=GraphKey(options.first_rules))
    return key_of(graph, options, frozenset(variants), may_ask)


def assert_different(*keys):
    assert len(set(keys)) == len(keys)


def test_equal_settings_have_equal_keys():
    assert key() == key()
    assert key(recipe=fp8pass.DelayedScaling()) == key(recipe="delayed") == key()
    assert key(graph_of()[0]) == key()


HIGH = {"backward_override": "high_precision"}
DELAYED = {"margin": 1, "amax_history_len": 16, "fp8_format": fp8pass.Format.E4M3, "amax_compute_algo": "most_recent"}
CHANGES = {
    fp8pass.DelayedScaling: DELAYED | {"initial_scale": "one", "reduce_amax": False, "fast_accum_output": False},
    fp8pass.Float8CurrentScaling: {"amax_epsilon": 1e-6, "use_power_2_scales": True, **HIGH},
    fp8pass.Float8RowwiseScaling: HIGH,
    fp8pass.Float8BlockScaling: {"use_f32_scales": True, "w_block_scaling_dim": 1},
    fp8pass.MXFP8BlockScaling: {"backward_override": "dequantized"},
}
RECIPES = [name for name in PRESETS if name != "delayed"]
RECIPES += [make(**{name: value}) for make, changes in CHANGES.items() for name, value in changes.items()]
RECIPES += [fp8pass.Float8CurrentScaling(backward_override="dequantized")]
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
    assert {key(**{name: value}) for name, value in NO_DECISIONS.items()} == {key()}
    fields = {f.name for f in dataclasses.fields(CompileOptions) if f.init}
    tested = {name for options in OPTIONS for name in options} | NO_DECISIONS.keys()
    # Inductor's, which are in torch's own key; the group, whose ranks a test of its own changes.
    assert fields - tested <= {"mode", "options", "amax_reduction_group"} | {"saved_activations"}


def changes_of(record):
    """The record, with one field after the other changed."""
    return (dataclasses.replace(record, **{field.name: "other"}) for field in dataclasses.fields(record))


def facts():
    """The graph, with one fact after the other changed."""
    graph = base()
    weight = next(i for i, given in enumerate(graph.inputs) if given.is_parameter)
    shard = dataclasses.replace(graph.inputs[weight], sharded=Sharded(2, 8, 256, None, None))
    shards = (dataclasses.replace(shard, sharded=sharded) for sharded in changes_of(shard.sharded))
    for given in (*changes_of(graph.inputs[weight]), shard, *shards):
        yield dataclasses.replace(graph, inputs=(*graph.inputs[:weight], given, *graph.inputs[weight + 1 :]))
    (first, *others), *rest = graph.extra
    for extra in changes_of(first):
        yield dataclasses.replace(graph, extra=((extra, *others), *rest))
    for name in ("surroundings", "placement"):
        for made in changes_of(getattr(graph, name)):
            yield dataclasses.replace(graph, **{name: made})


def test_every_fact_about_the_model_around_the_graph_changes_the_key():
    assert_different(key(), *map(key, facts()))


def test_the_ranks_of_the_amax_reduction_group_change_the_key():
    """Groups are named by number, so that other ranks have the same name in another run."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def named(*ranks):
        """The name and the key of each of these groups, in one run."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            groups = [dist.new_group(some) for some in ranks]
            return [(group.group_name, key(amax_reduction_group=group)) for group in groups]
        finally:
            dist.destroy_process_group()

    made = [named(ranks)[0] for ranks in ([0, 1], [0, 2], [0, 1, 2], [0, 1])]
    assert len({name for name, _ in made}) == 1
    keys = [key(), *(found for _, found in made)]
    assert keys[1] == keys[4]
    assert len(set(keys)) == 4
    assert len({found for _, found in named([0, 1], [0, 2])}) == 2, "of groups that are both there"


def test_variants_measurement_and_what_may_be_asked_change_the_key():
    rules = CompileOptions().first_rules
    measured = [GraphKey(rules, watch) for watch in (None, "tensors", "products")]
    moved = dataclasses.replace(base(), device=torch.device("meta"))
    assert_different(
        *(key_of(dataclasses.replace(base(), key=each), CompileOptions(), USUAL, False) for each in measured),
        *(key(variants={"first_step"}), key(may_ask=True), key(dataclasses.replace(base(), extra_start=9)), key(moved)),
    )


@each("name", ["merge gathers", "verify", "fold elements"])
def test_a_pass_left_out_changes_the_key(name):
    with without(name):
        found = key()
    with without(*{"verify", "plan launches"} - {name}):
        assert found != key()


def test_sources_versions_and_environment_change_the_key(monkeypatch):
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
    assert_different(*keys)
    assert key() == keys[0]


def test_an_earlier_pass_changes_the_key_by_its_uuid_and_without_one_there_is_no_key():
    def with_passes(*passes):
        return key(options={"joint_custom_pre_pass": list(passes)})

    a, b = (types.SimpleNamespace(uuid=lambda text=text: text) for text in ("a", "b"))
    assert len({key(), with_passes(a), with_passes(b), with_passes(a, b)}) == 4
    with pytest.raises(Uncacheable, match=r"has no uuid\(\)"):
        with_passes(lambda graph: None)


# -- the graph itself


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
        *({"custom": {"module_fqn": "x"}}, {"recompute": 1}, {"ac_graph_id": 3}),
    ]
    prints = [print_of(lambda node, change=change: node.meta.update(change)) for change in changes]
    assert_different(*prints)
    assert print_of(lambda node: node.meta.update({"unread": object()})) == prints[0]
    assert print_of(lambda node: setattr(node, "args", node.args[::-1])) != prints[0]
    with pytest.raises(Uncacheable, match=r"an object of builtins\.object has no text"):
        print_of(lambda node: node.meta.update({"custom": {"x": object()}}))


# -- users' own recipes

OWN = """
import dataclasses, math, os, random, torch
from fp8pass import DelayedScaling
from fp8pass.recipes import Granularity, Quantization, Recipe
from lowering.formats import E4M3

LIMIT = {limit}
ROLES = {{"output": 1}}
CHANCE = object()

def helper(role):
    return {helper}

class Base:
    attribute = {attribute}

    @property
    def wide(self):
        return {wide}

@dataclasses.dataclass(frozen=True)
class Own({bases}):
    name = "own"
    option: int = {default}

    def quantization(self, operand, role):
        {body}
        return Quantization(E4M3, Granularity.{granularity})

recipe = Own(option=5)
"""
USUAL_OWN = {
    "limit": "3",
    "helper": "len(role) > LIMIT",
    "attribute": "1",
    "wide": "True",
    "bases": "Base, Recipe",
    "default": "2",
    "body": "helper(role)",
    "granularity": "ROW_WISE",
}


def own(**changes):
    namespace = {"__name__": "own_recipe"}
    exec(compile(OWN.format(**USUAL_OWN | changes), "<string>", "exec", dont_inherit=True), namespace)
    return namespace["recipe"]


OWN_CHANGES = [
    *({"limit": "4"}, {"helper": "len(role) >= LIMIT"}, {"attribute": "2"}, {"wide": "False"}, {"bases": "Recipe, Base"}),
    *({"default": "3"}, {"granularity": "TENSOR_WISE"}),
    *({"body": f"helper(role), math.sqrt({number})"} for number in (2, 3)),
    *({"body": f"[helper(r) for r in {roles}]"} for roles in ("ROLES", "set(ROLES)")),
    *({"body": "torch.float8_e4m3fn"}, {"body": "(lambda: LIMIT)()"}),
]


def test_the_code_of_a_users_recipe_and_all_that_it_calls_changes_the_key():
    assert_different(
        *(key(recipe=own(**change)) for change in [{}, *OWN_CHANGES]), key(recipe=dataclasses.replace(own(), option=6))
    )
    assert key(recipe=own()) == key(recipe=own())
    recipe = own()
    before = key(recipe=recipe)
    type(recipe).quantization = own(granularity="TENSOR_WISE").quantization.__func__
    assert key(recipe=recipe) != before


@each(
    ("body", "reason"),
    [
        ("os.environ.get('X')", "os._Environ"),
        ("random.random()", "random"),
        ("torch.cuda.is_available()", "torch.cuda.is_available, which it calls, may return something else"),
        ("torch.is_grad_enabled()", "is_grad_enabled, which it calls, may return something else"),
        ("torch.rand(())", "rand, which it calls, may return something else"),
        ("CHANCE", "an object of builtins.object"),
        ("__import__('os')", "may return something else|has no text"),
        ("helper(math)", "passes the module math on"),
        ("from os import environ", "imports os when it runs"),
        ("open('settings')", "may return something else"),
    ],
)
def test_a_recipe_that_may_decide_otherwise_in_another_process_has_no_key(body, reason):
    with pytest.raises(Uncacheable, match=reason):
        key(recipe=own(body=body))


def test_functions_of_amaxes_go_by_their_code():
    def mean(history):
        return history.mean(0)

    def scaled(factor):
        return lambda history: factor * history.max(0).values

    def key_with(function):
        return key(recipe=fp8pass.DelayedScaling(amax_compute_algo=function))

    assert_different(*map(key_with, (mean, scaled(1.0), scaled(2.0), functools.partial(mean), "max")))
    assert key_with(scaled(1.0)) == key_with(scaled(1.0))


# -- equal keys, equal graphs

CHOICES = {
    "recipe": ["delayed", "current", "blockwise", fp8pass.DelayedScaling(margin=1), fp8pass.DelayedScaling(amax_history_len=4)],
    "rules": [{}, {"0": None}, {"0:grad_weight": None}, {"2": "current"}],
    "select": ["auto", "all"],
    "min_speedup": [None, 0.01, 0.6],
    "weight_copies": ["auto", "save", "recompute"],
    "strict": [False, True],
    "step": ["auto", "manual"],
}
#: At 0.6 no GEMM of these sizes runs in FP8, of which `strict` makes an error.
SETTINGS = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()}).filter(
    lambda chosen: not (chosen.get("strict") and chosen.get("min_speedup") == 0.6)
)


def rewritten(chosen, sizes, trains):
    """The key of a graph, and its rewrite as text."""
    torch._dynamo.reset()
    compiled = fp8pass.fp8_compile(mlp(*sizes), **EAGER, **chosen)
    with torch.set_grad_enabled(trains):
        compiled(torch.zeros(16, sizes[0]))
    session = session_of(compiled)
    (graph,) = session.graphs
    record = dataclasses.replace(graph.rewrite, before=None, after=None, passes=[])
    inputs = [
        (n.meta["val"].shape, n.meta["val"].dtype) for n in graph.source.graph.find_nodes(op="placeholder") if "val" in n.meta
    ]
    # Shapes and modes are in torch's own key.
    torchs = (sizes, trains)
    return (key_of(graph, session.options, USUAL, False), torchs), (repr(record), str(graph.rewrite.after.restore()), inputs)


@settings(max_examples=20)
@given(SETTINGS, SETTINGS, st.sampled_from([(32, 32, 32), (64, 32, 32)]), st.booleans(), st.booleans())
def test_equal_keys_have_equal_rewritten_graphs(one, other, sizes, trains, is_twice):
    other = one | {"strict": False, "step": "auto"} if is_twice else other
    (key_a, graph_a), (key_b, graph_b) = (rewritten(chosen, sizes, trains) for chosen in (one, other))
    if key_a == key_b:
        assert graph_a == graph_b
    if is_twice:
        assert key_a == key_b


# -- values as text

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, -0.0, 1.0, float("inf")])
    | st.text("a'[],", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text("ab", max_size=2), inner)
    ),
    max_leaves=6,
)


def typed(value):
    """A text that has the type of everything in it."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({[typed(v) for v in value]})"
    return repr([typed(item) for item in value.items()]) + "dict" if isinstance(value, dict) else f"{type(value)} {value!r}"


@settings(max_examples=300)
@given(PLAIN, PLAIN)
def test_texts_are_equal_for_equal_values_alone(a, b):
    assert (words(a) == words(b)) == (typed(a) == typed(b))


def test_sets_go_by_their_elements_whatever_their_order():
    assert words({"a", "b", "c"}) == words({"c", "b", "a"}) == words(frozenset("abc"))
    assert words({1}) != words({2})
