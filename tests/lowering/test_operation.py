"""lowering.operation: schemas inferred, fakes and providers attached, and what does not fit refused at import."""

import types

import pytest
import torch

from lowering.operation import NAMESPACE, Namespace
from tests.support.cases import each

SPACE = Namespace("operation_test")
names = (f"op{i}" for i in range(1000))


def scale(x: torch.Tensor, factor: float = 2.0, *, offset: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x * factor + offset + bias"""
    out = x * factor + offset
    return out if bias is None else out + bias


def raise_to(total: torch.Tensor, parts: list[torch.Tensor], index: list[int]) -> None:
    """total[index[i]] = max(itself, parts[i])"""
    for part, i in zip(parts, index, strict=True):
        total[i] = torch.maximum(total[i], part)


def weighted(x: torch.Tensor, weight: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    return x * weight.reshape(()) + offset


def total(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    out += sum(part.reshape(()) for part in parts)


def define(reference, **options):
    """An operation of a name of its own: one process can register each name once."""
    copy = types.FunctionType(reference.__code__, reference.__globals__, next(names), reference.__defaults__)
    for name in ("__kwdefaults__", "__annotations__", "__doc__"):
        setattr(copy, name, getattr(reference, name))
    return SPACE.operation(copy, **options)


def defined(reference=scale, **options):
    """With a fake."""
    operation = define(reference, **options)
    operation.fake(lambda x: torch.empty_like(x))
    return operation


def test_a_call_checks_its_arguments_once():
    """In Python and from a graph. What torch refuses without a computation is checked, too: a check says it better."""
    checked = []

    def check(x: object, factor: float) -> None:
        checked.append(factor)
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"x is {x!r}; pass a tensor")
        if factor == 0.0:
            raise ValueError("factor is 0.0; use another one")

    operation = defined(checks=[check])
    operation(torch.ones(2), 3.0)
    operation.overload(torch.ones(2), 4.0)
    assert checked == [3.0, 4.0]
    for call in (operation, operation.overload):
        with pytest.raises(ValueError, match=r"factor is 0\.0") as raised:
            call(torch.ones(2), 0.0)
        assert raised.value.__context__ is None
    with pytest.raises(ValueError, match="x is 'x'; pass a tensor"):
        operation("x")
    assert operation.overload(torch.ones(3, device="meta"), 0.0).shape == (3,), "nothing is checked in tracing"
    with pytest.raises(TypeError, match=r"the check .*check of .* requests x, factor; its arguments are total"):
        define(raise_to, mutates=["total"], checks=[check])
    with pytest.raises(TypeError, match=r"`indexed` of .* requests scale; its arguments are x, weight, offset"):
        define(weighted, indexed=["scale"])


def test_a_missing_fake_raises():
    space = Namespace("operation_test_without_fake")
    operation = space.operation(scale)
    with pytest.raises(RuntimeError, match=r"without a fake: scale; attach one with @scale.fake"):
        space.require_fakes()
    operation.fake(lambda x: torch.empty_like(x))
    space.require_fakes()
    NAMESPACE.require_fakes()


@each("parameters", ["x", "x, factor=2.0, *, bias=None, offset=0", "x, factor=3.0, *, offset=0, bias=None"])
def test_a_provider_of_another_signature_raises(parameters):
    operation, wrong = define(scale), eval(f"lambda {parameters}: x")
    message = r"a provider of .* needs the parameters of its reference, \(x: torch.Tensor, factor: float = 2.0, \*"
    with pytest.raises(TypeError, match=message):
        operation.provider(lambda device: True)(wrong)


def test_an_indexed_argument_is_a_scalar_or_a_vector_with_a_position():
    made, x, weights = defined(weighted, indexed=["weight"]), torch.randn(3), torch.tensor([2.0, 5.0])
    for call in (made, made.overload):
        assert torch.equal(call(x, weights[0], offset=1), 2 * x + 1)
        assert torch.equal(call(x, weights, offset=1, weight_index=1), 5 * x + 1)
        with pytest.raises(IndexError, match="out of bounds"):
            call(x, weights, weight_index=2)
    torch.library.opcheck(made.overload, (x, weights), {"weight_index": 1})
