"""Inductor's CUDA code for an H200 or another GPU, generated on a machine without one, the memory traffic of its kernels, and
what it would launch.

`capture()` stops Inductor where it would generate code, and computes nothing: outputs are empty tensors of the right shape.
`report()` moves the captured graphs' metadata to a make-believe `cuda:0`, generates code and counts what every kernel reads and
writes: each buffer once per kernel that touches it, as Inductor itself counts (`get_read_write_buffers_sizes`), hand-written
kernels with all tensors that they are given and return. That is a lower bound for real traffic, the same one for every
contestant. `launched()` runs the generated wrapper on empty CPU tensors and records what it would launch: Triton kernels, our
operations' launches, and GEMMs, attention and the rest by their shapes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.variants import Launch, recording
from lowering import hardware
from lowering import paths as blockwise_by_mxfp8
from lowering.inductor import prepare
from lowering.operation import NAMESPACE
from lowering.triton import ahead


def _gpu(name: str, capability: tuple[int, int], multiprocessors: int, **properties: int) -> types.SimpleNamespace:
    """A GPU as torch describes it, and the CUDA toolkit of its torch (CUDA C++ Programming Guide, compute capabilities)."""
    is_large = capability in ((9, 0), (10, 0))
    common = {
        "warp_size": 32,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048 if is_large else 1536,
        "max_threads_per_block": 1024,
        "gcnArchName": "",
        "is_integrated": 0,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448 if is_large else 101376,
        "shared_memory_per_multiprocessor": 233472 if is_large else 102400,
        "cuda": (12, 9),
    }
    (major, minor), numbers = capability, common | properties
    return types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=multiprocessors, **numbers)


H200 = _gpu("NVIDIA H200", (9, 0), 132, total_memory=143771 << 20, L2_cache_size=60 << 20)
RTX_5090 = _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, total_memory=32607 << 20, L2_cache_size=96 << 20, cuda=(13, 0))

_GEMM_NAMES = ("mm", "bmm", "addmm", "baddbmm", "scaled_mm", "grouped_mm", "attention", "convolution")
_CUDA = torch.device("cuda", 0)


class Kernel(NamedTuple):
    """One scheduled kernel."""

    name: str
    is_gemm: bool
    """True for a GEMM or attention."""
    num_bytes: int
    reads: frozenset[str]
    """Names of the buffers it reads from memory."""
    writes: dict[str, tuple[torch.dtype, int]]
    """The buffers it leaves in memory: dtype and number of elements by name; nothing for extern kernels."""
    inputs: dict[str, tuple[int, ...]]
    """The inputs of the graph that it reads: sizes by name."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Generated code of one graph and the traffic of its kernels."""

    name: str
    code: str
    kernels: list[Kernel]
    ahead: list[Any]
    """Arguments of the calls of `lowering.triton.ahead.compile_ahead`."""

    @property
    def elementwise(self) -> list[Kernel]:
        """The kernels that are neither GEMM nor attention."""
        return [k for k in self.kernels if not k.is_gemm]

    @property
    def host_waits(self) -> list[str]:
        """Calls in the wrapper that wait for the GPU, or move data to the host or from it."""
        start = re.search(r"^def partition_|def call\(self, args\)", self.code, re.MULTILINE)
        assert start is not None
        body = self.code[start.start() : self.code.index("runner = Runner(")]
        calls = r"\.item\(|\.tolist\(|\.cpu\(|\.to\(|\.copy_\(|_cpu\(|_local_scalar|nonzero|synchronize"
        return [line for line in body.splitlines() if re.search(calls, line) and not line.lstrip().startswith("#")]


@dataclasses.dataclass
class Capture:
    """Graphs that reached Inductor's code generation: name, module, example inputs."""

    graphs: list[tuple[str, fx.GraphModule, list[Any]]] = dataclasses.field(default_factory=list)

    def compile_inner(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        """Stands in for Inductor's code generation."""
        kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        self.graphs.append((f"{kind}_{len(self.graphs)}", copy.deepcopy(gm), list(example_inputs)))
        (results,) = gm.graph.find_nodes(op="output")[0].args
        positions = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        results = list(results) if isinstance(results, (list, tuple)) else [results]

        def run(args: list[Any]) -> list[Any]:
            return [
                args[positions[r]] if r in positions else _empty_like(getattr(r, "meta", {}).get("val", r)) for r in results
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Collect every graph that would be compiled while the context is open."""
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx

    grabbed = Capture()
    inner = mock.patch.object(torch._inductor.compile_fx, "_compile_fx_inner", grabbed.compile_inner)
    with functorch_config.patch(enable_autograd_cache=False), inner:
        yield grabbed


@contextlib.contextmanager
def planned_for(gpu: Any) -> Iterator[None]:
    """Inside, the CPU's graphs are rewritten as this GPU's would be: blockwise GEMMs go through MXFP8 where it has that."""
    refusal, platform = hardware._mx_refusal, hardware.Platform((gpu.major, gpu.minor), gpu.cuda, hardware.torch_version())
    with mock.patch.object(hardware, "_mx_refusal", return_value=refusal(platform)):
        yield


@contextlib.contextmanager
def fake_gpu(gpu: Any = H200) -> Iterator[list[Any]]:
    """Make torch, Inductor and Triton believe that cuda:0 is this GPU. Only code generation works inside.

    Yields a list for the arguments of every call of `lowering.triton.ahead.compile_ahead`, which compiles nothing.
    """
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    capability = gpu.major, gpu.minor
    arch = 10 * gpu.major + gpu.minor
    fake_driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *a: 0,
        get_active_torch_device=lambda: _CUDA,
    )
    foreseen: list[Any] = []
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *a, **k: gpu,
        "synchronize": lambda *a: None,
    }
    of_torch_alone = {
        "get_device_capability": lambda *a: capability,
        "get_device_name": lambda *a: gpu.name,
        "is_bf16_supported": lambda *a, **k: True,
        "_lazy_init": lambda: None,
    }
    interface = device_interface.get_interface_for_device("cuda")
    with contextlib.ExitStack() as stack:
        for name, function in (cuda | of_torch_alone).items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", function))
        for name, function in cuda.items():
            stack.enter_context(mock.patch.object(interface, name, staticmethod(function)))
        stack.enter_context(mock.patch.object(interface, "get_compute_capability", staticmethod(lambda *a, **k: arch)))
        for name in ("current_device", "get_device_properties"):
            stack.enter_context(mock.patch.object(interface.Worker, name, staticmethod(cuda[name])))
        stack.enter_context(mock.patch.object(driver, "_active", fake_driver))
        of_device = {"cuda": capability}
        stack.enter_context(mock.patch.object(hardware, "cuda_capability", lambda device: of_device.get(device.type)))
        stack.enter_context(mock.patch.object(hardware, "cuda_version", return_value=gpu.cuda))
        stack.enter_context(mock.patch.object(ahead, "compile_ahead", lambda *call: foreseen.append(call)))
        _forget_triton_probes()  # torch caches "is there a working Triton?" for the real machine
        stack.callback(_forget_triton_probes)
        yield foreseen


def _forget_triton_probes() -> None:
    import torch.utils._triton as probes

    for function in vars(probes).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _to_cuda(value: Any, fake_mode: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, torch.Tensor):
        return value
    with torch.utils._python_dispatch._disable_current_modes():
        sizes, strides = [int(s) for s in value.shape], [int(s) for s in value.stride()]
        meta = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        offset = value.storage_offset()
        if isinstance(offset, int) and offset:  # Inductor asks inputs for their alignment
            elements = meta.untyped_storage().nbytes() // meta.element_size()
            meta = torch.empty(offset + elements, dtype=value.dtype, device="meta").as_strided(sizes, strides, offset)
    return FakeTensor(fake_mode, meta, _CUDA)


def report(captured: Capture, options: dict[str, Any] | None = None, gpu: Any = H200) -> list[Report]:
    """Generate code for each captured graph (static shapes) and count its traffic; `options`: Inductor's config."""
    return [_report(name, gm, inputs, options or {}, gpu) for name, gm, inputs in captured.graphs]


def _report(name: str, gm: fx.GraphModule, inputs: list[Any], options: dict[str, Any], gpu: Any) -> Report:
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    traced_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes]) or fake_mode
    is_inference, is_backward = name.startswith("inference"), name.startswith("backward")
    with V.set_fake_mode(traced_mode), DebugContext():
        view_to_reshape(gm)
        record_original_output_strides(gm)
        post_grad_passes(gm, is_inference)  # these run operators on the metadata, which is a CPU's here
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map(lambda v: _to_cuda(v, fake_mode), node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _CUDA}
    args = [_to_cuda(a, fake_mode) for a in inputs]
    config = inductor_config.patch({"compile_threads": 1, "fx_graph_cache": False, **options})
    with fake_gpu(gpu) as foreseen, V.set_fake_mode(fake_mode), DebugContext(), config:
        prepare(gm.graph)
        lowering = GraphLowering(
            gm, example_inputs=args, shape_env=ShapeEnv(), is_inference=is_inference, is_backward=is_backward
        )
        with V.set_graph_handler(lowering):
            lowering.run(*args)
            wrapper = lowering.codegen()[0]
            code = wrapper if isinstance(wrapper, str) else wrapper.value
            nodes = ((type(n).__name__, type(getattr(n, "node", None)).__name__, n) for n in lowering.scheduler.nodes)
            launching = [n for kind, ir, n in nodes if kind != "NopKernelSchedulerNode" and ir != "MultiOutput"]
            return Report(name, code, [_kernel(n) for n in launching], foreseen)


def _kernel(node: Any) -> Kernel:
    from torch._inductor.virtualized import V

    ir_node = getattr(node, "node", None)
    label = str(getattr(ir_node, "python_kernel_name", None) or getattr(ir_node, "op_overload", None) or node.get_name())
    is_extern = node.is_extern()
    is_gemm = (is_extern or node.is_template()) and any(g in label for g in _GEMM_NAMES)
    reads = frozenset(node.get_read_write_buffer_accesses(include_reads=True, include_writes=False))
    written = () if is_extern else node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    buffers = {name: V.graph.get_buffer(name) for name in written}
    writes = {name: (b.get_dtype(), int(b.get_numel())) for name, b in buffers.items()}
    given = {name: V.graph.graph_inputs[name] for name in reads if name in V.graph.graph_inputs}
    inputs = {name: tuple(int(size) for size in tensor.get_size()) for name, tensor in given.items()}
    return Kernel(label, is_gemm, int(node.get_read_write_buffers_sizes()), reads, writes, inputs)


# -- what the code would launch

REPLACEMENTS = {
    "async_compile.triton(": "triton_kernel(",
    "async_compile.wait(globals())": "",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    "_empty_strided_cuda": "_empty_strided_cpu",
    "torch.cuda._DeviceGuard(0)": "nullcontext()",
    "torch.cuda.set_device(0)": "pass",
}

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
    launches: tuple[Launch, ...] = ()
    """Launches of an operation with hand-written kernels."""
    shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    """Tensors that an operation is given."""
    layouts: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Their strides, and how many bytes beyond a multiple of 16 they begin."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments by name of an operation that are no tensors."""
    inner: tuple[Event, ...] = ()
    """Launches of a GEMM besides itself."""

    @property
    def inner_bytes(self) -> int:
        """Bytes of the tensors that the launches of `inner` are given, each once."""
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
        made = Event(name, launches=tuple(launches), shapes=shapes, layouts=layouts, options=options, inner=inner)
        self.events.append(made)
        return result


def _besides_mxfp8s_gemm(args: Any, kwargs: Any, result: Any) -> tuple[Event, ...]:
    """The launches of a blockwise GEMM through MXFP8 before torch's GEMM, which returns `result`."""
    launches: list[Launch] = []
    checked = mock.patch.object(blockwise_by_mxfp8, "_check_powers_of_two", return_value=None)
    gemm = mock.patch.object(blockwise_by_mxfp8, "by_decision", return_value=result)
    with checked, gemm, _as_on_gpu(), recording(launches):
        NAMESPACE.operations["scaled_mm"].implementation(torch.device("cpu"))(*args, **kwargs)
    return (Event("e8m0_scales", launches=tuple(launches)),)


def _runs_kernels(name: str) -> bool:
    """True for an operation of ours with kernels that is not a GEMM."""
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
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty_strided(tuple(map(int, x.shape)), tuple(map(int, x.stride())), dtype=x.dtype, device=x.device)


def launched(captured: Capture, gpu: Any = H200) -> Iterator[tuple[Report, list[Event]]]:
    """Each of the captured graphs with its launches."""
    for graph in captured.graphs:
        (generated,) = report(Capture([graph]), gpu=gpu)
        yield generated, _run(generated.code, [_empty_like(x) for x in graph[2]])


def _run(code: str, inputs: list[Any]) -> list[Event]:
    events: list[Event] = []

    def triton_kernel(name: str, source: str, device_str: str) -> Any:
        return types.SimpleNamespace(run=lambda *args, stream: events.append(Event(name)))

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


# -- its kernels, compiled for a GPU that is not there

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def sources(code: str) -> dict[str, str]:
    """Kernel name -> source, of every kernel in Inductor's generated code."""
    return dict(_KERNEL.findall(code))


def compile_config(kernel: Any, config: Any, capability: int = 90) -> Any:
    """Triton's compiled form of one configuration of Inductor's kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (attributes,) = kernel.triton_meta["configs"]
    names = kernel.fn.arg_names
    constants = {**kernel.triton_meta.get("constants", {}), **config.kwargs}
    signature = {**kernel.triton_meta["signature"], **dict.fromkeys(config.kwargs, "constexpr")}
    by_position = {(names.index(k),): v for k, v in constants.items()}
    ast = ASTSource(kernel.fn, signature, by_position, getattr(attributes, "attrs", attributes))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with fake_gpu():
        return triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
