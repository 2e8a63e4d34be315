"""Torch's caches in a second process: warm, complete for inspection and state, never stale."""

import json
import subprocess
import sys

import pytest
import torch
from torch._functorch import config as functorch_config

from fp8pass import fp8_compile
from fp8pass.options import CompileOptions
from fp8pass.runtime.backend import JointPass
from fp8pass.runtime.recompute import GraphKey
from fp8pass.runtime.session import CompiledGraph
from tests.support.models import mlp

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from fp8pass import DelayedScaling, fp8_compile, inspect, state
from tests.support.models import mlp

torch.manual_seed(0)
model = mlp()
compiled = fp8_compile(model, DelayedScaling(margin=int(sys.argv[1])), rules=json.loads(sys.argv[2]))
x = torch.randn(16, 64)
for _ in range(2):
    out = compiled(x)
    out.sum().backward()
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "cache": inspect(compiled).cache["graph_0"],
    "gemms": len(inspect(compiled).gemms), "tensors": state(compiled).tensors,
    "backward": inspect(compiled).graphs[0].backward is not None, "sum": float(out.detach().double().sum()),
}))
"""


def run(folder, margin=0, rules=None):
    environment = {
        "PYTHONPATH": ":".join(p for p in sys.path if p),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "HOME": str(folder),
    }
    command = [sys.executable, "-c", SCRIPT, str(margin), json.dumps(rules)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_is_warm_and_complete(tmp_path):
    cold = run(tmp_path)
    assert (cold["hits"], cold["cache"]) == (0, "miss")
    assert cold["misses"] >= 2
    warm = run(tmp_path)
    assert (warm["misses"], warm["cache"]) == (0, "hit")
    for part in ("gemms", "tensors", "backward", "sum"):
        assert warm[part] == cold[part]
    assert warm["gemms"] == 5  # the input needs no gradient
    assert len(warm["tensors"]) == 6
    other = run(tmp_path, rules={"2": None})
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
