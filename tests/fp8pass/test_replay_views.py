"""Moves: what only puts elements elsewhere, and the same moves repeated on bytes and on block scales."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph import gathers
from tests.support.cases import each

c10d = torch.ops._c10d_functional
ROWS, COLS = 32, 6


def gathered(function, rows=ROWS, cols=COLS, mode="fake"):
    """The node that holds the gathered tensor [rows, cols], and the result of `function` of it."""

    def gather(shard):
        return function(c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, "group")))

    graph = make_fx(gather, tracing_mode=mode)(torch.randn(rows // 2, cols)).graph
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    (result,) = graph.find_nodes(op="output")[0].args
    return wait, result


# function of g[32, 6] -> whether rows stay whole, and whether every 4 rows that follow each other stay together
MOVES = {
    "nothing": (lambda g: g, True, True),
    "clone": (lambda g: g.clone(), True, True),
    "unsqueeze": (lambda g: g.unsqueeze(0), True, True),
    "squeeze": (lambda g: g.unsqueeze(0).squeeze(0), True, True),
    "batches of 8 rows": (lambda g: g.view(4, 8, COLS), True, True),
    "batches of 2 rows": (lambda g: g.view(16, 2, COLS), True, False),
    "batches put together": (lambda g: g.view(4, 8, COLS).reshape(16, 2, COLS).reshape(32, COLS), True, False),
    "permuted batches": (lambda g: g.view(2, 2, 8, COLS).permute(1, 0, 2, 3).reshape(32, COLS), True, True),
    "permuted rows": (lambda g: g.view(4, 8, COLS).transpose(0, 1).reshape(32, COLS), True, False),
    "parts along the tokens": (lambda g: torch.cat(g.view(2, 16, COLS).split(1), 1).squeeze(0), True, True),
    "parts of 8 rows": (lambda g: g.split(8)[3], True, True),
    "parts of 6 rows": (lambda g: g.split(6)[0], True, False),
    "parts of 4 and 28 rows": (lambda g: torch.cat(g.split([4, 28])[::-1]), True, True),
    "parts of 2 and 30 rows": (lambda g: torch.cat(g.split([2, 30])[::-1]), True, False),
    "slice of blocks": (lambda g: g[4:12], True, True),
    "slice across blocks": (lambda g: g[2:10], True, False),
    "slice from the end": (lambda g: g[-8:-4], True, True),
    "slice of batches": (lambda g: g.view(4, 8, COLS)[1:3], True, True),
    "every second row": (lambda g: g[::2], False, False),
    "doubled": (lambda g: torch.cat([g, g]), True, True),
    "side by side": (lambda g: torch.cat([g, g], 1), False, False),
    "parts of rows": (lambda g: g.split(3, 1)[0], False, False),
    "slice of columns": (lambda g: g[:, :4], False, False),
    "transposed": (lambda g: g.t(), False, False),
    "columns elsewhere": (lambda g: g.view(4, 8, COLS).permute(2, 0, 1), False, False),
    "longer rows": (lambda g: g.view(16, 2 * COLS), False, False),
    "a vector": (lambda g: g.view(-1), False, False),
}


def test_no_block_fits_into_dynamic_sizes():
    wait, result = gathered(lambda g: g.unsqueeze(0), mode="symbolic")
    assert not gathers.keeps_blocks(wait, wait, 1)
    assert not gathers.keeps_blocks(result, wait, 1)


def run(node, build, data):
    """The result of `build(node, done, call)` for `data` in the place of the gathered tensor."""
    graph = fx.Graph()
    start = graph.placeholder("data")
    graph.output(build(node, start, lambda target, *args, **kwargs: graph.call_function(target, args, kwargs)))
    return fx.GraphModule({}, graph)(data)


@each("case", MOVES)
def test_blocks_that_stay_whole_and_moves_repeated_on_bytes(case):
    function, keeps_rows, keeps_blocks = MOVES[case]
    wait, result = gathered(function)
    assert gathers.keeps_blocks(result, wait, 1) == keeps_rows
    assert gathers.keeps_blocks(result, wait, 4) == keeps_blocks
    data = torch.arange(ROWS * COLS, dtype=torch.uint8).view(ROWS, COLS)
    moved = run(result, lambda node, start, call: gathers.replay(node, {wait: start}, call), data)
    assert moved.equal(function(data))


KEPT = [(case, height) for case, (_, rows, blocks) in MOVES.items() for height, kept in ((1, rows), (4, blocks)) if kept]


@each(("case", "height"), KEPT)
def test_moves_repeated_on_scales(case, height):
    """Every row of the tensor carries its number, which tells whose scales its block must have."""
    function, *_ = MOVES[case]
    wait, result = gathered(function)
    width = 2
    scales = torch.arange(ROWS // height * width).view(ROWS // height, width)

    def build(node, start, call):
        return gathers.replay_on_scales(node, {wait: start}, height, width, call)

    numbers = function(torch.arange(ROWS).unsqueeze(1).expand(ROWS, COLS).contiguous())[..., 0]
    expected = scales[numbers[..., ::height] // height]
    moved = run(result, build, scales)
    assert moved.equal(expected)
    assert list(moved.shape) == gathers.scale_shape(result, height, width)
