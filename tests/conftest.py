"""The start of every test: nothing is compiled, numbers are seeded, and GPU tests run on GPUs alone."""

import contextlib
import os
import pathlib
import sys
import tempfile

from benchmarks.processes import share


def _share_the_machine() -> None:
    """Each of several pytest workers (pytest-xdist), and every process that its tests start, takes its part of the cores, and
    has a cache of its own for Inductor's code. To be done before torch is imported."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    cache = pathlib.Path(tempfile.gettempdir()) / f"torchinductor_fp8pass_tests_{os.getuid()}_{worker}"
    wanted = share(int(os.environ["PYTEST_XDIST_WORKER_COUNT"])) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    for variable, value in wanted.items():
        os.environ.setdefault(variable, value)


_share_the_machine()

import pytest  # noqa: E402
import torch  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402

from tests.distributed import support as ranks  # noqa: E402
from tests.support import suites, tracing  # noqa: E402
from tests.support.cuda_errors import end_if_spoilt  # noqa: E402

with contextlib.suppress(ImportError):  # a machine with a GPU may not have it; the tests that need it are not run there
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    suites.add_options(parser)
    if not pluginmanager.has_plugin("timeout"):  # of pyproject.toml, which is read strictly
        parser.addini("timeout", "seconds of a test, which pytest-timeout would hold it to")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of a test, which pytest-timeout would hold it to")
    config.pluginmanager.register(suites)
    config.pluginmanager.register(ranks)
    # Tests replace parts of passes and count their runs, which a hit leaves out; those of the cache turn it on (test_warm.py).
    # Whoever sets torch's own variable runs the suite with it, which finds what a hit does not restore.
    functorch_config.enable_autograd_cache = os.environ.get("TORCHINDUCTOR_AUTOGRAD_CACHE") == "1"
    _register_backend()
    tracing.collect_seldom()
    tracing.describe_nothing()
    tracing.measure_no_guards()


def _register_backend() -> None:
    """Let torch know the backend "fp8pass" where the package is not installed with its entry point, or is an earlier one."""
    from torch._dynamo.backends import registry

    from fp8pass.runtime.named_backend import fp8pass_backend

    registry._lazy_import()  # reads the entry points
    if "fp8pass" not in registry._COMPILER_FNS:
        registry.register_backend(fp8pass_backend, name="fp8pass")
    assert registry.lookup_backend("fp8pass") is fp8pass_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device with FP8 tensor cores")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords have the names of folders, too
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch):
    """Dynamo knows no graph yet, random numbers are the same in every order of tests, and text is as wide as in a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    known = {name: dict(trial.reasons) for name, trial in _trials()}
    yield
    for name, trial in _trials():  # what stands in for a library is not to be told of in another test
        trial.reasons.clear()
        trial.reasons.update(known.get(name, {}))
    end_if_spoilt()
    torch._dynamo.reset()


def _trials():
    """The trials of libraries whose modules are imported, by the names of the modules."""
    for name in ("blockwise.cublaslt", "blockwise.deep_gemm", "grouped.cutlass", "grouped.deep_gemm", "mxfp8.gemm"):
        module = sys.modules.get(f"lowering.{name}")
        if module is not None and hasattr(module, "trial"):
            yield name, module.trial
