"""Calls of every registered operation: what `operations` compares with the reference.

An operation without a sample here or in `benchmarks.kernel_cost` fails a test, and is a wrong case of part 0 on every machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.correctness import FAST_ERROR, GEMM_ERROR
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped.reference import alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.scaling import scale_shape
from lowering.statistics import empty_statistics

TENSOR, ROW, MX, ONE, TWO = Granularity
#: M, K, N.
SIZES = {"square": (512, 1024, 512), "ragged": (130, 200, 72), "one row": (1, 256, 64)}
_EMPTY = {"empty M": (0, 256, 64), "empty K": (16, 0, 64)}
#: Rows of each group, and those of none.
ROUTING, TAIL = (128, 0, 5, 300, 79), 11


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call of an operation."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    bound: float | None = None
    """Largest relative error; None: equal bit for bit."""
    is_unordered: bool = False
    """True if the elements of the last result come in any order."""
    valid: int | None = None
    """Rows of the result that belong to a group; None: all."""
    sums: float | None = None
    """Largest relative error of any element, where those are sums in other orders, with the bound None."""
    needs_mx: bool = False
    """True if it needs tensor cores for 1x32 blocks on a GPU."""


_SAMPLES: dict[str, list[Callable[[torch.device], Iterator[Sample]]]] = {}


def _of(*names: str) -> Callable[[Callable[..., Iterator[Sample]]], Callable[..., Iterator[Sample]]]:
    """Registers a function that makes the samples of some operations; it gets the operation's name where there are several."""

    def register(function: Callable[..., Iterator[Sample]]) -> Callable[..., Iterator[Sample]]:
        for name in names:
            made = function if len(names) == 1 else (lambda on, name=name: function(name, on))
            _SAMPLES.setdefault(name, []).append(made)
        return function

    return register


def samples(operation: str, on: torch.device) -> list[Sample]:
    """The samples of an operation, on a device; none for one that nobody has written samples of."""
    torch.manual_seed(0)
    return [sample for make in _SAMPLES.get(operation, ()) for sample in make(on)]


def _matrix(on: torch.device, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, cols, device=on).mul_(torch.exp(torch.randn(rows, 1, device=on))).to(dtype)


def _scale(on: torch.device) -> torch.Tensor:
    return torch.tensor(3.7, device=on)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_")


#: Copies that a cast of several matrices may make.
_LAYOUTS: dict[str, dict[str, Any]] = {
    "rowwise": {"pad_rows": True},
    "columnwise": {"rowwise": False, "columnwise": True},
    "columnwise, padded": {"rowwise": False, "columnwise": True, "pad_cols": True},
    "both": {"columnwise": True},
    "both, padded": {"columnwise": True, "pad_rows": True, "pad_cols": True},
}


def _forms(on: torch.device) -> list[torch.Tensor]:
    """Matrices of every form: ragged, one row, empty either way, a transpose, one cut out of a wider one, batches."""
    found = [_matrix(on, *shape, torch.float32) for shape in ((33, 50), (1, 130), (0, 5), (5, 0))]
    cut, batch = _matrix(on, 40, 60, torch.float16)[::2, 3:50], _matrix(on, 32, 48).view(2, 16, 48)
    return [*found, _matrix(on, 33, 50).t(), cut, batch, batch.mT]


@_of("cast", "cast_rowwise", "cast_blockwise", "cast_mxfp8")
def _casts_of_every_form(name: str, on: torch.device) -> Iterator[Sample]:
    """All in one launch; of one alone also what a cast of several does not make."""
    xs = _forms(on)
    scales = [torch.rand(x.shape[:-2], device=on) + 1 for x in xs]
    kinds: dict[str, dict[str, Any]] = {"": {}}
    if name == "cast":
        kinds = {"": {}, "amaxes": {"with_amax": True}}
    elif name == "cast_blockwise":
        kinds = {kind.label: {"granularity": kind.value} for kind in (ONE, TWO)}
    elif name == "cast_mxfp8":
        kinds["square"] = {"square": True}
    for (layout, copies), (kind, options), fp8 in itertools.product(_LAYOUTS.items(), kinds.items(), (E4M3, E5M2)):
        given = (xs, scales, fp8) if name == "cast" else (xs, fp8)
        yield Sample(f"every form, {layout}, {kind or 'plain'}, {_short(fp8)}", given, {**copies, **options})
    if name in ("cast_blockwise", "cast_mxfp8"):
        for (kind, options), columnwise in itertools.product(kinds.items(), (False, True)):
            compact = {"columnwise": columnwise, "compact": True}
            yield Sample(f"compact, columnwise {columnwise}, {kind or 'plain'}", ([xs[0]], E4M3), {**compact, **options})
    if name == "cast":
        for i, (x, scale) in enumerate(zip(xs[:6], scales, strict=False)):
            parts = {"columnwise": i % 2 == 0, "with_amax": True, "in_parts": True}
            yield Sample(f"form {i}, amaxes in parts", ([x], [scale], E4M3), parts, is_unordered=True)


@_of("cast")
def _cast(on: torch.device) -> Iterator[Sample]:
    x, line = _matrix(on, 130, 200), _matrix(on, 1, 257, torch.float32)
    for fp8 in (E4M3, E5M2):
        both = {"columnwise": True, "with_amax": True, "pad_rows": True, "pad_cols": True}
        yield Sample(f"ragged, both, {_short(fp8)}", ([x], [_scale(on)], fp8), both)
        yield Sample(f"one row, {_short(fp8)}", ([line], [_scale(on)], fp8), {"with_amax": True})
    yield Sample("a view", ([x.t()[3:]], [_scale(on)], E4M3), {"columnwise": True})
    vector = torch.rand(8, device=on) + 1
    yield Sample(
        "many, scales of a vector", ([x, line, x.float()], [vector, vector, vector], E4M3), {"scales_index": [5, 0, 2]}
    )
    in_parts = {"with_amax": True, "in_parts": True}
    yield Sample("amaxes in parts", ([_matrix(on, 512, 384)], [_scale(on)], E5M2), in_parts, is_unordered=True)
    yield Sample("non-finite", ([_with_non_finite(x)], [_scale(on)], E4M3), {"columnwise": True, "with_amax": True})


def _with_non_finite(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0], x[5, 7], x[-1, -1] = torch.inf, -torch.inf, torch.nan
    return x


@_of("quantize")
def _quantize(on: torch.device) -> Iterator[Sample]:
    every = torch.arange(-(2**15), 2**15, device=on).to(torch.int16).view(torch.bfloat16)
    for fp8 in (E4M3, E5M2):
        yield Sample(f"every bfloat16, {_short(fp8)}", (every, _scale(on), fp8))
    x = torch.randn(2, 3, 5, 7, device=on)
    views = {"permuted": x.permute(3, 0, 2, 1), "strided": x[:, ::2, 1:3], "one element": x[0, 0, 0, 0]}
    for label, view in views.items():
        yield Sample(label, (view, _scale(on), E5M2))


@_of("cast_rowwise", "cast_blockwise", "cast_mxfp8")
def _block_casts(name: str, on: torch.device) -> Iterator[Sample]:
    as_engines: dict[str, Any] = {"power_of_2": False}
    kinds: dict[str, tuple[dict[str, Any], ...]] = {
        "cast_rowwise": ({}, {"power_of_2": False}, {**as_engines, "inverse": "divide", "epsilon": 1e-4}),
        "cast_blockwise": (
            {"granularity": ONE.value},
            {"granularity": TWO.value, "power_of_2": False},
            {"granularity": TWO.value, **as_engines, "inverse": "multiply"},
        ),
        "cast_mxfp8": ({"square": False}, {"square": True}),
    }
    x = _with_non_finite(_matrix(on, 130, 200))
    for options, fp8 in itertools.product(kinds[name], (E4M3, E5M2)):
        label = ", ".join([*(f"{key} {value}" for key, value in options.items()), _short(fp8)])
        yield Sample(f"ragged, both, {label}", ([x], fp8), {"columnwise": True, "pad_rows": True, "pad_cols": True, **options})
        yield Sample(f"many, columnwise, {label}", ([x, x[:128, :128]], fp8), {"rowwise": False, "columnwise": True, **options})


@_of("amax_rowwise", "cast_lines_rowwise")
def _rowwise_passes(name: str, on: torch.device) -> Iterator[Sample]:
    xs = [_matrix(on, 130, 200), _matrix(on, 64, 48)]
    lines = {"rowwise": True, "columnwise": True}
    amaxes = torch.cat([x.abs().amax(dim).float() for x in xs for dim in (1, 0)])
    yield Sample("ragged", (xs,) if name == "amax_rowwise" else (xs, amaxes, E4M3), lines)
    for columnwise in (False, True):
        one, dim = {"rowwise": not columnwise, "columnwise": columnwise}, 0 if columnwise else 1
        of_one = torch.cat([x.abs().amax(dim).float() for x in xs])
        pads = {"pad_cols" if columnwise else "pad_rows": True}
        given = (xs,) if name == "amax_rowwise" else (xs, of_one, E4M3)
        yield Sample(f"columnwise {columnwise}", given, one if name == "amax_rowwise" else one | pads)


@_of("gemm_ready_blockwise", "gemm_ready_mxfp8")
def _gemm_ready(name: str, on: torch.device) -> Iterator[Sample]:
    is_mx = name == "gemm_ready_mxfp8"
    kinds = [{"square": square} for square in (False, True)] if is_mx else [{"granularity": kind.value} for kind in (ONE, TWO)]
    cast = NAMESPACE.operations["cast_mxfp8" if is_mx else "cast_blockwise"].reference
    for options, pad_outer in itertools.product(kinds, (False, True)):
        q, scales = cast([_matrix(on, 130, 200)], E4M3, compact=True, **options)
        yield Sample(f"pad_outer {pad_outer}, {options}", (q, scales), {**options, "pad_outer": pad_outer})


@_of("save_activation", "load_activation")
def _activations(name: str, on: torch.device) -> Iterator[Sample]:
    shapes = {"whole blocks": (64, 256), "ragged": (130, 200), "three dimensions": (2, 33, 384), "empty": (0, 256)}
    for (what, shape), as_bytes in itertools.product(shapes.items(), (False, True)):
        *sizes, cols = shape
        x = _matrix(on, math.prod(sizes), cols).reshape(shape)
        options = {"as_bytes": as_bytes, "power_of_2": what != "ragged" or as_bytes}
        if name == "save_activation":
            yield Sample(f"{what}, {options}", (x,), options)
        else:
            saved = NAMESPACE.operations["save_activation"].reference(x, **options)
            yield Sample(f"{what}, {options}", saved, {"dtype": torch.bfloat16})


@_of("packed")
def _packed(on: torch.device) -> Iterator[Sample]:
    yield Sample("of two widths", ([_matrix(on, 130, 200).to(E4M3), _matrix(on, 2, 3, torch.float32)],))
    yield Sample("a transpose", ([_matrix(on, 130, 200).t()],))


@_of("scale_values_mxfp8")
def _scale_values(on: torch.device) -> Iterator[Sample]:
    yield Sample("ragged", tuple(NAMESPACE.operations["cast_mxfp8"].reference([_matrix(on, 130, 200)], E4M3)))


@_of("e8m0_scales")
def _scales_of_128(on: torch.device) -> Iterator[Sample]:
    cast = NAMESPACE.operations["cast_blockwise"].reference
    for kinds in itertools.product((ONE, TWO), repeat=2):
        of_a, of_b = (
            cast([_matrix(on, size, 1300)], E4M3, granularity=kind.value, power_of_2=True)[1]
            for size, kind in zip((130, 300), kinds, strict=True)
        )
        options = {"square_a": kinds[0] is TWO, "square_b": kinds[1] is TWO}
        yield Sample(f"{kinds[0].label} by {kinds[1].label}", (of_a, of_b, 130, 300, 1300), options)


@_of("amax", "sigmoid")
def _of_one_tensor(name: str, on: torch.device) -> Iterator[Sample]:
    """The sigmoid has no kernel of its own: where Inductor fuses it, `recipes` compares the model."""
    x = _with_non_finite(_matrix(on, 130, 200)) if name == "amax" else _matrix(on, 130, 200, torch.float32)
    yield Sample("ragged", (x,))
    yield Sample("a view", (x.t()[1:],))
    for i, form in enumerate(_forms(on)):
        yield Sample(f"form {i}", (form,))


@_of("multi_amax", "multi_scales")
def _of_many_tensors(name: str, on: torch.device) -> Iterator[Sample]:
    xs = [_matrix(on, 130, 200), _matrix(on, 1, 7, torch.float32), _matrix(on, 512, 512), torch.zeros(0, 3, device=on)]
    if name == "multi_amax":
        yield Sample("many", (xs,))
        yield Sample("one", (xs[:1],))
        yield Sample("per matrix", ([_matrix(on, 130, 200).view(5, 26, 200)],), {"per_matrix": True})
        yield Sample("per matrix, many", (_forms(on)[4:],), {"per_matrix": True})
        return
    for fp8, options in ((E4M3, {"margin": 1}), (E5M2, {"power_of_2": True, "epsilon": 1e-2})):
        yield Sample(_short(fp8), (xs, fp8), options)


@_of("checksums")
def _checksums(on: torch.device) -> Iterator[Sample]:
    x = _matrix(on, 130, 200)
    kinds = [x, _matrix(on, 512, 512, torch.float32), x.to(E4M3), x.view(-1)[1:], torch.zeros(0, 3, device=on)]
    yield Sample("many", (kinds,))
    yield Sample("views", ([x.t(), x[:, 3:50]],))
    yield Sample("integers", ([torch.arange(3, dtype=torch.uint8, device=on)],))


@_of("scale_from_amax", "scales_from_amax")
def _scales_of_amaxes(name: str, on: torch.device) -> Iterator[Sample]:
    edges = torch.tensor([0.0, 1e-38, 0.3, 448.0, 3e38, torch.inf, torch.nan], device=on)
    if name == "scales_from_amax":
        yield Sample("as engines", (edges, E4M3), {"epsilon": 1e-2, "inverse": "multiply"})
        yield Sample("as engines, one", (edges[3], E5M2), {"inverse": "divide"})
    for fp8, options in ((E4M3, {}), (E5M2, {"margin": 2}), (E4M3, {"power_of_2": True, "epsilon": 1e-2})):
        yield Sample(f"{_short(fp8)} {options}", (edges, fp8), options)
        yield Sample(f"one, {_short(fp8)} {options}", (edges[2], fp8), options)


@_of("transposed_copy")
def _transposed_copy(on: torch.device) -> Iterator[Sample]:
    for rows, cols in ((512, 768), (130, 400)):
        yield Sample(f"{rows} x {cols}", (_matrix(on, rows, cols).to(E5M2),))


@_of("load_scales", "take")
def _vectors(name: str, on: torch.device) -> Iterator[Sample]:
    vector = torch.rand(300, device=on) + 0.5
    slots = torch.arange(299, -1, -1, device=on)
    yield Sample("some", (vector, slots, 128) if name == "load_scales" else (vector, [7, 0, 299, 7]))
    yield Sample("few", (vector, slots, 0) if name == "load_scales" else (vector, [1]))


@_of("record_amax")
def _records(on: torch.device) -> Iterator[Sample]:
    amax, slots = torch.full((200,), 4.0, device=on), torch.arange(199, -1, -1, device=on)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "three": [()] * 3,
        "three vectors": [(3,), (1,), (9,)],
        "three in parts": [(64,), (7, 3), (2049,)],
    }
    for label, of_each in shapes.items():
        observed = [10 * torch.rand(shape, device=on) for shape in of_each]
        yield Sample(label, (amax, slots, observed, [7, 20, 0]), {"in_parts": "parts" in label})
    yield Sample("none", (amax, slots, [], []))


@_of("update_scales")
def _update_scales(on: torch.device) -> Iterator[Sample]:
    limits = torch.tensor([448.0, 57344.0], device=on).repeat(19)[:37]
    for length, algo, margin in ((1, "max", 0), (130, "max", 3), (400, "most_recent", -2)):
        history = torch.rand(length, 37, device=on)
        history[0, :4] = torch.tensor([torch.inf, torch.nan, 0.0, 1e-44])
        state = history, torch.full((37,), 2.5, device=on), limits
        count = torch.full((37,), 5, dtype=torch.int32, device=on)
        yield Sample(f"{algo} of {length}", state, {"algo": algo, "margin": margin, "num_non_finite": count})
        yield Sample(f"{algo} of {length}, not counted", state, {"algo": algo, "margin": margin})


@_of("scaled_mm", "scaled_mm_rowwise")
def _gemms(name: str, on: torch.device) -> Iterator[Sample]:
    outputs = (torch.bfloat16, torch.float16, torch.float32)
    formats = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
    for (where, (m, k, n)), (of_a, of_b), out, fast, has_bias in itertools.product(
        (SIZES | _EMPTY).items(), formats, outputs, (True, False), (False, True)
    ):
        if (has_bias or out is not torch.bfloat16) and where != "square":
            continue
        a, b = torch.randn(m, k, device=on).to(of_a), torch.randn(n, k, device=on).to(of_b).t()
        scales = [torch.rand((size, 1) if name.endswith("rowwise") else (), device=on) + 0.5 for size in (m, n)]
        bias = [torch.randn(n, device=on).to(out)] if has_bias else []
        how = {"out_dtype": out, "fast_accum": fast}
        label = (
            f"{where} {_short(of_a)} {_short(of_b)} -> {_short(out)}{', fast' if fast else ''}{', bias' if has_bias else ''}"
        )
        yield Sample(label, (a, b, *scales, *bias), how, None if where in _EMPTY else FAST_ERROR if fast else GEMM_ERROR)


@_of("scaled_mm_blockwise")
def _blockwise_gemms(on: torch.device) -> Iterator[Sample]:
    cast = NAMESPACE.operations["cast_blockwise"].reference
    for (where, (m, k, n)), pair in itertools.product((SIZES | _EMPTY).items(), ((ONE, TWO), (ONE, ONE), (TWO, ONE))):
        (a, scale_a), (b, scale_b) = (
            cast([torch.randn(size, k, device=on)], E4M3, granularity=kind.value, pad_rows=size == n)
            for size, kind in zip((m, n), pair, strict=True)
        )
        for how in ("auto", "triton") if on.type == "cuda" else ("auto",):
            label = f"{where}, {pair[0].label} by {pair[1].label}, {how}"
            options = {"granularity_a": pair[0].value, "granularity_b": pair[1].value, "implementation": how}
            yield Sample(label, (a, b.t(), scale_a, scale_b), options, None if where in _EMPTY else GEMM_ERROR)


@_of("scaled_mm_mxfp8")
def _mx_gemms(on: torch.device) -> Iterator[Sample]:
    cast = NAMESPACE.operations["cast_mxfp8"].reference
    for where, (m, k, n) in (SIZES | _EMPTY).items():
        (a, scale_a), (b, scale_b) = (cast([_matrix(on, size, k)], E4M3) for size in (m, n))
        yield Sample(where, (a, b.t(), scale_a, scale_b), bound=None if where in _EMPTY else GEMM_ERROR, needs_mx=True)


def offsets(on: torch.device) -> torch.Tensor:
    return torch.tensor(ROUTING).cumsum(0).to(on, torch.int32)


@_of("scaled_grouped_mm")
def _grouped_gemms(on: torch.device) -> Iterator[Sample]:
    """Rows of experts by their weights, batches by batches, and weights' gradients."""
    experts, k, n, rows, offs = len(ROUTING), 512, 256, sum(ROUTING), offsets(on)

    def scales(kind: Granularity, outer: int, inner: int, *groups: int) -> torch.Tensor:
        if kind is TENSOR:
            return torch.rand(groups, device=on) + 0.5
        lines, num = scale_shape(outer, inner, kind)
        if kind is ONE:  # as casts write them, by blocks
            return torch.rand(*groups, num, lines, device=on).mT + 0.5
        return torch.rand(*groups, lines, num, device=on) + 0.5

    weights = torch.randn(experts, n, k, device=on).to(E4M3).mT
    for pair, fast, of_a in itertools.product(
        ((TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (ONE, TWO), (ONE, ONE)), (True, False), (E4M3, E5M2)
    ):
        if fast and pair[0].block is not None:
            continue
        options = {"granularity_a": pair[0].value, "granularity_b": pair[1].value, "fast_accum": fast}
        label = f"{pair[0].label} by {pair[1].label}, {_short(of_a)}{', fast' if fast else ''}"
        bound = FAST_ERROR if fast else GEMM_ERROR
        a = torch.randn(rows + TAIL, k, device=on).to(of_a)
        of_weights = scales(pair[1], n, k, experts)
        yield Sample(
            f"rows, {label}", (a, weights, scales(pair[0], rows + TAIL, k), of_weights, offs), options, bound, valid=rows
        )
        batch = torch.randn(experts, 72, k, device=on).to(of_a)
        yield Sample(f"batches, {label}", (batch, weights, scales(pair[0], 72, k, experts), of_weights), options, bound)
    for kind in (TENSOR, ROW, ONE):
        width = padded_width(rows + TAIL, experts, alignment(kind))
        columns = NAMESPACE.operations["group_columns"].reference
        dy, x = (
            columns(torch.randn(rows + TAIL, size, device=on).to(fp8), offs, align=alignment(kind))
            for size, fp8 in ((n, E5M2), (k, E4M3))
        )
        per_group = (experts,) if kind is ROW else ()
        factors = [scales(kind, size, width, *per_group) for size in (n, k)]
        options = {"granularity_a": kind.value, "granularity_b": kind.value}
        yield Sample(f"grad_weight, {kind.label}", (dy, x.t(), *factors, offs), options, GEMM_ERROR)


@_of("valid_rows", "group_columns", "cast_columns")
def _columns_of_groups(name: str, on: torch.device) -> Iterator[Sample]:
    """Rows in groups, and rows gathered."""
    slots = sum(ROUTING) + TAIL
    x, index = _matrix(on, slots, 130), torch.randint(0, slots, (slots,), device=on)
    for label, given in (("in place", None), ("gathered", index)):
        if name == "valid_rows":
            yield Sample(label, (offsets(on), slots, given))
        elif name == "group_columns":
            yield Sample(label, (x.to(E4M3), offsets(on), given))
        else:
            for kind, pad in itertools.product(("row_wise", "block_1x128", "block_1x32"), (False, True)):
                options = {"granularity": kind, "pad_outer": pad}
                yield Sample(f"{kind} {label}, pad_outer {pad}", (x, E5M2, offsets(on), given), options)
            if given is None:
                yield Sample("block_1x128, both copies", (x, E5M2, offsets(on)), {"granularity": ONE.value, "rowwise": True})


@_of("quantization_statistics", "statistics_of_parts", "product_statistics", "record_statistics")
def _statistics(name: str, on: torch.device) -> Iterator[Sample]:
    """Kernels, their sums aside, and plain torch."""
    a, b = _matrix(on, 130, 200), _matrix(on, 200, 72)
    if name == "quantization_statistics":
        scale = torch.tensor(3.0, device=on)
        yield Sample("tensor", (a, E4M3, scale, 1 / scale), {"granularity": TENSOR.value}, sums=1e-6)
        for kind in ("row_wise", "block_1x128", "block_1x32"):
            yield Sample(kind, (a, E4M3), {"granularity": kind, "columnwise": True, "power_of_2": True}, sums=1e-6)
    elif name == "statistics_of_parts":
        parts = [torch.arange(1.0, 9.0, dtype=torch.float64, device=on) for _ in range(2)]
        amax, counts = torch.ones(8, device=on), torch.full((8,), 3 + (2 << 10) + (1 << 20), dtype=torch.int32, device=on)
        for are_blocks, scale in ((False, torch.tensor(3.0, device=on)), (True, amax * 4)):
            yield Sample(f"blocks={are_blocks}", (*parts, amax, counts, scale, E4M3, 80, are_blocks))
    elif name == "product_statistics":
        yield Sample("matrix", (a @ b + 0.01, a, b))
    else:
        vectors = [torch.full_like(empty_statistics(1, on)[0], float(i)) for i in (1, 2)]
        yield Sample("two rows", (empty_statistics(4, on), vectors, [0, 2]))
