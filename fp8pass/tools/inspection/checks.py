"""What a compiled model says by itself, once: that a rule matches nothing, that no GEMM runs in FP8, that a head does, that
nobody makes its manual steps.

That a rule matches nothing is known when gradients have run, what runs in FP8 when the model has been called. Modules that are
compiled one by one and share a session are asked only after a backward: a call of one shows only a part of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8pass.errors import Fp8Warning, preview
from fp8pass.notices import tell
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rules import Rules
from fp8pass.runtime.session import Session
from fp8pass.tools.inspection.report import gemms_of_session
from fp8pass.tools.inspection.rules import remark_on, unmatched

_WILD = "*?[]!"


def after_call(session: Session) -> None:
    """What is known when a call of the model has ended."""
    if session.manual_steps is not None and (complaint := session.manual_steps.complaint):
        _say(session, "steps", complaint)
    if session.began_midway or (session.is_shared and not session.went_backward):
        return
    if session.uses and session.num_bound != session.num_checked:
        _check(session)
        session.num_checked = session.num_bound


def after_backward(session: Session) -> None:
    """What is known when the first backward has ended."""
    session.num_checked = -1
    after_call(session)


def _check(session: Session) -> None:
    gemms = gemms_of_session(session)
    if session.rules == session.settings.rules:  # who switches to rules without FP8 means it
        _say(session, "no FP8", _no_fp8(gemms))
    _say(session, "head", _heads_in_fp8(gemms, session.rules))
    if session.went_backward:
        remarks = [remark_on(rule, session.rules.rules, gemms) for rule in unmatched(session.rules.rules, gemms)]
        for step, later in session.schedule:
            found = [remark_on(rule, later.rules, gemms) for rule in unmatched(later.rules, gemms)]
            remarks += [f"In the schedule at step {step}: {remark}" for remark in found]
        _say(session, "rules", " ".join(remarks))


def _say(session: Session, kind: str, text: str) -> None:
    if text and kind not in session.warned:
        if not session.strict:
            session.warned.add(kind)
        tell(f"{_title(session)}: {text}", Fp8Warning, strict=session.strict)


def _title(session: Session) -> str:
    root = session.root()
    return "the compiled function" if root is None else type(root).__name__


def _no_fp8(gemms: Sequence[GemmRecord]) -> str:
    if any(g.quantized for g in gemms):
        return ""
    if not gemms:
        return (
            "no GEMM runs in FP8: what was compiled has no matrix multiplication. If the model has some, they were not called"
            " or ran eagerly, because of a graph break for example; print(fp8pass.inspect(model)) names its linears"
        )
    kinds = Counter((g.reason or "").partition(":")[0] for g in gemms)
    counts = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    return (
        f"no GEMM runs in FP8: all {len(gemms)} stay in high precision, with the reasons {counts}."
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
        f" {{{module!r}: {rules.default.name!r}}}, says that FP8 is meant"
    )


def _is_meant(gemm: GemmRecord, rules: Rules) -> bool:
    """Whether the rule that decides names the module, and is not one for many, such as "*"."""
    rule = rules.find(gemm.module, gemm.role)
    return rule is not None and bool(rule.module.rpartition(".")[2].strip(_WILD))
