"""Matrix values: what an operand is seen through, and where the search stops."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph.values import resolve
from tests.support.cases import each

prims = torch.ops.prims


def traced(function, *shapes, mode="fake", dtype=torch.float32):
    """The placeholders of the graph of `function` by name, and the node that it returns."""
    inputs = [torch.randn(s).to(dtype) for s in shapes]
    graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    (result,) = graph.find_nodes(op="output")[0].args
    return {n.name.removesuffix("_1"): n for n in graph.find_nodes(op="placeholder")}, result


SEEN_THROUGH = {
    # function of x[4, 6] -> rows and columns of the value, whether the operand is its transpose
    "itself": (lambda x: x * 1, None, (4, 6), False),
    "alias": (lambda x: torch.ops.aten.alias(x), "x", (4, 6), False),
    "detach": (lambda x: x.detach(), "x", (4, 6), False),
    "clone": (lambda x: x.clone(), "x", (4, 6), False),
    "t": (lambda x: x.t(), "x", (4, 6), True),
    "transpose": (lambda x: x.transpose(-1, -2), "x", (4, 6), True),
    "permute": (lambda x: x.permute(1, 0), "x", (4, 6), True),
    "t of t": (lambda x: x.t().t(), "x", (4, 6), False),
    "column-major copy": (lambda x: x.t().contiguous().t(), "x", (4, 6), False),
    "view": (lambda x: x.view(8, 3), "x", (8, 3), False),
    "t of view": (lambda x: x.view(8, 3).t(), "x", (8, 3), True),
    "view of view": (lambda x: x.view(2, 2, 6).view(8, 3), "x", (8, 3), False),
    "there and back": (lambda x: x.view(2, 2, 6).view(4, 6), "x", (4, 6), False),
    "view of t, there and back": (lambda x: x.t().contiguous().view(2, 3, 4).view(6, 4), "x", (4, 6), True),
    "unsqueeze": (lambda x: x.unsqueeze(0), "x", (4, 6), False),
    "unsqueeze and transpose": (lambda x: x.unsqueeze(0).transpose(1, 2), "x", (4, 6), True),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), "x", (4, 6), False),
    "bfloat16": (lambda x: x.bfloat16(), "x", (4, 6), False),
    "bfloat16 and t": (lambda x: x.bfloat16().t(), "x", (4, 6), True),
    "convert_element_type": (lambda x: prims.convert_element_type(x, torch.float16), "x", (4, 6), False),
    # einsum's way to write a projection: dimensions of size 1 move, elements do not.
    "einsum's permutation": (lambda x: x.view(4, 6, 1).permute(0, 2, 1).reshape(4, 6), "x", (4, 6), False),
}  # fmt: skip


@each("case", SEEN_THROUGH)
def test_what_an_operand_is_seen_through(case):
    function, root, sizes, is_transposed = SEEN_THROUGH[case]
    given, operand = traced(function, (4, 6))
    value, transposed = resolve(operand)
    assert value.root is (operand if root is None else given[root])
    assert ((value.rows, value.cols), transposed) == (sizes, is_transposed)


STOPS = {
    # The operand's elements are not those of x in row-major order, or not its values.
    "reshape of a transpose": (lambda x: x.t().reshape(4, 6), (4, 6)),
    "transpose of outer dimensions": (lambda x: x.view(2, 2, 6).transpose(0, 1).reshape(4, 6), (4, 6)),
    "slice": (lambda x: x[1:3], (2, 6)),
    "select": (lambda x: x.view(2, 2, 6).select(0, 1), (2, 6)),
    "expand": (lambda x: x.view(1, 24).expand(4, 24), (4, 24)),
    "scaled": (lambda x: x * 2, (4, 6)),
    "absolute": (lambda x: x.abs(), (4, 6)),
    "concatenation": (lambda x: torch.cat([x, x]), (8, 6)),
}


@each("case", STOPS)
def test_where_the_search_stops(case):
    function, sizes = STOPS[case]
    given, operand = traced(function, (4, 6))
    value, transposed = resolve(operand)
    assert value.root is not given["x"]
    assert ((value.rows, value.cols), transposed) == (sizes, False)


@each("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_casts_from_other_dtypes_are_not_seen_through(dtype):
    given, operand = traced(lambda x: x.to(torch.bfloat16), (4, 6), dtype=dtype)
    value, _ = resolve(operand)
    assert value.root is operand
    assert value.dtype is torch.bfloat16
    given, operand = traced(lambda x: x.to(torch.bfloat16), (4, 6), dtype=torch.float16)
    value, _ = resolve(operand)
    assert value.root is given["x"]
    assert value.dtype is torch.float16
