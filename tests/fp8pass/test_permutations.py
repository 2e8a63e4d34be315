"""What only moves elements: rows put back after a sort, gathered instead; moves repeated on bytes and on scales of blocks."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph import gathers
from fp8pass.rewrite.simplify import permuting_scatters
from tests.support.cases import each

aten = torch.ops.aten
N = 24


def by_index_put(perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return inverse


def by_scatter(perm):
    return torch.zeros_like(perm).scatter(0, perm, torch.arange(0, perm.shape[0]))


def found(program, *inputs):
    """The number of scatters of a traced program that are permutations; each is checked with numbers."""
    inputs = inputs or (torch.randn(N), torch.randn(N, 3))
    traced = make_fx(torch.func.functionalize(program), tracing_mode="fake")(*inputs)
    scatters = permuting_scatters(traced.graph)
    expected = traced(*inputs)
    for node, (rows, index) in scatters.items():
        with traced.graph.inserting_before(node):
            gathered = traced.graph.call_function(aten.index.Tensor, (rows, [index]))
        node.replace_all_uses_with(gathered)
    traced.recompile()
    assert traced(*inputs).equal(expected)
    return len(scatters)


def put(rows, index, base=None):
    return torch.index_put(torch.zeros_like(rows) if base is None else base, [index], rows, accumulate=True)


INVERSES = {
    "index_put": by_index_put,
    "scatter": by_scatter,
    "sorting": lambda perm: perm.sort()[1],
    "index_add": lambda perm: torch.zeros_like(perm).index_add(0, perm, torch.arange(N)),
}


def put_back(invert):
    return lambda keys, rows: put(rows, invert(keys.sort()[1]))


@each("invert", INVERSES.values())
def test_inverses(invert):
    assert found(put_back(invert)) == 1
    assert found(lambda keys, rows: torch.zeros(N, 3).index_add(0, invert(keys.sort()[1]), rows)) == 1


NO_INVERSES = {
    "a reversed count": lambda perm: torch.zeros_like(perm).scatter(0, perm, torch.arange(N - 1, -1, -1)),
    "a part": lambda perm: torch.zeros(N + 1, dtype=perm.dtype).scatter(0, perm, torch.arange(N))[:N],
    "twice": lambda perm: perm // 2,
    "from the end": lambda perm: torch.full_like(perm, -N).index_add(0, perm, torch.arange(N)),
    "descending": lambda perm: perm.sort(descending=True)[1],
}


def by_sorting(keys):
    return keys.sort()[1].sort()[1]


def test_what_is_no_inverse_no_permutation_or_no_sum_over_zeros():
    assert {case: found(put_back(invert)) for case, invert in NO_INVERSES.items()} == dict.fromkeys(NO_INVERSES, 0)
    rows, indices = torch.randn(N, 3), torch.randint(0, N, (N,))
    assert found(lambda rows, index: put(rows, by_scatter(index)), rows, indices) == 0, "an index that names rows twice"
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.ones_like(rows))) == 0
    assert found(lambda keys, rows: put(rows, by_sorting(keys), torch.zeros(N + 1, 3))) == 0, "spare rows"


# -- moves that are repeated on bytes and on scales

c10d = torch.ops._c10d_functional
ROWS, COLS = 32, 6


def gathered(function):
    """The node that holds the gathered tensor [ROWS, COLS], and the result of `function` of it."""

    def gather(shard):
        return function(c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, "group")))

    graph = make_fx(gather, tracing_mode="fake")(torch.randn(ROWS // 2, COLS)).graph
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    (result,) = graph.find_nodes(op="output")[0].args
    return wait, result


# function of g[32, 6] -> whether rows stay whole, and whether every 4 rows that follow each other stay together
MOVES = {
    "nothing": (lambda g: g, True, True),
    "batches put together": (lambda g: g.view(4, 8, COLS).reshape(16, 2, COLS).reshape(32, COLS), True, False),
    "permuted rows": (lambda g: g.view(4, 8, COLS).transpose(0, 1).reshape(32, COLS), True, False),
    "parts along the tokens": (lambda g: torch.cat(g.view(2, 16, COLS).split(1), 1).squeeze(0), True, True),
    "slice across blocks": (lambda g: g[2:10], True, False),
    "every second row": (lambda g: g[::2], False, False),
    "parts of rows": (lambda g: g.split(3, 1)[0], False, False),
    "columns elsewhere": (lambda g: g.view(4, 8, COLS).permute(2, 0, 1), False, False),
}


def run(build, data):
    """The result of `build(start, call)` for `data` in the place of the gathered tensor."""
    graph = fx.Graph()
    start = graph.placeholder("data")
    graph.output(build(start, lambda target, *args, **kwargs: graph.call_function(target, args, kwargs)))
    return fx.GraphModule({}, graph)(data)


@each("case", MOVES)
def test_moves_repeated_on_bytes_and_on_the_scales_of_blocks_that_stay_whole(case):
    """Every row of the tensor carries its number, which tells whose scales its block must have."""
    function, keeps_rows, keeps_blocks = MOVES[case]
    wait, result = gathered(function)
    data, width = torch.arange(ROWS * COLS, dtype=torch.uint8).view(ROWS, COLS), 2
    moved = run(lambda start, call: gathers.replay(result, {wait: start}, call), data)
    assert moved.equal(function(data))
    numbers = function(torch.arange(ROWS).unsqueeze(1).expand(ROWS, COLS).contiguous())[..., 0]
    for height, is_kept in ((1, keeps_rows), (4, keeps_blocks)):
        assert gathers.keeps_blocks(result, wait, height) == is_kept
        if is_kept:
            scales = torch.arange(ROWS // height * width).view(ROWS // height, width)
            moved = run(lambda start, call, h=height: gathers.replay_on_scales(result, {wait: start}, h, width, call), scales)
            assert moved.equal(scales[numbers[..., ::height] // height])
            assert list(moved.shape) == gathers.scale_shape(result, height, width)
