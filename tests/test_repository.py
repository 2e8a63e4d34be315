"""The house rules that a machine can hold: import order, public names, file sizes, lean imports."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import fp8pass
import lowering

ROOT = pathlib.Path(__file__).parents[1]

# A module imports only what stands before it (design: errors first, the public functions last).
ORDER = [
    "lowering.formats",
    "lowering.hardware",
    "lowering.checks",
    "lowering.operation",
    "lowering.trials",
    "lowering.triton",
    "lowering.tensorwise",
    "lowering.mxfp8",
    "lowering.blockwise",
    "lowering.rowwise",
    "lowering.state",
    "lowering.grouped",
    "lowering.gemm",
    "lowering.inductor",
    "lowering",
    "fp8pass.errors",
    "fp8pass.reasons",
    "fp8pass.cost",
    "fp8pass.graph",
    "fp8pass.recipes",
    "fp8pass.rules",
    "fp8pass.state",
    "fp8pass.rewrite",
    "fp8pass.capture",
    "fp8pass.stateful",
    "fp8pass.inspection",
    "fp8pass.arguments",
    "fp8pass.attach",
    "fp8pass.by_name",
    "fp8pass.api",
    "fp8pass.integrations",
]
SOURCES = sorted(path for package in ("lowering", "fp8pass") for path in (ROOT / package).rglob("*.py"))


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(module):
    matches = [name for name in ORDER if module == name or module.startswith(name + ".")]
    return ORDER.index(max(matches, key=len)) if matches else None


def imports(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:  # `from package import module` imports the module
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_one_way(path):
    own = layer(module_name(path))
    if own is None:  # fp8pass/__init__.py stands above all
        assert module_name(path) == "fp8pass"
        return
    for imported in imports(path):
        other = layer(imported)
        if other is not None:
            assert other <= own, f"{module_name(path)} imports {imported}, which stands after it"
        elif imported == "fp8pass":
            # `import fp8pass` inside a function, for the package's folder, is no dependency on its names.
            assert imported not in set(imports(path, top_level_only=True))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_triton_is_imported_by_kernels_alone(path):
    is_kernel = path.parent.name == "kernels" or path == ROOT / "lowering/triton/tile.py"
    imports_triton = "triton" in [name.split(".")[0] for name in imports(path, top_level_only=True)]
    assert not imports_triton or (is_kernel and path.name != "__init__.py")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=module_name)
def test_the_docstring_of_a_package_is_an_index_of_its_modules(path):
    """One line per file, which begins with its name: in backticks, or with two spaces behind it."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    listed = re.findall(r"^`?(\w+)(?:\.py)?(?:`|  )", docstring, re.MULTILINE)
    folders = [p.parent for p in path.parent.glob("*/__init__.py")]
    files = [p for p in path.parent.glob("*.py") if p.name != "__init__.py"]
    assert sorted(listed) == sorted(p.stem for p in [*files, *folders])


def test_importing_the_packages_imports_neither_triton_nor_inductors_compiler():
    code = "import sys, lowering; assert 'triton' not in sys.modules and 'fp8pass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("package", [fp8pass, lowering], ids=lambda p: p.__name__)
def test_exported_names_are_the_public_names(package):
    modules = {name for name in vars(package) if isinstance(getattr(package, name), type(sys))}
    public = {name for name in vars(package) if not name.startswith("_")} - modules
    assert public - {"annotations"} == set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)


@pytest.mark.parametrize("path", [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts and "build" not in p.parts], ids=str)
def test_files_stay_below_the_wall(path):
    assert len(path.read_text().splitlines()) <= 500


def test_every_public_name_is_documented():
    for package in (fp8pass, lowering):
        for name in package.__all__:
            assert (getattr(package, name).__doc__ or "").strip(), name
