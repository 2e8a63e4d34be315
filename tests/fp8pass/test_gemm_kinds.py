"""Kinds: which operations multiply matrices, which have an FP8 counterpart, where operands and addends are."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph import gemms
from tests.support.cases import each

aten = torch.ops.aten


@pytest.fixture
def custom():
    """Operations of another library."""
    library = torch.library.Library("kinds_of_others", "DEF")
    for schema in ("my_gemm(Tensor x, Tensor w) -> Tensor", "gemmology(Tensor x) -> Tensor", "linear(Tensor x) -> Tensor"):
        library.define(schema)
    yield torch.ops.kinds_of_others
    library._destroy()


def node_of(function, *shapes, mode="fake"):
    graph = make_fx(function, tracing_mode=mode)(*(torch.randn(s) for s in shapes)).graph
    (result,) = graph.find_nodes(op="output")[0].args
    return result


SCALED = (torch.ops.lowering.scaled_mm.default, torch.ops.lowering.scaled_mm_blockwise.default)
MATMULS = [
    *((getattr(aten, name).default, True) for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "_int_mm")),
    *((getattr(aten, name).default, False) for name in ("mv", "dot", "outer", "convolution", "upsample_linear1d")),
    *((getattr(aten, f"_{name}").default, True) for name in ("scaled_mm", "transformer_encoder_layer_fwd")),
    (aten._native_multi_head_attention.default, True),
    (torch.matmul, False),  # no operation of a traced graph
    *((target, False) for target in (*SCALED, torch.ops.lowering.cast.default, torch.ops.lowering.multi_amax.default)),
]


@each(("target", "expected"), MATMULS)
def test_matmuls(target, expected):
    node = fx.Graph().call_function(target, ())
    assert gemms.is_matmul(node) == expected
    assert gemms.is_scaled_gemm(node) == (target in SCALED)


def test_operations_of_others_count_by_whole_words_and_only_calls(custom):
    graph = fx.Graph()
    found = [gemms.is_matmul(graph.call_function(t.default, ())) for t in (custom.my_gemm, custom.gemmology, custom.linear)]
    assert found == [True, False, True]
    assert not gemms.is_matmul(graph.placeholder("mm"))


COUNTERPARTS = {
    "mm": (lambda a, b: torch.mm(a, b), [(4, 6), (6, 8)], True),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [(8,), (4, 6), (6, 8)], True),
    "bmm of one": (lambda a, b: torch.bmm(a, b), [(1, 4, 6), (1, 6, 8)], True),
    "bmm of two": (lambda a, b: torch.bmm(a, b), [(2, 4, 6), (2, 6, 8)], False),
    "bmm of none": (lambda a, b: torch.bmm(a, b), [(0, 4, 6), (0, 6, 8)], False),
    "baddbmm of one": (lambda c, a, b: torch.baddbmm(c, a, b), [(1, 4, 8), (1, 4, 6), (1, 6, 8)], False),
    "something else": (lambda a, b: a @ b[0], [(4, 6), (8, 6)], False),
}


@each("case", COUNTERPARTS)
def test_what_an_fp8_gemm_takes_the_place_of(case):
    function, shapes, expected = COUNTERPARTS[case]
    assert gemms.has_fp8_counterpart(node_of(function, *shapes)) == expected
    if case == "bmm of two":
        assert not gemms.is_batch_of_one(node_of(function, *shapes, mode="symbolic")), "of unknown size"


OPERANDS = {
    "mm": (lambda a, b: torch.mm(a, b), [(4, 6), (6, 8)], ["a", "b"], None),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [(8,), (4, 6), (6, 8)], ["a", "b"], "c"),
    "bmm": (lambda a, b: torch.bmm(a, b), [(2, 4, 6), (2, 6, 8)], ["a", "b"], None),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), [(2, 4, 8), (2, 4, 6), (2, 6, 8)], ["a", "b"], "c"),
    "addmm of a transpose": (lambda c, a, b: torch.addmm(c, a, b.t()), [(8,), (4, 6), (8, 6)], ["a", "t"], "c"),
    "mm of one matrix": (lambda a: torch.mm(a, a), [(4, 4)], ["a", "a"], None),
}


@each("case", OPERANDS)
def test_operands_and_addends(case):
    function, shapes, operands, addend = OPERANDS[case]
    node = node_of(function, *shapes)
    assert [n.name.removesuffix("_1") for n in gemms.operands_of(node)] == operands
    found = gemms.addend_of(node)
    assert (None if found is None else found.name.removesuffix("_1")) == addend


def test_operands_of_an_operation_of_others(custom):
    def call(*values):
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        return graph.call_function(custom.my_gemm.default, tuple(nodes))

    matrix, vector = torch.empty(4, 4, device="meta"), torch.empty(4, device="meta")
    three = call(matrix, matrix, vector)
    assert gemms.operands_of(three) == three.args[:2]
    assert gemms.operands_of(call(3, matrix, matrix))[0].name == "x1", "an int is no operand"
    assert gemms.operands_of(call(matrix)) == gemms.operands_of(call(matrix, vector)) == ()
    assert gemms.addend_of(three) is None


# -- grouped GEMMs

S, E = 24, 3
FORMS = {
    "rows x stack": (((S, 16), (E, 16, 32)), True, gemms.Form.ROWS, (S, 32, 16), E),
    "rows x rows": (((16, S), (S, 32)), True, gemms.Form.SUMS, (16, 32, S), E),
    "batched x batched": (((E, 8, 16), (E, 16, 32)), False, gemms.Form.BATCHED, (8, 32, 16), E),
    "stack x rows": (((E, 8, 16), (16, S)), True, None, (8, S, 16), 1),
}


@each("case", FORMS)
def test_forms_of_grouped_gemms(case):
    (a, b), has_offs, form, sizes, groups = FORMS[case]
    graph = fx.Graph()
    x, w, offs = (graph.placeholder(name) for name in ("x", "w", "offs"))
    for placeholder, shape in ((x, a), (w, b), (offs, (E,))):
        placeholder.meta["val"] = torch.empty(shape)
    node = graph.call_function(aten._grouped_mm.default, (x, w, *([offs] if has_offs else [])))
    node.meta["val"] = torch.empty(E, *sizes[:2]) if groups == E and form is not gemms.Form.ROWS else torch.empty(sizes[:2])
    assert gemms.form_of(node) is form
    assert gemms.has_fp8_counterpart(node) == (form is not None)
    assert gemms.sizes_of(node) == sizes
    assert gemms.num_groups(node) == groups
    assert (gemms.offs_of(node) is not None) == has_offs


def test_both_products_of_a_pair_of_gradients():
    """transformers' backward of its loop over the experts: its outputs are the GEMMs, not the operation."""
    pytest.importorskip("transformers.integrations.moe")
    graph = fx.Graph()
    x, w, offs, dy = (graph.placeholder(name) for name in ("x", "w", "offs", "dy"))
    for node, shape in ((x, (S, 16)), (w, (E, 16, 32)), (offs, (E,)), (dy, (S, 32))):
        node.meta["val"] = torch.empty(shape)
    pair = graph.call_function(torch.ops.transformers.grouped_mm_fallback_backward.default, (x, w, offs, dy))
    dx, dw = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    dx.meta["val"], dw.meta["val"] = torch.empty(S, 16), torch.empty(E, 16, 32)
    assert [gemms.is_matmul(n) for n in (pair, dx, dw)] == [False, True, True]
    assert [gemms.operands_of(n) for n in (dx, dw)] == [(dy, w), (x, dy)]
    assert [gemms.sizes_of(n) for n in (dx, dw)] == [(S, 16, 32), (16, 32, S)]
    assert [gemms.form_of(n) for n in (dx, dw)] == [gemms.Form.ROWS, gemms.Form.SUMS]
    assert [gemms.num_groups(n) for n in (dx, dw)] == [E, E]
    assert [gemms.operation_of(n) for n in (pair, dx)] == [pair, pair]
