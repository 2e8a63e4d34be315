"""Matrix values: what an operand is seen through, and where the search stops."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph.values import MatrixValue, depends_on, made_only_of, permutation, resolve, same_size
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


def test_casts_to_another_device_and_batches_of_one():
    _, operand = traced(lambda x: torch.ops.aten._to_copy(x, dtype=torch.bfloat16, device="meta"), (4, 6))
    assert resolve(operand)[0].root is operand
    given, operand = traced(lambda x: x.transpose(1, 2), (1, 4, 6))
    value, transposed = resolve(operand)
    assert (value.root, value.rows, value.cols, transposed) == (given["x"], 4, 6, True)
    given, operand = traced(lambda x: x.transpose(1, 2), (2, 4, 6))
    value, transposed = resolve(operand)
    assert (value.root, value.rows, value.cols, transposed) == (operand, 6, 4, False)
    _, operand = traced(lambda x: x.view(8, 6).t(), (2, 4, 6))
    value, transposed = resolve(operand)
    assert transposed
    assert value.reshape is operand.args[0]
    _, operand = traced(lambda x: x.t(), (4, 6))
    assert resolve(operand)[0].reshape is None


def test_equal_values():
    given, _ = traced(lambda x, y: x.view(8, 3) @ y, (4, 6), (3, 5))
    x, y = given["x"], given["y"]
    value = MatrixValue(x, 8, 3, reshape=y)
    assert value == MatrixValue(x, 8, 3)
    assert hash(value) == hash(MatrixValue(x, 8, 3))
    assert value != MatrixValue(x, 3, 8)
    assert value != MatrixValue(y, 8, 3)
    assert value != x


def test_symbolic_sizes_are_compared_without_a_guard():
    given, operand = traced(lambda x: x.view(x.shape[0] * 2, -1).t(), (4, 6), mode="symbolic")
    x = given["x"].meta["val"]
    shape_env = x.fake_mode.shape_env
    before = len(shape_env.guards)
    value, transposed = resolve(operand)
    assert (value.root, transposed) == (given["x"], True)
    assert same_size(value.rows, x.shape[0] * 2)
    assert not same_size(x.shape[0], x.shape[1])
    assert not same_size(x.shape[0], 4)
    assert value == MatrixValue(given["x"], x.shape[0] * 2, value.cols)
    assert value != MatrixValue(given["x"], x.shape[0], x.shape[1])
    assert len(shape_env.guards) == before


def test_permutations():
    functions = {
        lambda x: x.permute(2, 0, 1): [2, 0, 1],
        lambda x: x.permute(-1, 0, -2): [2, 0, 1],
        lambda x: x.transpose(0, -1): [2, 1, 0],
        lambda x: x.transpose(1, 1): [0, 1, 2],
        lambda x: x.view(8, 6): None,
    }
    assert [permutation(traced(function, (2, 4, 6))[1]) for function in functions] == list(functions.values())


def test_what_depends_on_a_node_and_what_is_made_of_nodes_alone():
    def function(w, x):
        merged = (w * 2).t()
        return merged, torch.mm(x, merged), torch.arange(6), torch.arange(6) + x[0]

    graph = make_fx(function, tracing_mode="fake")(torch.randn(6, 6), torch.randn(4, 6)).graph
    w, x = graph.find_nodes(op="placeholder")
    named = {str(n.target): n for n in graph.nodes if n.op == "call_function"}
    merged, product = named["aten.t.default"], named["aten.mm.default"]
    assert depends_on(graph, {w}) == {w, named["aten.mul.Tensor"], merged, product, *graph.find_nodes(op="output")}
    assert made_only_of(graph, {w}) == {w, named["aten.mul.Tensor"], merged}
    constants = {n for n in graph.nodes if "arange" in str(n.target)}
    assert len(constants) == 2
    assert not constants & made_only_of(graph, {w, x}), "what is made of nothing is not made of the seeds"
    assert product in made_only_of(graph, {w, x})
