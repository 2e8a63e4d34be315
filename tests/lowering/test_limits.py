"""Tiles of GEMMs and what kernels take, beside what each kind of GPU has; the catalogue of their configurations."""

import itertools
from collections.abc import Iterable, Iterator

import pytest

from benchmarks import catalogue, kernel_limits
from benchmarks.kernel_limits import ARCHS, Used
from benchmarks.variants import Launch, compile_launch
from lowering import hardware
from lowering.triton import limits
from lowering.triton.limits import BY_CAPABILITY, Limits
from tests.lowering.test_machine_code import require_right
from tests.support.cases import each

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


# -- tiles


def shared_bytes(tile: dict[str, int], of: Limits) -> int:
    """The shared memory of Triton's pipeline: every stage of both operands, but for the one that is in registers."""
    stages = tile["num_stages"] - of.has_operands_in_registers
    return stages * (tile["BLOCK_M"] + tile["BLOCK_N"]) * 128 + limits.BESIDE_STAGES


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
    calls = [each for _, found in by_operation for each in itertools.islice(found, 0, None, 3)]
    return [*calls, *catalogue.others()]


@needs_triton
def test_the_catalogue_has_every_kernel():
    calls = [*some_casts(), *itertools.islice(catalogue.gemms(), 0, None, 20)]
    launches = [launch for _, call in calls for launch in call.launches()]
    launched = {f"{launch.kernel.fn.__module__}.{launch.kernel.__name__}" for launch in launches}
    assert launched == set(catalogue.kernels())


@pytest.fixture(scope="module")
def of_sm90() -> dict[catalogue.Key, list[catalogue.Configuration]]:
    return catalogue.configurations(itertools.chain(catalogue.casts(), catalogue.gemms()))


# -- what they take


#: What the tensor cores of each kind of GPU are told by.
PRODUCTS = {89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def compiled(found: Iterable[tuple[str, Launch]], arch: int) -> Iterator[tuple[str, Launch, str, Used]]:
    """Name, launch, PTX and what is taken of it; raises where it is over a limit, or the machine code of sm_90 is wrong."""
    cubins, of = {}, kernel_limits.limits_of(arch)
    for name, launch in found:
        made = compile_launch(launch, arch)
        ptx, taken = made.asm["ptx"], kernel_limits.used(made)
        assert not [word for word in (".ftz", "div.full", "div.approx") if word in ptx], "subnormal numbers, exact quotients"
        assert [word for word in taken.over(of) if "spilled" not in word] == [], name
        cubins[f"{name} [{len(cubins)}]"] = made.asm["cubin"]
        yield name, launch, ptx, taken
    if arch == 90:
        require_right(iter(cubins.items()))


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
def test_gemms_are_within_limits(arch):
    """And take the shared memory that their tiles are chosen by."""
    calls = itertools.islice(catalogue.gemms(), 0, None, 7)
    launches = ((name, call.launches(divmod(arch, 10))[0]) for name, call in calls)
    for name, launch, ptx, taken in compiled(launches, arch):
        if name.startswith("grouped"):
            assert PRODUCTS[arch] in ptx, name
            assert "cp.async" in ptx, "operands are loaded ahead"
        assert taken.stack == 0 or taken.registers < taken.most_registers, name
        assert taken.shared <= shared_bytes({**launch.arguments, **launch.options}, kernel_limits.limits_of(arch)), name


#: The GEMMs, whose tiles depend on the device: each device has configurations of its own.
GEMMS = ("mm_blockwise_kernel", "grouped_rows_kernel", "grouped_batch_kernel")


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHS)
def test_casts_are_within_limits(arch, of_sm90):
    """One of a hundred configurations, and one of every kernel. ptxas may spill where it could have taken more registers; rows'
    statistics spill 24 bytes a thread on sm_100, which has no more."""
    kernels = {name: found for name, found in kernel_limits.by_kernel(of_sm90).items() if not name.endswith(GEMMS)}
    turns = (tuple(turn) for found in kernels.values() for turn in kernel_limits.turn_of(found, arch, 100))
    for name, _, _, taken in compiled(turns, arch):
        assert taken.stack <= 64, name
