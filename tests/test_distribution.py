"""What is published: a source distribution holds every file that is tracked, but for those of the repository itself."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

import fp8pass

ROOT = pathlib.Path(__file__).parents[1]
#: Belong to the repository, not to what is published.
LEFT_OUT = {".gitignore", ".ci", ".github", ".gitattributes"}


@pytest.mark.slow
def test_a_source_distribution_holds_what_it_names(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    if shutil.which("git") is None:
        pytest.skip("git lists what is tracked")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git repository")
    tracked = [name for name in listed.stdout.splitlines() if name.split("/")[0] not in LEFT_OUT and (ROOT / name).is_file()]
    for name in tracked:
        target = tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    build = "import setuptools.build_meta as backend; backend.build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "source", check=True, capture_output=True, timeout=300)
    stem = f"fp8pass-{fp8pass.__version__}"
    with tarfile.open(tmp_path / f"{stem}.tar.gz") as archive:
        held = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
        metadata = archive.extractfile(f"{stem}/PKG-INFO").read().decode()
    assert set(tracked) - held == set()
    assert f"Version: {fp8pass.__version__}\n" in metadata
    assert "Classifier: Typing :: Typed\n" in metadata
    assert not [name for name in held if name.endswith(".pyc")]
