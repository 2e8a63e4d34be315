"""The steps of kernels on one tile: loads, magnitudes as ordered integers, the saturating FP8 cast, stores in both layouts; and
scales of blocks and lines, by their exponents where they are powers of two.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from lowering.formats import CONSTRAINTS, E4M3, E5M2, PACK, ptx_to_fp8

#: Triton's names of the dtypes that can be quantized.
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

PTX_TO_E4M3 = tl.constexpr(ptx_to_fp8(E4M3))
PTX_TO_E5M2 = tl.constexpr(ptx_to_fp8(E5M2))
PTX_CONSTRAINTS = tl.constexpr(CONSTRAINTS)
PTX_PACK = tl.constexpr(PACK)
#: Bits of float32 +inf, the largest of all non-NaN magnitudes.
INF_BITS = tl.constexpr(0x7F800000)
#: First tiles that a program of a launch over many matrices compares with its own at a time.
MATRICES_PER_STEP = tl.constexpr(128)


@triton.jit
def as_float32(x):
    """Float32 of loaded values, exactly. NOTE [bfloat16] A bfloat16 is the upper half of a float32. Two lie in a register;
    shifted, the upper one is a mask away, where a conversion first moves it down."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """|x| of float32 values as int32 bits. For non-negative floats integer order is float order, with inf above every finite
    value and NaN above inf: an integer maximum therefore propagates NaN, which a float maximum drops."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(a, b):
    """The larger of two float32 values; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """`magnitude_bits` of the largest magnitude of a two-dimensional float32 tile; NaN wins. Float maxima take the magnitude of
    their operands for nothing, where integer maxima need an instruction of their own."""
    flat = tl.reshape(x, (x.numel,), can_reorder=True)
    return magnitude_bits(tl.reduce(tl.abs(flat), 0, larger))


@constexpr_function
def compiles_ptx():
    """True if PTX is compiled. Triton's interpreter runs none."""
    target = current_target()
    return target is not None and target.backend == "cuda"


@triton.jit
def converted(x, E5M2: tl.constexpr):
    """Float32 x as uint8 bits of FP8, to nearest even: NOTE [one piece of PTX] in lowering/formats.py. What is too large
    saturates, infinities included; NaN remains NaN, but for its sign."""
    if compiles_ptx():
        PTX: tl.constexpr = PTX_TO_E5M2 if E5M2 else PTX_TO_E4M3
        return tl.inline_asm_elementwise(PTX, PTX_CONSTRAINTS, [x], dtype=tl.uint8, is_pure=True, pack=PTX_PACK)
    if E5M2:
        return x.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return x.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)


@triton.jit
def fp8_bits(x, scale, E5M2: tl.constexpr):
    """`reference.quantize` of float32 x, as uint8 bits, but for infinities of E5M2; the sign of a NaN is not kept. NOTE
    [saturating conversion] The conversion itself saturates, infinities too; NaN remains. E4M3 has no infinity, so one has to
    become NaN: x * 0 is NaN for NaN and infinities and a zero of x's sign for all others, which a fused multiply-add adds
    without rounding twice. E5M2 has infinities: a caller that meets one, as the amax of its tile tells, stores `infinity_bits`
    over the 57344 that comes out here."""
    if E5M2:
        return saturated_bits(x, scale, True)
    return converted(tl.fma(x, scale, x * 0.0), False)


@triton.jit
def saturated_bits(x, scale, E5M2: tl.constexpr):
    """`fp8_bits`, but that infinities of both formats may come out as the largest finite value."""
    return converted(x * scale, E5M2)


@triton.jit
def infinity_bits(x, E5M2: tl.constexpr):
    """An infinity with the sign of float32 x as uint8 bits: E5M2's infinity, E4M3's NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (sign | (0x7C if E5M2 else 0x7F)).to(tl.uint8)


@triton.jit
def tiles_of(size, BLOCK: tl.constexpr):
    """The number of tiles of BLOCK that cover `size`: `tl.cdiv`, whose sum exceeds int32 for sizes just below 2**31."""
    return size // BLOCK + (size % BLOCK + (BLOCK - 1)) // BLOCK


@triton.jit
def place_of_tile(tile, tiles_c):
    """Row and column, int64, of a tile in a grid that is `tiles_c` wide. A grid has fewer than 2**31 programs, and unsigned
    numbers of 32 bits divide in the fewest instructions."""
    tile, tiles_c = tile.to(tl.uint32), tl.cast(tiles_c, tl.uint32)
    return (tile // tiles_c).to(tl.int64), (tile % tiles_c).to(tl.int64)


@triton.jit
def find_matrix(table, num_matrices, tile, FIELDS: tl.constexpr):
    """The fields of the matrix that a tile of a launch over many belongs to, and that matrix's first tile. table: int64, the
    first tile of each matrix [num_matrices], then their fields [num_matrices, FIELDS]."""
    matrix = -1
    for start in range(0, num_matrices, MATRICES_PER_STEP):
        offsets = start + tl.arange(0, MATRICES_PER_STEP)
        first = tl.load(table + offsets, mask=offsets < num_matrices, other=0x7FFFFFFFFFFFFFFF)
        matrix += tl.sum((first <= tile).to(tl.int32), axis=0)
    return table + num_matrices + matrix * FIELDS, tl.load(table + matrix)


@triton.jit
def runtime_size(size):
    """A size that the compilers do not know. NOTE [sizes of 1] Triton compiles them as constants. What is loaded beyond them is
    then a constant, too, and ptxas before 13.0 shares the conversion of two zeros between words (lowering/formats.py). No
    launch has a third dimension of programs, but that is known only then."""
    return size * tl.num_programs(2) if isinstance(size, int) else size


@triton.jit
def left(size, start, BLOCK: tl.constexpr):
    """The number of BLOCK indices from `start` on that are below `size`, as int32: at most BLOCK, negative if none."""
    return tl.minimum(runtime_size(size) - start, BLOCK).to(tl.int32)


@triton.jit
def load_tile(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE: tl.constexpr = False):
    """float32 elements of the matrix at x at rows r and columns c; zeros from rows_left and cols_left on. WHOLE: none are left
    out, and distances inside the tile are int32, which takes half the registers and instructions."""
    if WHOLE:
        return as_float32(tl.load(x + (r * stride_r)[:, None] + (c * stride_c)[None, :]))
    pointers = x + (r.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
    mask = (r < rows_left)[:, None] & (c < cols_left)[None, :]
    return as_float32(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE: tl.constexpr = False):
    """`load_tile` at rows r, r + 1, r + 2 and r + 3. See NOTE [four rows a thread]."""
    v0 = load_tile(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    v1 = load_tile(x, r + 1, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    v2 = load_tile(x, r + 2, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    v3 = load_tile(x, r + 3, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    return v0, v1, v2, v3


@triton.jit
def largest_of_rows(v0, v1, v2, v3):
    """The largest magnitude of four tiles, element by element; NaN wins."""
    return larger(larger(tl.abs(v0), tl.abs(v1)), larger(tl.abs(v2), tl.abs(v3)))


@triton.jit
def row_amaxes(v0, v1, v2, v3):
    """The largest magnitude of every row of four tiles; NaN wins."""
    a0, a1 = tl.reduce(tl.abs(v0), 1, larger), tl.reduce(tl.abs(v1), 1, larger)
    a2, a3 = tl.reduce(tl.abs(v2), 1, larger), tl.reduce(tl.abs(v3), 1, larger)
    return a0, a1, a2, a3


@triton.jit
def store_tile(q, bits, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE: tl.constexpr = False):
    """Store bits at rows r and columns c of the matrix at q, up to rows_left and cols_left. WHOLE: as `load_tile`'s."""
    if WHOLE:
        tl.store(q + (r * stride_r)[:, None] + (c * stride_c)[None, :], bits)
    else:
        pointers = q + (r.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
        tl.store(pointers, bits, mask=(r < rows_left)[:, None] & (c < cols_left)[None, :])


@triton.jit
def one_per_thread(values):
    """Values of lines [lines], spread over the threads: what is computed of them next is computed once. A reduction leaves the
    value of a line in every thread with elements of the line, so a thread has those of 16 columns. `tl.gather` takes results
    back to such threads, for less than the arithmetic would cost in each."""
    return tl.gather(values, tl.arange(0, values.shape[0]), 0)


@triton.jit
def four_rows(t0, t1, t2, t3):
    """[R / 4, C, 2, 2]: the elements of t_i [R / 4, C] next to each other in a thread."""
    return tl.join(tl.join(t0, t2), tl.join(t1, t3))


@triton.jit
def turned(four):
    """The transpose [C, R] of a tile [R, C] of whose rows 4 * k + i, as t_i, `four_rows` made `four`. NOTE [four rows a thread]
    A thread holds the bytes of four rows that lie next to each other in the columnwise copy, so the tile goes through shared
    memory by words. Loaded as one tile [R, C], it would go by bytes, two instructions each, and Triton 3.6 would rather
    quantize every element again in the layout of the second store."""
    return tl.reshape(tl.permute(four, (1, 0, 2, 3)), (four.shape[1], 4 * four.shape[0]))


@triton.jit
def store_rows(q, b0, b1, b2, b3, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE: tl.constexpr = False):
    """Store b_i at rows r + i and columns c of the matrix at q."""
    store_tile(q, b0, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    store_tile(q, b1, r + 1, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    store_tile(q, b2, r + 2, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    store_tile(q, b3, r + 3, c, rows_left, cols_left, stride_r, stride_c, WHOLE)


@triton.jit
def store_infinities(
    x, q, c, rows_left, cols_left, stride_r, stride_c, q_stride_r, q_stride_c, E5M2: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Over what `saturated_bits` made of infinities in a tile of BLOCK_R rows and columns c, what they become."""
    for start in tl.static_range(0, BLOCK_R, BLOCK_R // 4):
        r = start + tl.arange(0, BLOCK_R // 4)
        value = load_tile(x, r, c, rows_left, cols_left, stride_r, stride_c)
        pointers = q + (r.to(tl.int64) * q_stride_r)[:, None] + (c.to(tl.int64) * q_stride_c)[None, :]
        tl.store(pointers, infinity_bits(value, E5M2), mask=magnitude_bits(value) == INF_BITS)


@triton.jit
def store_columns(q, bits, rows_left, cols_left, stride_r, stride_c, WHOLE: tl.constexpr = False):
    """Store a transposed tile of bits [C, R] at row and column 0 of the matrix at q, whose columns are contiguous."""
    r, c = tl.arange(0, bits.shape[1]), tl.arange(0, bits.shape[0])
    store_tile(q, bits, c, r, cols_left, rows_left, stride_c, stride_r, WHOLE)


@triton.jit
def block_scale(amax, overflow_scale, epsilon, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """`scaling.scale_from_amax` of blocks or lines whose largest magnitudes are float32 `amax`. NOTE [exponents] Threads
    compute the scale of every row that they hold elements of, so divisions would cost more than the quantization itself.
    fp8_max is 1.75 * 2**p, and a power of two needs the quotient's exponent only: p minus that of the amax, one less where the
    amax's mantissa exceeds 1.75. The difference of 2**p * 1.75 and the amax, as integers, borrows from the exponent just
    there."""
    if HAS_EPSILON:
        amax = larger(amax, epsilon)
    if POWER_OF_2:
        # As unsigned integers positive floats keep their order, and quotients beyond float32 are above all others. Those
        # need amaxes below 2**-112, which float16 lacks; of the other input dtypes 2**127 is the largest power of two.
        amax_bits = amax.to(tl.uint32, bitcast=True)
        QUOTIENT: tl.constexpr = ((254 + (8 if FP8_MAX == 448.0 else 15)) << 23) + 0x600000
        bits = (tl.full(amax_bits.shape, QUOTIENT, tl.uint32) - amax_bits) & 0xFF800000
        scale = tl.minimum(bits, 0x7F000000).to(tl.float32, bitcast=True)
    else:
        amax_bits = amax.to(tl.uint32, bitcast=True)
        scale = tl.div_rn(FP8_MAX, amax)
        scale = tl.where(scale.to(tl.int32, bitcast=True) == INF_BITS, overflow_scale, scale)
    # Zero, infinity and NaN: zero minus one is the largest of all.
    return tl.where(amax_bits - 1 >= INF_BITS - 1, 1.0, scale)


@triton.jit
def reciprocal(scale, POWER_OF_2: tl.constexpr):
    """1 / scale, correctly rounded, of finite positive float32; that of 2**127 is subnormal."""
    if POWER_OF_2:
        return tl.maximum(0x7F000000 - scale.to(tl.int32, bitcast=True), 0x00400000).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)
