"""Modules that are compiled one by one: one step boundary for all whose steps are over, and the numbers that each alone has."""

import contextlib
import copy
import gc
import random
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.runtime.session import Session
from fp8pass.scales import store as stores
from tests.support.cases import rest
from tests.support.models import ResidualMlp
from tests.support.training import gradients, same

RECIPE = fp8pass.DelayedScaling(amax_history_len=4)
GIVEN = {"select": "all", "backend": "aot_eager"}
WIDTH = 16


def make_blocks(count, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleList(ResidualMlp(WIDTH, WIDTH, bias=False) for _ in range(count))


def in_place(block, recipe=RECIPE, **options):
    return fp8pass.fp8_compile(block, recipe, in_place=True, **GIVEN, **options)


def by_name(block, recipe=RECIPE, **options):
    block.compile(backend="fp8pass", options={"recipe": recipe, **GIVEN, **options})
    return block


def batch(step, scale=1.0):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step)) * scale


def run(blocks, x, **checkpoints):
    for block in blocks:
        x = checkpoint(block, x, **checkpoints) if checkpoints else block(x)
    return x


def compiled_blocks(count, compile_block=in_place, **options):
    """Some blocks, each compiled by itself."""
    blocks = make_blocks(count)
    for block in blocks:
        compile_block(block, **options)
    return blocks


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


@pytest.mark.parametrize("compile_block", [in_place, by_name])
def test_a_step_of_many_blocks_has_one_boundary(compile_block):
    """And so has each microbatch."""
    blocks = compiled_blocks(6, compile_block)
    train(blocks, 0)
    for step in range(1, 4):
        with counted() as updates:
            train(blocks, step)
        assert len(updates) == 1
        assert updates[0] >= len(fp8pass.state(blocks).tensors) == 6 * 6
        assert {s.num_steps for s in sessions_of(blocks)} == {step}
        assert all(s.clock.is_step_pending for s in sessions_of(blocks))


OTHER = fp8pass.DelayedScaling(amax_history_len=5)


@pytest.mark.parametrize(
    ("recipes", "options", "checkpoints", "count"),
    [
        ([RECIPE] * 5, {"step": "manual"}, {}, 1),
        ([RECIPE, OTHER] * 2, {}, {}, 2),
        *(([RECIPE] * 3, {}, {"use_reentrant": reentrant}, 1) for reentrant in (False, True)),
    ],
    ids=["manual steps", "other settings", "checkpointed", "checkpointed reentrantly"],
)
def test_blocks_of_equal_settings_share_a_boundary(recipes, options, checkpoints, count):
    blocks = make_blocks(len(recipes))
    for block, recipe in zip(blocks, recipes, strict=True):
        in_place(block, recipe, **options)
    for step in range(3):
        with counted() as updates:
            run(blocks, batch(step).requires_grad_(), **checkpoints).square().mean().backward()
            if options:
                fp8pass.state(blocks).step()
    assert len(updates) == count


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
    run(blocks[1:], batch(2))
    assert [s.num_steps for s in sessions_of(blocks)] == [1, 2, 2]


def gan_step(generator, critic, number):
    """Each is trained by a step of its own, and the critic runs in both."""
    loss = critic(batch(number)).mean() - critic(generator(batch(number + 50)).detach()).mean()
    loss.backward()
    generator.zero_grad()
    critic(generator(batch(number + 100))).mean().backward()


RARE = ["reversed", "some", "shared", "evaluate", "dropped", "twice", "late", "halves", "checkpoint", "gan", "load", "rules"]
RARE += ["grow", "forget"]


def events(seed):
    """Random calls of blocks, as programs make them, and some that no program makes."""
    choose = random.Random(seed)
    for _ in range(8):
        kind = choose.choice(["train"] * 5 + RARE)
        yield kind, choose.randrange(1000), choose.sample(range(5), choose.randrange(1, 5))


def play(compile_block, seed):
    """Everything that can be seen of these calls."""
    blocks, others, found = make_blocks(5), make_blocks(2, seed=1), []
    for block in (*blocks, *others):
        compile_block(block)
    waiting = []

    def note(out):
        found.append(out.detach().clone())
        out.square().mean().backward()

    for kind, number, some in events(seed):
        x = batch(number, 1 + number % 7)
        if kind == "train":
            note(run(blocks, x))
        elif kind == "reversed":
            note(run(reversed(blocks), x))
        elif kind == "some":
            note(run([blocks[i] for i in some], x))
        elif kind == "shared":
            note(run([blocks[i] for i in (*some, *some)], x))
        elif kind == "evaluate":
            with (torch.no_grad, torch.inference_mode)[number % 2]():
                found.append(run([blocks[i] for i in some], x))
        elif kind == "dropped":
            run(blocks, x)
        elif kind == "twice":
            loss = run(blocks, x).square().mean()
            loss.backward(retain_graph=True)
            found.append(blocks[some[0]](x).detach())
            loss.backward()
        elif kind == "late":
            waiting.append(run(blocks, x).square().mean())
        elif kind == "halves":
            middle = run(blocks[:2], x)
            below = middle.detach().requires_grad_()
            run(blocks[2:], below).square().mean().backward()
            middle.backward(below.grad)
        elif kind == "checkpoint":
            note(run(blocks, x.requires_grad_(), use_reentrant=bool(number % 2)))
        elif kind == "gan":
            gan_step(others[0], others[1], number)
        elif kind == "load" and len(fp8pass.state(blocks).tensors) == 30:
            fp8pass.state(blocks).load_state_dict(fp8pass.state(blocks).state_dict())
        elif kind == "rules":
            fp8pass.use_rules(blocks[some[0]], {"down": None} if number % 2 else None)
        elif kind == "grow":
            note(run([blocks[i] for i in some], x[: 8 + number % 3]))
        elif kind == "forget":
            fp8pass.state(blocks).forget_weights()
        if waiting and number % 3 == 0:
            waiting.pop().backward()
        found += [gradients(blocks), gradients(others)]
    for model in (blocks, others):
        fp8pass.state(model).step()
        found.append(fp8pass.state(model).state_dict())
    return found


@pytest.mark.parametrize("seed", [0, 1, 2, 7, *rest([3, 4, 5, 6])])  # the first four have every kind of event
def test_what_is_seen_is_what_each_alone_shows(seed):
    with mock.patch.object(Session, "shares_boundaries", False):  # sessions end their own steps, one by one
        expected = play(in_place, seed)
    torch._dynamo.reset()
    assert same(play(in_place, seed), expected)


def test_blocks_that_go_free_their_memory_and_those_that_come_later_join():
    blocks = compiled_blocks(4)
    for step in range(3):
        train(blocks, step)
    gone = weakref.ref(blocks[2]), weakref.ref(sessions_of(blocks[2])[0])
    del blocks[2]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    with counted() as updates:
        train(blocks, 3)
    assert len(updates) == 1
    blocks.append(in_place(copy.deepcopy(blocks[0])))
    for step in range(4, 7):
        with counted() as updates:
            train(blocks, step)
    assert len(updates) == 1


def test_blocks_that_are_left_out_by_turns_share_a_boundary():
    blocks = compiled_blocks(5)
    for step in range(8):
        train([block for i, block in enumerate(blocks) if i != step % 5], step)
    with counted() as updates:
        train(blocks[1:], 9)
        train(blocks[:4], 10)
    assert len(updates) <= 4


def test_functions_of_the_users_see_one_block_at_a_time():
    seen = []

    def largest(window):
        seen.append(window.shape[1])
        return window.amax(dim=0)

    blocks = compiled_blocks(3, recipe=fp8pass.DelayedScaling(amax_history_len=4, amax_compute_algo=largest))
    for step in range(3):
        train(blocks, step)
    assert set(seen) == {6}
