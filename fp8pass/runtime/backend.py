"""The torch.compile backend: compiles Dynamo's graphs with the pass inside, and runs them with the right state."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import pathlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8pass.errors import OptionError, UnsupportedDeviceError
from fp8pass.graph.origin import input_index, is_subgraph, is_tangent
from fp8pass.graph.sites import GraphContext, GraphInput, Surroundings
from fp8pass.graph.snapshot import Snapshot
from fp8pass.inputs import USUAL, CapacityExceeded, ExtraInput, InputsMissing, Needed
from fp8pass.options import NO_CPP_WRAPPER, CompileOptions
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.runner import rewrite
from fp8pass.rewrite.verify_prepared import prepare_checked
from fp8pass.runtime import frames
from fp8pass.runtime.binding import Binder
from fp8pass.runtime.forms import Forms
from fp8pass.runtime.instances import Placement, describe_inputs, real_inputs
from fp8pass.runtime.placeholders import copied, find_extra_inputs, with_extra_inputs
from fp8pass.runtime.refusals import refuse_nan_asserts, refusing_batches
from fp8pass.runtime.regions import without_regions
from fp8pass.runtime.session import CompiledGraph, Session, running_session
from fp8pass.runtime.settings import Form
from fp8pass.runtime.surroundings import surroundings_of
from fp8pass.scales.reduction import reduction_covers
from lowering.hardware import FP8_CAPABILITY, cuda_capability

log = logging.getLogger(__name__)


class JointPass(CustomGraphPass):
    """The pass on one graph, as Inductor's `joint_custom_pre_pass` and as a step before the partitioner."""

    def __init__(
        self,
        options: CompileOptions,
        compiled: CompiledGraph,
        placement: Placement,
        variants: frozenset[str] = USUAL,
        *,
        generates_code: bool = True,
        may_ask: bool = False,
    ):
        """may_ask: whether the pass may raise InputsMissing."""
        self.options = options
        self.generates_code = generates_code
        self.may_ask = may_ask
        self.variants = variants
        self.compiled = compiled
        self.placement = placement
        self.earlier = _earlier_passes(options.patches if generates_code else {})

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in self.earlier:
            earlier(graph)
        if is_subgraph(graph):  # Inductor brings those, too; discovery in the graph around it gives their matmuls a row each
            return
        compiled = self.compiled
        shares_scales = functools.partial(reduction_covers, self.options.amax_reduction_group)
        context = GraphContext(compiled.inputs, self.placement.name_module, compiled.surroundings, shares_scales)
        trains = any(is_tangent(n) for n in graph.find_nodes(op="placeholder"))
        inputs = find_extra_inputs(graph, compiled.extra_start, compiled.extra_inputs, input_index)
        options = Options(
            trains=trains,
            contiguous_outputs=not self.generates_code,
            given=self.options,
            watch=compiled.form.watch,
            variants=self.variants,
            may_ask=self.may_ask,
        )
        compiled.rewrite = rewrite(graph, context, compiled.form.rules, inputs, options)
        compiled.trains = trains
        if not trains:
            compiled.forward = compiled.rewrite.after

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: our sources, the rules, and what stood in this place before."""
        earlier = [p.uuid() if hasattr(p, "uuid") else None for p in self.earlier]
        ours = (source_digest(), self.options, self.compiled.form, sorted(self.variants))
        return hashlib.sha256(repr((ours, earlier)).encode()).digest()


def _has_break(gm: fx.GraphModule) -> bool:
    """Whether eager code runs before or after a graph in its call, because Dynamo ends the graph before its frame ends, or goes
    on with it behind a break."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    reason, code = getattr(gm, "compile_subgraph_reason", None), _traced_code()
    is_behind = code is not None and code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    return is_behind or (reason is not None and bool(reason.graph_break))


def _traced_code() -> CodeType | None:
    """Of the frame whose graph Dynamo hands over, by the way to it or at a call."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    return None if translator is None else translator.f_code


@functools.cache
def source_digest() -> str:
    """Digest of every source file of both packages: a changed pass or lowering never meets a stale cache."""
    import fp8pass
    import lowering

    digest = hashlib.sha256()
    for package in (fp8pass, lowering):
        for file in sorted(pathlib.Path(package.__path__[0]).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class Backend:
    """What `torch.compile` calls with each graph of Dynamo's.

    Backends with equal options are equal: then Dynamo compiles a block once for all layers that were compiled one by one,
    and does not run into its recompile limit, beyond which models run eagerly. The session of a call is the one that
    is running.
    """

    compiler_name = "fp8pass"

    def __init__(self, options: CompileOptions, find_session: Callable[[], Session] = running_session):
        self.options = options
        self._find_session = find_session
        self._counter = itertools.count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        device = _device_of(example_inputs)
        check_device(device)
        session = self._find_session()
        code, has_break = _traced_code(), _has_break(gm)
        reason = getattr(gm, "compile_subgraph_reason", None)
        frames.note_graph(code, reason.reason if reason is not None and reason.graph_break else None)
        if has_break:
            session.weights.note_break()
        surroundings = surroundings_of(gm, session.root())
        gm = without_regions(gm)
        captured = _Captured.take(f"graph_{next(self._counter)}", gm, example_inputs, device, session, surroundings)
        binder = self._compile(captured, session.form, Counter(), (gm, example_inputs))
        return Forms(binder, functools.partial(self._compile, captured), self._find_session, has_break=has_break).run

    def reset(self) -> None:
        """Forget recorded CUDA graphs: what `torch._dynamo.reset()` asks of the backends it has used."""
        from torch._inductor import config

        if self.options.backend == "inductor" and self.options.patches.get("triton.cudagraphs", config.triton.cudagraphs):
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()

    def _compile(
        self,
        captured: _Captured,
        form: Form,
        num_calls: Counter[frozenset[str]],
        given: tuple[fx.GraphModule, list[Any]] | None = None,
    ) -> Binder:
        """A graph in one form. given: what Dynamo handed over, while it waits for the result."""
        session, needed = self._find_session(), Needed()
        while True:
            extra = tuple(tuple(provider.inputs(captured.device, needed)) for provider in session.providers_of(form))
            compiled = captured.as_graph(form, extra)
            compile_variant = functools.partial(self._compile_again, captured, compiled)
            may_ask = needed.inputs is None
            try:
                if given is None:
                    function = compile_variant(USUAL, True, compiled, may_ask)
                else:
                    module, examples = with_extra_inputs(*given, compiled.extra_inputs, captured.device)
                    function = self._compile_inner(module, examples, compiled, captured, USUAL, True, may_ask)
            except CapacityExceeded as exceeded:
                log.info("%s; compiling again with room for them", exceeded)
                needed = dataclasses.replace(needed, entries=exceeded.needed)
            except InputsMissing as missing:
                log.info("%s; compiling again with them as inputs", missing)
                needed = dataclasses.replace(needed, inputs=missing.inputs)
            else:
                return Binder(compiled, function, compile_variant, num_calls)

    def _compile_again(
        self,
        captured: _Captured,
        compiled: CompiledGraph,
        variants: frozenset[str],
        generates_code: bool,
        own: CompiledGraph | None = None,
        may_ask: bool = False,
    ) -> Callable[..., Any]:
        """A graph that Dynamo has left behind, or a variant of it. own: what keeps the record, if not one of the variant."""
        if own is None:
            own = captured.as_graph(compiled.form, compiled.extra, "_".join((compiled.name, *sorted(variants))))
        module, examples = with_extra_inputs(captured.module, captured.traced, compiled.extra_inputs, captured.device)
        inputs = [_with_its_number(x, captured.fake_mode) for x in examples]
        with tracing(TracingContext(captured.fake_mode)) if captured.context is not None else nullcontext():
            return self._compile_inner(module, inputs, own, captured, variants, generates_code, may_ask)

    def _compile_inner(
        self,
        module: fx.GraphModule,
        examples: list[Any],
        compiled: CompiledGraph,
        captured: _Captured,
        variants: frozenset[str],
        generates_code: bool,
        may_ask: bool = False,
    ) -> Callable[..., Any]:
        generates_code &= self.options.backend == "inductor"
        options, placement = self.options, captured.placement
        joint_pass = JointPass(options, compiled, placement, variants, generates_code=generates_code, may_ask=may_ask)
        compile_inner = compile_inductor if generates_code else compile_aot_eager
        # The pass must see every graph, also those that a cache knows: inspection and state need its plan.
        # Inductor's own cache of generated code stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            function: Callable[..., Any] = compile_inner(module, examples, joint_pass)
        return function


@dataclasses.dataclass(frozen=True, eq=False)
class _Captured:
    """One graph of Dynamo's, kept to be compiled again: in another form, or as a variant. It keeps no Parameter alive."""

    name: str
    module: fx.GraphModule
    """A copy without extra inputs, which compiling does not change."""
    traced: list[Any]
    """The fake tensors that Dynamo traced with: they know which sizes are dynamic."""
    inputs: tuple[GraphInput, ...]
    placement: Placement
    surroundings: Surroundings
    device: torch.device
    fake_mode: FakeTensorMode | None
    code: CodeType | None
    """Of the frame that Dynamo traced."""
    is_whole: bool
    """Whether the graph is all of that frame."""
    context: weakref.ref[TracingContext] | None
    """Of Dynamo's compilation."""

    @classmethod
    def take(
        cls,
        name: str,
        gm: fx.GraphModule,
        example_inputs: list[Any],
        device: torch.device,
        session: Session,
        surroundings: Surroundings,
    ) -> _Captured:
        """Of what Dynamo hands over."""
        code, is_whole = _traced_code(), not _has_break(gm)
        gathers = session.options.fsdp_gather is not None
        inputs = describe_inputs(gm.graph, session.root(), gathers, code if is_whole else None)
        placement = session.names.place(inputs, real_inputs(gm.graph))
        placeholders = gm.graph.find_nodes(op="placeholder")
        traced = [n.meta.get("example_value", example) for n, example in zip(placeholders, example_inputs, strict=True)]
        context = TracingContext.try_get()
        fake_mode = None if context is None else context.fake_mode
        return cls(
            name,
            copied(gm),
            traced,
            inputs,
            placement,
            surroundings,
            device,
            fake_mode,
            code,
            is_whole,
            None if context is None else weakref.ref(context),
        )

    def forget_parameters(self) -> None:
        """Dynamo is done with the graph, so nothing asks any more which of its fake tensors stands for which tensor. What says
        so are weak references to Parameters, which torch itself clears behind its own backends: NOTE [no weak references to
        Parameters] in `fp8pass.weights.places`."""
        context = None if self.context is None else self.context()
        if context is not None:
            context.tensor_to_context.clear()
        for mode in {self.fake_mode, *(x.fake_mode for x in self.traced if isinstance(x, FakeTensor))}:
            if mode is None:
                continue
            describer = mode.fake_tensor_converter.meta_converter.describer
            describer.lookup_tensor.clear()
            describer.lookup_storage.clear()

    def as_graph(self, form: Form, extra: tuple[tuple[ExtraInput, ...], ...], name: str = "") -> CompiledGraph:
        """The record of a graph that is about to be compiled."""
        start, around = len(self.traced), self.surroundings
        name = name or self.name
        graph = CompiledGraph(name, form, self.inputs, self, start, extra, self.device, around, code=self.code)
        graph.is_whole = self.is_whole
        graph.forget_parameters = self.forget_parameters
        return graph


def _with_its_number(x: Any, fake_mode: FakeTensorMode | None) -> Any:
    """A Python float that changes comes as a tensor, whose fake knows the symbol of its number. AOTAutograd makes a fake of its
    own mode of another's, which knows none: here is one that does. Everything else stays as it is."""
    if fake_mode is None or not isinstance(x, FakeTensor) or x.dim() or x.item_memo is None:
        return x
    own = fake_mode.from_tensor(x, static_shapes=True)
    own.item_memo = x.item_memo
    return own


def _earlier_passes(patches: dict[str, Any]) -> list[Any]:
    from torch._inductor import config

    given = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def compile_inductor(gm: fx.GraphModule, examples: Sequence[Any], joint_pass: JointPass) -> Any:
    """Compile with Inductor; keeps snapshots of the partitioned graphs for inspection."""
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config as inductor_config

    from lowering.inductor import prepare, register_lowerings

    patches = joint_pass.options.patches
    if patches.get("cpp_wrapper", inductor_config.cpp_wrapper):
        raise OptionError(
            f"torch._inductor.config.cpp_wrapper is True: {NO_CPP_WRAPPER}; set it to False, or TORCHINDUCTOR_CPP_WRAPPER=0"
        )
    register_lowerings()

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        prepare_checked(graph.graph, prepare)
        refuse_nan_asserts(graph.graph, patches)
        compiled = inductor.compile_fx_inner(graph, inputs, **kwargs)
        if kwargs.get("is_backward") and hasattr(compiled, "current_callable"):
            compiled.current_callable = refusing_batches(compiled.current_callable)
        return compiled

    given = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
    partitioner = KeepPartition(joint_pass.compiled, given)
    all_patches = {**patches, "joint_custom_pre_pass": joint_pass, "custom_partitioner_fn": partitioner}
    return inductor.compile_fx(gm, list(examples), inner_compile=inner_compile, config_patches=all_patches)


class KeepPartition(CustomPartitionerFn):
    """Inductor's partitioner; keeps snapshots of what it makes. The backward is compiled at its first call, maybe steps later,
    and inspection shows it before."""

    def __init__(self, compiled: CompiledGraph | None, given: CustomPartitionerFn | None):
        self.compiled = compiled
        self.given = given

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        partition: Any = self.given or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        if self.compiled is not None and not is_subgraph(gm.graph):
            self.compiled.forward, self.compiled.backward = Snapshot.take(forward.graph), Snapshot.take(backward.graph)
        return forward, backward

    def uuid(self) -> Any:
        """Part of Inductor's cache key: it partitions as the partitioner does that it calls."""
        return b"min cut" if self.given is None else self.given.uuid()

    def __reduce__(self) -> Any:
        """Pickled with the rest of Inductor's settings, for the cache key: without the graph that it keeps snapshots for."""
        return KeepPartition, (None, self.given)


def compile_aot_eager(gm: fx.GraphModule, examples: Sequence[Any], joint_pass: JointPass) -> Any:
    """The same rewrite without code generation, with torch's own "aot_eager" settings."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    compiled = joint_pass.compiled

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint_pass(joint.graph)
        joint.recompile()
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        compiled.forward, compiled.backward = Snapshot.take(forward.graph), Snapshot.take(backward.graph)
        return forward, backward

    def inference(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint_pass(graph.graph)
        graph.recompile()
        return boxed_nop(graph, inputs)

    def backward(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return refusing_batches(boxed_nop(graph, inputs))

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, list(examples))


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))


def check_device(device: torch.device) -> None:
    """Raise UnsupportedDeviceError for a GPU without FP8 tensor cores; other devices compute the same numbers by emulation."""
    capability = cuda_capability(device)
    if capability is not None and capability < FP8_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
        raise UnsupportedDeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {has}; FP8 tensor cores need {needs} (Ada, Hopper or"
            f" newer). To emulate FP8, move model and inputs to the CPU"
        )
