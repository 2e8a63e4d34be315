"""The machine code of Inductor's fused casts: nothing depends on bits that no instruction computed, nor on sums of a matrix
product that has not finished. That of hand-written kernels: test_limits.py.

The control that this finds anything: tests/lowering/ptx has kernels that ptxas 12.8 gets wrong, and newer ones get right.
"""

import importlib.util
import pathlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from benchmarks.contestants import steady
from benchmarks.cross_codegen import capture, compile_config, load_kernel, report, sources
from fp8pass import fp8_compile
from lowering import hardware
from lowering.triton.assembler import Assembler, assemble, of_path, others
from tests.machine_code import UnknownInstruction, disassemble, findings, findings_of_text
from tests.support.models import LlamaBlock

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")

RECIPES = ("delayed", "current", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


def said_of(dump: str) -> str:
    """The number of findings of each kind, and one of them in words; "" if nothing is wrong."""
    try:
        found = findings_of_text(dump)
    except UnknownInstruction as error:
        return str(error)
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(Counter(finding.kind for finding in found).items()))
    return f"{counts}; {found[0]}" if found else ""


def require_right(cubins: Iterator[tuple[str, bytes]]) -> None:
    """Says all that is wrong with all of them. Equal ones are analysed once."""
    named = dict(cubins)
    assert named
    different = list(dict.fromkeys(named.values()))
    said = {cubin: said_of(dump) for cubin, dump in zip(different, disassemble(different), strict=True)}
    wrong = [f"  {name}: {said[cubin]}" for name, cubin in named.items() if said[cubin]]
    assert not wrong, f"{len(wrong)} of {len(named)} kernels are wrong:\n" + "\n".join(wrong)


# -- Inductor's


def fused_casts(recipe: str, folder: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Every configuration of the kernels that Inductor generates for a training step and that have FP8 in them."""
    torch._dynamo.reset()
    with torch.device("meta"):
        empty = LlamaBlock(4096, 14336, 32).bfloat16()
    compiled = fp8_compile(empty.to_empty(device="cpu"), steady(recipe))
    with capture() as graphs:
        compiled(torch.empty((2, 8192, 4096), dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    for generated in report(graphs):
        for name, source in sources(generated.code).items():
            if "float8" in source:
                kernel = load_kernel("kernel", source.replace(name, "kernel"), folder / f"{recipe}_{generated.name}_{name}.py")
                for i, config in enumerate(kernel.configs):
                    yield f"{recipe} {generated.name} {name} [{i}]", compile_config(kernel, config).asm["cubin"]


def test_fused_casts(tmp_path):
    require_right(cubin for recipe in RECIPES for cubin in fused_casts(recipe, tmp_path))


# -- the control

PTX = pathlib.Path(__file__).parent / "ptx"
#: Findings of each kind in what ptxas 12.8 makes of the kernels there.
WRONG = {
    "minimal": {"store": 16},
    "cast_of_one_column": {"store": 8},
    "cast_transpose_e4m3": {"store": 8},
    "cast_transpose_amax_e5m2": {"store": 8},
    "multi_cast_transpose_blockwise_128x128": {"store": 1},
    "fused_cast_both_e4m3": {"store": 2},
    "fused_silu_backward_e5m2": {"store": 2},
}


def bundled(name: str) -> Assembler:
    """An assembler that Triton ships, whichever the environment prefers."""
    import triton

    return of_path(str(pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name))


def assembled(name: str, ptxas: Assembler) -> bytes:
    return assemble((PTX / f"{name}.ptx").read_text(), ptxas, ["--gpu-name=sm_90a"])


@pytest.mark.parametrize("name", WRONG)
def test_what_the_old_assembler_gets_wrong_is_found(name):
    ptxas = bundled("ptxas")
    assert ptxas.version == (12, 8), "this Triton has another one, whose mistakes are not known"
    assert Counter(finding.kind for finding in findings(assembled(name, ptxas))) == WRONG[name]


def test_newer_assemblers_get_all_of_it_right():
    """Those that came with torch and Triton, and that of the extra `assemblers`."""
    spec = importlib.util.find_spec("nvidia")
    folders = map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
    found = [*others(), *(of_path(str(path)) for folder in folders for path in folder.glob("cu*/bin/ptxas"))]
    newer = {ptxas.version: ptxas for ptxas in found if ptxas.is_right}
    if not newer:
        pytest.skip("no ptxas of CUDA 13: Triton 3.7 has one, and so has `pip install fp8pass[assemblers]`")
    require_right((f"{name} by {ptxas}", assembled(name, ptxas)) for ptxas in newer.values() for name in WRONG)
