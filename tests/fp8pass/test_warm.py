"""Warm starts: what torch's caches bring back equals what was compiled, and nothing wrong is ever brought back."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_inductor_cache

from fp8pass import fp8_compile, inspect, requests, state
from fp8pass.errors import NotTracedError, UnsupportedError
from fp8pass.inputs import Needed
from fp8pass.runtime import backend, cache
from tests.support.cases import each
from tests.support.models import mlp
from tests.support.training import RECIPES, gradients, same


@pytest.fixture(autouse=True)
def empty_cache():
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


def entries():
    """The files of AOTAutograd's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    return sorted(path for path in pathlib.Path(AOTAutogradCache._get_tmp_dir()).rglob("*") if path.is_file())


def start(recipe="current", steps=1, **options):
    """A process's start, as far as one process can have several: nothing is known but what the cache's folder has. Returns the
    compiled model, and outputs and gradients of each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    compiled = fp8_compile(model, recipe, **options)
    results = []
    for _ in range(steps):
        model.zero_grad()
        out = compiled(torch.randn(16, 64))
        out.square().sum().backward()
        results += [out.detach(), gradients(model)]
    return compiled, results


def no_rewrite(*args):
    raise AssertionError("a warm start rewrites no graph")


def facts(compiled):
    """All that a user sees of a model, but the use of the cache."""
    found, tensors = inspect(compiled), state(compiled)
    table = found.to_dict()
    for graph in table["graphs"]:
        del graph["cache"]
    return table, str(found), tensors.state_dict(), [(g.estimates, g.trains, g.estimated_for) for g in found.graphs]


def code(compiled):
    return [[gm and gm.code for gm in (g.before, g.after, g.forward, g.backward)] for g in inspect(compiled).graphs]


def uses(compiled):
    """The use of the cache for every graph, under whatever rules."""
    return {graph.cache for part in inspect(compiled).parts for graph in part.session.every_graph}


# -- hits


@each("recipe", RECIPES)
def test_a_hit_equals_the_miss_in_tables_states_and_gradients(recipe, monkeypatch):
    with fresh_inductor_cache():
        cold, first = start(recipe, steps=3)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "rewrite", no_rewrite)
            warm, second = start(recipe, steps=3)
        assert (uses(cold), uses(warm)) == ({"miss"}, {"hit"})
        assert same(first, second)
        assert same(facts(warm), facts(cold))
        assert code(warm) == code(cold)
        assert len(inspect(warm).gemms) == 5
        out = warm(torch.randn(16, 64))
        with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient"):
            torch.autograd.grad(out, [*warm.parameters()], torch.ones(2, *out.shape), is_grads_batched=True)


def test_without_what_a_graph_is_traced_from_there_is_a_typed_error():
    start()
    warm, _ = start()
    torch._dynamo.reset()
    gc.collect()
    graph = inspect(warm).graphs[0]
    assert (graph.saved_bytes > 0, graph.cache) == (True, "hit")
    with pytest.raises(NotTracedError, match=r"torch\._dynamo\.reset\(\) has dropped"):
        graph.after  # noqa: B018


# -- damage


@each(
    "spoil",
    [
        lambda content: content[: len(content) // 2],
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
    assert [r.message for r in caplog.records if "compiled without it" in r.message]


def test_what_a_graph_asks_for_comes_back_whole_or_not_at_all(caplog):
    graph = inspect(start(backend="aot_eager")[0]).graphs[0].compiled
    cache.remember("key", graph, Needed(7))
    cache.remember("lambda", graph, lambda: 7)
    assert cache.recall("key", graph) == Needed(7)
    (path,) = requests.folder().iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.recall("key", graph) == Needed()
    path.unlink()
    path.mkdir()
    requests.RequestArtifact("key", b"").populate_cache()
    for said in ("key is damaged, and is not used", "fp8pass cannot be written, so graphs with extra inputs are traced twice"):
        assert [r for r in caplog.records if said in r.message]
    assert 'TORCH_LOGS="' in cache._why_bypassed(graph.source)
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert cache._why_bypassed(graph.source) == "torch caches no such graph: FX graph cache is not enabled"


# -- other processes

PROCESS = """
import pathlib, sys, torch
from tests.fp8pass.test_warm import start, uses

artifacts = pathlib.Path(sys.argv[1])
if artifacts.exists():
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())
compiled, results = start("delayed", steps=2, weight_copies="cache")
artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(uses(compiled), [float(out.double().sum()) for out in results[::2]])
"""


def test_a_second_process_is_warm_and_complete(tmp_path):
    def run(folder, artifacts):
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        command = [sys.executable, "-c", PROCESS, str(tmp_path / artifacts)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    cold = run("cache", "artifacts")
    assert cold.startswith("{'miss'}")
    for warm in (run("cache", "unused"), run("empty", "artifacts")):  # the same folder, and the mega-cache alone
        assert warm == cold.replace("miss", "hit")
