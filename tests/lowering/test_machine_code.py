"""The machine code of our kernels and of Inductor's fused casts: nothing depends on bits that no instruction computed, nor on
sums of a matrix product that has not finished.

The control that this finds anything: tests/lowering/ptx has kernels that ptxas 12.8 gets wrong, and newer ones get right.
"""

import contextlib
import importlib.util
import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

from benchmarks import catalogue, kernel_limits
from benchmarks.contestants import steady
from benchmarks.cross_codegen import capture, compile_config, load_kernel, report, sources
from benchmarks.variants import Launch, compile_launch
from fp8pass import fp8_compile
from lowering import hardware
from lowering.triton.assembler import Assembler, assemble, of_path
from tests.machine_code import UnknownInstruction, disassemble, findings, findings_of_text
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.moe import MoE

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")

RECIPES = ("delayed", "current", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


def said_of_each(cubins: Sequence[bytes]) -> list[str]:
    """The findings of each in words, "" if there are none. Equal ones are analysed once."""
    new = [cubin for cubin in dict.fromkeys(cubins) if cubin not in _said]
    _said.update((cubin, said_of(dump)) for cubin, dump in zip(new, disassemble(new), strict=True))
    return [_said[cubin] for cubin in cubins]


_said: dict[bytes, str] = {}


def said_of(dump: str) -> str:
    """The number of findings of each kind, and one of them in words; "" if nothing is wrong."""
    try:
        found = findings_of_text(dump)
    except UnknownInstruction as error:
        return str(error)
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(Counter(finding.kind for finding in found).items()))
    return f"{counts}; {found[0]}" if found else ""


def require_right(cubins: Iterator[tuple[str, bytes]]) -> None:
    """Says all that is wrong with all of them."""
    named = dict(cubins)
    assert named
    said = dict(zip(named, said_of_each(list(named.values())), strict=True))
    wrong = {name: what for name, what in said.items() if what}
    lines = "\n".join(f"  {name}: {what}" for name, what in wrong.items())
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(said)} kernels are wrong:\n{lines}", pytrace=False)


# -- hand-written kernels


def products() -> Iterator[tuple[str, Launch]]:
    """Some GEMMs of the catalogue."""
    yield from ((name, call.launches()[0]) for name, call in itertools.islice(catalogue.gemms(), 0, None, 7))


def others_of_ours() -> Iterator[tuple[str, Launch]]:
    """Some configurations of every other kernel."""
    for kernel, found in kernel_limits.by_kernel(catalogue.configurations(catalogue.casts())).items():
        yield from ((f"{kernel} of {each.name}", each.launch) for each in kernel_limits.turn_of(found, 90, 60))


@pytest.mark.parametrize(("launches", "num_products"), [(products, 30), (others_of_ours, 0)])
def test_hand_written_kernels(launches, num_products):
    found = []

    def compiled() -> Iterator[tuple[str, bytes]]:
        for i, (name, launch) in enumerate(launches()):
            asm = compile_launch(launch, 90).asm
            found.append("wgmma.mma_async" in asm["ptx"])
            yield f"{name} [{i}]", asm["cubin"]

    require_right(compiled())
    assert sum(found) >= num_products
    assert num_products or not any(found)


# -- Inductor's


def post_norm(dim: int, hidden: int) -> Net:
    """A residual MLP with GELU, normalized behind the sum, and a linear of what is normalized."""
    parts = {"mlp": mlp(dim, hidden, dim), "norm": nn.LayerNorm(dim), "last": nn.Linear(dim, dim)}
    return Net(lambda self, x: self.last(self.norm(x + self.mlp(x))), **parts)


#: The block with every recipe, the others by turns: rowwise_with_gw_hp leaves casts of rowwise out.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "Llama block": (lambda: LlamaBlock(4096, 14336, 32), (2, 8192, 4096), RECIPES),
    "GELU MLP and post-norm": (lambda: post_norm(1024, 4096), (4096, 1024), ("delayed", "rowwise", "blockwise")),
    "experts": (lambda: MoE(512, 768, 8, 2), (2048, 512), ("current", "rowwise", "mxfp8")),
}


def fused_casts(model: str, recipe: str, folder: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Every configuration of the kernels that Inductor generates for a training step and that have FP8 in them."""
    make, shape, _ = MODELS[model]
    torch._dynamo.reset()
    with torch.device("meta"):
        empty = make().bfloat16()
    compiled = fp8_compile(empty.to_empty(device="cpu"), steady(recipe))
    with capture() as graphs:
        compiled(torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    for generated in report(graphs):
        for name, source in sources(generated.code).items():
            if "float8" in source:
                cubins = cubins_of(source.replace(name, "kernel"), folder)
                yield from ((f"{recipe} {generated.name} {name} [{i}]", cubin) for i, cubin in enumerate(cubins))


def cubins_of(source: str, folder: pathlib.Path) -> list[bytes]:
    """The cubin of each configuration. Recipes share many kernels, under other names."""
    if source not in _cubins:
        kernel = load_kernel("kernel", source, folder / f"kernel{len(_cubins)}.py")
        _cubins[source] = [compile_config(kernel, config).asm["cubin"] for config in kernel.configs]
    return _cubins[source]


_cubins: dict[str, list[bytes]] = {}


@pytest.mark.parametrize("model", MODELS)
def test_fused_casts(model, tmp_path):
    require_right(cubin for recipe in MODELS[model][2] for cubin in fused_casts(model, recipe, tmp_path))


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


def others() -> Iterator[Assembler]:
    """Assemblers that Triton ships for Blackwell, that the extra `assemblers` installs, and that torch's CUDA wheels have."""
    with contextlib.suppress(ValueError):
        yield bundled("ptxas-blackwell")
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from (of_path(str(path)) for path in pathlib.Path(folder).glob("cu*/bin/ptxas"))
    yield from (of_path(str(path)) for path in pathlib.Path(torch.__file__).parent.glob("bin/ptxas"))


def assembled(name: str, ptxas: Assembler) -> bytes:
    return assemble((PTX / f"{name}.ptx").read_text(), ptxas, ["--gpu-name=sm_90a"])


def test_every_kernel_of_the_control_has_an_expectation():
    assert {path.stem for path in PTX.glob("*.ptx")} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_what_the_old_assembler_gets_wrong_is_found(name):
    ptxas = bundled("ptxas")
    assert ptxas.version == (12, 8), "this Triton has another one, whose mistakes are not known"
    assert Counter(finding.kind for finding in findings(assembled(name, ptxas))) == WRONG[name]


def test_newer_assemblers_get_all_of_it_right():
    newer = {ptxas.version: ptxas for ptxas in others() if ptxas.is_right}
    if not newer:
        pytest.skip("no ptxas of CUDA 13: Triton 3.7 has one, and so has `pip install fp8pass[assemblers]`")
    require_right((f"{name} by {ptxas}", assembled(name, ptxas)) for ptxas in newer.values() for name in WRONG)


def test_what_is_no_cubin_is_refused():
    with pytest.raises(RuntimeError, match="cannot read this cubin"):
        findings(b"no cubin")
