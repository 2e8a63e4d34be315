"""Every configuration of every hand-written kernel that lowering launches, for each kind of GPU: the one catalogue.

A configuration is what makes Triton compile other code by intent: types of pointers, constants (flags, formats, tiles), launch
options. Launches of operations are enumerated from their signatures: all combinations of their flags, formats and input dtypes,
of one matrix, several, and a batch, row-major, column-major and ragged. Of each configuration the two variants stay that Triton
knows most and least of: what is a multiple of 16, and what is 1. A new kernel that is not here fails
tests/lowering/test_limits.py.
"""

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import lowering
from benchmarks.variants import Launch, Variant, recorded, variant_of
from lowering import hardware
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES, Granularity
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.products import Product
from lowering.scaling import scale_shape
from lowering.triton.ahead import Kernel

FP8 = (E4M3, E5M2)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
TENSOR, LINE, MX, ONE, TWO = Granularity

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


def call(name: str, *arguments: Any, **options: Any) -> Call:
    """Of an operation's kernels."""
    return Call(NAMESPACE.operations[name].implementations()[-2], arguments, options)  # the last is the reference


# -- what casts, measures and moves


#: Operations whose calls are enumerated. `amax_rowwise` and `cast_lines_rowwise` launch the passes of `cast_with_scales`.
ENUMERATED = (
    "amaxes", "multi_scales", "quantize", "cast", "transposed_copy", "cast_with_scales", "cast_columns",
    "quantization_statistics",
)  # fmt: skip

#: Values of parameters, by their names; a bool has both.
_VALUES: dict[str, tuple[Any, ...]] = {"dtype": FP8, "align": (16, 128)}
#: Every so-many-th call has another one with an epsilon. Kernels ask whether it is 0.
_WITH_EPSILON = 5
_GRANULARITIES = {
    "cast_with_scales": (LINE, MX, ONE, TWO),
    "cast_columns": (LINE, ONE),
    "quantization_statistics": (TENSOR, LINE, MX, ONE, TWO),
}
_PADS = ("pad_rows", "pad_cols", "pad_outer")


def enumerated() -> Iterator[tuple[str, Call]]:
    """Calls of the operations above, in words. Copies of ragged matrices are padded."""
    count = itertools.count()
    for name in ENUMERATED:
        operation = NAMESPACE.operations[name]
        parameters = inspect.signature(operation.reference).parameters
        for words, tensors in _operands(name, list(parameters)):
            names = [each for each in parameters if each not in tensors]
            for values in itertools.product(*(_values(name, parameters[each]) for each in names)):
                given = tensors | dict(zip(names, values, strict=True))
                given |= dict.fromkeys(set(_PADS) & set(names), "511" in words)
                if _is_refused(operation, given):
                    continue
                what = " ".join([name, words, *(f"{key}={given[key]}" for key in names if given[key] not in (None, False, 0))])
                arguments = [given.pop(each.name) for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
                yield what, call(name, *arguments, **given)
                if "epsilon" in names and next(count) % _WITH_EPSILON == 0:
                    yield f"{what} with epsilon", call(name, *arguments, **given | {"epsilon": 1e-3})


def _values(name: str, parameter: inspect.Parameter) -> tuple[Any, ...]:
    if parameter.name == "granularity":
        return tuple(kind.value for kind in _GRANULARITIES[name])
    is_flag = "bool" in str(parameter.annotation) and parameter.name not in _PADS
    return (False, True) if is_flag else _VALUES.get(parameter.name, (parameter.default,))


def _is_refused(operation: Any, given: dict[str, Any]) -> bool:
    """By the operation's own checks; and what makes no copy."""
    if given.get("rowwise") is given.get("columnwise") is False:
        return True
    try:
        operation._check((), given)
    except ValueError:
        return True
    return False


def batches() -> Iterator[tuple[str, torch.Tensor]]:
    """Of two matrices each: row-major, column-major, and ragged ones."""
    for dtype in INPUTS:
        of = str(dtype).removeprefix("torch.")
        yield f"{of} 512x256", torch.empty(2, 512, 256, dtype=dtype)
        yield f"{of} 512x256 column-major", torch.empty(2, 256, 512, dtype=dtype).mT
        yield f"{of} 511x257 of 511x264", torch.empty(2, 511, 264, dtype=dtype)[..., :257]


def _operands(name: str, parameters: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of a call, by their parameters."""
    for words, x in batches():
        if "xs" in parameters:
            for form, xs in {"": [x[0]], " twice": [x[0], x[0]], " batch": [x]}.items():
                scales = [torch.ones(x.shape[:-2]) for x in xs]
                yield words + form, {"xs": xs} | ({"scales": scales} if "scales" in parameters else {})
        elif "offs" in parameters:
            if name == "transposed_copy":
                yield words, {"q": x[0].to(E4M3)}
            if name != "quantization_statistics" or words.endswith("512x256"):  # it has one variant for all sizes
                yield from _in_groups(name, words, x[0])
            if name == "quantization_statistics" and words.endswith("512x256"):  # scales of tensors are given, others not
                for form, each, scale in ((" batch", x, torch.ones(2)), ("", x[0], torch.ones(()))):
                    yield words + form, {"x": each, "scale": scale, "scale_inv": scale}
                    yield words + form, {"x": each}
        else:
            yield words, {"x": x[0]} | ({"scale": torch.ones(())} if "scale" in parameters else {})


def _in_groups(name: str, words: str, x: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = x.shape[0]
    offs = torch.arange(1, 9, dtype=torch.int32) * (rows // 8)
    for index in (None, torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)):
        gathered = "" if index is None else f" gathered by {index.dtype}"
        given = {"q" if name == "transposed_copy" else "x": x, "offs": offs, "index": index}
        if name == "transposed_copy":
            given["q"] = x.to(E4M3)
        yield f"{words} in groups{gathered}", given
        if name == "quantization_statistics":
            yield f"{words} in groups{gathered}", {**given, "scale": torch.ones(()), "scale_inv": torch.ones(())}


# -- what else operations launch


def _state(algo: str, has_counts: bool, of_one: bool = False) -> Call:
    history, vector = (torch.zeros(1, 1), torch.zeros(1)) if of_one else (torch.zeros(1024, 1000), torch.zeros(1000))
    counts = torch.zeros(len(vector), dtype=torch.int32) if has_counts else None
    return call("update_scales", history, vector, vector, num_non_finite=counts, algo=algo)


def _of_many_groups() -> Iterator[tuple[str, Call]]:
    """Where each row of so many groups goes."""
    for groups in (20, 40, 100, 200, 400, 1000):
        x, offs = torch.empty(4 * groups, 256, dtype=torch.bfloat16), torch.arange(4, 4 * groups + 4, 4, dtype=torch.int32)
        for rows in (None, torch.zeros(4 * groups, dtype=torch.int32), torch.zeros(4 * groups, dtype=torch.int64)):
            yield f"transposed_copy of {groups} groups", call("transposed_copy", x.to(E4M3), offs, rows)
            yield f"cast_columns of {groups} groups", call("cast_columns", x, E4M3, offs, rows, granularity=LINE.value)
            yield f"cast_columns of {groups} groups", call("cast_columns", x, E4M3, offs, rows, granularity=ONE.value)


def others() -> Iterator[tuple[str, Call]]:
    """Of scales, of the state of delayed scaling, of checksums, and of grouped GEMMs by other libraries."""
    from lowering.grouped import column_kernels as rows
    from lowering.grouped import gemm_kernels as gemm
    from lowering.mxfp8 import kernels as mx

    for algo, has_counts, of_one in itertools.product(("max", "most_recent"), (False, True), (False, True)):
        yield f"update_scales {algo}{' counted' * has_counts}{' of one' * of_one}", _state(algo, has_counts, of_one)
    vector, slots, scale = torch.ones(64), torch.arange(64), torch.ones(())
    for options in ({}, {"power_of_2": True}, {"inverse": "multiply"}):
        yield f"scales_from_amax {options}", call("scales_from_amax", vector, E4M3, **options)
    for count in (1, 40):
        yield f"load_scales {count}", call("load_scales", vector, slots, count)
    for index in ([5, 3], list(range(20))):
        yield f"record_amax at {index}", call("record_amax", vector, slots, [scale] * len(index), index)
    for length in (7, 16):
        parts = [torch.ones(length)] * 2
        yield f"record_amax in parts of {length}", call("record_amax", vector, slots, parts, [5, 3], in_parts=True)
    words = torch.empty(4096, 4096, dtype=torch.bfloat16)
    yield "checksums", call("checksums", [words, torch.empty(1, 1)])
    for square_a, square_b in ((False, True), (True, False), (False, False)):
        of_a, of_b = (torch.ones(4, 4 if square else 512) for square in (square_a, square_b))
        options = {"square_a": square_a, "square_b": square_b}
        yield f"e8m0_scales {options}", Call(mx.e8m0_scales, (of_a, of_b, 512, 512, 512), options)
    yield from _of_many_groups()
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
