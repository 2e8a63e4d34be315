"""Warm starts: what torch's caches bring back equals what was compiled, in every way in which models are compiled and trained,
and nothing wrong is ever brought back."""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_inductor_cache

from fp8pass import fp8_compile, inspect, monitor, requests, state, use_rules
from fp8pass.errors import NotTracedError, UnsupportedError
from fp8pass.options import CompileOptions
from fp8pass.rewrite.runner import rewrite
from fp8pass.runtime import backend, cache, cache_key
from fp8pass.runtime.recompute import GraphKey
from fp8pass.runtime.session import CompiledGraph
from tests.support.cases import each
from tests.support.models import BrokenLayers, ResidualMlp, Stack, mlp
from tests.support.training import RECIPES, gradients, same


@pytest.fixture(autouse=True)
def empty_cache():
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


def entries():
    """The files of AOTAutograd's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    return sorted(path for path in pathlib.Path(AOTAutogradCache._get_tmp_dir()).rglob("*") if path.is_file())


def start(recipe="current", steps=1, make=mlp, compile_model=None, between=None, grows=0, width=64, **options):
    """A process's start, as far as one process can have several: nothing is known but what the cache's folder has. Returns the
    compiled model, and outputs and gradients of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = fp8_compile(model, recipe, **options) if compile_model is None else compile_model(model)
    results = []
    for step in range(steps):
        model.zero_grad()
        out = compiled(torch.randn(16 + 16 * step * grows, width))
        if out.requires_grad:
            out.square().sum().backward()
        results += [out.detach(), gradients(model)]
        if between is not None:
            between(compiled, step)
    return compiled, results


def no_rewrite(*args):
    raise AssertionError("a warm start rewrites no graph")


def only_variants(graph, context, rules, inputs, options):
    assert options.variants, "a warm start rewrites no usual graph"
    return rewrite(graph, context, rules, inputs, options)


def facts(compiled):
    """All that a user sees of a model, but the use of the cache."""
    found, tensors = inspect(compiled), state(compiled)
    table = found.to_dict()
    for graph in table["graphs"]:
        del graph["cache"]
    scales = {name: (tensors.scale(name), tensors.amax_history(name).tolist()) for name in tensors.tensors}
    return table, str(found), scales, [(g.estimates, g.trains, g.estimated_for) for g in found.graphs]


def code(compiled):
    return [[gm and gm.code for gm in (g.before, g.after, g.forward, g.backward)] for g in inspect(compiled).graphs]


def uses(compiled):
    """The use of the cache for every graph, under whatever rules."""
    return {graph.cache for part in inspect(compiled).parts for graph in part.session.every_graph}


def cold_and_warm(monkeypatch, allowed=no_rewrite, **how):
    """Both starts, which are alike: the second one rewrites nothing."""
    cold, first = start(**how)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "rewrite", allowed)
        warm, second = start(**how)
    assert uses(warm) == {"hit"}
    assert same(first, second)
    assert facts(warm) == facts(cold)
    return cold, warm


# -- hits


@each("recipe", RECIPES)
def test_a_hit_equals_the_miss_in_tables_states_and_gradients(recipe, monkeypatch):
    with fresh_inductor_cache():
        counters.clear()
        cold, warm = cold_and_warm(monkeypatch, recipe=recipe, steps=3)
        assert recipe == "delayed" or counters["aot_autograd"]["autograd_cache_hit"] == 1
        assert uses(cold) == {"miss"}
        assert code(warm) == code(cold)
        assert len(inspect(warm).gemms) == 5


def test_without_what_a_graph_is_traced_from_there_is_a_typed_error():
    start()
    warm, _ = start()
    torch._dynamo.reset()
    gc.collect()
    graph = inspect(warm).graphs[0]
    assert (graph.saved_bytes > 0, graph.cache) == (True, "hit")
    with pytest.raises(NotTracedError, match=r"torch\._dynamo\.reset\(\) has dropped"):
        graph.after  # noqa: B018


def test_graphs_are_traced_again_in_the_modes_of_their_compilation(monkeypatch):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cold, warm = cold_and_warm(monkeypatch)
    assert code(warm) == code(cold)
    assert "bfloat16" in str(code(cold))


def frozen():
    model = mlp()
    return model.requires_grad_(False)


def half_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Deep(nn.Linear):
    """More tensors than a Linear lets expect: its graph asks for room."""

    def __init__(self):
        super().__init__(32, 32, bias=False)

    def forward(self, x):
        for _ in range(40):
            x = nn.functional.linear(x, self.weight)
        return x


@pytest.mark.parametrize(
    ("make", "allowed", "options"),
    [(frozen, no_rewrite, {"weight_copies": "cache"}), (Deep, only_variants, {"recipe": "delayed", "width": 32})],
)
def test_graphs_that_ask_for_inputs_hit_too(make, allowed, options, monkeypatch):
    """Such as those that hold the weights of inference: they are compiled a second time."""
    cold, warm = cold_and_warm(monkeypatch, allowed, make=make, **options)
    assert code(warm) == code(cold)
    assert len(list(requests.folder().iterdir())) == 1
    assert [w.kept for w in inspect(warm).graphs[0].kept] == [True] * 2 * (make is frozen)


def test_the_backward_of_a_hit_refuses_batches_of_gradients():
    for recipe in ("delayed", "delayed", "current", "current"):  # the first step of delayed scaling runs no generated code
        torch._dynamo.reset()
        compiled, x = fp8_compile(mlp(), recipe), torch.randn(16, 64, requires_grad=True)
        for _ in range(2):
            out = compiled(x)
            with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient"):
                torch.autograd.grad(out, x, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
            compiled(x).sum().backward()
    assert uses(compiled) == {"hit"}


# -- damage, and what is not cached


@each(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"fp8pass.runtime.cache", b"fp8pass.runtime.cachE"),
        lambda content: content.replace(b"fp8pass.rewrite.runner", b"fp8pass.rewrite.runneR"),
    ],
)
def test_a_damaged_entry_is_a_miss(spoil, caplog):
    with fresh_inductor_cache():
        _, first = start()
        for path in entries():
            path.write_bytes(spoil(path.read_bytes()))
        caplog.clear()
        again, second = start()
        assert uses(again) == {"miss"}
        assert same(first, second)
        said = [r.message for r in caplog.records if r.name.startswith("fp8pass")]
        if b"runneR" in spoil(b"fp8pass.rewrite.runner"):
            lacks = "graph_0: its entry in AOTAutograd's cache has no complete record of the rewrite, and is not used"
            assert said == [lacks]
            assert uses(start()[0]) == {"hit"}


_arrive = cache._arrive


def arrive_for_another_key(key, *others):  # entries have its name
    return _arrive("other", *others)


def test_a_record_for_another_key_is_not_used(monkeypatch, caplog):
    _, first = start()
    monkeypatch.setattr(cache, "_arrive", arrive_for_another_key)
    for use in ("miss", "bypassed: its entries are damaged"):
        again, second = start()
        assert inspect(again).cache == {"graph_0": use}
        assert same(first, second)
        assert len(inspect(again).gemms) == 5
    assert [r.message for r in caplog.records if "compiled without it" in r.message]


@pytest.mark.parametrize(
    ("patch", "options", "use"),
    [
        (functorch_config.patch(enable_autograd_cache=False), {}, "AOTAutograd's cache is off (torch._functorch.config"),
        (torch._inductor.config.patch(fx_graph_cache=False), {}, "torch caches no such graph: FX graph cache is not enabled"),
        (contextlib.nullcontext(), {"backend": "aot_eager"}, "torch caches generated code only"),
    ],
)
def test_what_is_not_cached_has_its_reason(patch, options, use):
    with patch:
        compiled, _ = start(**options)
    assert inspect(compiled).cache["graph_0"].startswith(f"bypassed: {use}")
    assert inspect(compiled).to_dict()["graphs"][0]["cache"] == inspect(compiled).cache["graph_0"]
    assert entries() == [] or "is off" not in use


def test_a_damaged_request_is_a_second_trace_and_a_folder_that_cannot_be_written_a_remark(caplog):
    how = {"make": frozen, "weight_copies": "cache"}
    start(**how)
    (path,) = requests.folder().iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert uses(start(**how)[0]) == {"hit"}
    assert [r.message for r in caplog.records if "is damaged, and is not used" in r.message]
    assert uses(start(**how)[0]) == {"hit"}
    with fresh_inductor_cache():
        requests.folder().write_text("no folder")
        assert uses(start(steps=2, **how)[0]) == {"miss"}
        assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_requests_are_written_whole():
    """A reader sees all of a file or none, whoever else writes it."""
    requests.write("key", b"content" * 1000)
    assert requests.read("key") == b"content" * 1000
    assert [path.name for path in requests.folder().iterdir()] == ["key"]
    assert requests.read("other") is None


# -- the ways in which models are compiled and trained


@torch.compiler.nested_compile_region
def region(layer, x):
    return layer(x)


class Regions(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = region(layer, x)
        return x


def layers(kind=Stack, **options):
    return lambda: kind((ResidualMlp() for _ in range(2)), **options)


def one_by_one(model):
    for layer in model.layers:
        fp8_compile(layer, "delayed", in_place=True)
    return model


def by_name(model):
    for layer in model.layers:
        layer.compile(backend="fp8pass")
    return model


DELAYED = {"recipe": "delayed"}
#: name -> arguments of `start`.
SETUPS = {
    "blocks in place": {"make": layers(), "compile_model": one_by_one},
    "blocks by name": {"make": layers(), "compile_model": by_name},
    "regions": {"make": layers(Regions), **DELAYED},
    "checkpointing": {"make": layers(use_reentrant=False), **DELAYED},
    "graph breaks": {"make": lambda: BrokenLayers(2), **DELAYED},
    "dynamic shapes": {"dynamic": True, "grows": 1, **DELAYED},
    "CUDA graphs": {"mode": "reduce-overhead", **DELAYED},
    "frozen weights": {"make": half_frozen},
    "released weights": {"make": half_frozen, "release_frozen": True},
    "cached weights": {"weight_copies": "cache"},
    "monitor": {"between": lambda compiled, step: step == 0 and monitor(compiled, every=2), **DELAYED},
    "use_rules": {"between": lambda compiled, step: step == 1 and use_rules(compiled, {"0": None}), **DELAYED},
    "schedule": {"schedule": {2: {"0": None}}, **DELAYED},
    "min_speedup": {"min_speedup": 0.1, **DELAYED},
}


@pytest.mark.exhaustive
@each("setup", SETUPS)
def test_each_way_hits_on_its_second_start_and_equals_the_first(setup, monkeypatch):
    with fresh_inductor_cache():
        cold, _ = cold_and_warm(monkeypatch, steps=4, **SETUPS[setup])
        assert "hit" not in uses(cold) or setup in ("blocks in place", "blocks by name")


@pytest.mark.exhaustive
@each("recipe", ["current", "delayed"])
def test_shapes_that_turn_dynamic_hit_from_the_third_start_on(recipe):
    """Torch remembers between starts which sizes changed, so the second compiles another first graph. With delayed scaling the
    first graph has one call alone, which runs the variant for the first step."""
    with fresh_inductor_cache():
        results = [start(recipe, steps=4, grows=1) for _ in range(3)]
    assert uses(results[2][0]) == {"hit"}
    assert same(results[0][1], results[2][1])


# -- other processes, and other passes

SCRIPT = """
import json, pathlib, sys
import torch
from torch._dynamo.utils import counters
from fp8pass import DelayedScaling, fp8_compile, inspect, requests, state
from tests.support.models import mlp

torch.manual_seed(0)
artifacts = pathlib.Path(sys.argv[2])
if artifacts.exists():
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())
compiled = fp8_compile(mlp(), DelayedScaling(), rules=json.loads(sys.argv[1]), weight_copies="cache")
x = torch.randn(16, 64)
for _ in range(2):
    out = compiled(x)
    out.sum().backward()
saved, info = torch.compiler.save_cache_artifacts()
if not artifacts.exists():
    artifacts.write_bytes(saved)
print(json.dumps({
    "requests": len(list(requests.folder().iterdir())), "cache": inspect(compiled).cache["graph_0"],
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "gemms": len(inspect(compiled).gemms), "tensors": state(compiled).tensors,
    "backward": inspect(compiled).graphs[0].backward is not None, "sum": float(out.detach().double().sum()),
    "handed on": len(info.artifacts["fp8pass"]),
}))
"""


def run_script(folder, artifacts, rules=None):
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(folder), "HOME": str(folder)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(rules), str(artifacts)]
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), **own}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_is_warm_and_complete(tmp_path):
    folder, artifacts = tmp_path / "cache", tmp_path / "artifacts"
    cold = run_script(folder, artifacts)
    assert (cold["hits"], cold["cache"]) == (0, "miss")
    assert cold["misses"] >= 2
    assert cold["requests"] == 1, "the graph asked for inputs that hold cached weights"
    assert cold["gemms"] == 5  # the input needs no gradient
    assert len(cold["tensors"]) == 6
    # the same folder, and the mega-cache alone
    for warm in (run_script(folder, tmp_path / "unused"), run_script(tmp_path / "empty", artifacts)):
        assert (warm["misses"], warm["cache"], warm["requests"], warm["handed on"]) == (0, "hit", 1, 1)
        assert all(warm[part] == cold[part] for part in ("gemms", "tensors", "backward", "sum"))
    other = run_script(folder, artifacts, rules={"2": None})
    assert other["cache"] == "miss"
    assert other["tensors"] == [t for t in cold["tensors"] if t.startswith("0:")]


class Counting(CustomGraphPass):
    calls = 0

    def __call__(self, graph):
        type(self).calls += 1

    def uuid(self):
        return b"counting"


def test_inductors_key_covers_our_sources_and_earlier_passes(monkeypatch):
    """The rewritten graph, which Inductor's key has, covers the rest: `test_cache_key.py` has that of AOTAutograd's cache."""

    def key(patches=None):
        options = CompileOptions(options=patches)
        compiled = CompiledGraph("graph_0", GraphKey(options.first_rules), (), None, 0, (), torch.device("cpu"), None)
        return backend.JointPass(options, compiled).uuid()

    keys = [key(), key({"joint_custom_pre_pass": Counting()})]
    monkeypatch.setattr(cache_key, "source_digest", lambda: "other sources")
    assert len({*keys, key()}) == 3


def test_an_earlier_joint_pass_still_runs():
    # A graph that asks for kept copies is compiled twice; this one does not.
    with functorch_config.patch(enable_autograd_cache=False), torch.no_grad():  # a hit runs no pass
        start(weight_copies="save", options={"joint_custom_pre_pass": Counting()})
    assert Counting.calls == 1


@each("was_enabled", [True, False])
def test_a_compilation_looks_for_no_garbage_and_leaves_the_switch_as_it_was(was_enabled, monkeypatch):
    def broken(*args):
        assert not gc.isenabled()
        raise ZeroDivisionError

    monkeypatch.setattr(backend, "rewrite", broken)
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
            start(backend="aot_eager")
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
