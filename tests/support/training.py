"""Training that tests share: steps, compiled models, and the comparison of results with those of another model."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8pass import fp8_compile
from tests.support.models import mlp
from tests.tolerances import SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT, sqnr


def mean_square(out: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return out.square().mean()


@dataclasses.dataclass(frozen=True)
class Step:
    """The output of a forward and the gradients of its backward: of the inputs, and of the Parameters by name."""

    out: torch.Tensor
    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """All gradients."""
        return [*self.inputs, *self.parameters.values()]


def step(call: Callable[..., Any], model: Any, *xs: torch.Tensor, loss: Callable[..., torch.Tensor] = mean_square) -> Step:
    """One forward and backward of `call`, which computes with the Parameters of `model`, if that is a module. Gradients begin
    at None."""
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    for parameter in named.values():
        parameter.grad = None
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in xs]
    out = call(*given)
    if out.requires_grad:
        loss(out).backward()
    parameters = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return Step(out.detach(), [x.grad for x in given if x.grad is not None], parameters)


def compiled_step(
    model: nn.Module,
    recipe: Any,
    *xs: torch.Tensor,
    count: int = 1,
    loss: Callable[..., torch.Tensor] = mean_square,
    **options: Any,
) -> tuple[Any, Step]:
    """`model` compiled, by aot_eager if `options` name no backend, and the last of `count` steps with equal random numbers."""
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, **{"backend": "aot_eager"} | options)
    for _ in range(count):
        torch.manual_seed(1)
        found = step(compiled, model, *xs, loss=loss)
    return compiled, found


def normal(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is of normal numbers, the same ones for every output of one shape."""
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)).sum()


def assert_close(
    found: Step,
    expected: Step,
    output: float = SQNR_MODEL_OUTPUT,
    gradient: float = SQNR_MODEL_GRADIENT,
    negligible: float = 0.0,
) -> None:
    """Signal to quantization noise of at least so many dB, in the output and in every gradient but negligible ones: those whose
    norm is below this part of the largest."""
    assert (found.out.shape, found.out.dtype) == (expected.out.shape, expected.out.dtype)
    assert sqnr(expected.out, found.out) >= output
    assert found.parameters.keys() == expected.parameters.keys()
    smallest = negligible * max((want.norm() for want in expected.gradients), default=0)
    for got, want in zip(found.gradients, expected.gradients, strict=True):
        assert got.dtype == want.dtype
        assert want.norm() < smallest or sqnr(want, got) >= gradient


def assert_equal(found: Step, expected: Step) -> None:
    """Equal bit for bit."""
    for got, want in zip([found.out, *found.gradients], [expected.out, *expected.gradients], strict=True):
        assert torch.equal(got, want)


def assert_trains_as(
    compiled: Callable[..., Any],
    model: Any,
    *xs: torch.Tensor,
    loss: Callable[..., torch.Tensor] = mean_square,
    warm_up: int = 0,
    **bounds: float,
) -> Step:
    """A step of a compiled model or function, after `warm_up` others, is close to one of `model`, a copy of which runs as it
    is. Returns the compiled one's."""
    plain = copy.deepcopy(model)
    for _ in range(warm_up + 1):
        found = step(compiled, model, *xs, loss=loss)
    assert_close(found, step(plain, plain, *xs, loss=loss), **bounds)
    return found


# -- compiled models in training

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
"""The presets."""


def fp8(model: Any, recipe: Any = "current", **options: Any) -> Any:
    """`fp8_compile` without code generation, for every GEMM that can be: tests of numbers and state compile so."""
    return fp8_compile(model, recipe, **{"backend": "aot_eager", "select": "all", **options})


def fp8_mlp(recipe: Any = "delayed", seed: int = 0, **options: Any) -> tuple[nn.Sequential, Any]:
    """An MLP of 64, 96 and 64 features with the weights of a seed, and `fp8` of it."""
    torch.manual_seed(seed)
    model = mlp(64, 96, 64)
    return model, fp8(model, recipe, **options)


def train(call: Callable[..., torch.Tensor], *xs: torch.Tensor) -> list[torch.Tensor]:
    """A forward and backward of a mean square for each input. Gradients add up. Returns the outputs."""
    found = []
    for x in xs:
        out = call(x)
        mean_square(out.float()).backward()
        found.append(out.detach())
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients of a model, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: Any, b: Any) -> bool:
    """Equality, bit for bit, of tensors and of sequences and mappings of them. NaN equals NaN outside of tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
