"""The public functions: `fp8_compile`, `inspect`, `state`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.capture.backend import Backend, Settings
from fp8pass.capture.clock import StepMode
from fp8pass.capture.session import Session
from fp8pass.errors import Fp8Error, Fp8FallbackWarning, NotCompiledError, OptionError, UnsupportedCopyError, nearest
from fp8pass.inspection import Inspection, make_inspection
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.rewrite.plan import WeightCopies
from fp8pass.rules import Select, parse_rules
from fp8pass.stateful import Fp8State

Model = TypeVar("Model", bound=Callable[..., Any])

_SESSION = "_fp8pass_session"
BackendName = Literal["inductor", "aot_eager"]


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
) -> Model:
    """Compile a model so that its matrix multiplications, forward and backward, run in FP8.

    Args:
        model: an nn.Module or a function. It is not changed: its parameters and `state_dict()` keys stay the same.
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
        weight_copies: how backward gets the FP8 copies of weights that only it reads. "save": forward writes them in the read
            that it needs anyway, and they are saved. "recompute": backward makes them from the Parameter, which saves one
            byte per parameter and costs one more read. "auto" recomputes where the GEMM has 4096 rows or more: there, by
            estimate, the read takes less than 3 % of the GEMMs' time.

    Returns:
        A callable with the signature of `model`; an nn.Module if `model` is one. It is compiled at its first call.

    Raises:
        RecipeError: the recipe has no such name.
        RuleError: a pattern or a value in `rules` is malformed.
        OptionError: another argument is invalid.
    """
    _check_choice("backend", backend, BackendName)
    _check_choice("step", step, StepMode)
    _check_choice("weight_copies", weight_copies, WeightCopies)
    _check_choice("select", select, Select)
    is_number = isinstance(min_speedup, (int, float)) and not isinstance(min_speedup, bool)
    if min_speedup is not None and not (is_number and 0 < min_speedup < float("inf")):
        raise OptionError(f"min_speedup is {min_speedup!r}; use a positive number such as 1.0, or None")
    if not callable(model):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; pass an nn.Module or a function")
    if isinstance(model, OptimizedModule) or _session_of(model) is not None:
        raise OptionError("model is compiled already; pass the model itself to fp8_compile")
    not_a_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if amax_reduction_group is not_a_member:
        raise OptionError(
            "amax_reduction_group is a group that this rank is not a member of; pass each rank the group that it belongs to"
        )
    session = Session(model, parse_rules(recipe, rules, select, min_speedup), step, amax_reduction_group)
    patches = _inductor_patches(backend, mode, options, dynamic)
    settings = Settings(session.rules, backend, patches, amax_reduction_group, weight_copies)
    compiled: Any = torch.compile(model, backend=Backend(settings), dynamic=dynamic, fullgraph=fullgraph)
    if isinstance(model, torch.nn.Module):
        compiled.__class__ = Fp8Module
        object.__setattr__(compiled, _SESSION, session)
        compiled.forward = _guarded(compiled.forward, session)
        return compiled
    wrapper = functools.wraps(model)(_guarded(compiled, session))
    setattr(wrapper, _SESSION, session)
    return wrapper  # type: ignore[return-value]


class Fp8Module(OptimizedModule):
    """A compiled model. Behaves as the OptimizedModule of torch.compile; `inspect` and `state` take it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedCopyError(
            "a compiled model cannot be copied: deepcopy the model itself, fp8_compile the copy, and hand it the state with"
            " state(copy).load_state_dict(state(compiled).state_dict())"
        )

    def __reduce__(self) -> Any:
        raise UnsupportedCopyError(
            "a compiled model cannot be pickled: save model.state_dict() and state(compiled).state_dict(), and compile again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def _guarded(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`function` with a step boundary before outermost calls, and with our errors as they were raised."""

    @torch._dynamo.disable(recursive=False)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outer = session.begin_forward(args)
        num_graph_calls = session.num_graph_calls
        try:
            result = function(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, Fp8Error):
                raise failure.inner_exception from None
            raise
        finally:
            session.end_forward(outer)
        if session.num_graph_calls == num_graph_calls:
            _warn_of_eager_run(session)
        return result

    return forward


def _warn_of_eager_run(session: Session) -> None:
    """torch.compile runs a model eagerly, so in high precision, when it gives up; that must not pass in silence."""
    if torch.compiler.is_compiling() or torch._dynamo.config.disable or session.warned_of_eager_run:
        return
    session.warned_of_eager_run = True
    warnings.warn(
        "no compiled graph ran in this call: torch.compile fell back to eager execution, in high precision. The usual cause is"
        " its recompile limit: see TORCH_LOGS=recompiles, compile with dynamic=True, or raise"
        " torch._dynamo.config.recompile_limit",
        Fp8FallbackWarning,
        stacklevel=3,
    )


def inspect(compiled: Callable[..., Any]) -> Inspection:
    """What was rewritten in a compiled model, what was not and why. Raises NotCompiledError for anything else."""
    return make_inspection(_known_session(compiled))


def state(compiled: Callable[..., Any]) -> Fp8State:
    """The state of delayed scaling of a compiled model. Raises NotCompiledError for anything else."""
    return Fp8State(_known_session(compiled))


def _session_of(compiled: object) -> Session | None:
    found = getattr(compiled, "__dict__", {}).get(_SESSION)
    return found if isinstance(found, Session) else None


def _known_session(compiled: object) -> Session:
    session = _session_of(compiled)
    if session is None:
        raise NotCompiledError(f"{type(compiled).__name__} did not come from fp8_compile; pass what fp8_compile returned")
    return session


def _check_choice(name: str, value: object, literal: Any) -> None:
    choices = get_args(literal)
    if value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise OptionError(f"{name} is {value!r}.{hint} Use one of {', '.join(map(repr, choices))}")


def _inductor_patches(backend: str, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's settings for `mode` and `options`, checked by torch.compile's own rules."""
    if mode is None and not options:
        return {}
    if backend != "inductor":
        given = f"mode={mode!r}" if mode is not None else f"options={options!r}"
        raise OptionError(f"{given} is for backend='inductor'; backend={backend!r} generates no code. Leave it out")
    if mode is not None and options:
        raise OptionError(f"mode={mode!r} and options={options!r}: torch.compile takes one of the two")
    try:
        return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)
    except RuntimeError as error:
        raise OptionError(str(error)) from error
