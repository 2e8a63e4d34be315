"""What ran eagerly, so in high precision: how it is said, and its rows in the table."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fp8pass.errors import Fp8FallbackWarning, preview
from fp8pass.notices import tell
from fp8pass.rewrite.report import GemmRecord
from fp8pass.runtime import frames
from fp8pass.runtime.parts import Part
from fp8pass.runtime.session import Session

_USUAL_CAUSES = (
    "Usual causes: its recompile limit (TORCH_LOGS=recompiles shows why; compile with dynamic=True, or raise"
    " torch._dynamo.config.recompile_limit); several models in one process, which share that limit where they share code"
    " (call torch._dynamo.reset() before the next one is made: those that are there compile anew); and code that it does not"
    " trace, such as a function under torch._dynamo.disable (TORCH_LOGS=graph_breaks names it; compile the modules around it"
    " one by one)"
)


def tell_of_modules(session: Session, paths: Sequence[str]) -> None:
    """Warn of modules that are newly known to run eagerly in a model whose rest runs compiled, or raise StrictError.

    Those that are expected to have their rows in the table only."""
    reasons: dict[str, list[str]] = {}
    for path in paths:
        run = session.eager.found[path]
        if not run.is_expected:
            reasons.setdefault(run.reason.detail, []).append(path)
    if not reasons:
        return
    root = session.root()
    count = sum(map(len, reasons.values()))
    texts = [f"{preview(modules)} ({reason})" for reason, modules in reasons.items()]
    tell(
        f"{'the model' if root is None else type(root).__name__}: {count} {'module runs' if count == 1 else 'modules run'}"
        f" eagerly, in high precision, while the rest is compiled: {'; '.join(texts)}. print(fp8pass.inspect(model)) has them;"
        f" for a module that is meant to run eagerly, torch.compiler.disable(module) says so",
        Fp8FallbackWarning,
        strict=session.strict,
    )


def tell_of_call(session: Session) -> None:
    """Warn of a call in which no compiled graph ran, or raise StrictError."""
    session.warned_of_eager_run = True
    cause = _cause(session.root())
    session.eager_call = session.eager_call or cause or "torch.compile fell back to eager execution"
    tell(
        "no compiled graph ran in this call: torch.compile fell back to eager execution, in high precision."
        f" {_USUAL_CAUSES if cause is None else f'The cause: {cause}'}",
        Fp8FallbackWarning,
        strict=session.strict,
    )


def _cause(root: nn.Module | None) -> str | None:
    """Why torch.compile ran nothing in the call that has just ended; None where it is not known."""
    if (stance := frames.stance()) != "default":
        return f"torch.compiler.set_stance({stance!r})"
    if modes := [type(mode).__name__.lstrip("_") for mode in _get_current_dispatch_mode_stack()]:
        return (
            f"the dispatch mode {preview(modes)}, under which torch.compile compiles nothing: call the model once, forward and"
            f" backward, before the mode begins, and it runs what is compiled"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "a transform of torch.func, such as grad or vmap, around the compiled model, which torch.compile does not compile"
            " from outside: compile a function that calls the transform, fp8_compile(lambda *args: torch.func.grad(f)(*args))"
        )
    forward = None if root is None else root.forward
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if getattr(forward, "_torchdynamo_disable", False):
        return f"torch.compiler.disable (torch._dynamo.disable) on {type(root).__name__}.forward: compile the modules below it"
    if isinstance(code, CodeType) and frames.is_at_limit(code):
        return (
            f"{frames.limit_reason(code)}. Several models in one process share that limit where they share code:"
            f" torch._dynamo.reset() before the next one is made gives it room (those that are there compile anew)"
        )
    if (recurrent := _recurrent(root)) and not getattr(torch._dynamo.config, "allow_rnn", True):
        return (
            f"nn.{recurrent}, which torch.compile traces only with torch._dynamo.config.allow_rnn = True, set before the first"
            f" call; otherwise compile the modules around it one by one"
        )
    if isinstance(code, CodeType) and (reason := frames.left_eager(code)) is not None:
        return f"{reason} (TORCH_LOGS=graph_breaks shows the line; compile the modules around it one by one)"
    return None


def _recurrent(root: nn.Module | None) -> str:
    return next((type(m).__name__ for m in ([] if root is None else root.modules()) if isinstance(m, nn.RNNBase)), "")


def eager_records(part: Part, known: Sequence[GemmRecord] = ()) -> list[GemmRecord]:
    """A row per GEMM of a part that ran eagerly, by the module's path in the whole model. known: the records of its graphs,
    which have the sizes of those that ran compiled before."""
    sizes = {gemm.module: gemm for gemm in reversed(known) if gemm.role == "output"}
    found = []
    for path, run in part.session.eager.found.items():
        if not run.is_gemm:
            continue
        module = part.outer(path)
        same = sizes.get(module)
        m, n, k, source = (run.m, run.n, run.k, run.source) if same is None else (same.m, same.n, same.k, same.source)
        found.append(
            GemmRecord(
                module=module,
                role="output",
                m=m,
                n=n,
                k=k,
                groups=1,
                quantized=False,
                reason=str(run.reason),
                recipe=None,
                a_format=None,
                b_format=None,
                a_scaling=None,
                b_scaling=None,
                speedup=None,
                source=run.source or source,
                op="linear",
                path=None,
            )
        )
    return found
