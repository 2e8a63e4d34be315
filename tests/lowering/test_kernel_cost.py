"""Bounds on what the casts cost on an H200, from the cubins of the installed Triton; see benchmarks/kernel_cost.py."""

import re

import pytest

from benchmarks import catalogue, h100_model, kernel_cost
from benchmarks.cubin import executed_path, instructions_of
from lowering import hardware
from tests.support.cases import each

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")

_CASTS = (
    "quantize", "cast", "cast columnwise", "cast_amax", "cast_amax columnwise", "cast_transpose", "cast_transpose_amax",
    "multi_cast_transpose_amax", "blockwise 1x128 rowwise", "blockwise 1x128 columnwise", "blockwise 1x128 both",
    "blockwise 128x128 rowwise", "blockwise 128x128 columnwise", "blockwise 128x128 both",
    "cast_batch_amax", "cast_batch columnwise", "cast_transpose_batch_amax", "batch 128x128 both",
    "multi_cast rowwise", "multi_cast columnwise", "multi_cast_amax rowwise", "multi_cast_amax columnwise",
    "blockwise 1x128 multi rowwise", "blockwise 1x128 multi columnwise", "blockwise 1x128 multi both",
    "blockwise 128x128 multi rowwise", "blockwise 128x128 multi columnwise", "blockwise 128x128 multi both",
    *(f"cast_lines_rowwise {how}{what}" for how in ("", "multi ") for what in ("rows", "columns", "both")),
    "cast_lines_rowwise batch both",
    *(f"mxfp8 {block} {what}" for block in ("1x32", "32x32") for what in ("rowwise", "columnwise", "both")),
)  # fmt: skip
#: E5M2's kernels look for infinities behind their last vector, and are otherwise those of E4M3: of every second cast.
NAMES = [*(f"{cast} e4m3" for cast in _CASTS), *(f"{cast} e5m2" for cast in _CASTS[::2])]


@needs_triton
@pytest.mark.timeout(1800)  # it compiles them all
@each("name", NAMES)
def test_memory_limits_every_cast(name):
    """And no element is quantized twice, but where the two copies have scales of their own: of 1x128 blocks, and of lines."""
    kernel = kernel_cost.cost_of(name)
    program = kernel.program
    limit = kernel_cost.bound(name)
    assert limit is not None
    assert h100_model.issue_to_memory(program) <= limit
    assert h100_model.resident(program) * program.warps >= 16
    assert h100_model.bytes_in_flight(program) >= 60e3, "twice what Little's law asks for: programs also compute and store"
    assert kernel.cubin.stack == 0, "spilled registers"
    assert kernel.moves_the_tile() == {"load": True, "store": True}
    elements = program.load_bytes / 2 / (32 * program.warps)
    copies = 2 if "both" in name and "128x128" not in name and "32x32" not in name else 1
    assert kernel.ptx.count("cvt.rn.satfinite.e") == elements / 2 * copies


#: Part of a kernel's name -> why the memory that it moves is not what limits it.
_NOT_CASTS = {
    "_mm_|grouped_|clear_rows|epilogue": "GEMMs, and what prepares and ends them, are limited by arithmetic",
    "scales|record_amax": "scales and a few amaxes cost their launch",
    "statistics": "measured steps alone",
    "checksums": "where copies are kept",
    "move_rows|padded_factors": "where DeepGEMM is installed",
}


@needs_triton
def test_no_kernel_is_left_out():
    launches = [launch.kernel for name in kernel_cost.kernels() for launch in kernel_cost.launches(name)]
    left_out = {name.rpartition(".")[2] for name, jit in catalogue.kernels().items() if jit not in launches}
    assert {name for name in left_out if not re.search("|".join(_NOT_CASTS), name)} == set()


def test_occupancy():
    """By CUDA's occupancy calculator, compute capability 9.0."""
    for registers, warps, shared, programs in (
        (32, 4, 0, 16), (128, 4, 0, 4), (129, 4, 0, 3), (220, 4, 0, 2), (255, 8, 0, 1), (16, 1, 0, 32), (32, 8, 100 << 10, 2)
    ):  # fmt: skip
        program = h100_model.Program(registers, shared, warps, instructions=1, load_bytes=1, store_bytes=0)
        assert h100_model.resident(program) == programs


def test_what_limits_a_program():
    copy = h100_model.Program(registers=32, shared=0, warps=8, instructions=50, load_bytes=16384, store_bytes=16384)
    assert h100_model.share_of_copy(copy) > 0.95
    assert h100_model.share_of_copy(h100_model.Program(32, 0, 8, 5000, 16384, 16384)) < 0.2, "issues too much"
    assert h100_model.share_of_copy(h100_model.Program(255, 0, 8, 50, 4096, 4096)) < 0.3, "too little in flight"


SASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, UR5, PT ;
        /*0020*/               @P0 BRA 0x50 ;
        /*0030*/                   CALL.REL.NOINC `(slow) ;
        /*0040*/                   FMUL R4, R4, R5 ;
        /*0050*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0060*/                   LDG.E R8, desc[UR4][R2.64] ;
        /*0070*/              @!P1 BRA 0x50 ;
        /*0080*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0090*/              @!P2 EXIT ;
        /*00a0*/                   STG.E.U8 desc[UR4][R2.64], R4 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   BRA 0xc0;
        /*00d0*/                   NOP;
"""


@pytest.mark.parametrize(("loop_steps", "expected"), [(1, (10, 20, 9)), (4, (19, 32, 9))])
def test_the_usual_way_through_a_kernel(loop_steps, expected):
    program = instructions_of(SASS)
    assert len(program) == 12
    assert executed_path(program, loop_steps) == expected


def test_a_guarded_exit_before_much_else_ends_the_usual_way():
    cold = "".join(f"        /*{0xB0 + 16 * i:04x}*/                   FADD R0, R0, R1 ;\n" for i in range(100))
    last = f"        /*{0xB0 + 1600:04x}*/                   EXIT ;\n"
    program = instructions_of(SASS[: SASS.index("        /*00b0*/")] + cold + last)
    assert executed_path(program, 1) == (8, 20, 8)
