"""The published files: the source distribution holds every tracked file, but for those of the repository itself, and the
wheel alone runs the README's example."""

import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

import fp8pass

ROOT = pathlib.Path(__file__).parents[1]
#: Belong to the repository, not to what is published.
LEFT_OUT = {".gitignore", ".ci", ".github", ".gitattributes"}
STEM = f"fp8pass-{fp8pass.__version__}"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with the source distribution and the wheel, built from the tracked files, and the names of those files."""
    pytest.importorskip("setuptools", minversion="77")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git lists what is tracked")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [name for name in listed.stdout.splitlines() if name.split("/")[0] not in LEFT_OUT and (ROOT / name).is_file()]
    folder = tmp_path_factory.mktemp("published")
    for name in tracked:
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    build = "import setuptools.build_meta as backend; backend.build_sdist('..'); backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, capture_output=True, timeout=300)
    return folder, tracked


@pytest.mark.slow
def test_a_source_distribution_holds_what_it_names(published):
    folder, tracked = published
    with tarfile.open(folder / f"{STEM}.tar.gz") as archive:
        held = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
    assert set(tracked) - held == set()
    assert not [name for name in held if name.endswith(".pyc")]


@pytest.mark.slow
def test_a_package_index_takes_it(published):
    pytest.importorskip("twine", reason="it checks what an index would refuse (extra `dev`)")
    files = [str(path) for path in published[0].iterdir() if path.is_file()]
    assert len(files) == 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, timeout=300)


def test_what_an_index_shows_links_to_nothing_in_the_repository():
    """An index has none of its files."""
    text = (ROOT / "PACKAGE.md").read_text()
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []


#: The backend by its name, in a process that has not imported the package.
_BY_NAME = """
import sys, torch
assert "fp8pass" in torch._dynamo.list_backends() and "fp8pass" not in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
compiled = torch.compile(model, backend="fp8pass", options={"recipe": "delayed", "backend": "aot_eager"})
compiled(torch.randn(16, 32)).sum().backward()
import fp8pass
print(sum(gemm.quantized for gemm in fp8pass.inspect(compiled).gemms))
"""


@pytest.mark.slow
def test_the_wheel_alone_runs_the_example_of_the_readme_and_registers_the_backend(published, tmp_path):
    """In an environment that has what the wheel requires, in an empty folder."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    packages = next((environment / "lib").glob("python*/site-packages"))
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    with zipfile.ZipFile(published[0] / f"{STEM}-py3-none-any.whl") as wheel:
        wheel.extractall(packages)
    (tmp_path / "empty").mkdir()

    def run(*arguments):
        command = [environment / "bin" / "python", "-I", *arguments]  # -I: neither PYTHONPATH nor the user's own packages
        done = subprocess.run(command, cwd=tmp_path / "empty", capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    example = next(re.finditer(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))[1]
    printed = run("-c", example + "\nprint(fp8pass.__file__)")
    assert "4 of 5 GEMMs run in FP8" in printed
    assert printed.splitlines()[-1] == str(packages / "fp8pass" / "__init__.py")
    assert f"fp8pass       {fp8pass.__version__}" in run("-m", "fp8pass")
    assert run("-c", _BY_NAME) == "5\n"
