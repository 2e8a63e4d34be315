"""Kinds: which operations multiply matrices, which have an FP8 counterpart, where operands and addends are."""

import pytest
import torch
from torch import fx

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


SCALED = (torch.ops.lowering.scaled_mm.default, torch.ops.lowering.scaled_grouped_mm.default)
MATMULS = [
    *((getattr(aten, name).default, True) for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "_int_mm")),
    *((getattr(aten, name).default, False) for name in ("mv", "dot", "outer", "convolution", "upsample_linear1d")),
    *((getattr(aten, f"_{name}").default, True) for name in ("scaled_mm", "transformer_encoder_layer_fwd")),
    (aten._native_multi_head_attention.default, True),
    (torch.matmul, False),  # no operation of a traced graph
    *((target, False) for target in (*SCALED, torch.ops.lowering.cast.default, torch.ops.lowering.amaxes.default)),
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
    "rows x stack": (((S, 16), (E, 16, 32)), True, "rows", (S, 32, 16), E),
    "rows x rows": (((16, S), (S, 32)), True, "sums", (16, 32, S), E),
    "batched x batched": (((E, 8, 16), (E, 16, 32)), False, "batched", (8, 32, 16), E),
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
    node.meta["val"] = torch.empty(E, *sizes[:2]) if groups == E and form != "rows" else torch.empty(sizes[:2])
    assert gemms.form_of(node) is form
    assert gemms.has_fp8_counterpart(node) == (form is not None)
    assert gemms.sizes_of(node) == sizes
    assert gemms.num_groups(node) == groups
    assert (gemms.offs_of(node) is not None) == has_offs
