"""The Triton kernels as cubins, on a machine without a GPU: accesses, launches, barriers. What they take: test_limits.py.

The launch wrappers run on CPU tensors with Triton's `run` replaced by a recorder; see benchmarks/variants.py.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from benchmarks.kernel_limits import Used, used
from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from tests.lowering.kernel_cases import kernel
from tests.support.copies import one_copy

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")

SCALE = torch.tensor(2.0)


class Compiled(NamedTuple):
    ttgir: str
    ptx: str
    used: Used

    @property
    def registers(self) -> int:
        """Per thread."""
        return self.used.registers

    @property
    def stack(self) -> int:
        """Bytes per thread of spilled registers."""
        return self.used.stack


def compiled(launch: Launch, arch: int) -> Compiled:
    """Compile a launch."""
    result = compile_launch(launch, arch)
    return Compiled(result.asm["ttgir"], result.asm["ptx"], used(result))


def global_accesses(ptx: str) -> Counter[str]:
    """Number of loads and stores of each width: {"ld.v4.b32": 8, ...}."""
    accesses = re.findall(r"\b(ld|st)\.global(?:\.L\d::\w+|\.\w+::\w+)*\.((?:v\d\.)?[bfus]\d+)", ptx)
    return Counter(f"{kind}.{width}" for kind, width in accesses)


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((rows, cols), dtype=dtype)


def call(name: str, *arguments, **options) -> list[Launch]:
    return recorded(kernel(name), *arguments, **options)


def blockwise(block: str, fp8: torch.dtype = E4M3, dtype: torch.dtype = torch.bfloat16, both: bool = False, **options):
    """Launch the cast of three matrices."""
    copies = {"columnwise": True} if both else one_copy(**options)
    return call("cast_blockwise", [matrix(4096, 4096, dtype)] * 3, fp8, granularity=f"block_{block}", **copies)


def step_boundary(algo: str) -> list[Launch]:
    history, vector, counts = torch.zeros(1024, 1008), torch.zeros(1008), torch.zeros(1008, dtype=torch.int32)
    state = history[:, :1000], vector[:1000], vector[:1000]
    return call("update_scales", *state, num_non_finite=counts[:1000], algo=algo, margin=1)


CALLS: dict[str, Callable[[], list[Launch]]] = {
    "amax bf16": lambda: call("amax", matrix(4096, 4096)),
    "quantize e4m3": lambda: call("quantize", matrix(4096, 4096), SCALE, E4M3),
    "quantize e5m2 fp32": lambda: call("quantize", matrix(4096, 4096, torch.float32), SCALE, E5M2),
    "cast e4m3": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E4M3),
    "cast columnwise": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E4M3, rowwise=False, columnwise=True),
    "cast_amax e5m2": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E5M2, with_amax=True),
    "cast_transpose e4m3": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E4M3, columnwise=True),
    "cast_transpose_amax e4m3": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E4M3, columnwise=True, with_amax=True),
    "cast_transpose_amax e5m2": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E5M2, columnwise=True, with_amax=True),
    "cast_transpose_amax fp32": lambda: call(
        "cast", [matrix(4096, 4096, torch.float32)], [SCALE], E4M3, columnwise=True, with_amax=True
    ),
    "cast_transpose_amax column-major": lambda: call(
        "cast", [matrix(4096, 4096).t()], [SCALE], E4M3, columnwise=True, with_amax=True
    ),
    "transposed copy": lambda: call("transposed_copy", matrix(4096, 4096, torch.uint8).view(E4M3)),
    "multi aligned": lambda: call("cast", [matrix(4096, 4096)] * 3, [SCALE] * 3, E4M3, columnwise=True, with_amax=True),
    "checksums": lambda: call("checksums", [matrix(4096, 4096), matrix(4096, 1024, torch.float32)]),
    "multi blockwise both": lambda: blockwise("128x128", both=True),
    "rowwise both": lambda: call("cast_rowwise", [matrix(4096, 4096)], E4M3, columnwise=True),
    "rowwise row": lambda: call("cast_rowwise", [matrix(4096, 4096)], E4M3, power_of_2=False),
    "rowwise multi aligned": lambda: call("cast_rowwise", [matrix(4096, 4096)] * 3, E4M3, columnwise=True),
    "update_scales max": lambda: step_boundary("max"),
    "record_amax": lambda: call("record_amax", torch.ones(64), torch.arange(64), [SCALE] * 20, list(range(20))),
    "cast_partial_amax": lambda: call("cast", [matrix(4096, 4096)], [SCALE], E4M3, with_amax=True, in_parts=True),
    "cast_transpose_partial_amax": lambda: call(
        "cast", [matrix(4096, 4096)], [SCALE], E5M2, columnwise=True, with_amax=True, in_parts=True
    ),
    "load_scales": lambda: call("load_scales", torch.ones(64), torch.arange(64), 40),
    "cast_transpose_mxfp8 e4m3": lambda: call("cast_mxfp8", [matrix(4096, 4096)], E4M3, columnwise=True),
}


def vectors_of(name: str) -> tuple[Counter[str], str]:
    launch = CALLS[name]()[0]
    result = compiled(launch, 90)
    return global_accesses(result.ptx), result.ptx


# Per thread: a tile of R x C elements over 32 * num_warps threads, 16 bytes an access.
@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("amax bf16", 8192 * 2 / 256 / 16, 0),
        ("checksums", 4096 * 4 / 256 / 16, 0),
        ("quantize e4m3", 8192 * 2 / 256 / 16, 8192 / 256 / 16),
        ("quantize e5m2 fp32", 8192 * 4 / 256 / 16, 8192 / 256 / 16),
        ("cast e4m3", 64 * 128 * 2 / 256 / 16, 64 * 128 / 256 / 16),
        ("cast columnwise", 64 * 128 * 2 / 128 / 16, 64 * 128 / 128 / 16),
        ("cast_amax e5m2", 64 * 128 * 2 / 256 / 16, 64 * 128 / 256 / 16),
        ("cast_transpose e4m3", 64 * 128 * 2 / 128 / 16, 2 * 64 * 128 / 128 / 16),
        ("cast_transpose_amax e4m3", 64 * 128 * 2 / 128 / 16, 2 * 64 * 128 / 128 / 16),
        ("cast_transpose_amax e5m2", 64 * 128 * 2 / 128 / 16, 2 * 64 * 128 / 128 / 16),
        ("cast_transpose_amax fp32", 64 * 128 * 4 / 128 / 16, 2 * 64 * 128 / 128 / 16),
        ("cast_transpose_amax column-major", 64 * 128 * 2 / 128 / 16, 2 * 64 * 128 / 128 / 16),
        ("multi aligned", 64 * 128 * 2 / 128 / 16, 2 * 64 * 128 / 128 / 16),
    ],
)
def test_aligned_tiles_move_16_bytes_an_access(name, loads, stores):
    """Each element is loaded once and each copy stored once, all by vectors; what is left are scalars.

    E5M2 looks at a tile that has infinities again, behind its last vector, once for each copy, and stores those by bytes.
    """
    _, ptx = vectors_of(name)
    usual, again = ptx, ""
    copies = 2 if "transpose" in name else 1
    if "e5m2" in name:
        last = ptx.rindex("st.global.v4")
        usual, again = ptx[: ptx.index("\n", last)], ptx[last:]
        assert global_accesses(again)["ld.v4.b32"] == loads * copies
        assert global_accesses(again)["st.b8"] == 16 * stores
    accesses = global_accesses(usual)
    assert accesses["ld.v4.b32"] == loads, accesses
    assert accesses["st.v4.b32"] == stores, accesses
    narrow = {key: count for key, count in accesses.items() if ".v" not in key}
    assert sum(count for key, count in narrow.items() if key.startswith("ld") and not key.endswith("64")) <= 3, accesses
    assert sum(count for key, count in narrow.items() if key.startswith("st")) <= 1, accesses
    assert "cvt.rn.satfinite.e" in ptx or name.startswith(("amax", "checksums"))


def test_the_recorder_sees_misaligned_and_strided_inputs():
    """The assertions above can fail: a view that begins off 16 bytes has no 16-byte loads."""
    launch = call("cast", [matrix(4096, 4112)[:, 1:4097]], [SCALE], E4M3)[0]
    assert global_accesses(compiled(launch, 90).ptx)["ld.v4.b32"] == 0


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cast_transpose e4m3", 1),
        ("cast_transpose_amax e4m3", 2),
        ("cast_partial_amax", 1),
        ("cast_transpose_partial_amax", 1),
        ("amax bf16", 2),
        ("multi aligned", 1),
        ("rowwise both", 2),
        ("rowwise row", 2),
        ("rowwise multi aligned", 2),
        ("update_scales max", 1),
        ("record_amax", 1),
        ("load_scales", 1),
    ],
)
def test_number_of_launches(name, launches):
    assert len(CALLS[name]()) == launches


def test_one_tile_needs_no_second_launch():
    assert len(call("amax", matrix(16, 16))) == 1
    assert len(call("cast", [matrix(16, 16)], [SCALE], E4M3, columnwise=True, with_amax=True)) == 1


def test_many_matrices_of_one_kind_are_one_launch():
    xs = [matrix(16 * i, 64) for i in range(1, 200)]
    assert len(call("cast", xs, [SCALE] * len(xs), E4M3, columnwise=True, with_amax=True)) == 1
    mixed = [*xs, matrix(33, 50), matrix(16, 16, torch.float32)]
    assert len(call("cast", mixed, [SCALE] * len(mixed), E4M3, columnwise=True, with_amax=True)) == 3


@pytest.mark.parametrize("columnwise", [False, True])
def test_many_single_copies_are_one_launch(columnwise):
    xs = [matrix(128 * i, 256) for i in range(1, 150)]
    wanted = {"columnwise": columnwise}
    for with_amax in (False, True):
        assert len(call("cast", xs, list(torch.ones(len(xs))), E4M3, **one_copy(**wanted), with_amax=with_amax)) == 1
    for granularity in ("block_1x128", "block_128x128"):
        assert len(call("cast_blockwise", xs, E4M3, **one_copy(granularity=granularity, **wanted))) == 1
        assert len(call("cast_blockwise", xs, E4M3, granularity=granularity, columnwise=True)) == 1
        mixed = [*xs, matrix(130, 256), matrix(128, 128, torch.float32)]
        assert len(call("cast_blockwise", mixed, E4M3, **one_copy(granularity=granularity, **wanted))) == 3


@pytest.mark.parametrize(
    ("scales", "message"),
    [([SCALE], "2 matrices need as many scales, got 1"), ([SCALE, torch.ones(2)], "scale"), ([SCALE, SCALE.double()], "scale")],
)
def test_scales_of_many_that_do_not_fit_are_refused(scales, message):
    with pytest.raises(ValueError, match=message):
        NAMESPACE.operations["cast"]([matrix(16, 16)] * 2, scales, E4M3)


def test_empty_inputs_launch_nothing():
    assert call("amax", matrix(0, 5)) == []
    assert call("quantize", matrix(0, 5), SCALE, E4M3) == []
    assert call("cast", [matrix(5, 0)], [SCALE], E4M3, columnwise=True, with_amax=True) == []
    assert call("cast", [matrix(0, 5)], [SCALE], E4M3, columnwise=True, with_amax=True) == []
    assert call("record_amax", torch.ones(4), torch.arange(4), [], []) == []


def test_division_is_correctly_rounded():
    for name in ("update_scales max", "load_scales"):
        assert "div.rn.f32" in compiled(CALLS[name]()[0], 90).ptx


@pytest.mark.parametrize("name", ["cast e4m3", "cast_amax e5m2", "cast_transpose_mxfp8 e4m3", "multi blockwise both"])
@pytest.mark.parametrize("arch", [89, 90])
def test_conversions_are_one_piece_of_ptx(name, arch):
    """NOTE [one piece of PTX] in lowering/formats.py: by it alone, and not by way of float16."""
    ptx = compiled(CALLS[name]()[0], arch).ptx
    pieces = re.findall(r"\{ \.reg \.b16 lo, hi; .* mov\.b32 %r\d+, \{lo, hi\}; \}", ptx)
    assert len(re.findall(r"cvt\.\S*e[45]m[23]", ptx)) == 2 * len(pieces) > 0
    assert "f16.f32" not in ptx.replace("bf16.f32", "")


def test_the_step_boundary_has_its_barriers():
    """One between the loads and the stores of a step, one before the staging row is cleared; reductions add their own
    later, so these are counted before."""
    ttgir = compiled(CALLS["update_scales max"]()[0], 90).ttgir
    order = re.findall(r"\b(?:gpu|ttg)\.\w*(barrier)|tt\.(store)", ttgir)
    assert ["".join(names) for names in order] == ["barrier", "store", "barrier", "store", "store", "store", "store"]


def test_transposed_bytes_are_read_and_stored_sixteen_at_a_time():
    (launch,) = CALLS["transposed copy"]()
    accesses = global_accesses(compiled(launch, 90).ptx)
    assert set(accesses) == {"ld.v4.b32", "st.v4.b32"}
