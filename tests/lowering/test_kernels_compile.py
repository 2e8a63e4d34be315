"""The Triton kernels as cubins, on a machine without a GPU: accesses, launches, barriers. What they take: test_limits.py.

The launch wrappers run on CPU tensors with Triton's `run` replaced by a recorder; see benchmarks/variants.py.
"""

import functools
import itertools
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from benchmarks.kernel_limits import Used, used
from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.formats import E4M3, E5M2
from tests.lowering.kernel_cases import kernel
from tests.support.copies import one_copy

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")

SCALE = torch.tensor(2.0)


class Compiled(NamedTuple):
    ttgir: str
    ptx: str
    used: Used


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


def step_boundary() -> tuple:
    history, vector, counts = torch.zeros(1024, 1008), torch.zeros(1008), torch.zeros(1008, dtype=torch.int32)
    options = {"num_non_finite": counts[:1000], "algo": "max", "margin": 1}
    return "update_scales", (history[:, :1000], vector[:1000], vector[:1000]), options


X, BOTH, AMAX = matrix(4096, 4096), {"columnwise": True}, {"with_amax": True}
ONE_OF = [X], [SCALE], E4M3
MANY = [X] * 3, [SCALE] * 3, E4M3
ROWS = {"granularity": "row_wise"}
#: Operation, arguments and options of calls in words.
_CALLS: dict[str, tuple[str, tuple, dict]] = {
    "amax bf16": ("amaxes", ([X],), {}),
    "quantize e4m3": ("quantize", (X, SCALE, E4M3), {}),
    "quantize e5m2 fp32": ("quantize", (X.float(), SCALE, E5M2), {}),
    "cast e4m3": ("cast", ONE_OF, {}),
    "cast columnwise": ("cast", ONE_OF, {"rowwise": False, **BOTH}),
    "cast_amax e5m2": ("cast", ([X], [SCALE], E5M2), AMAX),
    "cast_transpose e4m3": ("cast", ONE_OF, BOTH),
    "cast_transpose_amax e4m3": ("cast", ONE_OF, BOTH | AMAX),
    "cast_transpose_amax e5m2": ("cast", ([X], [SCALE], E5M2), BOTH | AMAX),
    "cast_transpose_amax fp32": ("cast", ([X.float()], [SCALE], E4M3), BOTH | AMAX),
    "cast_transpose_amax column-major": ("cast", ([X.t()], [SCALE], E4M3), BOTH | AMAX),
    "transposed copy": ("transposed_copy", (matrix(4096, 4096, torch.uint8).view(E4M3),), {}),
    "multi aligned": ("cast", MANY, BOTH | AMAX),
    "checksums": ("checksums", ([X, matrix(4096, 1024, torch.float32)],), {}),
    "multi blockwise both": ("cast_with_scales", ([X] * 3, E4M3), {"granularity": "block_128x128", **BOTH}),
    "rowwise both": ("cast_with_scales", ([X], E4M3), BOTH | ROWS),
    "rowwise row": ("cast_with_scales", ([X], E4M3), {"power_of_2": False} | ROWS),
    "rowwise multi aligned": ("cast_with_scales", ([X] * 3, E4M3), BOTH | ROWS),
    "update_scales max": step_boundary(),
    "record_amax": ("record_amax", (torch.ones(64), torch.arange(64), [SCALE] * 20, list(range(20))), {}),
    "cast_partial_amax": ("cast", ONE_OF, AMAX | {"in_parts": True}),
    "cast_transpose_partial_amax": ("cast", ([X], [SCALE], E5M2), BOTH | AMAX | {"in_parts": True}),
    "load_scales": ("load_scales", (torch.ones(64), torch.arange(64), 40), {}),
    "cast_transpose_mxfp8 e4m3": ("cast_with_scales", ([X], E4M3), BOTH | {"granularity": "block_1x32"}),
}
CALLS = {words: functools.partial(call, name, *arguments, **options) for words, (name, arguments, options) in _CALLS.items()}


def ptx_of(name: str, arch: int = 90) -> str:
    return compiled(CALLS[name]()[0], arch).ptx


# Per thread: a tile of R x C elements over 32 * num_warps threads, 16 bytes an access.
TILE = 64 * 128


@pytest.mark.parametrize(
    ("name", "loaded", "stored", "threads"),
    [
        ("amax bf16", 8192 * 2, 0, 256),
        ("checksums", 4096 * 4, 0, 256),
        ("quantize e4m3", 8192 * 2, 8192, 256),
        ("quantize e5m2 fp32", 8192 * 4, 8192, 256),
        ("cast e4m3", TILE * 2, TILE, 256),
        ("cast columnwise", TILE * 2, TILE, 128),
        ("cast_amax e5m2", TILE * 2, TILE, 256),
        *((f"cast_transpose{kind}", TILE * 2, 2 * TILE, 128) for kind in (" e4m3", "_amax e4m3", "_amax e5m2")),
        ("cast_transpose_amax fp32", TILE * 4, 2 * TILE, 128),
        ("cast_transpose_amax column-major", TILE * 2, 2 * TILE, 128),
        ("multi aligned", TILE * 2, 2 * TILE, 128),
    ],
)
def test_aligned_tiles_move_16_bytes_an_access(name, loaded, stored, threads):
    """Each element is loaded once and each copy stored once, all by vectors; what is left are scalars.

    E5M2 looks at a tile that has infinities again, behind its last vector, once for each copy, and stores those by bytes.
    """
    loads, stores = loaded / threads / 16, stored / threads / 16
    ptx = ptx_of(name)
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
    conversions = 0 if name.startswith(("amax", "checksums")) else TILE
    assert 2 * threads * usual.count("cvt.rn.satfinite.e") == conversions, "none is quantized twice"


def test_the_recorder_sees_misaligned_and_strided_inputs():
    """The assertions above can fail: a view that begins off 16 bytes has no 16-byte loads."""
    launch = call("cast", [matrix(4096, 4112)[:, 1:4097]], [SCALE], E4M3)[0]
    assert global_accesses(compiled(launch, 90).ptx)["ld.v4.b32"] == 0


def test_number_of_launches():
    """One tile needs no second one, and empty inputs none at all."""
    for launches, names in (
        (1, "cast_transpose e4m3, cast_partial_amax, cast_transpose_partial_amax, multi aligned"),
        (1, "update_scales max, record_amax, load_scales"),
        (2, "cast_transpose_amax e4m3, amax bf16, rowwise both, rowwise row, rowwise multi aligned"),
    ):
        assert {name: len(CALLS[name]()) for name in names.split(", ")} == dict.fromkeys(names.split(", "), launches)
    for shape, launches in (((16, 16), 1), ((0, 5), 0), ((5, 0), 0)):
        assert len(call("amaxes", [matrix(*shape)])) == launches
        assert len(call("cast", [matrix(*shape)], [SCALE], E4M3, **BOTH | AMAX)) == launches
    assert call("quantize", matrix(0, 5), SCALE, E4M3) == []
    assert call("record_amax", torch.ones(4), torch.arange(4), [], []) == []


@pytest.mark.parametrize("copies", [BOTH, one_copy(columnwise=False), one_copy(columnwise=True)])
def test_many_matrices_of_one_kind_are_one_launch(copies):
    xs = [matrix(128 * i, 256) for i in range(1, 150)]
    mixed = [*xs, matrix(130, 256), matrix(128, 128, torch.float32)]
    for with_amax in (False, True):
        for given, launches in ((xs, 1), (mixed, 3)):
            assert len(call("cast", given, list(torch.ones(len(given))), E4M3, **copies, with_amax=with_amax)) == launches
    for granularity, (given, launches) in itertools.product(("block_1x128", "block_128x128"), ((xs, 1), (mixed, 3))):
        assert len(call("cast_with_scales", given, E4M3, **copies, granularity=granularity)) == launches


def test_division_is_correctly_rounded():
    for name in ("update_scales max", "load_scales"):
        assert "div.rn.f32" in ptx_of(name)


@pytest.mark.parametrize("name", ["cast e4m3", "cast_amax e5m2", "cast_transpose_mxfp8 e4m3", "multi blockwise both"])
@pytest.mark.parametrize("arch", [89, 90])
def test_conversions_are_one_piece_of_ptx(name, arch):
    """NOTE [one piece of PTX] in lowering/formats.py: by it alone, and not by way of float16."""
    ptx = ptx_of(name, arch)
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
    assert set(global_accesses(ptx_of("transposed copy"))) == {"ld.v4.b32", "st.v4.b32"}
