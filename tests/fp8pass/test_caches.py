"""Torch's caches in a second process: warm, complete for inspection and state, never stale."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config

from fp8pass import fp8_compile
from fp8pass.options import CompileOptions
from fp8pass.runtime import backend
from fp8pass.runtime.backend import JointPass
from fp8pass.runtime.recompute import GraphKey
from fp8pass.runtime.session import CompiledGraph
from tests.support.cases import each
from tests.support.models import mlp

SCRIPT = """
import json, pathlib, sys
import torch
from torch._dynamo.utils import counters
from fp8pass import DelayedScaling, fp8_compile, inspect, requests, state
from tests.support.models import mlp

torch.manual_seed(0)
model = mlp()
artifacts = pathlib.Path(sys.argv[3])
if artifacts.exists():
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())
options = {"rules": json.loads(sys.argv[2]), "weight_copies": "cache"}
compiled = fp8_compile(model, DelayedScaling(margin=int(sys.argv[1])), **options)
x = torch.randn(16, 64)
for _ in range(2):
    out = compiled(x)
    out.sum().backward()
if not artifacts.exists():
    artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({
    "requests": len(list(requests.folder().iterdir())),
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "cache": inspect(compiled).cache["graph_0"],
    "gemms": len(inspect(compiled).gemms), "tensors": state(compiled).tensors,
    "backward": inspect(compiled).graphs[0].backward is not None, "sum": float(out.detach().double().sum()),
}))
"""


def run(folder, artifacts, margin=0, rules=None):
    environment = {
        "PYTHONPATH": ":".join(p for p in sys.path if p),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "HOME": str(folder),
    }
    command = [sys.executable, "-c", SCRIPT, str(margin), json.dumps(rules), str(artifacts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_is_warm_and_complete(tmp_path):
    folder, artifacts = tmp_path / "cache", tmp_path / "artifacts"
    cold = run(folder, artifacts)
    assert (cold["hits"], cold["cache"]) == (0, "miss")
    assert cold["misses"] >= 2
    assert cold["requests"] == 1, "the graph asked for inputs that hold cached weights"
    warm = run(folder, tmp_path / "unused")
    elsewhere = run(tmp_path / "empty", artifacts)  # the mega-cache alone
    for start in (warm, elsewhere):
        assert (start["misses"], start["cache"], start["requests"]) == (0, "hit", 1)
        for part in ("gemms", "tensors", "backward", "sum"):
            assert start[part] == cold[part]
    assert warm["gemms"] == 5  # the input needs no gradient
    assert len(warm["tensors"]) == 6
    other = run(folder, artifacts, rules={"2": None})
    assert other["cache"] == "miss"
    assert other["tensors"] == [t for t in cold["tensors"] if t.startswith("0:")]


def test_inductors_key_covers_our_sources_and_earlier_passes(monkeypatch):
    """The rewritten graph, which Inductor's key has, covers the rest: `test_cache_key.py` has that of AOTAutograd's cache."""
    from fp8pass.runtime import cache_key

    class Earlier:
        def uuid(self):
            return b"earlier"

    def key(patches=None):
        options = CompileOptions(options=patches)
        compiled = CompiledGraph("graph_0", GraphKey(options.first_rules), (), None, 0, (), torch.device("cpu"), None)
        return JointPass(options, compiled).uuid()

    keys = [key(), key({"joint_custom_pre_pass": Earlier()})]
    monkeypatch.setattr(cache_key, "source_digest", lambda: "other sources")
    assert len({*keys, key()}) == 3


def test_an_earlier_joint_pass_still_runs():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Counting(CustomGraphPass):
        calls = 0

        def __call__(self, graph):
            type(self).calls += 1

        def uuid(self):
            return b"counting"

    options = {"joint_custom_pre_pass": Counting()}
    # A graph that asks for kept copies is compiled twice; this one does not.
    compiled = fp8_compile(mlp(), "current", weight_copies="save", options=options)
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):  # a hit runs no pass
        compiled(torch.randn(16, 64))
    assert Counting.calls == 1


@each("was_enabled", [True, False])
def test_a_compilation_looks_for_no_garbage_and_leaves_the_switch_as_it_was(was_enabled, monkeypatch):
    def broken(*args):
        assert not gc.isenabled()
        raise ZeroDivisionError

    monkeypatch.setattr(backend, "rewrite", broken)
    compiled = fp8_compile(mlp(), "current", backend="aot_eager")
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
            compiled(torch.randn(16, 64))
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
