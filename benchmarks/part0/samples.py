"""Calls of every registered operation: what `operations` compares with the reference, on a GPU, in Triton's interpreter
(tests/lowering/kernel_cases.py), and by opcheck.

An operation without a sample here fails a test, and is a wrong case of part 0 on every machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.correctness import FAST_ERROR, GEMM_ERROR
from lowering.casts import cast_with_scales
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped.reference import alignment, padded_width
from lowering.operation import NAMESPACE
from lowering.scaling import scale_shape
from lowering.statistics import empty_statistics

TENSOR, ROW, MX, ONE, TWO = Granularity
#: M, K, N.
SIZES = {"square": (512, 1024, 512), "ragged": (130, 200, 72), "one row": (1, 256, 64)}
_EMPTY = {"empty M": (0, 256, 64), "empty K": (16, 0, 64)}
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
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
    """The samples of an operation, on a device; none for one without samples."""
    torch.manual_seed(0)
    return [sample for make in _SAMPLES.get(operation, ()) for sample in make(on)]


def _matrix(on: torch.device, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, cols, device=on).mul_(torch.exp(torch.randn(rows, 1, device=on))).to(dtype)


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


_SCALINGS: tuple[dict[str, Any], ...] = ({}, {"power_of_2": False}, {"epsilon": 1e-3})


def _forms(on: torch.device) -> list[torch.Tensor]:
    """Matrices of every form and dtype: ragged, of whole tiles, one row, empty either way, one element; with NaN and infinity;
    transposes, parts of a wider one with and without steps, one row repeated; batches."""
    shapes = ((33, 50), (1, 130), (0, 5), (5, 0), (1, 1), (48, 16), (63, 100))
    found = [_matrix(on, *shape, INPUTS[i % 3]) for i, shape in enumerate(shapes)]
    wide = _with_non_finite(_matrix(on, 129, 257, torch.float16))
    found += [wide, _matrix(on, 64, 128), _matrix(on, 128, 256).t(), _matrix(on, 256, 128)]
    found += [_matrix(on, 33, 50).t(), _matrix(on, 40, 60, torch.float16)[::2, 3:50], wide[1:34, 3:53].t(), wide[::2, ::3]]
    batch = _matrix(on, 32, 48).view(2, 16, 48)
    stack = torch.stack([_matrix(on, 63, 100, torch.float32), _with_non_finite(_matrix(on, 63, 100, torch.float32))])
    return [*found, wide[:1].expand(4, -1), batch, batch.mT, stack, stack[:, ::2], stack[:, :, :0]]


@_of("cast", "cast_with_scales")
def _casts_of_every_form(name: str, on: torch.device) -> Iterator[Sample]:
    """All in one launch; of one alone also what a cast of several does not make."""
    if name == "cast":
        yield from _every_form(on, {"": {}, "amaxes": {"with_amax": True}}, TENSOR)
        return
    yield from _every_form(on, {ROW.label: {"granularity": ROW.value}}, ROW)
    yield from _every_form(on, {kind.label: {"granularity": kind.value} for kind in (ONE, TWO)}, ONE)
    mx = {"granularity": MX.value}
    yield from _every_form(on, {MX.label: mx, "square": {**mx, "square": True}}, MX)


def _every_form(on: torch.device, kinds: dict[str, dict[str, Any]], of: Granularity) -> Iterator[Sample]:
    xs = _forms(on)
    scales = [torch.rand(x.shape[:-2], device=on) + 1 for x in xs]
    is_given = of is TENSOR
    for (layout, copies), (kind, options), fp8 in itertools.product(_LAYOUTS.items(), kinds.items(), (E4M3, E5M2)):
        given = (xs, scales, fp8) if is_given else (xs, fp8)
        yield Sample(f"every form, {layout}, {kind or 'plain'}, {_short(fp8)}", given, {**copies, **options})
    turns = itertools.cycle(itertools.product(kinds.items(), _LAYOUTS.items(), (E4M3, E5M2)))
    for i, (x, scale) in enumerate(zip(xs, scales, strict=True)):  # a launch of its own: by turns, of which none are multiples
        for _ in range(3):
            (kind, options), (layout, copies), fp8 = next(turns)
            scaling = _SCALINGS[i % 3] if of in (ROW, ONE) else {}
            label = f"form {i} alone, {layout}, {kind or 'plain'}, {_short(fp8)} {scaling or ''}"
            yield Sample(label, ([x], [scale], fp8) if is_given else ([x], fp8), {**copies, **options, **scaling})
        if x.dim() == 2 and of.block is not None:
            compact = {"columnwise": i // 2 % 2 == 0, "compact": True}
            (kind, options) = list(kinds.items())[i % 2]
            yield Sample(f"form {i}, compact, {kind or 'plain'}", ([x], E4M3), {**compact, **options})
        if x.dim() == 2 and is_given:
            sides = {"rowwise": i % 3 != 0, "columnwise": i % 3 != 1, "with_amax": True, "in_parts": True}
            yield Sample(f"form {i}, amaxes in parts", ([x], [scale], E4M3), sides, is_unordered=True)
    many = [_matrix(on, 17, 3 + i % 5, torch.float32) for i in range(131)]
    yield Sample(f"131, {kind}", (many, [scales[0]] * 131, E4M3) if is_given else (many, E4M3), {"columnwise": True, **options})


@_of("cast")
def _cast(on: torch.device) -> Iterator[Sample]:
    x, line, vector = _matrix(on, 130, 200), _matrix(on, 1, 257, torch.float32), torch.rand(8, device=on) + 1
    both = {"columnwise": True, "with_amax": True, "pad_rows": True, "pad_cols": True}
    batch = torch.stack([x, _with_non_finite(x), -x])
    yield Sample("a batch, one scale", ([batch, x, batch.mT], [torch.full((), 3.7, device=on)] * 3, E5M2), both)
    yield Sample("many, scales of a vector", ([x, line, x.float()], [vector] * 3, E4M3), {"scales_index": [5, 0, 2]})
    in_parts = {"with_amax": True, "in_parts": True}
    yield Sample("amaxes in parts", ([_matrix(on, 512, 384)], [vector[0]], E5M2), in_parts, is_unordered=True)


def _with_non_finite(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0], x[5, 7], x[-1, -1] = torch.inf, -torch.inf, torch.nan
    x[1, ::3], x[2, ::2] = 0.0, -0.0
    return x


@_of("quantize")
def _quantize(on: torch.device) -> Iterator[Sample]:
    every = torch.arange(-(2**15), 2**15, device=on).to(torch.int16).view(torch.bfloat16)
    x = torch.randn(2, 3, 5, 7, device=on)
    views = {"every bfloat16": every, "permuted": x.permute(3, 0, 2, 1), "strided": x[:, ::2, 1:3], "one": x[0, 0, 0, 0]}
    views |= {f"{'' if form.numel() else 'empty '}form {i}": form for i, form in enumerate(_forms(on))}
    for (label, view), fp8 in itertools.product(views.items(), (E4M3, E5M2)):
        yield Sample(f"{label}, {_short(fp8)}", (view, torch.tensor(3.7, device=on), fp8))


@_of("cast_with_scales")
def _casts_of_every_scale(on: torch.device) -> Iterator[Sample]:
    kinds: tuple[tuple[Granularity, dict[str, Any]], ...] = (
        (ROW, {}),
        (ROW, {"power_of_2": False, "inverse": "divide", "epsilon": 1e-4}),
        (ONE, {}),
        (TWO, {"power_of_2": False}),
        (TWO, {"power_of_2": False, "inverse": "multiply"}),
        (MX, {}),
    )
    x = _with_non_finite(_matrix(on, 130, 200))
    for (kind, how), fp8 in itertools.product(kinds, (E4M3, E5M2)):
        options = {"granularity": kind.value, **how}
        label = ", ".join([*(f"{key} {value}" for key, value in options.items()), _short(fp8)])
        yield Sample(f"ragged, both, {label}", ([x], fp8), {"columnwise": True, "pad_rows": True, "pad_cols": True, **options})
        many = [x[:128, :128].contiguous(), _matrix(on, 256, 128)]  # whole blocks
        yield Sample(f"many, columnwise, {label}", (many, fp8), {"rowwise": False, "columnwise": True, **options})


@_of("amax_rowwise", "cast_lines_rowwise")
def _rowwise_passes(name: str, on: torch.device) -> Iterator[Sample]:
    forms = [x for x in _forms(on) if x.dim() == 2]
    aligned = [_matrix(on, *shape) for shape in ((64, 128), (16, 16), (160, 272), (48, 0))]
    ragged = [_matrix(on, 130, 200), _matrix(on, 64, 48)]
    for (what, xs), (rowwise, columnwise) in itertools.product(
        {"ragged": ragged, "aligned": aligned, "of every form": forms, "one": aligned[:1], "empty": aligned[3:]}.items(),
        ((True, True), (True, False), (False, True)),
    ):
        sides: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
        amaxes = NAMESPACE.operations["amax_rowwise"].reference(xs, **sides)
        label = f"{what}, rowwise {rowwise}, columnwise {columnwise}"
        if name == "amax_rowwise":
            yield Sample(label, (xs,), sides)
        else:
            pads = {"pad_rows": what == "ragged", "pad_cols": what != "ragged"}
            yield Sample(label, (xs, amaxes, (E4M3, E5M2)[rowwise]), sides | pads | {"power_of_2": what != "aligned"})


@_of("gemm_ready")
def _gemm_ready(on: torch.device) -> Iterator[Sample]:
    kinds: list[dict[str, Any]] = [{"granularity": kind.value} for kind in (ONE, TWO, MX)]
    for options, pad_outer in itertools.product([*kinds, {**kinds[-1], "square": True}], (False, True)):
        q, scales = cast_with_scales([_matrix(on, 130, 200)], E4M3, compact=True, **options)
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
    yield Sample("ragged", tuple(cast_with_scales([_matrix(on, 130, 200)], E4M3, granularity=MX.value)))


@_of("amaxes", "sigmoid")
def _of_one_tensor(name: str, on: torch.device) -> Iterator[Sample]:
    """The sigmoid has no kernel of its own: where Inductor fuses it, `recipes` compares the model."""
    x = _matrix(on, 130, 200, torch.float32) if name == "sigmoid" else _with_non_finite(_matrix(on, 130, 200))
    forms = {"ragged": x, "a view": x.t()[1:], **{f"form {i}": form for i, form in enumerate(_forms(on))}}
    for what, given in forms.items():
        yield Sample(what, (given,) if name == "sigmoid" else ([given],))


#: Zeros, numbers that are subnormal in float32, the largest ones, infinity and NaN of both signs.
_EDGES = (
    0.0, -0.0, 1e-45, 1e-40, 1e-38, 1e-3, 0.3, 448.0, 57344.0, 3e38, 3.4028234663852886e38, torch.inf, torch.nan, -torch.nan,
)  # fmt: skip


@_of("amaxes", "multi_scales")
def _of_many_tensors(name: str, on: torch.device) -> Iterator[Sample]:
    xs = [_matrix(on, 130, 200), _matrix(on, 1, 7, torch.float32), _matrix(on, 512, 512), torch.zeros(0, 3, device=on)]
    if name == "amaxes":
        yield Sample("many", (xs,))
        yield Sample("per matrix", ([_matrix(on, 130, 200).view(5, 26, 200)],), {"per_matrix": True})
        yield Sample("per matrix, many", (_forms(on),), {"per_matrix": True})
        return
    edges = [torch.tensor([v], device=on) for v in _EDGES]
    many = {"many": xs, "edges": edges, "long": [torch.linspace(-3, 5, 20011, device=on)], "forms": [*_forms(on), *edges]}
    for (what, given), fp8, options in itertools.product(
        many.items(), (E4M3, E5M2), ({"margin": 1}, {"power_of_2": True, "epsilon": 1e-2})
    ):
        yield Sample(f"{what}, {_short(fp8)}, {options}", (given, fp8), options)


@_of("checksums")
def _checksums(on: torch.device) -> Iterator[Sample]:
    x = _matrix(on, 130, 200)
    kinds = [x, _matrix(on, 512, 512, torch.float32), x.to(E4M3), x.view(-1)[1:], torch.zeros(0, 3, device=on)]
    yield Sample("many", (kinds,))
    yield Sample("views", ([x.t(), x[:, 3:50], x.view(-1)[:3], x.view(torch.uint8).view(-1)[5:]],))
    yield Sample("every form", (_forms(on),))
    yield Sample("integers", ([torch.arange(3, dtype=torch.uint8, device=on)],))


@_of("scales_from_amax")
def _scales_of_amaxes(on: torch.device) -> Iterator[Sample]:
    random = torch.exp2(40 * torch.randn(300, device=on))  # whose quotients round
    vector = torch.cat([torch.tensor(_EDGES, device=on), random[random.isfinite()]])
    views = {"edges": vector, "later ones": vector[5:], "every third": vector[::3], "one": vector[6]}
    views |= {"a transpose": vector[:280].view(20, 14).t(), "largest": vector[9:11]}
    views |= {"columns": vector[:280].view(20, 14)[:, 2:9], "none": vector[:0], "repeated": vector[6].expand(4)}
    views |= {"bfloat16": vector[:200].bfloat16(), "float64": vector[:200].double()}
    kinds: list[dict[str, Any]] = [
        {"margin": margin, "epsilon": epsilon, "power_of_2": power_of_2}
        for margin, epsilon, power_of_2 in itertools.product((0, 3, -2, 20), (0.0, 1e-2), (False, True))
    ]
    kinds += [{"epsilon": epsilon, "inverse": inverse} for epsilon in (0.0, 1e-2) for inverse in ("multiply", "divide")]
    for i, (what, amax) in enumerate(views.items()):
        for j, options in enumerate(kinds if what in ("edges", "largest") else (kinds[i % 16], kinds[-1 - i % 4])):
            yield Sample(f"{what}, {options}", (amax, (E4M3, E5M2)[(i + j) % 2]), options)


@_of("transposed_copy")
def _transposed_copy(on: torch.device) -> Iterator[Sample]:
    for rows, cols in ((512, 768), (256, 256), (130, 400), (129, 257), (1, 130), (1, 1), (0, 7), (5, 0)):
        label = f"{'' if rows * cols else 'empty '}{rows} x {cols}"
        every = torch.arange(rows * cols, device=on).to(torch.uint8).view(rows, cols)
        yield Sample(label, (every.view(E5M2),))
        yield Sample(f"{label} of a wider one", (torch.nn.functional.pad(every, (3, 4)).view(E4M3)[:, 3 : cols + 3],))
        yield Sample(f"{label}, a transpose", (every.view(E4M3).t(),))


@_of("load_scales", "take")
def _vectors(name: str, on: torch.device) -> Iterator[Sample]:
    vector = torch.rand(300, device=on) + 0.5
    slots = torch.arange(299, -1, -1, device=on)
    if name == "take":
        yield Sample("some", (vector, [7, 0, 299, 7]))
        yield Sample("few", (vector, [1]))
        return
    for count in (128, 0, 1, 5, 300):
        yield Sample(f"{count}", (vector, slots, count))


@_of("record_amax")
def _records(on: torch.device) -> Iterator[Sample]:
    amax, slots = torch.full((200,), 4.0, device=on), torch.arange(199, -1, -1, device=on)
    for label, sizes in {"three": ((), (), ()), "vectors": (3, 1, 9), "in parts": (64, (7, 3), 2049)}.items():
        observed = [10 * torch.rand(size, device=on) for size in sizes]  # type: ignore[call-overload]
        yield Sample(label, (amax, slots, observed, [7, 20, 0]), {"in_parts": "parts" in label})
    for index in ([0], [3, 4, 5], [7, 2, 9], [5, 5, 6], list(range(20, 170)), list(range(0, 200, 2)), [199]):
        values = [torch.tensor(float(7 * i % 11), device=on) for i in range(len(index))]
        values[-1] = torch.tensor(torch.nan, device=on)
        dtype = torch.int32 if len(index) % 2 else torch.int64
        yield Sample(f"{len(index)} from {index[0]}", (amax, slots.to(dtype), values, index))
    yield Sample("none", (amax, slots, [], []))


@_of("update_scales")
def _update_scales(on: torch.device) -> Iterator[Sample]:
    turns = itertools.cycle((0, 3, -2))
    for length, n, algo in itertools.product((1, 2, 3, 129, 130, 131, 400), (1, 37), ("max", "most_recent")):
        limits = torch.tensor([448.0, 57344.0], device=on).repeat(19)[:n]
        history = torch.exp(8 * torch.randn(length, n + 3, device=on))
        history[0, :5] = torch.tensor([3e38, torch.inf, torch.nan, 0.0, 1e-44], device=on)[: len(history[0])]
        state = history[:, :n], torch.full((n,), 2.5, device=on), limits
        count = torch.full((n,), 5, dtype=torch.int32, device=on)
        options = {"algo": algo, "margin": next(turns)}
        yield Sample(f"{algo} of {length} of {n}", state, {**options, "num_non_finite": count})
        yield Sample(f"{algo} of {length} of {n}, not counted", state, options)
    yield Sample("none", tuple(torch.empty(shape, device=on) for shape in ((4, 0), (0,), (0,))))


@_of("scaled_mm")
def _gemms(on: torch.device) -> Iterator[Sample]:
    outputs = (torch.bfloat16, torch.float16, torch.float32)
    formats = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
    for kind, (where, (m, k, n)), (of_a, of_b), out, fast, has_bias in itertools.product(
        (TENSOR, ROW), (SIZES | _EMPTY).items(), formats, outputs, (True, False), (False, True)
    ):
        if (has_bias or out is not torch.bfloat16) and where != "square":
            continue
        a, b = torch.randn(m, k, device=on).to(of_a), torch.randn(n, k, device=on).to(of_b).t()
        scales = [torch.rand((size, 1) if kind is ROW else (), device=on) + 0.5 for size in (m, n)]
        bias = [torch.randn(n, device=on).to(out)] if has_bias else []
        how = {"out_dtype": out, "fast_accum": fast, "granularity_a": kind.value, "granularity_b": kind.value}
        label = f"{kind.label} {where} {_short(of_a)} {_short(of_b)} -> {_short(out)}"
        label += f"{', fast' if fast else ''}{', bias' if has_bias else ''}"
        yield Sample(label, (a, b, *scales, *bias), how, None if where in _EMPTY else FAST_ERROR if fast else GEMM_ERROR)


@_of("scaled_mm")
def _gemms_of_blocks(on: torch.device) -> Iterator[Sample]:
    pairs = ((ONE, TWO), (ONE, ONE), (TWO, ONE), (MX, MX))
    for (where, (m, k, n)), pair in itertools.product((SIZES | _EMPTY).items(), pairs):
        (a, scale_a), (b, scale_b) = (
            cast_with_scales([_matrix(on, *size)], E4M3, granularity=kind.value, pad_rows=kind is not MX and size[0] == n)
            for size, kind in zip(((m, k), (n, k)), pair, strict=True)
        )
        for how in ("auto", "triton") if on.type == "cuda" and MX not in pair else ("auto",):
            label = f"{where}, {pair[0].label} by {pair[1].label}, {how}"
            options = {"granularity_a": pair[0].value, "granularity_b": pair[1].value, "implementation": how}
            bound = None if where in _EMPTY else GEMM_ERROR
            yield Sample(label, (a, b.t(), scale_a, scale_b), options, bound, needs_mx=MX in pair)


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
        columns = NAMESPACE.operations["transposed_copy"].reference
        dy, x = (
            columns(torch.randn(rows + TAIL, size, device=on).to(fp8), offs, align=alignment(kind))
            for size, fp8 in ((n, E5M2), (k, E4M3))
        )
        per_group = (experts,) if kind is ROW else ()
        factors = [scales(kind, size, width, *per_group) for size in (n, k)]
        options = {"granularity_a": kind.value, "granularity_b": kind.value}
        yield Sample(f"grad_weight, {kind.label}", (dy, x.t(), *factors, offs), options, GEMM_ERROR)


@_of("valid_rows", "transposed_copy", "cast_columns")
def _columns_of_groups(name: str, on: torch.device) -> Iterator[Sample]:
    """Rows in groups, and rows gathered."""
    slots = sum(ROUTING) + TAIL
    x, index = _matrix(on, slots, 130), torch.randint(0, slots, (slots,), device=on)
    for label, given in (("in place", None), ("gathered", index)):
        if name == "valid_rows":
            yield Sample(label, (offsets(on), slots, given))
        elif name == "transposed_copy":
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
        yield from _statistics_of_matrices(on)
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


def _statistics_of_matrices(on: torch.device) -> Iterator[Sample]:
    """One scale, those of engines, of lines and of blocks; each copy and both; strided ones, stacks, rows in groups."""

    def lost(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Everything that is counted, in either format."""
        x = _with_non_finite(_matrix(on, rows, cols, torch.float32)) * torch.logspace(-6, 2, cols, device=on)
        x.view(-1)[3:8] = torch.tensor([1e-30, -1e-30, -1e-9, 1e-42, 3e38], device=on)
        return x.to(dtype)

    x, thin = lost(100, 140, torch.bfloat16), lost(33, 70, torch.float32).t()
    stack = torch.stack([lost(40, 70, torch.float16), 3 * lost(40, 70, torch.float16)])
    three = torch.tensor([1.0, 7.0, 0.01], device=on)
    for what, given, scale in (("matrix", x, three[1]), ("stack", stack, three[:2]), ("stack, one scale", stack, three[2])):
        yield Sample(what, (given, E5M2, scale, 1 / scale), {"granularity": TENSOR.value}, sums=1e-6)
    kinds = [ROW.value, ONE.value, TWO.value, MX.value]
    for i, (kind, square) in enumerate([*((kind, False) for kind in kinds), (MX.value, True)]):
        both: dict[str, Any] = {"granularity": kind, "columnwise": True, "power_of_2": True, "square": square}
        both |= {"epsilon": 1e-3} if kind == ONE.value else {}
        for j, (given, fp8, sides) in enumerate(
            ((x, E4M3, {}), (stack, E5M2, {"rowwise": False}), (thin, E4M3, {"columnwise": False}))
        ):
            other = {"power_of_2": kind == MX.value or (i + j) % 2 == 0}
            yield Sample(f"{kind}, {square}, {j}", (given, fp8), both | sides | other, sums=1e-6)
    yield Sample("as engines", (thin, E4M3), {"granularity": ROW.value, "inverse": "divide", "power_of_2": False}, sums=1e-6)
    factors = cast_with_scales([x], E4M3, granularity=ROW.value, columnwise=True, pad_rows=True)[1::2]
    given_factors = {"granularity": ROW.value, "columnwise": True, "power_of_2": True}
    yield Sample("factors of casts", (x, E4M3, None, None, None, None, *factors), given_factors, sums=1e-6)
    rows, ends = lost(150, 40, torch.bfloat16), torch.tensor([30, 30, 135], dtype=torch.int32, device=on)
    for label, index in (("in place", None), ("gathered", torch.randint(0, 150, (140,), device=on))):
        scale = three[1]
        yield Sample(f"groups {label}", (rows, E4M3, scale, 1 / scale, ends, index), {"granularity": TENSOR.value}, sums=1e-6)
        for kind in (ROW.value, ONE.value, MX.value):
            options = {"granularity": kind, "columnwise": True, "power_of_2": True}
            yield Sample(f"groups {label}, {kind}", (rows, E4M3, None, None, ends, index), options, sums=1e-6)
    columns = NAMESPACE.operations["cast_columns"].reference(rows, E4M3, ends, granularity="row_wise", pad_outer=True)[1]
    options = {"granularity": ROW.value, "rowwise": False, "columnwise": True, "power_of_2": True}
    yield Sample("factors of groups", (rows, E4M3, None, None, ends, None, None, columns), options, sums=1e-6)
