"""Tiles of GEMMs and what kernels take, beside what each kind of GPU has; the catalogue of their configurations."""

import itertools
import json
import re
import types

import pytest
import torch

from benchmarks import catalogue, kernel_limits
from benchmarks.common import RESULTS, ROOT
from benchmarks.kernel_limits import ARCHS, Used
from benchmarks.variants import compile_launch
from lowering import hardware
from lowering.triton import limits
from lowering.triton.limits import BY_CAPABILITY, Limits, tile_of_gemm
from tests.support.cases import each

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")
CUDA = torch.device("cuda", 0)


# -- tiles


def shared_bytes(tile: dict[str, int], of: Limits) -> int:
    """The shared memory of Triton's pipeline: every stage of both operands, but for the one that is in registers."""
    stages = tile["num_stages"] - of.has_operands_in_registers
    return stages * (tile["BLOCK_M"] + tile["BLOCK_N"]) * 128 + limits.BESIDE_STAGES


@each("capability", BY_CAPABILITY)
@each("rows", [1, 64, 65, 4096])
@each("is_wide", [False, True])
def test_tiles_fit(capability, rows, is_wide):
    of = BY_CAPABILITY[capability]
    tile = tile_of_gemm(rows, of, is_wide)
    assert shared_bytes(tile, of) <= of.shared_memory
    assert tile["num_stages"] == limits.MOST_STAGES, "all of these devices have room for them"
    assert (tile["BLOCK_N"] == 256) == (is_wide and rows > 64 and capability in ((9, 0), (10, 0)))


def test_less_shared_memory_makes_fewer_stages():
    found = [tile_of_gemm(4096, Limits(size << 10), is_wide=True) for size in (227, 163, 99, 65)]
    assert [(tile["BLOCK_N"], tile["num_stages"]) for tile in found] == [(256, 4), (128, 4), (128, 3), (128, 2)]


def test_every_device_has_its_own(monkeypatch):
    """One without an entry is asked."""
    found = types.SimpleNamespace(shared_memory_per_block_optin=123456)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    for capability, of in {**BY_CAPABILITY, (13, 0): Limits(123456)}.items():
        monkeypatch.setattr(hardware, "cuda_capability", lambda device, capability=capability: capability)
        assert limits.of_device(CUDA) == of
    monkeypatch.undo()
    assert limits.of_device(torch.device("cpu")) == BY_CAPABILITY[9, 0], "what is compiled without a GPU"


@pytest.mark.gpu
def test_limits_are_those_that_the_device_tells():
    properties = torch.cuda.get_device_properties(0)
    assert limits.of_device(CUDA).shared_memory == properties.shared_memory_per_block_optin
    assert properties.regs_per_multiprocessor >= kernel_limits.REGISTERS


@needs_triton
@each("capability", BY_CAPABILITY)
def test_every_gemm_is_launched_with_a_tile_that_fits(capability):
    """With 256 columns of experts and fast accumulation, a GPU of capability 12.0 was given Hopper's: 147,456 bytes."""
    of = BY_CAPABILITY[capability]
    for name, call in itertools.islice(catalogue.gemms(), 0, None, 5):
        (launch,) = call.launches(capability)
        assert shared_bytes({**launch.arguments, **launch.options}, of) <= of.shared_memory, name


# -- the catalogue


def some_casts() -> list[tuple[str, catalogue.Call]]:
    """Some calls of every operation, but GEMMs."""
    by_operation = itertools.groupby(catalogue.enumerated(), lambda each: each[0].split()[0])
    calls = [each for _, found in by_operation for each in itertools.islice(found, 0, None, 37)]
    return [*calls, *catalogue.others()]


@needs_triton
def test_the_catalogue_has_every_kernel():
    calls = [*some_casts(), *itertools.islice(catalogue.gemms(), 0, None, 20)]
    launches = [launch for _, call in calls for launch in call.launches()]
    launched = {f"{launch.kernel.fn.__module__}.{launch.kernel.__name__}" for launch in launches}
    assert launched == set(catalogue.kernels())


@needs_triton
def test_a_bias_beside_factors_of_lines_leaves_no_registers_for_a_wide_sum_in_tensor_memory():
    """Whichever operand has the factors."""
    found: dict[bool, set[int]] = {False: set(), True: set()}
    for name, call in catalogue.gemms():
        if name.startswith("grouped") and "fast" in name:
            (launch,) = call.launches((10, 0))
            adds_to_lines = "row_wise" in name and "with bias" in name
            found[adds_to_lines].add(launch.arguments["BLOCK_N"])
    assert found == {False: {128, 256}, True: {128}}


@needs_triton
def test_nothing_else_is_launched():
    """Every `kernel[grid](...)` in lowering is of a `Kernel`."""
    kernels = {name.rpartition(".")[2] for name in catalogue.kernels()}
    sources = {path: path.read_text() for path in ROOT.glob("lowering/**/*.py")}
    functions = {name for text in sources.values() for name in re.findall(r"@triton\.jit.*\ndef (\w+)", text)}
    assert kernels < functions
    launched = {name for text in sources.values() for name in re.findall(r"\b(\w+)\[[^\n]*\]\(", text)}
    assert kernels <= launched
    assert launched & functions == kernels


@pytest.fixture(scope="module")
def of_sm90() -> dict[catalogue.Key, list[catalogue.Configuration]]:
    return catalogue.configurations(itertools.chain(catalogue.casts(), catalogue.gemms()))


# -- what they take


def test_what_is_over_a_limit():
    of = BY_CAPABILITY[12, 0]
    fits = Used(255, 0, 255, of.shared_memory, 256, 0)
    assert fits.over(of) == []
    assert fits._replace(registers=72, stack=16).over(of) == [], "ptxas could have taken more registers"
    for changed, words in (
        ({"shared": 147456}, "147456 bytes of shared memory of 101376"),
        ({"stack": 8}, "8 spilled bytes a thread of 0"),
        ({"tensor_memory": 32}, "32 columns of tensor memory of 0"),
        ({"threads": 288}, "73728 registers of 65536"),
        ({"registers": 32, "threads": 1056}, "1056 threads of 1024"),
        ({"registers": 256, "threads": 32}, "256 registers a thread of 255"),
    ):
        assert fits._replace(**changed).over(of) == [words]


def require_exact(ptx: str) -> None:
    """Subnormal numbers stay, and quotients are rounded."""
    assert not [word for word in (".ftz", "div.full", "div.approx") if word in ptx]


#: What the tensor cores of each kind of GPU are told by.
PRODUCTS = {89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
def test_gemms_are_within_limits(arch):
    """And take the shared memory that their tiles are chosen by."""
    of = kernel_limits.limits_of(arch)
    for name, call in itertools.islice(catalogue.gemms(), 0, None, 7):
        (launch,) = call.launches(divmod(arch, 10))
        compiled = compile_launch(launch, arch)
        taken = kernel_limits.used(compiled)
        require_exact(compiled.asm["ptx"])
        if name.startswith("grouped"):
            assert PRODUCTS[arch] in compiled.asm["ptx"], name
            assert "cp.async" in compiled.asm["ptx"], "operands are loaded ahead"
        assert taken.over(of) == [], name
        assert taken.shared <= shared_bytes({**launch.arguments, **launch.options}, of), name


#: The GEMMs, whose tiles depend on the device: each device has configurations of its own.
GEMMS = ("mm_blockwise_kernel", "grouped_rows_kernel", "grouped_batch_kernel")
#: Bytes a thread that ptxas may give up where it could have taken more registers: sixteen of them.
MOST_SPILLED = 64


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
def test_casts_are_within_limits(arch, of_sm90):
    """One of a hundred configurations, and one of every kernel."""
    of = kernel_limits.limits_of(arch)
    for name, configurations in kernel_limits.by_kernel(of_sm90).items():
        for configuration in [] if name.endswith(GEMMS) else kernel_limits.turn_of(configurations, arch, 100):
            compiled = compile_launch(configuration.launch, arch)
            taken = kernel_limits.used(compiled)
            require_exact(compiled.asm["ptx"])
            assert taken.over(of) == [], configuration.name
            assert taken.stack <= MOST_SPILLED, configuration.name


RECORDED = sorted(RESULTS.glob("kernel_limits-triton-*.json"))


@needs_triton
@each("path", RECORDED)
def test_recorded_rows_are_within_limits(path):
    """Rows of every GEMM on every kind of GPU, and of what else was compiled; none of a kernel that is gone."""
    assert len(RECORDED) == 2, "of both Tritons"
    rows = json.loads(path.read_text())["rows"]
    names = {name.removeprefix("lowering.") for name in catalogue.kernels()}
    recorded = {row["what"] for row in rows}
    assert recorded <= {f"{name} on sm_{arch}" for name in names for arch in ARCHS}
    gemms = {name for name in names if name.endswith(GEMMS)}
    assert {f"{name} on sm_{arch}" for name in gemms for arch in ARCHS} <= recorded
    assert [row for row in rows if row["over"] or row["spilled bytes"] > MOST_SPILLED] == []
