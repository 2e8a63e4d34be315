"""Runs a function on several ranks: real processes, gloo on the loopback interface, every rank's result or exception.

Processes are forked from a server that has imported torch already, so a run starts in a fraction of a second, and each
has fresh processes: nothing is left over from the run before.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: str = ""
    """Type and text of the exception, or "died (exit code N)"."""
    trace: str = ""


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 300, group_timeout: float = 120
) -> list[Any]:
    """`function(rank, *args)` on each rank; results by rank. Raises RanksFailed with every trace if a rank failed."""
    outcomes = outcomes_on_ranks(function, num_ranks, *args, timeout=timeout, group_timeout=group_timeout)
    failed = [f"--- rank {i}: {o.error}\n{o.trace}" for i, o in enumerate(outcomes) if o.error]
    if failed:
        raise RanksFailed("\n".join(failed))
    return [o.value for o in outcomes]


def outcomes_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 300, group_timeout: float = 120
) -> list[Outcome]:
    """The same with an Outcome per rank, for runs that should fail. `function` is a top-level function of its file."""
    context = _server()
    file, name = inspect.getfile(function), function.__name__
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes, pipes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(sender, file, name, rank, num_ranks, store, group_timeout, args), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        deadline = time.monotonic() + timeout
        outcomes = [_outcome(p, c, deadline) for p, c in zip(processes, pipes, strict=True)]
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    return outcomes


def _outcome(process: Any, pipe: Connection, deadline: float) -> Outcome:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pickle.loads(pipe.recv_bytes())
    except EOFError:
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


def _rank_main(
    sender: Connection,
    file: str,
    name: str,
    rank: int,
    size: int,
    store: str,
    group_timeout: float,
    args: Sequence[Any],
) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=group_timeout)
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
        outcome = Outcome(_load(file, name)(rank, *args))
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))  # not `send`, which would share tensors' memory with a process that ends
    sender.close()
    sys.stdout.flush()
    os._exit(0)  # peers may be gone, so an orderly shutdown of the group could wait for them


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_" + pathlib.Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
