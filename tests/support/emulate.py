"""Inductor's H200 code, executed on a CPU: its Triton kernels in Triton's interpreter, everything around them in torch.

Needs a process started with TRITON_INTERPRET=1. The kernels run as they stand, with the first configuration that
Inductor would try and the grid that it would launch; operators and hand-written kernels run on the CPU.
"""

import contextlib
import importlib.util
import itertools
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.cross_codegen import REPLACEMENTS, Capture, fake_gpu, report
from tests.support.interpreter import exact_interpreter

Call = Callable[[list[Any]], list[Any]]


class Emulation(Capture):
    """A `Capture` whose graphs compute: each runs the code generated for it.

    `code`: what was generated per graph; `kernels`: names of the launched ones, in order."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self.folder = folder
        self.code: list[str] = []
        self.kernels: list[str] = []

    def compile_inner(self, gm: torch.fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        super().compile_inner(gm, example_inputs, **kwargs)
        (generated,) = report(Capture(self.graphs[-1:]))
        self.code.append(generated.code)
        call = _load(generated.code, self.folder / generated.name, self.kernels)

        def run(args: list[Any]) -> list[Any]:
            return call(list(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _load(code: str, folder: pathlib.Path, launched: list[str]) -> Call:
    """The generated `call`, for CPU tensors."""
    folder.mkdir()
    counter = itertools.count()

    def triton_kernel(name: str, source: str, device_str: str) -> Any:
        return _kernel(name, source, folder / f"{name}_{next(counter)}.py", launched)

    for theirs, ours in REPLACEMENTS.items():
        assert theirs in code, f"generated code has no {theirs!r}"
        code = code.replace(theirs, ours)
    module = types.ModuleType("generated")
    module.__dict__.update(triton_kernel=triton_kernel, nullcontext=contextlib.nullcontext, scaled_mm=scaled_mm)
    code = code.replace("extern_kernels._scaled_mm(", "scaled_mm(")
    exec(compile(code, str(folder / "generated.py"), "exec"), module.__dict__)
    return module.call


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """aten._scaled_mm on the CPU, which before torch 2.13 has none with a scale per row. Scales begin as cuBLAS wants them."""
    assert scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
    if scale_a.numel() == scale_b.numel() == 1:
        torch._scaled_mm(a, b, scale_a, scale_b, bias, out=out, **options)
        return
    product = (a.float() @ b.float()) * scale_a * scale_b
    out.copy_(product if bias is None else product + bias.float())


def _kernel(name: str, source: str, path: pathlib.Path, launched: list[str]) -> Any:
    """Stands in for Inductor's launcher: `.run(*args, stream=...)`."""
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with fake_gpu():
        spec.loader.exec_module(module)
    kernel = getattr(module, name)
    config = kernel.configs[0]

    def run(*args: Any, stream: int) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        launched.append(name)
        grid = GridExpr.from_meta(kernel.inductor_meta, config)
        names = [n for n in kernel.fn.arg_names if n not in config.kwargs]
        sizes = dict(zip(names, args, strict=True))
        kernel.fn[grid.eval_slow({**sizes, **config.kwargs})](*args, **config.kwargs)

    return types.SimpleNamespace(run=run)


@contextlib.contextmanager
def emulated_h200(folder: pathlib.Path) -> Iterator[Emulation]:
    """Inside, torch.compile generates code for an H200 and runs it on the CPU."""
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx

    emulation = Emulation(folder)
    inner = mock.patch.object(torch._inductor.compile_fx, "_compile_fx_inner", emulation.compile_inner)
    with functorch_config.patch(enable_autograd_cache=False), inner, exact_interpreter():
        yield emulation
