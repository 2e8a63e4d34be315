"""Runs a function on several ranks: real processes, gloo on the loopback interface, every rank's result or exception.

`@on_ranks(2)` makes a test of a function that asserts on each rank, where `everyone` has the values of all of them.

Processes are forked from a server that has imported torch already. The ranks of a file stay for its next runs, in one process
group; those of a run that fails, or that asks for fresh ones, end with it. See `rank.py`.
"""

import functools
import inspect
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.distributed.rank import ROOT, Outcome, rank_main


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 900, fresh: bool = False
) -> list[Any]:
    """`function(rank, *args)` on each rank; results by rank. Raises RanksFailed with every trace if a rank failed.

    function: A top-level function of its file.
    timeout: Seconds until all must have finished.
    fresh: In processes of its own: for what destroys groups, replaces parts of modules, or should fail.
    """
    ranks = (None if fresh else _kept.pop(num_ranks, None)) or _Ranks(num_ranks)
    outcomes = ranks.run(function, args, timeout, is_last=fresh)
    failed = [f"--- rank {i}: {o.error}\n{o.trace}" for i, o in enumerate(outcomes) if o.error]
    if fresh or failed:
        ranks.end()
    else:
        _kept[num_ranks] = ranks
    if failed:
        raise RanksFailed("\n".join(failed))
    return [o.value for o in outcomes]


def on_ranks(num_ranks: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of `function(rank, ...)`, which asserts on each rank. It gets the test's other arguments; `options` are those
    of `run_on_ranks`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(**given: Any) -> None:
            run_on_ranks(function, num_ranks, *(given[parameter.name] for parameter in others), **options)

        test.on_rank, test.__signature__ = function, inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate


def everyone(value: Any) -> list[Any]:
    """On a rank: the values of all ranks, in order. Each of them calls it."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def nothing(rank: int) -> None:
    """What ranks run that should start and no more."""


def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the server before the first case, which would pay for it."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("numprocesses", None)
    needs_ranks = any(item.get_closest_marker("dist") for item in session.items)
    if session.config.getoption("--cpu-limit") and is_worker and needs_ranks:
        run_on_ranks(nothing, 1, fresh=True)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks are those of one file."""
    while _kept and (nextitem is None or nextitem.path != item.path):
        _kept.popitem()[1].end()


class _Ranks:
    """Processes that wait for a function to run."""

    def __init__(self, num_ranks: int):
        context = _server()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._processes, self._pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, rank, num_ranks, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, *, is_last: bool) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        request = pickle.dumps((inspect.getfile(function), function.__name__, args, is_last))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        return [_outcome(p, c, deadline) for p, c in zip(self._processes, self._pipes, strict=True)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._folder.cleanup()


_kept: dict[int, _Ranks] = {}
"""By their number: those that the last run left."""


def _outcome(process: Any, pipe: Connection, deadline: float) -> Outcome:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(timeout=5)
        return Outcome(error=f"died (exit code {process.exitcode})")
    return Outcome(error="did not finish in time")


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    path = os.environ.get("PYTHONPATH", "")
    if str(ROOT) not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), path]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context
