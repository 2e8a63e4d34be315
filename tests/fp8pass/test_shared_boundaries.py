"""Modules that are compiled one by one: one step boundary for all whose steps are over, and for no other."""

import contextlib
from unittest import mock

import torch
from torch import nn

import fp8pass
from fp8pass.scales import store as stores
from tests.support.models import ResidualMlp
from tests.support.training import same

RECIPE = fp8pass.DelayedScaling(amax_history_len=4)
WIDTH = 16


def compiled_blocks(count):
    """Some blocks, each compiled by itself."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(ResidualMlp(WIDTH, WIDTH, bias=False) for _ in range(count))
    for block in blocks:
        fp8pass.fp8_compile(block, RECIPE, in_place=True, select="all", backend="aot_eager")
    return blocks


def batch(step):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))


def run(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def sessions_of(model):
    return [part.session for part in fp8pass.api.parts_of(model)]


def train(blocks, step):
    run(blocks, batch(step)).square().mean().backward()


@contextlib.contextmanager
def counted():
    """The numbers of columns of each update, as they come."""
    found, update = [], stores.update_scales

    def counting(history, *args, **options):
        found.append(history.shape[1])
        return update(history, *args, **options)

    with mock.patch.object(stores, "update_scales", counting):
        yield found


def test_a_step_of_many_blocks_has_one_boundary():
    blocks = compiled_blocks(6)
    train(blocks, 0)
    for step in range(1, 4):
        with counted() as updates:
            train(blocks, step)
        assert len(updates) == 1
        assert updates[0] >= len(fp8pass.state(blocks).tensors) == 6 * 6
        assert {s.num_steps for s in sessions_of(blocks)} == {step}


def test_a_backward_that_is_to_come_keeps_the_boundary_apart():
    blocks = compiled_blocks(3)
    for step in range(2):
        train(blocks, step)
    sessions = sessions_of(blocks)
    loss = run(blocks, batch(2)).square().mean()
    loss.backward(retain_graph=True)
    blocks[0](batch(3))  # ends the step of the first one alone: a second backward may reach the others
    assert [s.num_steps for s in sessions] == [3, 2, 2]
    loss.backward()
    run(blocks[1:], batch(4))
    assert [s.num_steps for s in sessions] == [3, 3, 3]


def test_blocks_whose_forward_came_before_end_no_step():
    """The second one begins alone, as where a step runs it twice: the first one's step is not known to be over."""
    blocks = compiled_blocks(3)
    for step in range(2):
        train(blocks, step)
    first = fp8pass.state(blocks[0]).state_dict()
    run(blocks[1:], batch(2))
    assert [s.num_steps for s in sessions_of(blocks)] == [1, 2, 2]
    assert same(fp8pass.state(blocks[0]).state_dict(), first), "what it has staged is in no history yet"
