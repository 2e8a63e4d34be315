"""Warnings that a compiled model gives by itself, once each, and the remarks on rules that have decided nothing.

A rule that matches nothing is known when gradients have run, what runs in FP8 when the model has been called. Modules that are
compiled one by one and share a session are checked only after a backward: a call of one shows only a part of the model.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fp8pass.errors import Fp8FallbackWarning, Fp8Warning, ReasonKind, nearest, preview, tell
from fp8pass.graph.values import by_key
from fp8pass.inputs import in_backward
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.saved import SavedRecord
from fp8pass.rules import ROLE_WORDS, ROLES, SAVED, Rule, Rules
from fp8pass.runtime.eager import ALLOW_RNN, is_at_limit, left_eager, limit_reason, stance
from fp8pass.runtime.instances import module_paths
from fp8pass.runtime.recompute import hook_backward
from fp8pass.runtime.records import gemms_of_session, saved_of_session
from fp8pass.runtime.session import Session
from fp8pass.weights import fsdp

_WILD = "*?[]!"
#: A subscript as Python writes it: `layers[0]`. Behind a dot it would be a set of digits.
_INDEX = re.compile(r"(?<=[\w\]])\[(\d+)\]")
#: Numbers of equal layers as tables fold them: `0-31`, `{0,2}`.
_FOLDED = re.compile(r"(?<=\.)(?:\d+-\d+|\{[\d,-]+\})(?=\.|$)|^(?:\d+-\d+|\{[\d,-]+\})(?=\.|$)")
_SELF = "__self__."  # Begins the paths in a frame of `nn.Module.__call__`, as those of a model compiled in place.
_USUAL_CAUSES = (
    "Usual causes: (1) Its recompile limit. TORCH_LOGS=recompiles shows why; compile with dynamic=True, or raise"
    " torch._dynamo.config.recompile_limit. (2) Several models in one process, which share that limit where they share code."
    " Call torch._dynamo.reset() before the next one is made; existing models are compiled again. (3) Code that it does not"
    " trace, such as a function under torch._dynamo.disable. TORCH_LOGS=graph_breaks names it; compile the modules around it"
    " one by one"
)


def after_call(session: Session, num_graph_calls: int, eager: Sequence[str]) -> None:
    """Warn of what is known when a call of the model has ended. num_graph_calls: the session's count when it began; eager: the
    modules that are now known to have run eagerly."""
    if torch.compiler.is_compiling():
        return
    if session.num_graph_calls != num_graph_calls:
        if eager:
            _tell_of_modules(session, eager)
    elif not torch._dynamo.config.disable and (session.options.strict or "eager call" not in session.seen.warned):
        # A call in which no compiled graph ran.
        session.seen.warned.add("eager call")
        cause = _cause(session.root(), session.frame)
        session.seen.eager_call = session.seen.eager_call or cause or "torch.compile fell back to eager execution"
        tell(
            "no compiled graph ran in this call: torch.compile fell back to eager execution, in high precision."
            f" {_USUAL_CAUSES if cause is None else f'The cause: {cause}'}",
            Fp8FallbackWarning,
            strict=session.options.strict,
        )
    if not in_backward():  # a recomputation
        _tell_of_decisions(session)


def _tell_of_decisions(session: Session) -> None:
    seen = session.seen
    complaint = "" if session.manual_steps is None or "steps" in seen.warned else session.manual_steps.complaint
    if complaint and session.rules.stateful:
        _say(session, "steps", complaint)
    if seen.num_bound == seen.num_checked or seen.began_midway or (session.is_shared and not seen.went_backward):
        return
    if session.graphs:
        _check(session)
        session.seen.num_checked = session.seen.num_bound


def watch_backward(session: Session, result: Any) -> None:
    """Warn at the end of the first backward that reaches what a graph returned, of what is known then. A forward that runs in a
    backward, a recomputation, is a part of it that knows nothing of the rest."""
    if in_backward():
        session.seen.went_backward = True
        return
    hook_backward(result, functools.partial(_await_end_of_backward, session))


def _await_end_of_backward(session: Session, *_: object) -> None:
    """A hook of autograd's, in a backward. Compiled autograd traces hooks, and refuses callbacks."""
    if torch.compiler.is_compiling():
        return
    backward = torch._C._current_graph_task_id()
    if session.seen.awaits_backward and backward != session.seen.backward:
        session.seen.backward = backward
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end_backward, session))


def _end_backward(session: Session) -> None:
    session.seen.went_backward = True
    session.seen.num_checked = -1
    _tell_of_decisions(session)
    session.seen.awaits_backward = False  # unless that raised


def _check(session: Session) -> None:
    gemms = gemms_of_session(session)
    if session.rules == session.options.first_rules and session.rules.has_gemms:  # who switches to rules without FP8 means it
        _say(session, "no FP8", _no_fp8(gemms))
    _say(session, "head", _heads_in_fp8(gemms, session.rules))
    _say(session, "place", _unplaced(session))
    if session.seen.went_backward:
        decided: list[Decided] = [*gemms, *saved_of_session(session)]
        trains = any(graph.trains for graph in session.graphs)  # not where new rules have met evaluations alone
        rules, root = session.rules.rules, session.root()
        remarks = [remark_on(rule, rules, decided, root) for rule in _to_tell(rules, decided, trains)]
        for step, later in session.options.later_rules:
            found = [remark_on(rule, later.rules, decided, root) for rule in _to_tell(later.rules, decided, trains)]
            remarks += [f"In the schedule at step {step}: {remark}" for remark in found]
        _say(session, "rules", " ".join(remarks))


def _say(session: Session, kind: str, text: str) -> None:
    if text and kind not in session.seen.warned:
        if not session.options.strict:
            session.seen.warned.add(kind)
        tell(f"{_title(session)}: {text}", Fp8Warning, strict=session.options.strict)


def _title(session: Session) -> str:
    root = session.root()
    return "the compiled function" if root is None else type(root).__name__


def _no_fp8(gemms: Sequence[GemmRecord]) -> str:
    if any(g.quantized or g.is_empty for g in gemms):
        return ""
    if not gemms:
        return (
            "no GEMM runs in FP8: the compiled model has no matrix multiplication. If the model has some, they were not called"
            " or ran eagerly, because of a graph break for example; print(fp8pass.inspect(model)) names its linears"
        )
    kinds = Counter(map(_kind, gemms))
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    return (
        f"no GEMM runs in FP8: all {len(gemms)} run in high precision, with the reasons {counts}."
        f" The first is {gemms[0].module}:{gemms[0].role}, {gemms[0].reason}. print(fp8pass.inspect(model)) lists all of them"
    )


def _heads_in_fp8(gemms: Sequence[GemmRecord], rules: Rules) -> str:
    found = dict.fromkeys(g.module for g in gemms if g.looks_like_head and g.quantized and not _is_meant(g, rules))
    if not found:
        return ""
    module = next(iter(found))
    return (
        f"{preview(found)} looks like the output embedding (a head) and runs in FP8, where its rounding errors enter the loss"
        f" directly. rules={{{module!r}: None}} keeps it in high precision; a rule that names it, such as"
        f" {{{module!r}: {rules.default.name!r}}}, confirms that FP8 is intended"
    )


def _is_meant(gemm: GemmRecord, rules: Rules) -> bool:
    """Say whether the rule that decides names the module, and is not one for many, such as "*"."""
    rule = rules.find(gemm.module, gemm.role)
    return rule is not None and bool(rule.module.rpartition(".")[2].strip(_WILD))


def _unplaced(session: Session) -> str:
    """The modules in FP8 below variables that lead to no module of the model, and below which no Parameter of it is read."""
    root = session.root()
    if root is None or not (session.rules.rules or session.rules.stateful):
        return ""  # nothing depends on places
    paths = module_paths(root)
    made = [(graph.rewrite.gemms, found) for graph, found in session.graphs.items() if graph.rewrite is not None]
    gemms = [(gemm.path, place) for gemms, found in made for place in found for gemm in gemms if gemm.quantized]
    names = {place.name_module(path) for path, place in gemms if path is not None and path.root not in place.variables} - paths
    unplaced = [n for n in sorted(names) if n.removeprefix(_SELF) in paths or any(path.endswith(f".{n}") for path in paths)]
    if not unplaced:
        return ""
    return (
        f"the places of {preview(unplaced)} in the model are not known: their graphs read no Parameters, but plain tensors in"
        " their place, and no attribute of a variable leads to them. Rules with the paths of these modules do not apply, and"
        " with delayed scaling layers that run the same graph share amax histories. Call them from a method of a module"
    )


# -- modules and calls that ran eagerly


def _tell_of_modules(session: Session, paths: Sequence[str]) -> None:
    """Warn of modules that are newly known to run eagerly in a model whose rest runs compiled, or raise StrictError. Those that
    are expected to have their rows in the table only."""
    runs = session.eager.found
    reasons = by_key((path for path in paths if not runs[path].is_expected), lambda path: runs[path].reason.detail)
    if not reasons:
        return
    root = session.root()
    count = sum(map(len, reasons.values()))
    texts = "; ".join(f"{preview(modules)} ({reason})" for reason, modules in reasons.items())
    tell(
        f"{'the model' if root is None else type(root).__name__}: {count} {'module runs' if count == 1 else 'modules run'}"
        f" eagerly, in high precision, while the rest is compiled: {texts}. print(fp8pass.inspect(model)) has them;"
        f" if a module is meant to run eagerly: module.forward = torch.compiler.disable(module.forward){_hooks_of_fsdp(root)}",
        Fp8FallbackWarning,
        strict=session.options.strict,
    )


def _hooks_of_fsdp(root: nn.Module | None) -> str:
    """The advice for a model under FSDP2, whose hooks are most often the cause; empty for any other model."""
    if root is None or not fsdp.of_model(root):
        return ""
    return (
        ". fully_shard breaks the graph around every module that it wraps: to compile a layer between them, such as the head,"
        " make it part of a module class of your own, and call fully_shard on that module"
    )


def _cause(root: nn.Module | None, frame: CodeType | None) -> str | None:
    """The reason why torch.compile ran nothing in the call that has just ended; None where it is not known. frame: the code of
    the frame of ours around the model, if there is one."""
    if (now := stance()) != "default":
        return f"torch.compiler.set_stance({now!r})"
    if modes := [type(mode).__name__.lstrip("_") for mode in _get_current_dispatch_mode_stack()]:
        return (
            f"the dispatch mode {preview(modes)}, under which torch.compile compiles nothing, and leaves the model eager in"
            f" later calls, too: call torch._dynamo.reset() after the mode. If the model is called once, forward and backward,"
            f" before the mode begins, the compiled graphs run under it"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "a transform of torch.func, such as grad or vmap, around the compiled model, which torch.compile does not compile"
            " from outside: compile a function that calls the transform, fp8_compile(lambda *args: torch.func.grad(f)(*args))"
        )
    forward = None if root is None else root.forward
    code = frame or getattr(getattr(forward, "__func__", forward), "__code__", None)
    if getattr(forward, "_torchdynamo_disable", False):
        return f"torch.compiler.disable (torch._dynamo.disable) on {type(root).__name__}.forward: compile the modules below it"
    if isinstance(code, CodeType) and is_at_limit(code):
        return (
            f"{limit_reason(code)}. Several models in one process share that limit where they share code:"
            f" call torch._dynamo.reset() before you make the next one (existing models are compiled again)"
        )
    if (recurrent := _recurrent(root)) and not getattr(torch._dynamo.config, "allow_rnn", True):
        return (
            f"nn.{recurrent}, which torch.compile traces only with torch._dynamo.config.allow_rnn = True, set before the first"
            f" call; otherwise compile the modules around it one by one"
        )
    if isinstance(code, CodeType) and (reason := left_eager(code)) is not None:
        return f"{reason} (TORCH_LOGS=graph_breaks shows details; compile the modules around it one by one)"
    return None


def _recurrent(root: nn.Module | None) -> str:
    return next((type(m).__name__ for m in ([] if root is None else root.modules()) if isinstance(m, nn.RNNBase)), "")


# -- rules that have decided nothing


Decided = GemmRecord | SavedRecord
#: The reasons why a GEMM is in high precision whatever its rule, and its recipe.
_FIXED = tuple(kind.value for kind in (ReasonKind.EAGER, ReasonKind.DTYPE, ReasonKind.UNSUPPORTED_OP, ReasonKind.SHAPE))


def deciding(rules: Iterable[Rule], gemm: Decided) -> Rule | None:
    """The rule that decides about a GEMM, or a saved value: the first that matches."""
    return next((rule for rule in rules if rule.matches(gemm.module, gemm.role)), None)


def unmatched(rules: Sequence[Rule], gemms: Iterable[Decided]) -> list[Rule]:
    """The rules without effect on any of these GEMMs and saved values, in order."""
    matched = {rule.pattern for g in gemms if (rule := deciding(rules, g)) is not None and _has_effect(rule, g)}
    return [rule for rule in rules if rule.pattern not in matched]


def _has_effect(rule: Rule, gemm: Decided) -> bool:
    """False if the rule that decides about a GEMM changes nothing: the GEMM cannot run in FP8, or runs eagerly anyway."""
    tells_nothing = isinstance(gemm, GemmRecord) and gemm.is_empty
    return rule.role == SAVED or tells_nothing or _kind(gemm) not in (_FIXED[:1] if rule.recipe is None else _FIXED)


def _kind(gemm: Decided) -> str:
    return (gemm.reason or "").partition(":")[0]


def _to_tell(rules: Sequence[Rule], gemms: Sequence[Decided], trains: bool) -> list[Rule]:
    """The rules without effect that a warning is due for: not for high precision of what is in high precision anyway, nor where
    the warning is that nothing runs in FP8, nor for roles of a backward where no graph trains."""
    matched = {rule.pattern for g in gemms if (rule := deciding(rules, g)) is not None}
    is_told = not any(g.quantized for g in gemms)
    met = [r for r in unmatched(rules, gemms) if trains or r.role in (None, "output")]
    return [r for r in met if r.pattern not in matched or not (r.recipe is None or is_told)]


def remark_on(rule: Rule, rules: Sequence[Rule], gemms: Sequence[Decided], root: object) -> str:
    """Say why a rule has no effect, and what to write instead. root: the model."""
    same = [g for g in gemms if rule.matches(g.module, g.role)]
    what = "saved values" if rule.role == SAVED else "GEMMs"
    held = dict.fromkeys(g.module for g in same if deciding(rules, g) == rule)
    if held:
        kinds = ", ".join(dict.fromkeys(_kind(g) for g in same if g.module in held))
        run = "runs" if len(held) == 1 else "run"
        return f"The rule {rule.pattern!r} has no effect: {preview(held)} {run} in high precision under any rule ({kinds})."
    if same:
        earlier = dict.fromkeys(found.pattern for g in same if (found := deciding(rules, g)) is not None)
        return f"The rule {rule.pattern!r} decides nothing: its {what} match {preview(map(repr, earlier))} first."
    said = f"The rule {rule.pattern!r} has matched no {'saved value' if rule.role == SAVED else 'GEMM'}."
    role = f":{rule.role}" if rule.role else ""
    modules = sorted({g.module for g in gemms})
    if any(dataclasses.replace(rule, role=None).matches(module, "") for module in modules):
        return f"{said} The module has none with the role {rule.role}."
    if rule.role is None and (rule.module in (*ROLES, SAVED) or rule.module in ROLE_WORDS):
        meant = ROLE_WORDS.get(rule.module, rule.module)
        return f"{said} A role follows a colon; did you mean {'*:' + meant!r}?"
    for why, pattern in _meant(rule.module, modules):
        if fnmatch.filter(modules, pattern.partition(":")[0]):
            return f"{said} {why}; did you mean {pattern + (role if ':' not in pattern else '')!r}?"
    if no_gemm := _no_gemm(rule, root):
        return f"{said} {no_gemm}"
    return said + (_numbers(_INDEX.sub(r".\1", rule.module), modules) or nearest(rule.module, map(as_pattern, modules)))


def _no_gemm(rule: Rule, root: object) -> str:
    """The first module that a rule names and that has no GEMM in any graph, such as a convolution."""
    modules = root.named_modules() if isinstance(root, nn.Module) and rule.role != SAVED else ()
    for path, module in modules:
        if isinstance(module, nn.RNNBase) and rule.matches(path, rule.role or ""):
            return f"{path} is a {type(module).__name__}, which runs eagerly: {ALLOW_RNN}."
        if isinstance(module, _WITHOUT_GEMMS) and rule.matches(path, rule.role or ""):
            return f"{path} is a {type(module).__name__}, which has none."
    return ""


#: Modules with Parameters that compute something else.
_WITHOUT_GEMMS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def as_pattern(module: str) -> str:
    """The pattern that matches this module alone; a colon in its name, behind which a role would stand, is written as "?"."""
    return glob.escape(module).replace(":", "?")


def _meant(pattern: str, modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Usual mistakes in a pattern: why it matches nothing, and the pattern that may be meant."""
    if pattern in modules:
        yield "In a pattern [...] is a set of characters", as_pattern(pattern)
    dotted = _INDEX.sub(r".\1", pattern)
    if dotted != pattern:
        yield "In a pattern [...] is a set of characters", dotted
        yield "In a pattern [...] is a set of characters", f"{dotted}.*"
    yield "It does not cover the modules inside", f"{pattern}.*"
    stem, _, last = pattern.rpartition(".")
    if last in ROLES or last in ROLE_WORDS:
        yield "A role follows a colon", f"{stem}:{ROLE_WORDS.get(last, last)}"
    if last in ("weight", "bias"):
        yield "Rules name modules, not Parameters", stem
    folded = _FOLDED.sub(lambda found: f"[{found[0]}]" if len(found[0]) == 3 else "*", pattern)
    if folded != pattern:
        yield "Tables fold equal layers", folded
    prefixes = {module[: dot.start()] for module in modules for dot in re.finditer(r"\.", module)}
    for inner in dict.fromkeys((pattern, dotted, f"{dotted}.*")):
        found = [prefix for prefix in prefixes if fnmatch.filter(modules, f"{prefix}.{inner}")]
        if found:
            yield "Paths begin at the compiled model", f"{found[0] if len(found) == 1 else '*'}.{inner}"


def _numbers(pattern: str, modules: Sequence[str]) -> str:
    """The numbers that there are where a pattern has one that no module has."""
    for found in re.finditer(r"(?<=\.)\d+(?=\.|$)|\[-\d+\]", pattern):
        before = pattern[: found.start()].rstrip(".")
        parts = (m.removeprefix(f"{before}.").partition(".")[0] for m in modules if m.startswith(f"{before}."))
        there = sorted({int(part) for part in parts if part.isdecimal()})
        if there and found[0].strip("[]") not in map(str, there):
            last = f"{before}.{there[-1]}{pattern[found.end() :]}"
            return f" {before!r} has {there[0]} to {there[-1]}; did you mean {last!r}?"
    return ""
