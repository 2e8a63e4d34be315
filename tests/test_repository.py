"""The house rules that a machine can hold: import order, public names, lean imports."""

import ast
import functools
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize
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


parsed = functools.cache(ast.parse)
"""The tree of a text: several tests read every file."""


def imports(path, top_level_only=False):
    tree = parsed(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:  # `from package import module` imports the module
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def test_imports_point_one_way():
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
            if other is None and imported == "fp8pass" and imported in set(imports(path, top_level_only=True)):
                wrong.append(f"{module} imports fp8pass")
    assert wrong == []


#: All of fp8pass that is not core: tools and frameworks' callbacks, and the public functions and commands that call them.
AROUND_THE_CORE = ("fp8pass.tools", "fp8pass.integrations", "fp8pass.api", "fp8pass.__main__")


def is_around_the_core(module):
    return any(module == name or module.startswith(f"{name}.") for name in AROUND_THE_CORE)


def test_no_core_file_imports_a_tool():
    """Not inside a function either, nor for its types alone."""
    core = [path for path in SOURCES if module_name(path) != "fp8pass" and not is_around_the_core(module_name(path))]
    assert len(core) > 100
    wrong = {module_name(path): found for path in core if (found := sorted(filter(is_around_the_core, imports(path))))}
    assert wrong == {}


def rooms():
    """The rooms of lowering/: the folders that register operations."""
    return sorted(path.parent.name for path in (ROOT / "lowering").glob("*/reference.py"))


def named_modules(path):
    """Modules that a file imports, and those that it names in strings, to import them later."""
    yield from imports(path)
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\blowering(?:\.\w+)+", node.value)


def named_rooms(path):
    """Rooms of lowering/ that a file imports or names as modules."""
    parts = [module.split(".") for module in named_modules(path)]
    return {part[1] for part in parts if part[0] == "lowering" and len(part) > 1} & set(rooms())


def test_no_room_imports_another():
    assert len(rooms()) >= 5
    found = {
        module_name(path): others
        for room in rooms()
        for path in sorted((ROOT / "lowering" / room).rglob("*.py"))
        if (others := named_rooms(path) - {room})
    }
    assert found == {}


def test_every_way_to_import_a_room_is_seen(tmp_path):
    path = tmp_path / "file.py"
    for line in (
        "import lowering.{}.ops",
        "from lowering import {}",
        "from lowering.{}.ops import x",
        "def f():\n    from lowering.{} import ops",
        'x.lazy_provider(runs, "lowering.{}.kernels.cast")',
        'x.lazy_provider(runs, f"lowering.{}.{{name}}")',
    ):
        for room in rooms():
            path.write_text(line.format(room))
            assert named_rooms(path) == {room}, line


def test_triton_is_imported_by_kernels_alone():
    def may(path):
        of_all_rooms = {ROOT / f"lowering/triton/{name}.py" for name in ("tile", "many", "epilogue")}
        return path.stem.endswith("kernels") or path in of_all_rooms

    found = [p for p in SOURCES if "triton" in [name.split(".")[0] for name in imports(p, top_level_only=True)]]
    assert len(found) > 10
    assert [str(p) for p in found if not may(p)] == []


def test_importing_fp8pass_imports_neither_dynamo_nor_inductor_nor_triton():
    """And lowering not fp8pass."""
    names = "('torch._dynamo', 'torch._inductor', 'triton', 'rich')"
    found = f"[name for name in {names} if name in sys.modules]"
    code = f"import sys, lowering; assert 'fp8pass' not in sys.modules; import fp8pass; assert not {found}, {found}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_no_public_name_is_that_of_a_module():
    """An import of the module would replace it."""
    assert {f"fp8pass.{name}" for name in fp8pass.__all__} & {module_name(path) for path in SOURCES} == set()


def test_no_name_is_borne_by_two_public_classes():
    """But for the callbacks of two frameworks, whose users import one of them."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module_name(path))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {
        "Fp8Callback": ["fp8pass.integrations.lightning", "fp8pass.integrations.transformers"]
    }


def test_the_version_has_one_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fp8pass.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", fp8pass.__version__)
    literals = [
        path
        for path in [ROOT / "pyproject.toml", *SOURCES]
        if re.search(rf'"{re.escape(fp8pass.__version__)}"', path.read_text())
    ]
    assert literals == [ROOT / "fp8pass/__init__.py"]


#: Files of other projects, which are named as sources.
_OF_OTHERS = """
    deep_gemm/utils/math.py fp8_utils.py integrations/compressed_tensors.py integrations/finegrained_fp8.py
    layers/quantization/fp8.py model_loader/weight_utils.py modeling_utils.py quant_scheme.py quantization/online/fp8.py
    roofline_utils.py testing/training/roofline_utils.py tests/generators.py utils/deep_gemm.py utils/match.py utils/math.py
    utils/quant_utils.py
"""


def prose(text):
    """The docstrings, those of attributes too, and comments of a file."""
    alone = [node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Expr)]
    found = [node.value for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*found, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def missing_files(text):
    """The files `name.py` that the prose of a file names and that the tree does not have."""
    named = {name.removeprefix("../") for name in re.findall(r"[\w./-]*\b[\w-]+\.py\b", prose(text))} - {*_OF_OTHERS.split()}
    return {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files_of_the_tree())}


@functools.cache
def files_of_the_tree():
    folders = ("fp8pass", "lowering", "tests", "benchmarks", "examples")
    return [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_prose_names_no_file_that_is_gone():
    assert {module_name(path): missing for path in SOURCES if (missing := missing_files(path.read_text()))} == {}
    gone = '"""See `gone.py` and rules.py."""\nx = 1\n"""utils/match.py, fp8pass/cost/device.py"""\n# schemes/lost.py'
    assert missing_files(gone) == {"gone.py", "fp8pass/cost/device.py", "schemes/lost.py"}


#: What a process has that an import could change. torch is there before: what its own modules do when they load is theirs.
_STATE_OF_THE_PROCESS = """
import gc, json, logging, os, sys, threading, warnings
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config
from torch._inductor.compile_fx import compile_fx

frameworks = {"accelerate", "lightning", "peft", "safetensors", "transformers", "triton"}

def configuration(module):
    return {name: repr(value) for name, value in module.get_config_copy().items()}

def process():
    loggers = [logging.getLogger(), *(l for l in logging.Logger.manager.loggerDict.values() if isinstance(l, logging.Logger))]
    return {
        "meta_path": [repr(finder) for finder in sys.meta_path],
        "path": list(sys.path),
        "path_hooks": [repr(hook) for hook in sys.path_hooks],
        "excepthook": repr(sys.excepthook),
        "gc": [gc.get_threshold(), gc.isenabled(), len(gc.callbacks)],
        "handlers": {l.name: [repr(l.handlers), l.propagate, l.level] for l in loggers if not l.name.startswith("fp8pass")},
        "own handlers": [l.name for l in loggers if l.name.split(".")[0] in ("fp8pass", "lowering") and l.handlers],
        "filters": [repr(entry) for entry in warnings.filters],
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "inductor": configuration(torch._inductor.config),
        "dynamo": configuration(torch._dynamo.config),
        "functorch": configuration(torch._functorch.config),
        "torch": [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.cuda.is_initialized(),
                  torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        "frameworks": sorted(frameworks & set(sys.modules)),
    }

before = process()
import fp8pass
after = process()
made = {name: after["handlers"].pop(name) for name in set(after["handlers"]) - set(before["handlers"])}
before["handlers made"] = {}
after["handlers made"] = {name: found for name, found in made.items() if found[0] != "[]"}
print(json.dumps({name: [str(before[name]), str(after[name])] for name in before if before[name] != after[name]}))
"""


def test_an_import_changes_nothing_outside_of_itself():
    run = subprocess.run(
        [sys.executable, "-c", _STATE_OF_THE_PROCESS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    assert json.loads(run.stdout) == {}


@pytest.mark.parametrize("package", [fp8pass, lowering], ids=lambda p: p.__name__)
def test_exported_names_are_the_public_names(package):
    modules = {name for name in vars(package) if isinstance(getattr(package, name), type(sys))}
    public = {name for name in vars(package) if not name.startswith("_")} - modules
    assert public - {"annotations"} == set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)


def test_every_public_name_is_documented():
    for package in (fp8pass, lowering):
        for name in package.__all__:
            assert (getattr(package, name).__doc__ or "").strip(), name
