"""The house rules that a machine can hold: import order, public names, lean imports."""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import fp8pass
import lowering

ROOT = pathlib.Path(__file__).parents[1]

# A module imports only what stands before it (design: errors first, the public functions last).
_IN_ORDER = """
lowering.formats lowering.hardware lowering.copies lowering.scaling lowering.products lowering.checks lowering.operation
lowering.trials lowering.deep_gemm lowering.triton lowering.tensor_cores lowering.tensorwise lowering.mxfp8 lowering.blockwise
lowering.rowwise lowering.state lowering.state_kernels lowering.grouped lowering.casts lowering.gemm lowering.ops lowering.paths
lowering.api lowering.other_ops lowering.statistics lowering.kernels lowering.inductor lowering lowering.triton.check
fp8pass.errors fp8pass.cost fp8pass.graph fp8pass.recipes fp8pass.schemes fp8pass.rules fp8pass.options fp8pass.inputs
fp8pass.requests fp8pass.scales fp8pass.weights fp8pass.rewrite fp8pass.runtime fp8pass.scales.view fp8pass.tools.tables
fp8pass.tools.monitoring fp8pass.tools fp8pass.api fp8pass.__main__ fp8pass.integrations
"""
ORDER = _IN_ORDER.split()
SOURCES = sorted(path for package in ("lowering", "fp8pass") for path in (ROOT / package).rglob("*.py"))


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(module):
    matches = [name for name in ORDER if module == name or module.startswith(name + ".")]
    return ORDER.index(max(matches, key=len)) if matches else None


@functools.cache
def imports(path, top_level_only=False):
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:  # `from package import module` imports the module
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def test_imports_point_one_way():
    """So no core file imports a tool or a framework's callback, not inside a function either."""
    wrong = []
    for path in SOURCES:
        module = module_name(path)
        own = layer(module)
        if own is None:  # fp8pass/__init__.py stands above all
            assert module == "fp8pass"
            continue
        for imported in imports(path):
            other = layer(imported)
            if other is not None and other > own:
                wrong.append(f"{module} imports {imported}, which stands after it")
        # `import fp8pass` inside a function, for the package's folder, is no dependency on its names.
        if "fp8pass" in imports(path, top_level_only=True):
            wrong.append(f"{module} imports fp8pass")
    assert wrong == []


def test_no_room_imports_another():
    """Nor names it as a module, to import it later. The rooms are the folders of lowering/ that register operations."""
    rooms = {path.parent.name for path in (ROOT / "lowering").glob("*/reference.py")}
    assert len(rooms) >= 5
    for room in rooms:
        for path in (ROOT / "lowering" / room).rglob("*.py"):
            named = [*imports(path), *re.findall(r"\blowering(?:\.\w+)+", path.read_text())]
            assert {name.split(".")[1] for name in named if name.startswith("lowering.")} & rooms <= {room}, path


def test_triton_is_imported_by_kernels_alone():
    of_all_rooms = {ROOT / f"lowering/triton/{name}.py" for name in ("tile", "many", "epilogue")}
    found = {path for path in SOURCES if "triton" in [name.split(".")[0] for name in imports(path, top_level_only=True)]}
    assert len(found) > 10
    assert [path for path in found - of_all_rooms if not path.stem.endswith("kernels")] == []


def test_importing_fp8pass_imports_neither_dynamo_nor_inductor_nor_triton():
    """And lowering not fp8pass."""
    code = """
import sys, lowering
assert "fp8pass" not in sys.modules
import fp8pass
assert not {"torch._dynamo", "torch._inductor", "triton", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


#: What a process has that an import could change. torch is there before: what its own modules do when they load is theirs.
_STATE_OF_THE_PROCESS = """
import gc, json, logging, os, sys, threading, warnings
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config
from torch._inductor.compile_fx import compile_fx

def process():
    loggers = [logging.getLogger(), *(l for l in logging.Logger.manager.loggerDict.values() if isinstance(l, logging.Logger))]
    configs = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)
    return {
        "imports": [repr(finder) for finder in sys.meta_path] + sys.path + [repr(hook) for hook in sys.path_hooks],
        "hooks": [repr(sys.excepthook), len(gc.callbacks), gc.get_threshold()],
        "handlers": {l.name: [repr(l.handlers), l.propagate, l.level] for l in loggers if l.handlers},
        "filters": [repr(entry) for entry in warnings.filters],
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "configs": [{name: repr(value) for name, value in config.get_config_copy().items()} for config in configs],
        "torch": [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.cuda.is_initialized(),
                  torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        "frameworks": sorted({"accelerate", "lightning", "peft", "transformers", "triton"} & set(sys.modules)),
    }

before = process()
import fp8pass
after = process()
print(json.dumps({name: [str(before[name]), str(after[name])] for name in before if before[name] != after[name]}))
"""


def test_an_import_changes_nothing_outside_of_itself():
    run = subprocess.run(
        [sys.executable, "-c", _STATE_OF_THE_PROCESS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    assert json.loads(run.stdout) == {}


def test_the_version_has_one_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fp8pass.__version__"}
    literal = f'"{fp8pass.__version__}"'
    assert [path for path in SOURCES if literal in path.read_text()] == [ROOT / "fp8pass/__init__.py"]


#: Files of other projects, which are named as sources.
_OF_OTHERS = """
    deep_gemm/utils/math.py fp8_utils.py integrations/compressed_tensors.py integrations/finegrained_fp8.py
    layers/quantization/fp8.py model_loader/weight_utils.py modeling_utils.py quant_scheme.py quantization/online/fp8.py
    roofline_utils.py testing/training/roofline_utils.py tests/generators.py utils/deep_gemm.py utils/match.py utils/math.py
    utils/quant_utils.py
"""


def test_prose_names_no_file_that_is_gone():
    folders = ("fp8pass", "lowering", "tests", "benchmarks", "examples")
    tree = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in SOURCES:
        named = {name.removeprefix("../") for name in re.findall(r"[\w./-]*\b[\w-]+\.py\b", path.read_text())}
        missing = {name for name in named - {*_OF_OTHERS.split()} if not any(file.endswith(f"/{name}") for file in tree)}
        assert not missing, path


@pytest.mark.parametrize("package", [fp8pass, lowering], ids=lambda p: p.__name__)
def test_exported_names_are_the_public_names(package):
    """Each is documented, and none is a module's, whose import would replace it."""
    modules = {name for name in vars(package) if isinstance(getattr(package, name), type(sys))}
    public = {name for name in vars(package) if not name.startswith("_")} - modules
    assert public - {"annotations"} == set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)
    assert {f"{package.__name__}.{name}" for name in package.__all__} & set(map(module_name, SOURCES)) == set()
    assert [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()] == []
