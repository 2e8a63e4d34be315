"""A rank's process: runs one function after the other in one process group, each as if in a process of its own.

NOTE [shared ranks] Between two runs in one process everything is undone that a test may leave behind by running as a program
does: compiled code, random numbers, environment, configurations of torch, warnings, what ranks told each other. A run that
replaces a function or a constant of a module, and leaves it so, needs fresh ranks.
"""

import ast
import dataclasses
import datetime
import gc
import importlib.util
import itertools
import os
import pathlib
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
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


def rank_main(pipe: Connection, rank: int, size: int, store: str) -> None:
    """Answer each (file, name of a function, its arguments, whether it is the last) with an Outcome, until one is an error or
    the other end is closed."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    before = None
    for count in itertools.count():
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        try:
            if before is None:
                limit, files = datetime.timedelta(seconds=120), dist.FileStore(store, size)
                dist.init_process_group("gloo", store=files, rank=rank, world_size=size, timeout=limit)
                before = Before()
            before.store_of(count)
            file, name, args, is_last = pickle.loads(request)
            with warnings.catch_warnings():
                function = load(file, name)
                outcome = Outcome(function(rank, *args))
            answer = pickle.dumps(outcome)  # not `send`, which would share tensors' memory with a process that ends
            del outcome
            if not is_last:
                before.restore()
        except BaseException as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            pipe.send_bytes(pickle.dumps(outcome))
            break
        sys.stdout.flush()
        pipe.send_bytes(answer)
    sys.stdout.flush()
    os._exit(0)  # peers may be gone, so an orderly shutdown of the group could wait for them


def load(file: str, name: str) -> Callable[..., Any]:
    """A function of a file, which is executed anew, with asserts that say what they compared; of a test, what its ranks run."""
    from _pytest.assertion.rewrite import rewrite_asserts

    spec = importlib.util.spec_from_file_location("ranks_" + pathlib.Path(file).stem, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    source = pathlib.Path(file).read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source)
    exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, name)
    return getattr(function, "on_rank", function)


class Before:
    """What was there before the first run of a rank, and is there again before each: see NOTE [shared ranks]."""

    def __init__(self) -> None:
        import torch._functorch.config
        import torch._inductor.config
        import torch.distributed as dist

        self._configs = {
            config: config.get_config_copy()
            for config in (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
        }
        self._environment = dict(os.environ)
        self._random = torch.get_rng_state()
        self._bucket_bytes = dist._DEFAULT_FIRST_BUCKET_BYTES
        self._path = list(sys.path)
        self._store = dist.distributed_c10d._get_default_store()

    def store_of(self, run: int) -> None:
        """What ranks tell each other by the store of the default group, each run begins without."""
        import torch.distributed as dist

        from fp8pass.runtime import ranks

        store = dist.PrefixStore(f"run {run}", self._store)
        dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", store)
        ranks._group_numbers.clear()

    def restore(self) -> None:
        """Undo what a run left. Raises AssertionError for what it should not have left."""
        import torch
        import torch.distributed as dist

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for config, values in self._configs.items():
            now = config.get_config_copy()
            config.load_config({name: value for name, value in values.items() if now[name] != value})
        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._path
        dist._DEFAULT_FIRST_BUCKET_BYTES = self._bucket_bytes
        gc.collect()  # models are held in cycles, and some of what is registered for them is there as long as they are
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float32
        torch.set_rng_state(self._random)
