"""Compile launches on a machine without a GPU: `recorded` runs a launch wrapper on CPU tensors with Triton's `run` replaced by
a recorder; `compile_launch` compiles what was recorded with the types and alignments that Triton would have derived."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    programs: int


def recorded(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Launch]:
    """The launches of one call."""
    launches: list[Launch] = []
    with recording(launches):
        function(*arguments, **options)
    return launches


@contextlib.contextmanager
def recording(launches: list[Launch]) -> Iterator[None]:
    """Inside, a launch is added to `launches` and does not happen."""
    from triton.runtime.jit import JITFunction

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(size > 0 for size in grid)
        named = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        named |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        assert set(named) == set(kernel.arg_names)
        launches.append(Launch(kernel, named, options, math.prod(grid)))

    with mock.patch.object(JITFunction, "run", record):
        yield


class Variant(NamedTuple):
    """The input of Triton's compiler for a launch: types by name, constants, alignments and options."""

    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]
    options: dict[str, int]


def variant_of(launch: Launch) -> Variant:
    """As Triton derives it from the arguments."""
    variant = Variant(launch.kernel.__name__, {}, {}, {}, launch.options)
    for position, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and is_special):
            variant.signature[name] = "constexpr"
            variant.constants[(position,)] = value
            continue
        if isinstance(value, torch.Tensor):
            variant.signature[name], divisible = "*" + TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, int):
            variant.signature[name], divisible = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        else:
            variant.signature[name], divisible = "fp32", False
        if divisible and is_special:
            variant.attributes[(position,)] = [["tt.divisibility", 16]]
    return variant


def compile_launch(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel: `.asm`, `.metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = variant_of(launch)
    source = ASTSource(launch.kernel, variant.signature, constexprs=variant.constants, attrs=variant.attributes)
    target = GPUTarget("cuda", arch, 32)
    driver = SimpleNamespace(get_current_target=lambda: target)
    with mock.patch.object(triton.runtime.driver, "_active", driver):  # kernels ask it what they are compiled for
        result = triton.compile(source, target=target, options=launch.options)
    assert result.asm["cubin"]
    return result
