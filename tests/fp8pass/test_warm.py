"""Warm starts: what AOTAutograd's cache brings back equals what was compiled, and nothing wrong is ever brought back."""

from __future__ import annotations

import contextlib
import gc
import pathlib

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_inductor_cache
from torch.compiler._cache import CacheArtifactManager

from fp8pass import fp8_compile, inspect, requests, state
from fp8pass.errors import NotTracedError, UnsupportedError
from fp8pass.rewrite.runner import rewrite
from fp8pass.runtime import backend, cache
from tests.support.cases import each
from tests.support.models import mlp

RECIPES = ("delayed", "current", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


@pytest.fixture(autouse=True)
def empty_cache():
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


def entries():
    """The files of AOTAutograd's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    folder = pathlib.Path(AOTAutogradCache._get_tmp_dir())
    return sorted(path for path in folder.rglob("*") if path.is_file())


def start(recipe="delayed", steps=2, make=mlp, x=None, **options):
    """A process's start, as far as one process can have several: nothing is known but what the cache's folder has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = fp8_compile(model, recipe, **options)
    x = torch.randn(16, 64) if x is None else x
    results = []
    for step in range(steps):
        model.zero_grad()
        out = compiled(x * (step + 1))
        out.square().sum().backward()
        results += [out.detach(), *(p.grad for p in model.parameters())]
    return compiled, results


def facts(compiled):
    """All that a user sees of a model, but the use of the cache."""
    found = inspect(compiled)
    table = found.to_dict()
    for graph in table["graphs"]:
        del graph["cache"]
    tensors = state(compiled)
    scales = {name: (tensors.scale(name), tensors.amax_history(name).tolist()) for name in tensors.tensors}
    estimates = [graph.estimates for graph in found.graphs]
    return table, str(found), scales, estimates, [(g.trains, g.estimated_for) for g in found.graphs]


def graphs_as_text(compiled):
    kinds = ("before", "after", "forward", "backward")
    found = [[getattr(graph, kind) for kind in kinds] for graph in inspect(compiled).graphs]
    return [[gm and gm.code for gm in graphs] for graphs in found]


@each("recipe", RECIPES)
def test_a_hit_equals_the_miss_in_tables_states_and_gradients(recipe):
    with contextlib.nullcontext() if recipe == "delayed" else fresh_inductor_cache():
        cold, first = start(recipe, steps=3)
        assert set(inspect(cold).cache.values()) == {"miss"}
        warm, second = start(recipe, steps=3)
        assert set(inspect(warm).cache.values()) == {"hit"}
        assert all(map(torch.equal, first, second))
        assert facts(warm) == facts(cold)
        assert graphs_as_text(warm) == graphs_as_text(cold)


def test_graphs_are_traced_again_in_the_modes_of_their_compilation():
    def run():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp()
        compiled = fp8_compile(model, "current")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            compiled(torch.ones(16, 64))
        return compiled

    texts = [graphs_as_text(run()) for _ in range(2)]
    assert texts[0] == texts[1]
    assert "bfloat16" in str(texts[0])


def test_without_what_a_graph_is_traced_from_there_is_a_typed_error():
    start("current", steps=1)
    warm, _ = start("current", steps=1)
    torch._dynamo.reset()
    gc.collect()
    graph = inspect(warm).graphs[0]
    assert (graph.saved_bytes > 0, graph.cache) == (True, "hit")
    with pytest.raises(NotTracedError, match=r"torch\._dynamo\.reset\(\) has dropped"):
        graph.after  # noqa: B018


def test_a_hit_compiles_nothing_and_rewrites_nothing(monkeypatch):
    start("current", steps=1)
    monkeypatch.setattr(backend, "rewrite", no_rewrite)
    counters.clear()
    warm, _ = start("current", steps=1)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert len(inspect(warm).gemms) == 5


@each(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"fp8pass.runtime.cache", b"fp8pass.runtime.cachE"),
    ],
)
def test_a_damaged_entry_is_a_miss(spoil):
    with fresh_inductor_cache():
        _, first = start("current", steps=1)
        for path in entries():
            path.write_bytes(spoil(path.read_bytes()))
        again, second = start("current", steps=1)
        assert set(inspect(again).cache.values()) == {"miss"}
        assert all(map(torch.equal, first, second))


def test_a_damaged_record_is_a_miss_with_one_line_in_the_log_and_the_next_start_hits(caplog):
    _, first = start("current", steps=1)
    for path in entries():
        content = path.read_bytes()
        assert b"fp8pass.rewrite.runner" in content
        path.write_bytes(content.replace(b"fp8pass.rewrite.runner", b"fp8pass.rewrite.runneR"))
    for use in ("miss", "hit"):
        caplog.clear()
        again, second = start("current", steps=1)
        assert inspect(again).cache == {"graph_0": use}
        assert all(map(torch.equal, first, second))
        assert [r.message for r in caplog.records if r.name.startswith("fp8pass")] == [
            "graph_0: its entry in AOTAutograd's cache has no complete record of the rewrite, and is not used"
        ]


_arrive = cache._arrive


def arrive_for_another_key(key, *others):
    return _arrive("other", *others)


def test_a_record_for_another_key_is_not_used(monkeypatch, caplog):
    _, first = start("current", steps=1)
    monkeypatch.setattr(cache, "_arrive", arrive_for_another_key)
    for use in ("miss", "bypassed: its entries are damaged"):
        again, second = start("current", steps=1)
        assert inspect(again).cache == {"graph_0": use}
        assert all(map(torch.equal, first, second))
        assert len(inspect(again).gemms) == 5
    assert [r.message for r in caplog.records if "compiled without it" in r.message]


def test_torchs_switch_is_ours():
    with functorch_config.patch(enable_autograd_cache=False):
        compiled, _ = start("current", steps=1)
    assert inspect(compiled).cache["graph_0"].startswith("bypassed: AOTAutograd's cache is off (torch._functorch.config")
    assert entries() == []


def test_what_torch_does_not_cache_has_its_reason():
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled, _ = start("current", steps=1)
    assert inspect(compiled).cache == {"graph_0": "bypassed: torch caches no such graph: FX graph cache is not enabled"}


def test_no_code_is_no_cache():
    compiled, _ = start("current", steps=1, backend="aot_eager")
    assert inspect(compiled).cache == {"graph_0": "bypassed: torch caches generated code only"}
    assert inspect(compiled).to_dict()["graphs"][0]["cache"] == "bypassed: torch caches generated code only"


def test_the_backward_of_a_hit_refuses_batches_of_gradients():
    for _ in range(2):
        compiled, _ = start("current", steps=1)
        x = torch.randn(16, 64, requires_grad=True)
        for _ in range(2):
            out = compiled(x)
            with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient"):
                torch.autograd.grad(out, x, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
            compiled(x).sum().backward()
    assert set(inspect(compiled).cache.values()) == {"hit"}


# -- what graphs ask for beside themselves


def infer(calls=2):
    """A model whose weights are kept: its graph asks for inputs that hold them, and is compiled a second time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp().requires_grad_(False)
    compiled = fp8_compile(model, "current", weight_copies="cache")
    with torch.no_grad():
        return compiled, [compiled(torch.ones(16, 64)) for _ in range(calls)]


def no_rewrite(*args):
    raise AssertionError("a warm start rewrites no graph")


def test_inference_hits_too_and_keeps_weights(monkeypatch):
    cold, first = infer()
    monkeypatch.setattr(backend, "rewrite", no_rewrite)
    warm, second = infer()
    monkeypatch.undo()
    assert (inspect(cold).cache, inspect(warm).cache) == ({"graph_0": "miss"}, {"graph_0": "hit"})
    assert all(map(torch.equal, first, second))
    assert facts(warm) == facts(cold)
    assert [w.kept for w in inspect(warm).graphs[0].kept] == [True, True]
    assert graphs_as_text(warm) == graphs_as_text(cold)


def test_a_graph_with_more_tensors_than_its_first_inputs_have_room_for_hits(monkeypatch):
    class Deep(nn.Linear):
        def forward(self, x):
            for _ in range(40):  # more tensors than a Linear lets expect
                x = nn.functional.linear(x, self.weight)
            return x

    def deep():
        return Deep(32, 32, bias=False)

    x = torch.randn(16, 32)
    cold, first = start("delayed", make=deep, x=x)
    assert len(list(requests.folder().iterdir())) == 1, "its graph asked for room"
    monkeypatch.setattr(backend, "rewrite", only_variants)
    warm, second = start("delayed", make=deep, x=x)
    monkeypatch.undo()
    assert set(inspect(warm).cache.values()) == {"hit"}
    assert all(map(torch.equal, first, second))
    assert facts(warm) == facts(cold)


def only_variants(graph, context, rules, inputs, options):
    assert options.variants, "a warm start rewrites no usual graph"
    return rewrite(graph, context, rules, inputs, options)


def test_a_damaged_or_unreadable_request_is_a_second_trace(caplog):
    infer()
    (path,) = requests.folder().iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    again, _ = infer()
    assert inspect(again).cache == {"graph_0": "hit"}
    assert [r.message for r in caplog.records if "is damaged, and is not used" in r.message]
    warm, _ = infer()
    assert inspect(warm).cache == {"graph_0": "hit"}


def test_a_folder_that_cannot_be_written_is_a_remark(caplog):
    requests.folder().write_text("no folder")
    compiled, results = infer()
    assert inspect(compiled).cache == {"graph_0": "miss"}
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    assert torch.equal(*results)


def test_requests_are_written_whole(tmp_path, monkeypatch):
    """A reader sees all of a file or none, whoever else writes it."""
    requests.write("key", b"content" * 1000)
    assert requests.read("key") == b"content" * 1000
    assert [path.name for path in requests.folder().iterdir()] == ["key"]
    assert requests.read("other") is None


# -- the mega-cache


def test_the_mega_cache_carries_all_of_it(monkeypatch):
    CacheArtifactManager.clear()
    infer()
    start("current", steps=1)
    saved, info = torch.compiler.save_cache_artifacts()
    assert len(info.artifacts["fp8pass"]) == 1
    CacheArtifactManager.clear()
    with fresh_inductor_cache():
        loaded = torch.compiler.load_cache_artifacts(saved)
        assert loaded.artifacts == info.artifacts
        monkeypatch.setattr(backend, "rewrite", no_rewrite)
        caches = [inspect(made[0]).cache for made in (infer(), start("current", steps=1))]
        assert caches == [{"graph_0": "hit"}] * 2
        again, _ = torch.compiler.save_cache_artifacts()
        assert again, "a warm process hands the caches on"


# -- the first step of delayed scaling, which runs without generated code


def test_a_warm_start_traces_no_frame_not_even_for_its_first_step(monkeypatch):
    cold, first = start("delayed", steps=3)
    monkeypatch.setattr(backend, "rewrite", no_rewrite)
    warm, second = start("delayed", steps=3)
    monkeypatch.undo()
    assert all(map(torch.equal, first, second))
    assert facts(warm) == facts(cold)


def test_the_first_step_of_a_hit_refuses_batches_of_gradients():
    for _ in range(2):
        torch._dynamo.reset()
        compiled = fp8_compile(mlp(), "delayed")
        x = torch.randn(16, 64, requires_grad=True)
        out = compiled(x)
        with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient"):
            torch.autograd.grad(out, x, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)
