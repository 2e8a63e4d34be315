"""The torch.compile backend: compiles Dynamo's graphs with the pass inside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.output_code import OutputCode
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen

from fp8pass.errors import OptionError, UnsupportedDeviceError, UnsupportedError
from fp8pass.graph.gemms import GraphContext
from fp8pass.graph.origin import input_index, is_subgraph, is_tangent
from fp8pass.graph.traces import Snapshot
from fp8pass.inputs import STATISTICS, USUAL
from fp8pass.options import NO_CPP_WRAPPER, CompileOptions, SavedActivations, refuse_torch_pass
from fp8pass.recipes import DelayedScaling
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.runner import rewrite, save_activations
from fp8pass.rewrite.verify_partitioned import prepare_checked
from fp8pass.runtime import cache
from fp8pass.runtime.cache_key import digest_of, earlier_passes, key_of, lowered_by
from fp8pass.runtime.dynamo_graphs import find_extra_inputs, traced_code
from fp8pass.runtime.eager import function_name, note_graph
from fp8pass.runtime.frame import DynamoGraph
from fp8pass.runtime.session import CompiledGraph, Session, running_session
from fp8pass.runtime.words import Uncacheable
from fp8pass.scales.reduction import reduction_covers
from fp8pass.schemes.emitter import StateKey
from lowering.formats import FP8_MAX
from lowering.hardware import FP8_CAPABILITY, cuda_capability


@dataclasses.dataclass(eq=False, repr=False)
class JointPass(CustomGraphPass):
    """The pass on one graph, as Inductor's `joint_custom_pre_pass` and as a step before the partitioner."""

    options: CompileOptions
    compiled: CompiledGraph
    variants: frozenset[str] = USUAL
    generates_code: bool = True
    may_ask: bool = False  # True if the pass may raise InputsMissing.

    def __post_init__(self) -> None:
        self.earlier = earlier_passes(self.options.patches if self.generates_code else {})

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in self.earlier:
            earlier(graph)
        if is_subgraph(graph):  # Inductor brings those, too; discovery in the graph around it gives their matmuls a row each
            return
        compiled = self.compiled
        shares_scales = functools.partial(reduction_covers, self.options.amax_reduction_group)
        context = GraphContext(compiled.inputs, compiled.placement.name_module, compiled.surroundings, shares_scales)
        trains = any(is_tangent(n) for n in graph.find_nodes(op="placeholder"))
        inputs = find_extra_inputs(graph, compiled.extra_start, compiled.extra_inputs, input_index)
        options = Options(
            trains=trains,
            in_training=compiled.in_training,
            contiguous_outputs=not self.generates_code,
            given=self.options,
            watch=compiled.key.watch,
            variants=self.variants,
            may_ask=self.may_ask,
        )
        compiled.rewrite = rewrite(graph, context, compiled.key.rules, inputs, options)
        compiled.trains = trains
        if not trains:
            compiled.forward = compiled.rewrite.after

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: our sources, what lowerings read besides the graph, and what stood here before."""
        earlier = [p.uuid() if hasattr(p, "uuid") else None for p in self.earlier]
        return hashlib.sha256(repr((lowered_by(), earlier)).encode()).digest()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection: nodes and fake tensors live until a graph is compiled, and each search visits all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _may_begin_with_variant(graph: CompiledGraph) -> bool:
    """True if the first call of training may run a variant of a graph, `FIRST_STEP`, and no later one the graph itself."""
    keys = (given.key for given in graph.extra_inputs)
    recipes = (key.recipe for key in keys if isinstance(key, StateKey))
    return any(isinstance(recipe, DelayedScaling) and recipe.initial_scale == "current" for recipe in recipes)


def _has_break(gm: fx.GraphModule) -> bool:
    """True if eager code runs before or after a graph in its call, because Dynamo ends the graph before its frame ends, or goes
    on with it behind a break."""
    reason, code = getattr(gm, "compile_subgraph_reason", None), traced_code()
    is_behind = code is not None and function_name(code.co_name) != code.co_name
    return is_behind or (reason is not None and bool(reason.graph_break))


class Backend:
    """The torch.compile backend: a callable that takes each graph of Dynamo's. Backends with equal options are equal: then
    Dynamo compiles a block once for all layers that were compiled one by one, and does not run into its recompile limit, beyond
    which models run eagerly. The session of a call is the one that is running."""

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
        device = device_of(example_inputs)
        rules = self.options.first_rules, *(rules for _, rules in self.options.later_rules)
        if any(each.has_gemms for each in rules):
            check_device(device)
        code, has_break = traced_code(), _has_break(gm)
        reason = getattr(gm, "compile_subgraph_reason", None)
        note_graph(code, reason if reason is not None and reason.graph_break else None)
        if has_break:
            self._find_session().weights.note_break()
        name = f"graph_{next(self._counter)}"
        compilers = (self._compile, self._trace)
        return DynamoGraph(name, gm, example_inputs, device, code, has_break, self._find_session, *compilers).run

    def reset(self) -> None:
        """Forget recorded CUDA graphs, when `torch._dynamo.reset()` resets the backends that it has used."""
        from torch._inductor import config

        if self.options.backend == "inductor" and self.options.patches.get("triton.cudagraphs", config.triton.cudagraphs):
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()

    @without_collections()
    def _compile(
        self,
        module: fx.GraphModule,
        examples: list[Any],
        graph: CompiledGraph,
        variants: frozenset[str],
        generates_code: bool,
        may_ask: bool,
    ) -> Callable[..., Any]:
        """Compile one graph, with the pass inside; `graph` is the record of it."""
        generates_code &= self.options.backend == "inductor"
        joint_pass = JointPass(self.options, graph, variants, generates_code=generates_code, may_ask=may_ask)
        way = compile_inductor if generates_code else compile_aot_eager
        try:
            if self.options.backend != "inductor":
                raise Uncacheable("torch caches generated code only")
            key = digest_of([key_of(graph, self.options, variants, may_ask), generates_code])
        except Uncacheable as reason:
            graph.cache = f"bypassed: {reason}"
            with cache.without():
                return way(module, examples, joint_pass)
        if not generates_code:
            entries = cache.whole_entries()
        elif not variants and _may_begin_with_variant(graph):
            entries = cache.at_once()
        else:
            entries = contextlib.nullcontext()
        with entries:
            function = cache.compiled(graph, module, key, functools.partial(way, module, examples, joint_pass))
        later = generates_code and graph.cache == cache.HIT and graph.trains
        return refusing_batches_later(function) if later else function

    def _trace(self, module: fx.GraphModule, examples: list[Any], graph: CompiledGraph) -> None:
        """Rewrite and partition a graph as `_compile` does, without generating code, once InputsMissing has been settled."""
        with cache.without():
            compile_inductor(module, examples, JointPass(self.options, graph), generates_code=False)


def compile_inductor(
    gm: fx.GraphModule, examples: Sequence[Any], joint_pass: JointPass, key: str = "", generates_code: bool = True
) -> Any:
    """Compile with Inductor; keeps snapshots of the partitioned graphs for inspection. key: that of the graph in AOTAutograd's
    cache. generates_code: False for the snapshots alone."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config as inductor_config

    from lowering.inductor import prepare, register_lowerings

    patches = joint_pass.options.patches
    if patches.get("cpp_wrapper", inductor_config.cpp_wrapper):
        raise OptionError(
            f"torch._inductor.config.cpp_wrapper is True: {NO_CPP_WRAPPER}; set it to False, or TORCHINDUCTOR_CPP_WRAPPER=0"
        )

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not generates_code:
            return boxed_nop(graph, list(inputs))
        if kwargs.get("is_backward") and functorch_config.force_non_lazy_backward_lowering:
            _keep_saved_tensors()
        register_lowerings()
        prepare_checked(graph.graph, prepare)
        refuse_nan_asserts(graph.graph, patches)
        if key and not kwargs.get("is_backward"):
            cache.attach(joint_pass.compiled, key)
        with without_collections():
            compiled = inductor.compile_fx_inner(graph, inputs, **kwargs)
        if kwargs.get("is_backward") and hasattr(compiled, "current_callable"):
            compiled.current_callable = refusing_batches(compiled.current_callable)
        return compiled

    given = patches.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
    partitioner = KeepPartition(joint_pass.compiled, given, joint_pass.options.saved_activations)
    all_patches = {**patches, "joint_custom_pre_pass": joint_pass, "custom_partitioner_fn": partitioner}
    return inductor.compile_fx(gm, list(examples), inner_compile=inner_compile, config_patches=all_patches)


def _keep_saved_tensors() -> None:
    """Let backwards keep the tensors that the graph saves (`retain_graph`): nothing is written over them (`donated_buffer`).
    Torch decides by the first backward, which a graph that is compiled at once has not seen."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


class KeepPartition(CustomPartitionerFn):
    """The given partitioner or torch's own, which saves in FP8 what may be and keeps snapshots of both graphs. The backward is
    compiled at its first call, maybe steps later, and inspection shows it before."""

    def __init__(
        self, compiled: CompiledGraph | None, given: CustomPartitionerFn | None, saved_activations: SavedActivations | None
    ):
        self.compiled = compiled
        self.given = given
        self.saved_activations = saved_activations

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        partition: Any = self.given or min_cut_rematerialization_partition
        forward, backward = partition(gm, joint_inputs, **kwargs)
        compiled = self.compiled
        if compiled is None or is_subgraph(gm.graph):
            return forward, backward
        if self.saved_activations is not None and compiled.rewrite is not None:  # which a graph without operations has not
            refuse_torch_pass({})
            context = GraphContext(compiled.inputs, compiled.placement.name_module)
            inputs = find_extra_inputs(forward.graph, compiled.extra_start, compiled.extra_inputs, input_index)
            statistics = None if compiled.key.watch is None else inputs.get(STATISTICS[0])
            graphs, num_outputs, rules = (forward.graph, backward.graph), kwargs["num_fwd_outputs"], compiled.key.rules
            compiled.rewrite = save_activations(*graphs, num_outputs, rules, context, compiled.rewrite, statistics)
            forward.recompile()
            backward.recompile()
        compiled.forward, compiled.backward = Snapshot.take(forward.graph), Snapshot.take(backward.graph)
        return forward, backward

    def uuid(self) -> Any:
        """Part of Inductor's cache key: it partitions as the partitioner does that it calls. What is saved in FP8 is a part of
        the key already, by the options and rules of the joint pass."""
        return b"min cut" if self.given is None else self.given.uuid()

    def __reduce__(self) -> Any:
        """Pickled with the rest of Inductor's settings, for the cache key: without the graph that it keeps snapshots for."""
        return KeepPartition, (None, self.given, self.saved_activations)


def compile_aot_eager(gm: fx.GraphModule, examples: Sequence[Any], joint_pass: JointPass, key: str = "") -> Any:
    """Compile without code generation, with torch's own "aot_eager" settings. key: that of the graph in AOTAutograd's cache."""
    from torch._dynamo.backends.common import aot_autograd

    partitioner = KeepPartition(joint_pass.compiled, None, joint_pass.options.saved_activations)

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint_pass(joint.graph)
        joint.recompile()
        return partitioner(joint, inputs, **kwargs)

    def forward(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> EagerCode:
        if key:
            cache.attach(joint_pass.compiled, key)
        return EagerCode(graph)

    def inference(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> EagerCode:
        joint_pass(graph.graph)
        return forward(graph, inputs)

    def backward(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> EagerCode:
        _keep_saved_tensors()
        return EagerCode(graph, is_backward=True)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, list(examples))


def device_of(inputs: Sequence[Any]) -> torch.device:
    """The device of a graph with these inputs: the first that is no CPU, if there is one."""
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
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


# -- features of torch that graphs with FP8 operations cannot have


def refusing_batches(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled backward that raises UnsupportedError under vmap. run: takes its arguments as a list, which it may empty."""

    @functools.wraps(run)
    def checked(args: list[Any]) -> Any:
        refuse_batches(args)
        return run(args)

    checked._boxed_call = True  # type: ignore[attr-defined]
    return checked


def refusing_batches_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that came from a cache, whose backward raises UnsupportedError under vmap. Torch has made the backward:
    its class is taken from the first result that has one."""
    is_done = False

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal is_done
        result = function(*args)
        if not is_done:
            is_done = _refuse_batches_in_backward_of(result)
        return result

    return call


def _refuse_batches_in_backward_of(result: Any) -> bool:
    """Let the compiled backward that a result comes from refuse batches. Returns whether there is one."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    nodes = [out.grad_fn for out in outputs if isinstance(out, torch.Tensor) and out.grad_fn is not None]
    nodes += [before for node in nodes for before, _ in node.next_functions if before is not None]  # of views
    for node in nodes:
        compiled = getattr(type(node), "_forward_cls", None)
        run = getattr(compiled, "_backward_impl", None)
        if compiled is None or run is None:
            continue

        def checked(context: Any, args: list[Any], run: Callable[..., Any] = run) -> Any:
            refuse_batches(args)
            return run(context, args)

        compiled._backward_impl = staticmethod(checked)
        return True
    return False


def refuse_nan_asserts(graph: fx.Graph, patches: dict[str, Any]) -> None:
    """Raise UnsupportedError for a graph with FP8 values whose options have Inductor assert that nothing is NaN or inf."""
    from torch._inductor import config

    if not patches.get("nan_asserts", config.nan_asserts):
        return
    held = next((n for n in graph.nodes if getattr(n.meta.get("val"), "dtype", None) in FP8_MAX), None)
    if held is not None:
        raise UnsupportedError(
            f"Inductor's option nan_asserts checks every tensor for inf, and torch has no isinf for {held.meta['val'].dtype}:"
            f" leave nan_asserts off; torch.autograd.set_detect_anomaly(True) and fp8pass.monitor(compiled) find NaN and inf"
        )


# -- partitioned graphs that run as they are, without generated code, in a form that AOTAutograd's cache keeps whole


@dataclasses.dataclass
class EagerCode(OutputCode):
    """A forward, a backward or an inference graph, called with a list of its arguments, which it may empty."""

    graph: fx.GraphModule | None
    is_backward: bool = False
    stored: bytes | None = None  # The graph in an entry of the cache.

    def __post_init__(self) -> None:
        self._boxed_call = True
        self._take_lists()

    def _take_lists(self) -> None:
        assert self.graph is not None
        self.graph.graph.set_codegen(_BoxedCodeGen())
        self.graph.recompile()

    def __call__(self, inputs: Any) -> Any:
        assert self.graph is not None
        if self.is_backward:
            refuse_batches(inputs)
        return self.graph.forward(inputs)

    def prepare_for_serialization(self) -> None:
        """Store the graph. Torch calls it on a copy."""
        assert self.graph is not None
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.graph.graph, {}))
        for node in copy.nodes:
            node.meta = {}
        try:
            self.stored = GraphPickler.dumps(fx.GraphModule(self.graph, copy), PicklerOptions(ops_filter=None))
        except Exception as error:
            raise BypassAOTAutogradCache(f"a graph without code cannot be pickled: {error}") from error
        self.graph = None

    def post_compile(self, *args: Any, **options: Any) -> None:
        """Restore the graph, where it comes from the cache."""
        if self.graph is None:
            assert self.stored is not None
            loaded = GraphPickler.loads(self.stored, FakeTensorMode(shape_env=ShapeEnv()))
            assert isinstance(loaded, fx.GraphModule)
            self.graph, self.stored = loaded, None
            self._take_lists()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing was generated."""


def refuse_batches(args: Iterable[Any]) -> None:
    """Raise UnsupportedError where a gradient is a batch of gradients, under vmap."""
    functorch = torch._C._functorch
    is_batch = getattr(functorch, "is_legacy_batchedtensor", functorch.is_batchedtensor)
    if any(type(a) is torch.Tensor and is_batch(a) for a in args):
        raise UnsupportedError(
            "a compiled backward cannot run for a batch of gradients at once, as torch.autograd.grad(is_grads_batched=True)"
            " and torch.autograd.functional.jacobian(vectorize=True) ask for it. Call the compiled model and"
            " torch.autograd.grad once per gradient, or use the model that was given to fp8_compile"
        )
