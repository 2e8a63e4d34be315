"""What nodes tell: the matrix values of operands, and their origin, in the forms that Dynamo and AOTAutograd leave on nodes."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph.origin import Path, parse_path
from fp8pass.graph.values import resolve
from tests.support.cases import each


def traced(function, dtype=torch.float32):
    """The placeholder of the graph of `function` for x[4, 6], and the node that it returns."""
    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 6).to(dtype)).graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    return placeholder, graph.output_node().args[0]


SEEN_THROUGH = {
    # function of x[4, 6] -> rows and columns of the value, whether the operand is its transpose
    "transpose": (lambda x: x.transpose(-1, -2), (4, 6), True),
    "permute": (lambda x: x.permute(1, 0), (4, 6), True),
    "column-major copy": (lambda x: x.t().contiguous().t(), (4, 6), False),
    "t of view": (lambda x: x.view(8, 3).t(), (8, 3), True),
    "view of t, there and back": (lambda x: x.t().contiguous().view(2, 3, 4).view(6, 4), (4, 6), True),
    "unsqueeze and transpose": (lambda x: x.unsqueeze(0).transpose(1, 2), (4, 6), True),
    "bfloat16 and t": (lambda x: x.bfloat16().t(), (4, 6), True),
    "convert_element_type": (lambda x: torch.ops.prims.convert_element_type(x, torch.float16), (4, 6), False),
    # einsum's way to write a projection: dimensions of size 1 move, elements do not.
    "einsum's permutation": (lambda x: x.view(4, 6, 1).permute(0, 2, 1).reshape(4, 6), (4, 6), False),
}  # fmt: skip


@each("case", SEEN_THROUGH)
def test_what_an_operand_is_seen_through(case):
    function, sizes, is_transposed = SEEN_THROUGH[case]
    placeholder, operand = traced(function)
    value, transposed = resolve(operand)
    assert value.root is placeholder
    assert ((value.rows, value.cols), transposed) == (sizes, is_transposed)


STOPS = {  # The operand's elements are not those of x in row-major order, or not its values.
    "reshape of a transpose": (lambda x: x.t().reshape(4, 6), (4, 6)),
    "transpose of outer dimensions": (lambda x: x.view(2, 2, 6).transpose(0, 1).reshape(4, 6), (4, 6)),
    "expand": (lambda x: x.view(1, 24).expand(4, 24), (4, 24)),
    "scaled": (lambda x: x * 2, (4, 6)),
}


@each("case", STOPS)
def test_where_the_search_stops(case):
    function, sizes = STOPS[case]
    placeholder, operand = traced(function)
    value, transposed = resolve(operand)
    assert value.root is not placeholder
    assert ((value.rows, value.cols), transposed) == (sizes, False)


# -- origin

SOURCES = {
    "L['self']": ("self", ""),
    "L['self']._modules['layers']._modules['0']._parameters['weight']": ("self", "layers.0.weight"),
    "L['params'][\"a.b\"].weight": ("params", "a.b.weight"),
    "L['self'].__dict__['base']._modules['up'].weight": ("self", "base.up.weight"),
    "L['self'].forward._torchdynamo_inline.__self__._modules['up'].weight": ("self", "up.weight"),
    "L['self'].forward.__self__": ("self", ""),
    "L['batch'][3]": ("batch", "3"),
    # With plain tensors in the places of Parameters.
    "getattr(getattr(L['self'].a, '0').b, '1')": ("self", "a.0.b.1"),
    # An attribute of the user's that only begins like one of nn.Module's dictionaries stays.
    "L['self']._modules_of_mine.up": ("self", "_modules_of_mine.up"),
}


def test_paths():
    assert {source: parse_path(source) for source in SOURCES} == {source: Path(*path) for source, path in SOURCES.items()}
    assert [parse_path(s) for s in ("", "self.weight", "___from_numpy(L['x'])", "C['x']", "L[x]")] == [None] * 5
    assert (str(Path("self", "layers.0")), str(Path("self", ""))) == ("self.layers.0", "self")
