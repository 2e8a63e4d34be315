"""The public functions: `fp8_compile`, `fp8_uncompile`, `inspect`, `state`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fp8pass.errors import NotCompiledError, OptionError, preview
from fp8pass.recipes import Recipe, RecipeName

if TYPE_CHECKING:  # NOTE [a lean import]: what compiles is imported when it is first needed; with it come Dynamo and Triton
    import torch
    import torch.distributed as dist

    from fp8pass.arguments import BackendName
    from fp8pass.capture.clock import StepMode
    from fp8pass.capture.parts import Part
    from fp8pass.inspection import Inspection
    from fp8pass.rewrite.plan import WeightCopies
    from fp8pass.rules import Select
    from fp8pass.stateful import Fp8State

Model = TypeVar("Model", bound=Callable[..., Any])


def fp8_compile(
    model: Model,
    recipe: Recipe | RecipeName = "delayed",
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
    in_place: bool = False,
    strict: bool = False,
) -> Model:
    """Compile a model so that its matrix multiplications, forward and backward, run in FP8.

    Args:
        model: an nn.Module or a function. Without `in_place` it is not changed: its parameters and `state_dict()` keys stay
            the same.
        recipe: a recipe object, or "delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8".
        rules: ordered `pattern -> recipe or None` (None: high precision); the first match wins. A pattern is a glob on the
            module path, optionally with a role: "layers.*.mlp.*", "lm_head", "*:grad_weight".
        backend: "inductor", or "aot_eager" for the same rewrite without code generation.
        step: "auto" ends a step of delayed scaling when the next forward begins; "manual" leaves it to `state(...).step()`.
        amax_reduction_group: the ranks over which delayed scaling reduces amaxes; by default all.
        dynamic: as in torch.compile.
        fullgraph: as in torch.compile.
        mode: as in torch.compile; for the backend "inductor".
        options: Inductor's options, as in torch.compile; for the backend "inductor".
        select: "auto" keeps in high precision what trains better or faster there: routers of experts, the output embedding,
            and GEMMs with n or k below 32. "all" takes every GEMM that can run in FP8. A rule that matches a GEMM always
            decides.
        min_speedup: GEMMs that no rule matches stay in high precision if their expected speed-up over bfloat16, an estimate,
            is smaller; 1.0 leaves out those expected to be slower. None: the estimate decides nothing.
        weight_copies: how backward gets the FP8 copies of weights that only it reads. "save": the forward writes them in the
            same read as its own copies, and they are saved. "recompute": the backward makes them from the Parameter, which
            saves one byte per parameter and costs one more read. "auto" recomputes where the GEMM has 4096 rows or more:
            there the read takes an estimated 3 % of the GEMMs' time at most.
        in_place: compile the nn.Module itself, as `nn.Module.compile()` does, and return it: the same object and class, with
            the same `forward` and `state_dict()` keys. `inspect` and `state` take it, a copy or a pickle of it is the
            uncompiled model, and `fp8_uncompile` undoes it. A torch.compile around it has a graph break there. Calls of
            `model.forward(x)` run eagerly.
        strict: raise StrictError where the compiled model would give an `Fp8Warning`: a rule that has matched nothing when the
            first backward ends, no GEMM in FP8, a GEMM in FP8 that looks like a head and that no rule names, a call that ran
            eagerly, and `model.compile()` after `in_place=True`.

    Returns:
        A callable with the signature of `model`; an nn.Module if `model` is one. It is compiled at its first call.

    Raises:
        RecipeError: the recipe has no such name.
        RuleError: a pattern or a value in `rules` is malformed.
        OptionError: another argument is invalid.
        StrictError: with `strict=True`, at a call or at the end of a backward: see there.
        UnsupportedDeviceError: at the first call, if the model is on a GPU of a compute capability below 8.9.
    """
    from torch import nn

    from fp8pass.arguments import CompileOptions, check_bool
    from fp8pass.attach import compile_beside, compile_in_place

    if not callable(model):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; pass an nn.Module or a function")
    if isinstance(model, type):
        raise OptionError(f"model is the class {model.__name__}; pass an instance: {model.__name__}(...)")
    _check_not_compiled(model)
    check_bool("in_place", in_place)
    check_bool("fullgraph", fullgraph)
    if in_place and not isinstance(model, nn.Module):
        raise OptionError(f"in_place=True compiles an nn.Module, and model is a {type(model).__name__}; leave in_place out")
    given = CompileOptions(
        recipe=recipe,
        rules=rules,
        backend=backend,
        step=step,
        amax_reduction_group=amax_reduction_group,
        dynamic=dynamic,
        mode=mode,
        options=options,
        select=select,
        min_speedup=min_speedup,
        weight_copies=weight_copies,
        strict=strict,
    )
    session = given.session(model)
    if in_place and isinstance(model, nn.Module):
        compile_in_place(model, session, dynamic=dynamic, fullgraph=fullgraph)
        return model
    compiled: Model = compile_beside(model, session, dynamic=dynamic, fullgraph=fullgraph)
    return compiled


def fp8_uncompile(model: torch.nn.Module) -> None:
    """Undo `fp8_compile(model, in_place=True)`: the model runs eagerly again, in high precision.

    This discards the state of delayed scaling. To continue with it later, save `state(model).state_dict()` first.

    Raises:
        NotCompiledError: the model is not compiled in place, or no longer because `model.compile()` was called.
    """
    from torch import nn

    from fp8pass.attach import is_in_place, replaced, undo_in_place

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
            f"{type(model).__name__} is not compiled in place, so there is nothing to undo. What fp8_compile returns without"
            f" in_place=True leaves the model as it is: call the model itself"
        )
    undo_in_place(model)


def inspect(compiled: Callable[..., Any]) -> Inspection:
    """What was rewritten in a compiled model, what was not, and why.

    Args:
        compiled: what `fp8_compile` or torch.compile(backend="fp8pass") returned or compiled in place, or a model with modules
            that were compiled one by one: then all of them, by their paths in the model.

    Raises:
        NotCompiledError: it is anything else, or `model.compile()` replaced what `fp8_compile(in_place=True)` had made.
    """
    from torch import nn

    from fp8pass.attach import is_called_in_place
    from fp8pass.inspection import make_inspection

    parts = _parts(compiled)
    in_place = any(is_called_in_place(m) for m in (compiled.modules() if isinstance(compiled, nn.Module) else ()))
    is_whole = len(parts) == 1 and not parts[0].prefix
    return make_inspection(parts, parts[0].session.root() if is_whole else compiled, in_place)


def state(compiled: Callable[..., Any]) -> Fp8State:
    """The state of delayed scaling of a compiled model.

    Args:
        compiled: as for `inspect`; of modules that were compiled one by one it is one state.

    Raises:
        NotCompiledError: as for `inspect`.
    """
    from fp8pass.stateful import Fp8State

    return Fp8State(_parts(compiled))


def _check_not_compiled(model: Callable[..., Any]) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    from fp8pass.attach import CALL, is_in_place, session_of

    if is_in_place(model):
        raise OptionError("model is compiled in place already; call fp8_uncompile(model) before compiling it again")
    if isinstance(model, OptimizedModule) or session_of(model) is not None:
        raise OptionError("model is compiled already; pass the model itself to fp8_compile")
    if getattr(model, "__dict__", {}).get(CALL) is not None:
        raise OptionError(
            "model.compile() was called on this model; pass one that is not compiled to fp8_compile, or undo it with"
            " model._compiled_call_impl = None"
        )


def _parts(compiled: object) -> list[Part]:
    """What is compiled of a model: the model, or modules of it, the outer ones of those that lie within each other first."""
    from torch import nn

    from fp8pass.attach import replaced, session_of
    from fp8pass.by_name import named_session
    from fp8pass.capture.parts import Part

    session = session_of(compiled) or named_session(compiled)
    if session is not None:
        return [Part(session)]
    if (cause := replaced(compiled)) is not None:
        raise NotCompiledError(cause)
    parts = _compiled_modules(compiled) if isinstance(compiled, nn.Module) else []
    if not parts:
        raise NotCompiledError(
            f"{type(compiled).__name__} did not come from fp8_compile; pass what fp8_compile returned, or what"
            f" torch.compile(model, backend='fp8pass') returned"
        )
    return parts


def _compiled_modules(model: torch.nn.Module) -> list[Part]:
    from fp8pass.attach import replaced, session_of
    from fp8pass.by_name import named_session
    from fp8pass.capture.instances import without_wrappers, wrapper_paths
    from fp8pass.capture.parts import Part
    from fp8pass.capture.session import Session

    wrapped = wrapper_paths(model)
    found: dict[Session, Part] = {}
    for path, module in model.named_modules():
        session = session_of(module) or named_session(module)
        if session is None and (cause := replaced(module)) is not None:
            raise NotCompiledError(f"{path}: {cause}")
        if session is not None:
            found.setdefault(session, Part(session, without_wrappers(path, wrapped)))
    return list(found.values())
