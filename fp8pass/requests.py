"""The extra inputs that graphs needed when they were compiled (`inputs.Needed`), in a folder beside torch's caches.

A graph asks for inputs while it is rewritten, before there is an entry of AOTAutograd's cache, and is compiled again with them:
a warm start has to know them before it looks for the entry. The folder is a part of torch's mega-cache: importing fp8pass makes
`torch.compiler.load_cache_artifacts` know its files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import tempfile

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

log = logging.getLogger(__name__)

_TYPE = "fp8pass"


def folder() -> pathlib.Path:
    """The folder of these files, in that of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return pathlib.Path(cache_dir()) / "fp8pass"


@CacheArtifactFactory.register
class RequestArtifact(CacheArtifact):
    """One file of the folder in torch's mega-cache."""

    def populate_cache(self) -> None:
        """Write the file."""
        _write(self.key, self.content)

    @staticmethod
    def type() -> str:
        """The name of such artifacts in torch's mega-cache."""
        return _TYPE


def read(key: str) -> bytes | None:
    """The content that was written under a key; None where there is none, or a file is damaged, which is logged."""
    try:
        stored = (folder() / key).read_bytes()
    except OSError:
        return None
    digest, content = stored[:32], stored[32:]
    if hashlib.sha256(content).digest() != digest:
        log.warning("%s is damaged, and is not used", folder() / key)
        return None
    CacheArtifactManager.record_artifact(_TYPE, key, stored)
    return content


def write(key: str, content: bytes) -> None:
    """Keep a content under a key. Where the folder cannot be written, that is logged once."""
    stored = hashlib.sha256(content).digest() + content
    CacheArtifactManager.record_artifact(_TYPE, key, stored)
    _write(key, stored)


def _write(key: str, stored: bytes) -> None:
    """Write a file at once: another process sees all of it or none."""
    target, name = folder(), None
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target, prefix=".", delete=False) as file:
            name = file.name
            file.write(stored)
        os.replace(name, target / key)
    except OSError as error:
        _say_unwritable(str(target), str(error))
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


@functools.cache
def _say_unwritable(target: str, error: str) -> None:
    """Once per folder and error."""
    log.warning("%s cannot be written, so graphs with extra inputs are traced twice at each start: %s", target, error)
