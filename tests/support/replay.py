"""What Inductor's code for a GPU would launch, in order: its wrapper runs on empty CPU tensors, and nothing is computed.

Generated Triton kernels are recorded with their arguments; operations of ours run their launch wrappers under a recorder;
GEMMs, attention and whatever else comes return empty tensors of the right shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowering import blockwise_by_mxfp8
from lowering.operation import NAMESPACE
from tests.support.cross_codegen import H200, Capture, Report, fake_gpu, report
from tests.support.emulate import REPLACEMENTS
from tests.support.variants import Launch, recording

#: Of `aten`: what only looks at memory that is there, or makes some.
_FREE = {
    "empty", "empty_strided", "empty_like", "new_empty", "zeros", "fill_", "zero_", "is_pinned",
    "alias", "as_strided", "detach", "expand", "permute", "reshape", "_reshape_alias", "select", "slice", "split", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """One launch of the wrapper, or one operation that it calls."""

    name: str
    num_bytes: int
    """Moved by it, as Inductor counts them; 0 for GEMMs and attention."""
    generated: Any = None
    """Inductor's kernel, if it is one."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of a generated kernel."""
    launches: tuple[Launch, ...] = ()
    """Of an operation with hand-written kernels."""
    shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    """Tensors that an operation is given."""
    layouts: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Their strides, and how many bytes beyond a multiple of 16 they begin."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments by name of an operation that are no tensors."""
    inner: tuple[Event, ...] = ()
    """What a GEMM launches besides itself."""

    @property
    def inner_bytes(self) -> int:
        """Of the tensors that the launches of `inner` are given, each once."""
        given = [x for event in self.inner for launch in event.launches for x in launch.arguments.values()]
        return sum(x.nbytes for x in {id(x): x for x in given if isinstance(x, torch.Tensor)}.values())


class _Empty(TorchDispatchMode):
    """Every operation returns at once."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("aten::") and name.removeprefix("aten::") in _FREE:
            return func(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        shapes = tuple((t.dtype, tuple(t.shape)) for t in tensors)
        launches: list[Launch] = []
        inner: tuple[Event, ...] = ()
        if kwargs.get("implementation") == "mxfp8":
            result = _shaped(func, args, kwargs)
            inner = _besides_mxfp8s_gemm(args, kwargs, result)
        elif _runs_kernels(name):
            with recording(launches):
                result = func(*args, **kwargs)
        else:
            result = kwargs["out"] if "out" in kwargs else _shaped(func, args, kwargs)
        layouts = tuple((t.stride(), t.data_ptr() % 16) for t in tensors)
        options = {key: value for key, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        made = Event(name, 0, launches=tuple(launches), shapes=shapes, layouts=layouts, options=options, inner=inner)
        self.events.append(made)
        return result


def _besides_mxfp8s_gemm(args: Any, kwargs: Any, result: Any) -> tuple[Event, ...]:
    """What a blockwise GEMM through MXFP8 runs before torch's GEMM, which returns `result`."""
    events: list[Event] = []
    checked = mock.patch.object(blockwise_by_mxfp8, "_check_powers_of_two", return_value=None)
    gemm = mock.patch.object(blockwise_by_mxfp8, "scaled_mm_mxfp8", return_value=result)
    with checked, gemm, _Empty(events):
        NAMESPACE.operations["scaled_mm_blockwise"].implementation(torch.device("cpu"))(*args, **kwargs)
    return tuple(events)


def _runs_kernels(name: str) -> bool:
    """Whether it is an operation of ours, no GEMM, with kernels."""
    operation = NAMESPACE.operations.get(name.removeprefix("lowering::"))
    if operation is None or "scaled_" in name:
        return False
    with _as_on_gpu():
        return operation.implementation(torch.device("cpu")) is not operation.reference


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        result = func(*fake[0], **fake[1])
    return tree_map(_empty_like, result)


def _empty_like(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(tuple(map(int, x.shape)), tuple(map(int, x.stride())), dtype=x.dtype)


def launched(captured: Capture, folder: pathlib.Path, gpu: Any = H200) -> Iterator[tuple[Report, list[Event]]]:
    """Each of the captured graphs with its launches, which do not say what they move. `folder` receives the sources of the
    generated kernels."""
    for number, graph in enumerate(captured.graphs):
        (generated,) = report(Capture([graph]), gpu=gpu)
        yield generated, _run(generated.code, [_empty_like(x) for x in graph[2]], folder, f"g{number}_", gpu)


def replay(captured: Capture, folder: pathlib.Path) -> list[Event]:
    """All launches of the captured graphs. `folder` receives the sources of the generated kernels."""
    events = []
    for generated, found in launched(captured, folder):
        moved = iter([k for k in generated.kernels if not k.is_gemm])
        for event in found:
            counted = event.generated is not None or (event.name.startswith("lowering::") and "scaled_mm" not in event.name)
            events.append(dataclasses.replace(event, num_bytes=next(moved).num_bytes) if counted else event)
        left = list(moved)
        assert not left, f"the wrapper of {generated.name} launched fewer kernels than were scheduled: {left}"
    return events


def _run(code: str, inputs: list[Any], folder: pathlib.Path, prefix: str, gpu: Any) -> list[Event]:
    events: list[Event] = []
    counter = itertools.count()

    def triton_kernel(name: str, source: str, device_str: str) -> Any:
        kernel = load_kernel(name, source, folder / f"{prefix}{next(counter)}.py", gpu)

        def run(*args: Any, stream: int) -> None:
            names = [n for n in kernel.fn.arg_names if n not in kernel.configs[0].kwargs]
            events.append(Event(name, 0, kernel, dict(zip(names, args, strict=True))))

        return types.SimpleNamespace(run=run)

    for theirs, ours in REPLACEMENTS.items():
        code = code.replace(theirs, ours)
    module = types.ModuleType("generated")
    module.__dict__.update(triton_kernel=triton_kernel, nullcontext=contextlib.nullcontext)
    exec(compile(code, "generated.py", "exec"), module.__dict__)
    with _as_on_gpu(), _Empty(events):
        module.call(list(inputs))
    return events


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Operations launch their kernels for CPU tensors too."""
    from lowering import hardware

    with mock.patch.object(hardware, "has_fp8_tensor_cores", return_value=True):
        yield


def load_kernel(name: str, source: str, path: pathlib.Path, gpu: Any = H200) -> Any:
    """Inductor's kernel object of a generated source."""
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with fake_gpu(gpu):
        spec.loader.exec_module(module)
    return getattr(module, name)
