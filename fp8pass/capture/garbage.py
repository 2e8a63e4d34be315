"""Rarer full garbage collections while a graph is compiled.

Compilation makes objects by the million, and nearly all of them live until it ends. Python's collections of the young ones are
cheap; those of all objects, which walk a growing graph again and again and free next to nothing, took some 3 % of the
time. They wait while a graph is compiled, and still come, so that the compilation of a large model stays bounded in memory.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

#: Collections of the middle generation before one of all objects, each after 7000 new objects or so; Python's own is 10.
RARE = 1000

_lock = threading.Lock()
_own: tuple[int, ...] = ()
"""The thresholds before the first of the threads that compile began."""
_compiling = 0


@contextlib.contextmanager
def rarer_collections() -> Iterator[None]:
    """Let full collections wait. In whatever order threads enter and leave, the last one restores what was set before the
    first; a user's setting stays where it makes collections rarer still, or turns them off."""
    global _compiling, _own
    with _lock:
        if _compiling == 0:
            _own = gc.get_threshold()
            gc.set_threshold(*_own[:2], max(RARE, _own[2]))
        _compiling += 1
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if _compiling == 0:
                gc.set_threshold(*_own)
