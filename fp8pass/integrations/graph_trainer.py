"""FP8 in torchtitan's GraphTrainer, which traces a whole training step and owns the graph.

    from fp8pass.integrations.graph_trainer import register_fp8_pipeline

    register_fp8_pipeline("fp8", recipe="delayed", rules={"lm_head": None})

and `--compile.mode aot_fx_trace --compile.pass_pipeline fp8`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.errors import NotCompiledError, OptionError
from fp8pass.graph.gemms import is_scaled_gemm
from fp8pass.graph.traces import FLAG
from fp8pass.inputs import Needed
from fp8pass.options import CompileOptions
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.rewrite.verify_partitioned import prepare_checked
from fp8pass.runtime.cache_key import source_digest
from fp8pass.runtime.session import Part, Session
from fp8pass.scales.view import Fp8State
from fp8pass.tools.external_graphs import RewrittenGraph, rewritten_in
from lowering.inductor import prepare, register_lowerings

Pass = Callable[..., fx.GraphModule]

_PACKAGE = "torchtitan.experiments.graph_trainer"
ops = torch.ops.lowering

#: Passes of GraphTrainer's own list: ours comes behind the first of these that is there, and before the other.
_AFTER = ("deduplicate_fsdp_unshard_chains_pass", "canonicalize_graph_pass", "eliminate_dead_code_pass")
_MEMORY_POLICY = "tag_with_memory_policy_pass"
_REGIONAL = "regional_inductor_pass"
_FULL = "full_inductor_compilation_pass"


def register_fp8_pipeline(
    name: str = "fp8",
    recipe: Recipe | RecipeName = "delayed",
    *,
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    **options: Any,
) -> None:
    """Register GraphTrainer's own pipeline with the FP8 rewrite in it, and the hook that ends steps of delayed scaling.

    The rewrite stands behind the deduplication of FSDP's gathers and before the memory policy, which saves FP8 GEMMs. State
    enters the trace as non-persistent buffers of the model, `fp8_scale` and the like; a step ends before the next one begins.

    Args:
        name: its name for `--compile.pass_pipeline`.
        recipe: as in `fp8_compile`.
        rules: as in `fp8_compile`.
        options: `select`, `min_speedup` and `amax_reduction_group`, as in `fp8_compile`.

    Raises:
        RecipeError, RuleError, OptionError: as in `fp8_compile`.
        ImportError: torchtitan 0.3.0 or newer is not installed.
    """
    unknown = sorted(set(options) - {"select", "min_speedup", "amax_reduction_group"})
    if unknown:
        raise OptionError(f"the option {unknown[0]!r} is unknown here; use select, min_speedup or amax_reduction_group")
    given = CompileOptions(recipe=recipe, rules=rules, step="manual", backend="aot_eager", **options)
    registry = importlib.import_module(f"{_PACKAGE}.registry")
    before_step, passes = pipeline(given)
    registry.register_pre_train_step_hook(name)(before_step)
    registry.register_pass_pipeline(name)(passes)


def fp8_run(trainer: Any) -> Run:
    """The run that trains a GraphTrainer in FP8: `state` for checkpoints and, once a step has been traced, `rewritten`.

    Raises NotCompiledError before the trainer's first step, or if its pipeline is another one.
    """
    try:
        return _runs[trainer]
    except KeyError:
        raise NotCompiledError(
            "this trainer has run no step with a pipeline of register_fp8_pipeline; pass --compile.pass_pipeline fp8"
        ) from None


class Run:
    """One trainer's model in FP8."""

    def __init__(self, model: nn.Module, session: Session):
        self.rewritten: RewrittenGraph | None = None
        """The graph; None before the first step was traced."""
        self.state: Fp8State = Fp8State([Part(session)])
        """Scales and amax histories, for checkpoints."""
        self._model = model
        self._session = session
        self._usual: fx.GraphModule | None = None
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._names = []
        for given in (each for provider in session.providers for each in provider.inputs(device, Needed())):
            if hasattr(model, given.name):
                raise OptionError(f"the model has an attribute {given.name!r}, which is the name of a buffer of the FP8 state")
            model.register_buffer(given.name, torch.zeros(given.shape, dtype=given.dtype, device=device), persistent=False)
            self._names.append(given.name)

    def begin_step(self, traced: Any) -> None:
        """End the step that ran, and set the graph and the state of the next."""
        if self.rewritten is None:
            return
        self.state.step()
        self._bind()
        traced.gm = self.graph

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that the next call runs."""
        assert self.rewritten is not None
        assert self._usual is not None
        first = self.rewritten.first_step
        return first if first is not None and self.rewritten.is_first_step else self._usual

    def rewrite(self, traced: Any, gm: fx.GraphModule) -> fx.GraphModule:
        """The pass: `gm` in FP8."""
        names: list[str | None] = []
        places: dict[str, int] = {}
        for i, path in enumerate(traced.state_fqns):
            layout = traced.input_subclass_layouts.get(i)
            if path in self._names:
                places[path] = len(names)
            names += [None if path in self._names else path] * (1 if layout is None else layout.num_tensors)
        with unset_fake_temporarily():
            self.rewritten = rewritten_in(self._session, gm, names, places)
        return self.rewritten.graph

    def finish(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The last pass: keep what the others made of the graph; the first step runs another one."""
        self._usual = gm
        self._bind()
        return self.graph

    def _bind(self) -> None:
        """Let the model's buffers be the state."""
        assert self.rewritten is not None
        for name, tensor in zip(self.rewritten.state_names, self.rewritten.state_tensors(), strict=True):
            self._model._buffers[name] = tensor


_runs: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()


def pipeline(options: CompileOptions) -> tuple[Callable[[Any], None], Callable[..., list[Pass]]]:
    """A hook, which runs before a trainer traces its step, and GraphTrainer's default pipeline with the rewrite."""
    latest: weakref.ref[Any] | None = None

    def before_step(trainer: Any) -> None:
        """The hook. Raises OptionError for a trainer that would not run the pipeline, and so train in high precision."""
        nonlocal latest
        latest = weakref.ref(trainer)
        if trainer in _runs:
            _runs[trainer].begin_step(trainer._traced_step)
            return
        _check_runs_passes(trainer)
        if trainer._traced_step is not None:
            raise OptionError("this trainer has traced its step already; register the pipeline before its first step")
        (model,) = trainer.model_parts
        _runs[trainer] = Run(model, Session(model, options))

    def passes(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Pass]:
        """GraphTrainer's passes and ours. Raises OptionError for a graph that was compiled ahead, or without the hook."""
        if config.compile.precompile_artifact_dir:
            raise OptionError("a graph from --compile.precompile_artifact_dir is compiled already; leave it out for FP8")
        trainer = None if latest is None else latest()
        run = None if trainer is None else _runs.get(trainer)
        if run is None:
            raise OptionError("a step was traced before the hook had run; call GraphTrainer.train_step, which runs it")
        if config.compile.inductor_compilation == "full":  # Inductor then generates code for casts, and fuses them
            register_lowerings()
        own = importlib.import_module(f"{_PACKAGE}.passes")
        found: list[Pass] = own.construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
        first, last = functools.partial(fp8_pass, run=run, traced=traced), functools.partial(fp8_last_pass, run=run)
        return with_rewrite(found, first, last)

    return before_step, passes


def _check_runs_passes(trainer: Any) -> None:
    if trainer.parallel_dims.pp_enabled:
        raise OptionError(
            "pipeline parallelism runs no pass pipeline, so it would train in high precision; use other parallelism"
        )
    given = trainer.config.compile
    if not given.enable or given.mode != "aot_fx_trace" or not given.enable_passes:
        options = f"enable={given.enable}, mode={given.mode!r} and enable_passes={given.enable_passes}"
        raise OptionError(
            f"with {options} no pass pipeline runs, so training would be in high precision; pass --compile.enable"
            f" --compile.mode aot_fx_trace --compile.enable_passes"
        )


def with_rewrite(passes: list[Pass], rewrite: Pass, last: Pass) -> list[Pass]:
    """GraphTrainer's passes, with the rewrite behind its clean-up, FP8 GEMMs saved by its memory policy, and our last pass.
    Regional Inductor runs our operations as they are, so that they share launches before it."""
    found = list(passes)
    if _REGIONAL in (names := [_name(p) for p in found]):
        found.insert(names.index(_REGIONAL), share_launches_pass)
    names = [_name(p) for p in found]
    after = next((name for name in _AFTER if name in names), None)
    if _FULL in names:
        found[names.index(_FULL)] = functools.partial(prepared_inductor_pass, inductor=found[names.index(_FULL)])
    if _MEMORY_POLICY in names:
        found.insert(names.index(_MEMORY_POLICY) + 1, save_fp8_gemms_pass)
    found.insert(0 if after is None else names.index(after) + 1, rewrite)
    return [*found, last]


def _name(graph_pass: Pass) -> str:
    inner: Any = graph_pass.func if isinstance(graph_pass, functools.partial) else graph_pass
    return str(inner.__name__)


def fp8_pass(gm: fx.GraphModule, example_inputs: Any = None, *, run: Run, traced: Any) -> fx.GraphModule:
    """Rewrite the traced step."""
    return run.rewrite(traced, gm)


def save_fp8_gemms_pass(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
    """Save what FP8 GEMMs of the forward and the load of the scales return, as the memory policy saves other GEMMs."""
    for node in gm.graph.nodes:
        is_kept = is_scaled_gemm(node) or node.target is torch.ops.lowering.load_scales.default
        if is_kept and not node.meta.get(FLAG):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm


def share_launches_pass(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
    """Join operations that run as they are, as Inductor's lowerings do: scales are made by the second launch of their amax,
    and partial amaxes are recorded without a launch that finishes each. The results are the same bit for bit."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.scales_from_amax.default):
        _make_scales_with_amax(node)
    for node in gm.graph.find_nodes(op="call_function", target=ops.record_amax.default):
        _record_parts(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _make_scales_with_amax(node: fx.Node) -> None:
    """Replace an amax and the scales made of it by `multi_scales`."""
    amax, options = node.args[0], dict(node.kwargs)
    if options.pop("inverse", None) is not None or not isinstance(amax, fx.Node) or list(amax.users) != [node]:
        return
    if amax.target is not ops.amaxes.default or amax.kwargs.get("per_matrix"):
        return
    tensors: Any = amax.args[0]
    graph = node.graph
    with graph.inserting_before(amax):
        scales = _called(graph, ops.multi_scales.default, (tensors, node.args[1]), options, like=node)
    for result in list(node.users):
        with graph.inserting_before(result):
            vector = _called(graph, operator.getitem, (scales, result.args[1]), {}, like=result)
            found = _called(graph, torch.ops.aten.select.int, (vector, 0, 0), {}, like=result) if len(tensors) == 1 else vector
        result.replace_all_uses_with(found)
        graph.erase_node(result)
    graph.erase_node(node)
    graph.erase_node(amax)


def _record_parts(record: fx.Node) -> None:
    """Let casts of one matrix hand their partial amaxes to the operation that records them."""
    observed: Any = record.args[2]
    index: Any = record.kwargs.get("observed_index") or [-1] * len(observed)
    if any(i < 0 and x.meta["val"].dim() for x, i in zip(observed, index, strict=True)):
        return
    casts = [x.args[0] for x in observed if x.target is operator.getitem and list(x.users) == [record]]
    for cast in casts:
        if cast.target is ops.cast.default and len(cast.args[0]) == 1 and cast.args[0][0].meta["val"].dim() == 2:
            cast.kwargs = {**cast.kwargs, "in_parts": True}
            cast.meta["val"] = _value(cast)
            amax = max(cast.users, key=lambda user: user.args[1])
            amax.meta["val"] = _value(amax)
            record.kwargs = {**record.kwargs, "in_parts": True}


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    node.meta["val"] = _value(node)
    return node


def _value(node: fx.Node) -> Any:
    """The fake result of a node, by those of its arguments."""
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    with detect_fake_mode(fakes) or contextlib.nullcontext():
        return target(*args, **kwargs)


def prepared_inductor_pass(gm: fx.GraphModule, example_inputs: Any = None, *, inductor: Pass) -> fx.GraphModule:
    """Run GraphTrainer's full Inductor, which traces the graph anew, and prepare what comes of it as `fp8_compile` does."""
    given: Any = inductor_config.post_grad_custom_pre_pass
    earlier = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    with inductor_config.patch(post_grad_custom_pre_pass=_Prepare(earlier)):
        return inductor(gm, example_inputs)


class _Prepare(CustomGraphPass):
    """Inductor's pass before its own ones behind autograd: those that were configured, then `prepare`."""

    def __init__(self, earlier: list[Any]):
        self.earlier = earlier

    def __call__(self, graph: fx.Graph) -> None:
        for earlier in self.earlier:
            earlier(graph)
        prepare_checked(graph, prepare)

    def uuid(self) -> Any:
        """Part of Inductor's cache key: our sources, and the configured passes; None, and so no cache, where one has no key."""
        keys = [p.uuid() if hasattr(p, "uuid") else None for p in self.earlier]
        return None if None in keys else (source_digest(), keys)


def fp8_last_pass(gm: fx.GraphModule, example_inputs: Any = None, *, run: Run) -> fx.GraphModule:
    """Hand out the graph of the first step."""
    return run.finish(gm)
