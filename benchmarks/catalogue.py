"""Configurations of every hand-written kernel that lowering launches: those that the samples of part 0 launch, those of GEMMs
for each kind of GPU, and what operations launch besides.

A configuration is what makes Triton compile other code by intent: types of pointers, constants (flags, formats, tiles), launch
options. Of each configuration the two variants stay that Triton knows most and least of: what is a multiple of 16, and what is
1. A new kernel that is not here fails tests/lowering/test_limits.py.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import lowering
from benchmarks.part0.samples import samples
from benchmarks.variants import Launch, Variant, recorded, variant_of
from lowering import hardware
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.products import Product
from lowering.scaling import scale_shape
from lowering.triton.ahead import Kernel

TENSOR, LINE, _, ONE, TWO = Granularity

#: Kinds of scales that meet in a GEMM of groups: rows by experts, groups of columns, matrices of batches.
ROWS_BY_EXPERTS = [(TENSOR, TENSOR), (LINE, LINE), (LINE, TENSOR), (TENSOR, LINE), (ONE, ONE), (ONE, TWO)]
COLUMNS = [(TENSOR, TENSOR), (LINE, LINE), (ONE, ONE)]
FORMS = {"rows by experts": ROWS_BY_EXPERTS, "stacks": [*ROWS_BY_EXPERTS, (TWO, ONE)], "columns": COLUMNS}
DENSE = [(ONE, TWO), (TWO, ONE), (ONE, ONE)]


class Call(NamedTuple):
    """A call of a function that launches kernels."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def launches(self, capability: tuple[int, int] = (9, 0)) -> list[Launch]:
        """As on a GPU of this compute capability. Memory is zeros where the host goes on with what a kernel did not write."""
        empty = torch.zeros if self.function.__name__ == "quantization_statistics" else torch.empty
        with (
            mock.patch.object(hardware, "cuda_capability", return_value=capability),
            mock.patch.object(torch, "empty", empty),
        ):
            return recorded(self.function, *self.arguments, **self.options)


# -- what casts, measures and moves


def enumerated() -> Iterator[tuple[str, Call]]:
    """The calls of part 0 of every operation with kernels, but GEMMs, in words that begin with its name."""
    for name, operation in NAMESPACE.operations.items():
        functions = [] if name.startswith("scaled_") else operation.implementations()
        for sample in samples(name, torch.device("cpu")) if len(functions) > 1 else ():
            arguments, options = operation.picked(sample.arguments, sample.options)
            yield f"{name} {sample.name}", Call(functions[-2], tuple(arguments), options)  # the last is the reference


# -- what else operations launch


def others() -> Iterator[tuple[str, Call]]:
    """Behind GEMMs, and around those of other libraries."""
    from lowering.grouped import column_kernels as rows
    from lowering.grouped import gemm_kernels as gemm
    from lowering.mxfp8 import kernels as mx

    for square_a, square_b in ((False, True), (True, False), (False, False)):
        of_a, of_b = (torch.ones(4, 4 if square else 512) for square in (square_a, square_b))
        options = {"square_a": square_a, "square_b": square_b}
        yield f"e8m0_scales {options}", Call(mx.e8m0_scales, (of_a, of_b, 512, 512, 512), options)
    q, factors, offs = fp8(1000, 256), torch.empty(2, 1000).t(), torch.arange(1, 9, dtype=torch.int32) * 125
    yield "padded_rows", Call(rows.padded_rows, (q, factors, offs), {})
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty(1000, 256, dtype=dtype)
        yield f"rows_of_groups {dtype}", Call(rows.rows_of_groups, (out, torch.empty(1000, dtype=torch.int32), 1000), {})
        yield f"clear_rows {dtype}", Call(gemm.clear_rows_of_no_group, (out, offs), {})
    yield from _epilogues()


def _epilogues() -> Iterator[tuple[str, Call]]:
    """Behind GEMMs: scales of rows, columns, both or neither; a bias of any dtype; results of any."""
    from lowering.triton import epilogue

    m, n, scalar = 129, 1040, torch.ones(())
    scales = {
        "rows": (torch.ones(m, 1), scalar),
        "columns": (scalar, torch.ones(n, 1)),
        "both": (torch.ones(m, 1), torch.ones(n, 1)),
    }
    for (lines, factors), out_dtype, bias_dtype in itertools.product(
        (*scales.items(), ("none", (scalar, scalar))), HIGH_PRECISION_DTYPES, (None, *HIGH_PRECISION_DTYPES)
    ):
        bias = None if bias_dtype is None else torch.ones(n, dtype=bias_dtype)
        product = Product(fp8(m, 16), fp8(n, 16).t(), *factors, bias, out_dtype=out_dtype)
        arguments = torch.empty(m, n), n, product, lines != "none"
        yield f"epilogue, scales of {lines}, to {out_dtype}, bias {bias_dtype}", Call(epilogue.launch, arguments, {})


# -- GEMMs


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8).view(dtype)


def factors_of(kind: Granularity, outer: int, inner: int, groups: int = 0) -> torch.Tensor:
    """Memory for the factors of an operand of a grouped GEMM, or of each of a batch, in the layout that casts give them."""
    shape = () if kind is TENSOR else scale_shape(outer, inner, kind)
    scales = torch.empty((groups, *shape) if groups else shape)
    return scales.mT.contiguous().mT if kind is ONE else scales


#: What does not change a tile, by turns: formats of a and b, the output's dtype, whether there is a bias, groups.
_FORMATS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
_GROUPS = (8, 128, 1000)


def _turns() -> Iterator[tuple[Any, ...]]:
    """Every combination of them, again and again, in an order in which neighbours differ in most."""
    found = list(itertools.product(_FORMATS, HIGH_PRECISION_DTYPES, (False, True), _GROUPS))
    return itertools.cycle(found[i * 25 % len(found)] for i in range(len(found)))


def gemms() -> Iterator[tuple[str, Call]]:
    """Dense and grouped ones: every kind of scales with every height and width of tiles, whole blocks of K and a rest, fast
    accumulation and none."""
    turns = _turns()
    for pair, rows, k in itertools.product(DENSE, (48, 256), (256, 208)):
        for formats in _FORMATS:
            yield _dense(pair, rows, k, formats, next(turns))
    for rows, n, k in itertools.product((48, 256), (192, 512), (256, 208)):
        for form, pairs in FORMS.items():
            for pair in pairs if form != "columns" or k == 256 else []:
                yield from _of_groups(form, pair, rows, n, k, turns)


def _dense(
    pair: tuple[Granularity, Granularity], m: int, k: int, formats: tuple[torch.dtype, torch.dtype], turn: tuple[Any, ...]
) -> tuple[str, Call]:
    from lowering.blockwise.kernels import multiply

    _, out_dtype, has_bias, _ = turn
    n = 192
    scales = [torch.empty(gemm_ready_scale_shape(outer, k, kind)) for kind, outer in zip(pair, (m, n), strict=True)]
    bias = torch.empty(n, dtype=out_dtype) if has_bias else None
    given = Product(
        fp8(m, k, dtype=formats[0]), fp8(n, k, dtype=formats[1]).t(), *scales, bias,
        granularity_a=pair[0].value, granularity_b=pair[1].value, out_dtype=out_dtype,
    )  # fmt: skip
    return f"dense GEMM {_in_words(pair, formats, out_dtype, has_bias)} {m}x{n}x{k}", Call(multiply, (given,), {})


def _of_groups(form: str, pair: Any, rows: int, n: int, k: int, turns: Iterator[Any]) -> Iterator[tuple[str, Call]]:
    """Columns of groups are at padded offsets: multiples of what a block along K is, or of 16. The tensor cores may add over
    all of K, but not of blocks."""
    for fast_accum in (False,) if pair[0].block else (False, True):
        formats, out_dtype, has_bias, groups = next(turns)
        is_columns, is_stacks = form == "columns", form == "stacks"
        k = padded_width(64 * groups, groups, alignment(pair[0])) if is_columns else k
        m = rows * groups if form == "rows by experts" else rows
        a = fp8(*([groups] * is_stacks), m, k, dtype=formats[0])
        b = fp8(*([groups] * (not is_columns)), n, k, dtype=formats[1]).mT
        per_group = [groups if pair[0] is LINE else 0] * 2 if is_columns else [groups * is_stacks, groups]
        scales = [factors_of(kind, outer, k, each) for kind, outer, each in zip(pair, (m, n), per_group, strict=True)]
        offs = None if is_stacks else torch.empty(groups, dtype=torch.int32)
        bias = torch.empty(groups, n, dtype=out_dtype) if has_bias and not is_columns else None
        kinds = {"granularity_a": pair[0].value, "granularity_b": pair[1].value}
        given = GroupedGemm(a, b, *scales, offs, bias, **kinds, out_dtype=out_dtype, fast_accum=fast_accum)
        yield _grouped(form, (rows, n, k), given)


def _grouped(what: str, sizes: tuple[int, ...], given: GroupedGemm) -> tuple[str, Call]:
    from lowering.grouped.gemm_kernels import scaled_grouped_mm

    of = _in_words(given.granularities, (given.a.dtype, given.b.dtype), given.out_dtype, given.bias is not None)
    fast = " fast" if given.fast_accum else ""
    name = f"grouped GEMM {what} {of}{fast} {'x'.join(map(str, sizes))} of {given.num_groups}"
    return name, Call(scaled_grouped_mm, (given,), {})


def _in_words(pair: Any, formats: Any, out_dtype: torch.dtype, has_bias: bool) -> str:
    scales = " by ".join(kind.value for kind in pair)
    dtypes = " by ".join("e5m2" if each == E5M2 else "e4m3" for each in formats)
    return f"{scales}, {dtypes} to {hardware.short(out_dtype)}{' with bias' * has_bias}"


# -- all of them


class Configuration(NamedTuple):
    """What a launch is compiled to, and a call that makes it."""

    name: str
    launch: Launch


Key = tuple[Any, ...]


def key_of(launch: Launch) -> Key:
    """What tells configurations apart: types of pointers, constants, launch options."""
    pointers = tuple(kind for kind in variant_of(launch).signature.values() if kind.startswith("*"))
    constants = tuple(repr(launch.arguments[p.name]) for p in launch.kernel.params if p.is_constexpr)
    return launch.kernel.fn.__module__, launch.kernel.__name__, pointers, constants, tuple(sorted(launch.options.items()))


def casts() -> Iterator[tuple[str, Call]]:
    """All but GEMMs: what does not depend on the GPU."""
    yield from enumerated()
    yield from others()


def configurations(calls: Iterable[tuple[str, Call]], capability: tuple[int, int] = (9, 0)) -> dict[Key, list[Configuration]]:
    """Those of calls, by what tells them apart: the variants that Triton knows least and most of, once if they are equal."""
    found: dict[Key, dict[int, Configuration]] = {}
    for name, each in calls:
        for launch in each.launches(capability):
            found.setdefault(key_of(launch), {}).setdefault(_known(variant_of(launch)), Configuration(name, launch))
    return {key: [variants[n] for n in sorted({min(variants), max(variants)})] for key, variants in found.items()}


def _known(variant: Variant) -> int:
    """How many facts about the numbers and addresses of a launch Triton compiles for."""
    return len(variant.attributes) + len(variant.constants)


def kernels() -> dict[str, Any]:
    """Triton's function of every kernel in lowering, by its module and name."""
    modules = [
        module.name
        for module in pkgutil.walk_packages(lowering.__path__, "lowering.")
        if module.name.endswith("kernels") or ".triton." in module.name
    ]
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    found = [value.jit for value in values if isinstance(value, Kernel)]
    return {f"{jit.fn.__module__}.{jit.__name__}": jit for jit in found}
