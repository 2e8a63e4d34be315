"""lowering.operation: schemas inferred, fakes and providers attached, and what does not fit refused at import."""

import sys
import types

import pytest
import torch

from lowering.operation import NAMESPACE, Namespace
from lowering.state import update_scales_on_cpu
from tests.support.cases import each

CPU = torch.device("cpu")
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


def schema_of(operation):
    return str(operation.overload._schema).partition("(")[2]


def test_a_call_computes_what_the_reference_computes():
    operation, x = defined(), torch.randn(3)
    assert schema_of(operation) == "Tensor x, float factor=2., *, int offset=0, Tensor? bias=None) -> Tensor"
    for arguments, options in (((x,), {}), ((x, 3.0), {"offset": 2}), ((x,), {"bias": torch.ones(3)})):
        assert torch.equal(operation(*arguments, **options), scale(*arguments, **options))
    torch.library.opcheck(operation.overload, (x, 3.0), {"bias": torch.ones(3)})
    assert operation.__doc__ == scale.__doc__


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


def test_operations_in_place_need_no_fake():
    operation = define(raise_to, mutates=["total"])
    assert schema_of(operation) == "Tensor(a0!) total, Tensor[] parts, int[] index) -> ()"
    assert operation.has_fake
    total = torch.zeros(3)
    assert operation(total, [torch.tensor(2.0)], [1]) is None
    assert total.tolist() == [0.0, 2.0, 0.0]
    torch.library.opcheck(operation.overload, (torch.zeros(3), [torch.tensor(2.0)], [1]))


def test_a_missing_fake_raises():
    space = Namespace("operation_test_without_fake")
    operation = space.operation(scale)
    with pytest.raises(RuntimeError, match=r"without a fake: scale; attach one with @scale.fake"):
        space.require_fakes()
    operation.fake(lambda x: torch.empty_like(x))
    space.require_fakes()
    NAMESPACE.require_fakes()


@each(
    "parameters",
    [
        "x",
        "x, factor=2.0, offset=0, bias=None",
        "x, factor=2.0, *, bias=None, offset=0",
        "x, factor=3.0, *, offset=0, bias=None",
        "x, factor=2.0, *, offset=0, bias",
        "x, scale=2.0, *, offset=0, bias=None",
    ],
)
def test_a_provider_of_another_signature_raises(parameters, monkeypatch):
    operation, wrong = define(scale), eval(f"lambda {parameters}: x")
    message = r"a provider of .* needs the parameters of its reference, \(x: torch.Tensor, factor: float = 2.0, \*"
    with pytest.raises(TypeError, match=message):
        operation.provider(lambda device: True)(wrong)
    monkeypatch.setitem(sys.modules, "operation_test_kernels", module_of(operation.name, wrong))
    operation.lazy_provider(lambda device: True, "operation_test_kernels")
    with pytest.raises(TypeError, match=message):
        operation(torch.ones(2))


def module_of(name, function):
    module = types.ModuleType("operation_test_kernels")
    module.__spec__ = types.SimpleNamespace(name="operation_test_kernels")
    setattr(module, name, function)
    return module


def test_the_first_provider_that_takes_the_device_computes(monkeypatch):
    operation = defined()
    asked = []

    @operation.provider(lambda device: bool(asked.append(device)))
    def _(x, factor=2.0, *, offset=0, bias=None):
        raise AssertionError("not for this device")

    @operation.provider(lambda device: device.type == "cpu")
    def _(x, factor=2.0, *, offset=0, bias=None):
        return torch.full_like(x, 7.0)

    assert operation(torch.ones(2)).tolist() == [7.0, 7.0]
    assert asked == [CPU]
    assert operation.implementation(torch.device("meta")) is operation.reference
    assert operation.implementations()[-1] is operation.reference
    assert NAMESPACE.operations["update_scales"].implementation(CPU) is update_scales_on_cpu


def test_a_lazy_provider_is_imported_when_it_is_needed(monkeypatch):
    operation = defined()
    with pytest.raises(ModuleNotFoundError, match="operation_test_nothing, which is to provide op"):
        operation.lazy_provider(lambda device: True, "operation_test_nothing")
    module = module_of(operation.name, lambda x, factor=2.0, *, offset=0, bias=None: x + 1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    runs = []
    operation.lazy_provider(lambda device: bool(runs), module.__name__)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert operation(torch.ones(2)).tolist() == [2.0, 2.0]  # the reference
    runs.append(True)
    with pytest.raises(ModuleNotFoundError):
        operation(torch.ones(2))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert operation(torch.zeros(2)).tolist() == [1.0, 1.0]


# -- elements of vectors


def weighted(x: torch.Tensor, weight: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    return x * weight.reshape(()) + offset


def total(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    out += sum(part.reshape(()) for part in parts)


def test_an_indexed_argument_is_a_scalar_or_a_vector_with_a_position():
    made = defined(weighted, indexed=["weight"])
    assert schema_of(made) == "Tensor x, Tensor weight, *, int offset=0, int? weight_index=None) -> Tensor"
    x, weights = torch.randn(3), torch.tensor([2.0, 5.0])
    for call in (made, made.overload):
        assert torch.equal(call(x, weights[0], offset=1), 2 * x + 1)
        assert torch.equal(call(x, weights, offset=1, weight_index=1), 5 * x + 1)
        assert torch.equal(call(x, weight=weights, weight_index=1), 5 * x)
        with pytest.raises(IndexError, match="out of bounds"):
            call(x, weights, weight_index=2)
    torch.library.opcheck(made.overload, (x, weights), {"weight_index": 1})


def test_an_indexed_list_may_mix_scalars_and_elements():
    made = define(total, mutates=["out"], indexed=["parts"])
    assert schema_of(made) == "Tensor[] parts, Tensor(a1!) out, *, int[]? parts_index=None) -> ()"
    out, vector, scalar = torch.zeros(()), torch.tensor([1.0, 10.0]), torch.tensor(100.0)
    made.overload([vector, scalar, vector], out, parts_index=[1, -1, 0])
    assert out == 111
    made.overload([scalar, scalar], out)
    assert out == 311
    with pytest.raises(ValueError, match="shorter"):
        made.overload([vector, scalar], out, parts_index=[1])
