"""Moves: what only puts elements elsewhere, and the same moves repeated on bytes and on block scales."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph import gathers
from tests.support.cases import each

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
