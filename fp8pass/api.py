"""The public functions that take a model or a graph, or what `fp8_compile` made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fp8pass.errors import ExportError, NotCompiledError, OptionError, preview
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.recipes.recipe import is_int

if TYPE_CHECKING:  # NOTE [a lean import]: what compiles is imported when it is first needed; with it come Dynamo and Triton
    import os

    import torch
    import torch.distributed as dist
    from torch import fx

    from fp8pass.cost import Device
    from fp8pass.options import BackendName, FsdpGather, SavedActivations, StepMode, WeightCopies
    from fp8pass.recipes.engines import Engine
    from fp8pass.rules import Select
    from fp8pass.runtime.session import Part, Session
    from fp8pass.scales.view import Fp8State
    from fp8pass.tools.diff import Difference
    from fp8pass.tools.estimation import Estimation
    from fp8pass.tools.export import ExportReport
    from fp8pass.tools.export.formats import FormatName
    from fp8pass.tools.external_graphs import RewrittenGraph
    from fp8pass.tools.inspection import Inspection
    from fp8pass.tools.monitoring import Monitor

Model = TypeVar("Model", bound=Callable[..., Any])


def fp8_compile(
    model: Model,
    recipe: Recipe | RecipeName | None = "delayed",
    *,
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    backend: BackendName = "inductor",
    step: StepMode = "auto",
    amax_reduction_group: dist.ProcessGroup | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    select: Select = "auto",
    min_speedup: float | None = None,
    weight_copies: WeightCopies = "auto",
    saved_activations: SavedActivations | None = None,
    in_place: bool = False,
    strict: bool = False,
    match: Engine | None = None,
    schedule: Mapping[int, Mapping[str, Recipe | RecipeName | None]] | None = None,
    fsdp_gather: FsdpGather | None = None,
    release_frozen: bool = False,
) -> Model:
    """Compile a model so that its matrix multiplications, forward and backward, run in FP8.

    Args:
        model: an nn.Module or a function. Without `in_place` it does not change, nor do its parameters and the keys of its
            `state_dict()`.
        recipe: a recipe object, or the name of one, such as "delayed" or "mxfp8": `fp8pass.recipes.RecipeName` has all names.
            None, for `saved_activations` only: all GEMMs run in high precision.
        rules: ordered `pattern -> recipe or None` (None: high precision); the first match wins. A pattern is a glob on the
            module path, optionally with a role: "layers.*.mlp.*", "lm_head", "*:grad_weight", "layers.0.*:saved".
        backend: "inductor", or "aot_eager" for the same rewrite without code generation.
        step: "auto" ends a step of delayed scaling when the next forward begins; "manual" leaves it to `state(...).step()`.
        amax_reduction_group: the ranks over which delayed scaling reduces amaxes; by default all.
        dynamic: as in torch.compile.
        fullgraph: as in torch.compile.
        mode: as in torch.compile; for the backend "inductor".
        options: Inductor's options, as in torch.compile; for the backend "inductor".
        select: "auto" keeps in high precision what trains better or faster there: routers of experts, the output embedding,
            GEMMs with n or k below 32, GEMMs that make weights of Parameters, those of linear algebra, and products in
            gradients of what is no GEMM. "all" takes every GEMM that can run in FP8. A rule that matches a GEMM always
            decides.
        min_speedup: GEMMs that no rule matches run in high precision if their expected speed-up over bfloat16, an estimate,
            is smaller; 1.0 leaves out those expected to be slower. None: the estimate decides nothing.
        weight_copies: how backward gets the FP8 copies of weights that only it reads. "save": the forward writes them in the
            same read as its own copies, and they are saved. "recompute": the backward makes them from the Parameter, which
            saves one byte per parameter and costs one more read. "auto" recomputes where the GEMM has 4096 rows or more:
            there the read takes an estimated 3 % of the GEMMs' time at most. With these three every call quantizes the weights
            that it reads, in training and in inference, so no write can leave a copy out of date. "cache" keeps the copies of
            all weights until they change: frozen ones and all in inference are quantized once, those that train once per
            optimizer step instead of once per microbatch, for two bytes per parameter between the calls. You promise that
            weights change between steps, or by writes that torch counts. The promise is checked by content at step boundaries
            and in every 16th call; a weight that has changed without a trace raises StaleWeightError.
        saved_activations: "fp8" saves values for the backward as E4M3 with a float32 scale per 1x128 values where pointwise
            code and norms only read them there, and lets the backward compute operands of GEMMs again from them. Attention's
            q, k, v and output, and values that other operations read, are saved so only by a rule with the role `saved`:
            {"layers.*.attn*:saved": "blockwise"}. It needs no FP8 hardware. The page on memory has its costs.
        in_place: compile the nn.Module itself, as `nn.Module.compile()` does, and return it: the same object and class, with
            the same `forward` and `state_dict()` keys. `inspect` and `state` take it, a copy or a pickle of it is the
            uncompiled model, and `fp8_uncompile` undoes it. A torch.compile around it has a graph break there. Calls of
            `model.forward(x)` run eagerly.
        strict: raise StrictError where the compiled model would give an `Fp8Warning`, such as a rule that has matched nothing
            when the first backward ends, no GEMM in FP8, a GEMM in FP8 that looks like a head and that no rule names, a call or
            a module that ran eagerly, and `model.compile()` after `in_place=True`. The page on what runs in FP8 lists all.
        match: the inference engine whose online quantization forward GEMMs reproduce byte for byte, FP8 values and scales:
            "vllm" ("current", in which q, k and v, and gate and up, have one scale together; "rowwise"; and blockwise
            in float32), "vllm-per-tensor" ("current" with one scale per input, too), "deepgemm" ("blockwise") or "hf",
            transformers' own FP8 linear ("rowwise"). It sets how scales are computed, the smallest amax and fast accumulation;
            Float8BlockScaling's `use_f32_scales` chooses between float32 and UE8M0 scales. Backward GEMMs keep the recipe's own
            quantization.
        schedule: `step -> rules`: after so many steps these rules take the place of those before, as by `use_rules`. A step
            is one of training, as `step` ends them, whatever the recipe. `state(...).state_dict()` holds the number of steps,
            and `load_state_dict` continues with the rules of that step.
        fsdp_gather: "fp8" lets FSDP2 (`fully_shard`) gather weights whose GEMMs run in FP8 as FP8 bytes, half of bfloat16's.
            It does so where FSDP2 frees the gathered Parameter after the forward, with `reshard_after_forward=True`: a
            Parameter that remains gathered has other readers. Parameters and checkpoints do not change.
        release_frozen: the values of Parameters with requires_grad=False that only FP8 GEMMs read are freed once they are
            quantized: one FP8 copy is left, which the backward transposes (two where scales run along rows). Reading such a
            Parameter outside of the compiled model raises ReleasedWeightError; `state(...).restore_weights()` gives it the
            values of its copy. `inspect` lists the released Parameters, and why others were not.

    Returns:
        A callable with the signature of `model`; an nn.Module if `model` is one. It is compiled at its first call.

    Raises:
        RecipeError: the recipe has no such name.
        RuleError: a pattern or a value in `rules` or `schedule` is malformed.
        OptionError: another argument is invalid.
        StrictError: with `strict=True`, where there would be an `Fp8Warning`: at a call or at the end of a backward.
        UnsupportedDeviceError: at the first call, if the model is on a GPU of a compute capability below 8.9, unless no recipe
            quantizes GEMMs.
    """
    arguments = locals()  # the options among them are handed on as they are, under their names

    from torch import nn

    from fp8pass.options import NAMES, CompileOptions, check_bool
    from fp8pass.runtime.session import Session
    from fp8pass.runtime.wrap import compile_beside, compile_in_place

    if not callable(model):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; pass an nn.Module or a function")
    if isinstance(model, type):
        raise OptionError(f"model is the class {model.__name__}; pass an instance: {model.__name__}(...)")
    _check_not_compiled(model)
    check_bool("in_place", in_place)
    check_bool("fullgraph", fullgraph)
    if in_place and not isinstance(model, nn.Module):
        raise OptionError(f"in_place=True compiles an nn.Module, and model is a {type(model).__name__}; leave in_place out")
    given = CompileOptions(**{name: arguments[name] for name in (*NAMES, "dynamic")})
    session = Session(model, given)
    if in_place and isinstance(model, nn.Module):
        compile_in_place(model, session, dynamic=dynamic, fullgraph=fullgraph, **given.torch_options)
        return model
    compiled: Model = compile_beside(model, session, dynamic=dynamic, fullgraph=fullgraph, **given.torch_options)
    return compiled


def fp8_uncompile(model: torch.nn.Module) -> None:
    """Undo `fp8_compile(model, in_place=True)`: the model runs eagerly again, in high precision.

    This discards the state of delayed scaling. To continue with it later, save `state(model).state_dict()` first. Parameters
    that `release_frozen` has released get the values of their FP8 copies.

    Raises:
        NotCompiledError: the model is not compiled in place, or no longer because `model.compile()` was called.
    """
    from torch import nn

    from fp8pass.runtime.wrap import is_in_place, replaced, undo_in_place

    if not is_in_place(model):
        if (cause := replaced(model)) is not None:
            raise NotCompiledError(cause)
        given: object = model
        modules = given.named_modules() if isinstance(given, nn.Module) else ()
        if inside := [name for name, module in modules if is_in_place(module)]:
            raise NotCompiledError(
                f"{type(model).__name__} is not compiled in place itself: {preview(inside)} are; call fp8_uncompile on each"
            )
        raise NotCompiledError(
            f"{type(model).__name__} is not compiled in place, so there is nothing to undo. Without in_place=True"
            f" fp8_compile does not change the model: call the model itself"
        )
    for part in parts_of(model):
        part.session.weights.releases.restore()
    undo_in_place(model)


def inspect(compiled: Callable[..., Any]) -> Inspection:
    """Report what was rewritten in a compiled model, what was not, and why.

    Args:
        compiled: the result of `fp8_compile` or torch.compile(backend="fp8pass"), a model compiled in place, or one whose
            modules were compiled one by one: then all of them, by their paths in the model.

    Raises:
        NotCompiledError: it is anything else, or `model.compile()` replaced `fp8_compile(in_place=True)`.
    """
    from torch import nn

    from fp8pass.runtime.wrap import is_called_in_place
    from fp8pass.tools.inspection import make_inspection

    parts = parts_of(compiled)
    in_place = any(is_called_in_place(m) for m in (compiled.modules() if isinstance(compiled, nn.Module) else ()))
    is_whole = len(parts) == 1 and not parts[0].prefix
    return make_inspection(parts, parts[0].session.root() if is_whole else compiled, in_place)


def diff(before: Inspection | Mapping[str, Any], after: Inspection | Mapping[str, Any]) -> Difference:
    """Compare the decisions on the GEMMs of two compiled models: another rule, recipe, option, shape or version as the cause.

    Args:
        before: `inspect(compiled)`, or the result of its `to_dict()`: the two runs are often two processes, and a dict can be
            saved as JSON.
        after: the same of the other run.

    Returns:
        The difference. It prints as a table, with equal layers folded into one row. `changes` lists GEMMs whose decision
        changed: their formats, or the kind of reason for high precision. GEMMs are matched by module path and role.

    Raises:
        OptionError: an argument is neither, or has no GEMMs because the model had not run.
    """
    from fp8pass.tools.diff import compare

    return compare(before, after)


def state(compiled: Callable[..., Any]) -> Fp8State:
    """The state of delayed scaling of a compiled model.

    Args:
        compiled: as for `inspect`; of modules that were compiled one by one it is one state.

    Raises:
        NotCompiledError: as for `inspect`.
    """
    from fp8pass.scales.view import Fp8State

    return Fp8State(parts_of(compiled))


def export_fp8(
    compiled: Callable[..., Any],
    folder: str | os.PathLike[str],
    format: FormatName = "compressed-tensors",
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> ExportReport:
    """Write the weights of a compiled model in FP8, as its forward GEMMs read them, for inference engines and other loaders.

    The folder gets safetensors files with their index, and config.json with `quantization_config`, as `save_pretrained` writes
    them; other files in it, such as those of a tokenizer, are left alone. Files of tensors of an earlier export are replaced
    when the new ones are complete. Tensors are made one at a time, so that no more memory than a layer's is needed besides.
    With step="auto", the step of delayed scaling that the next forward would end ends here.

    Args:
        compiled: as for `inspect`: an nn.Module that has run once. With delayed scaling, one that was trained for a step.
        folder: where to write; it is made if it does not exist.
        format: "compressed-tensors", or "fp8", DeepSeek-V3's. Weights that it cannot hold, or that its loaders would read
            wrongly, are written in high precision, with a reason in the report.
        max_shard_bytes: the largest size of a file, but for a layer that is larger.

    Returns:
        The files, which weights are in FP8, and why the others are not. Under torch.distributed every rank must call it; rank
        0 writes.

    Raises:
        NotCompiledError: as for `inspect`.
        ExportError: the format has no such name, the compiled model is a function or has adapters, or no weight can be written
            in FP8. On other ranks than 0 also if rank 0 could not write, where the error is raised as it is.
    """
    from fp8pass.tools.export import plan_export, write_folder

    if not is_int(max_shard_bytes) or max_shard_bytes < 1:
        raise ExportError(f"max_shard_bytes is {max_shard_bytes!r}; use a positive int, such as 5_000_000_000")
    parts, model = _parts_and_model(compiled)
    return write_folder(plan_export(parts, model, format), model, folder, format, max_shard_bytes)


def state_dict_fp8(
    compiled: Callable[..., Any], format: FormatName = "compressed-tensors"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that `export_fp8` writes, one after the other, as (name, tensor): for sending weights to an engine.

    Names are those that vLLM and SGLang read.
    A tensor is made when the iteration arrives at it, on the device of its Parameter, whole also where that is sharded: then
    every rank must iterate. Tensors in high precision share memory with the model. Arguments and errors are those of
    `export_fp8`; errors are raised at the call.
    """
    from fp8pass.tools.export import iterate, plan_export

    return iterate(plan_export(*_parts_and_model(compiled), format))


def _parts_and_model(compiled: Callable[..., Any]) -> tuple[list[Part], torch.nn.Module]:
    """The compiled parts of a model, and what their paths begin at."""
    from torch import nn

    parts = parts_of(compiled)
    is_whole = len(parts) == 1 and not parts[0].prefix
    model = parts[0].session.root() if is_whole else compiled
    if not isinstance(model, nn.Module):
        raise ExportError("the compiled function has no Parameters with names; compile and export the nn.Module that has them")
    return parts, model


def monitor(
    compiled: Callable[..., Any],
    every: int = 100,
    log: Callable[[dict[str, float]], object] | None = None,
    *,
    results: bool = False,
) -> Monitor:
    """Measure the error of every quantized tensor, in every n-th step of training, from the first one on.

    Steps count as for `schedule` of `fp8_compile`, and step 0 is measured. A measured step runs other compiled graphs, which
    also count: the first one compiles them, by the inner compiler only. All other steps run as without a monitor, and
    training is the same. Forwards without gradients are not measured.

    Args:
        compiled: as for `inspect`.
        every: how many steps lie between two measured ones, plus 1.
        log: called at the end of each measured step, on every rank, with `Measurement.to_dict()`: wandb.log, or
            a function that hands the numbers to MLflow or TensorBoard, with the step, "fp8/step".
        results: also compare the result of each FP8 GEMM with that in high precision. That takes a GEMM each, and backward
            keeps the operands in high precision for it.

    Returns:
        A Monitor. `.latest` are the numbers, `str()` a table of them, `.stop()` ends it.

    Raises:
        OptionError: an argument is invalid, or the model has a monitor already.
        NotCompiledError: as for `inspect`.
    """
    from fp8pass.tools.monitoring import start

    return start(parts_of(compiled), every, log, results)


def use_rules(compiled: Callable[..., Any], rules: Mapping[str, Recipe | RecipeName | None] | None) -> None:
    """Train on with other rules, from the next step boundary on.

    Graphs are compiled for them when they are next called, by the inner compiler only: Dynamo compiles nothing. Switching back
    to earlier rules compiles nothing either. Amax histories are kept, also of tensors that these rules leave in high precision;
    a tensor that was never quantized before begins with an empty one. With a `schedule`, these rules last until its
    next entry behind that boundary; they take the place of an entry for the boundary itself. Where ranks train together, all
    of them must call this in the same step.

    Args:
        compiled: as for `inspect`; if modules were compiled one by one, each with its own state, one of these modules.
        rules: as in `fp8_compile`: all of them, they take the place of those before. The recipe for all other GEMMs, `select`
            and `min_speedup` do not change.

    Raises:
        RuleError: a pattern or a value is malformed, or modules that share a compiled graph would follow different rules. The
            rules in force are kept.
        RecipeError: with `match`, the engine does not quantize as a recipe of the rules does.
        OptionError: several modules of `compiled` were compiled one by one.
        NotCompiledError: as for `inspect`.
    """
    from fp8pass.options import matching_rules
    from fp8pass.rules import with_rules

    parts = parts_of(compiled)
    if len(parts) > 1 or parts[0].prefix:
        names = preview([part.prefix for part in parts])
        raise OptionError(f"modules of {type(compiled).__name__} were compiled one by one: call use_rules on each ({names})")
    session = parts[0].session
    wanted, engine = with_rules(session.options.first_rules, rules), getattr(session.options.first_rules.default, "match", None)
    session.use_rules(wanted if engine is None else matching_rules(wanted, engine))


def estimate(
    model: torch.nn.Module,
    *args: Any,
    device: str | Device = "h200",
    recipe: Recipe | RecipeName | Literal["all"] = "all",
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    select: Select = "auto",
    weight_copies: WeightCopies = "auto",
    kwargs: Mapping[str, Any] | None = None,
) -> Estimation:
    """Estimate what FP8 gains in a training step of a model, in seconds, without a GPU.

    The model is traced on tensors without content, wherever its own are: build a large one on the meta device. It is neither
    run nor changed. Of equal layers one of each kind is traced. Attention counts as one operation.

    Args:
        model: an nn.Module in training mode. Pass arguments that make it return a loss, so that the head is recognized.
        args: its arguments; of tensors only shape, dtype and strides count.
        device: "h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", or a `fp8pass.cost.Device` with the rates of another one.
        recipe: "all", or one recipe as in `fp8_compile`.
        rules: as in `fp8_compile`.
        select: as in `fp8_compile`.
        weight_copies: as in `fp8_compile`.
        kwargs: keyword arguments of the call.

    Raises:
        OptionError: nothing is known of the device, it does not run the recipe, or another argument is invalid.
        RecipeError, RuleError: as in `fp8_compile`.
    """
    from fp8pass.tools.estimation import estimate_model

    return estimate_model(model, args, kwargs or {}, device, recipe, rules=rules, select=select, weight_copies=weight_copies)


def rewrite_graph(
    graph: fx.GraphModule,
    recipe: Recipe | RecipeName = "delayed",
    *,
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    inputs: Sequence[str | None] | None = None,
    select: Select = "auto",
    min_speedup: float | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> RewrittenGraph:
    """Rewrite the GEMMs of a graph that you traced into FP8, without torch.compile.

    The graph is a trace by make_fx of forward, loss and `torch.autograd.grad`, or one of AOTAutograd's joint graphs that is not
    partitioned yet: its primals and tangents become flat inputs. It consists of ATen operations with fake values in
    `meta["val"]`, and changes nothing in place that a GEMM reads. A GEMM belongs to the module in `meta["nn_module_stack"]` or
    `meta["custom"]["module_fqn"]`, else to the one that owns the Parameter that it reads; others belong to "matmul".

    Args:
        graph: it is not changed.
        recipe: as in `fp8_compile`.
        rules: as in `fp8_compile`.
        inputs: for each of the graph's first inputs the name of the Parameter or buffer that it holds, such as
            "layers.0.wq.weight"; None for an input that holds none, as for those beyond the sequence. None: what AOTAutograd's
            descriptors say.
        select: as in `fp8_compile`.
        min_speedup: as in `fp8_compile`.
        amax_reduction_group: as in `fp8_compile`.

    Returns:
        The rewritten graph, its table of GEMMs, and the state of delayed scaling as further inputs.

    Raises:
        RecipeError, RuleError: as in `fp8_compile`.
        OptionError: the graph is not one that can be rewritten, or `inputs` does not fit it; the text says why.
    """
    from fp8pass.tools.external_graphs import rewritten

    return rewritten(
        graph,
        inputs=inputs,
        recipe=recipe,
        rules=rules,
        select=select,
        min_speedup=min_speedup,
        amax_reduction_group=amax_reduction_group,
    )


def _check_not_compiled(model: Callable[..., Any]) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    from fp8pass.runtime.eager import CALL
    from fp8pass.runtime.wrap import is_in_place, session_of

    if is_in_place(model):
        raise OptionError("model is compiled in place already; call fp8_uncompile(model) before compiling it again")
    if isinstance(model, OptimizedModule) or session_of(model) is not None:
        raise OptionError("model is compiled already; pass the model itself to fp8_compile")
    if getattr(model, "__dict__", {}).get(CALL) is not None:
        raise OptionError(
            "model.compile() was called on this model; pass one that is not compiled to fp8_compile, or undo it with"
            " model._compiled_call_impl = None"
        )


def parts_of(compiled: object) -> list[Part]:
    """The compiled parts of a model: the model, or modules of it, the outer ones of those that lie within each other first."""
    from torch import nn

    from fp8pass.runtime.session import Part
    from fp8pass.runtime.wrap import replaced, session_of

    session = session_of(compiled) or _named_session(compiled)
    if session is not None:
        return [Part(session)]
    if (cause := replaced(compiled)) is not None:
        raise NotCompiledError(cause)
    parts = _compiled_modules(compiled) if isinstance(compiled, nn.Module) else []
    if not parts:
        raise NotCompiledError(
            f"{type(compiled).__name__} did not come from fp8_compile; pass the result of fp8_compile, or"
            f" of torch.compile(model, backend='fp8pass')"
        )
    return parts


def _named_session(compiled: object) -> Session | None:
    """The session of what was compiled by the backend's name. Torch imports the module of the backend before anything is, and
    once it is there, calls of all models look for callers that were."""
    named = sys.modules.get("fp8pass.runtime.named_backend")
    session: Session | None = None if named is None else named.named_session(compiled)
    return session


def _compiled_modules(model: torch.nn.Module) -> list[Part]:
    from fp8pass.runtime.instances import without_wrappers, wrapper_paths
    from fp8pass.runtime.session import Part
    from fp8pass.runtime.wrap import replaced, session_of

    wrapped = wrapper_paths(model)
    found: dict[Session, Part] = {}
    for path, module in model.named_modules():
        session = session_of(module) or _named_session(module)
        if session is None and (cause := replaced(module)) is not None:
            raise NotCompiledError(f"{path}: {cause}")
        if session is not None:
            found.setdefault(session, Part(session, without_wrappers(path, wrapped)))
    return list(found.values())
