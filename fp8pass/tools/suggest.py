"""`suggest_rules`: which GEMMs quantization hurts, to first order, and rules for them. `last_blocks`: the field's habit."""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8pass.errors import OptionError, preview
from fp8pass.graph.origin import joined
from fp8pass.graph.values import by_key
from fp8pass.options import CompileOptions, SavedActivations
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.recipes.recipe import is_int
from fp8pass.tools.tables import as_text, make_table

if TYPE_CHECKING:
    from rich.table import Table

    from fp8pass.tools.probe import Probe, StepPasses

COLUMNS = ("rank", "module", "role", "expected", "spread", "measured", "FLOPs", "rule")


def suggest_rules(
    model: nn.Module,
    step: Callable[[Any], torch.Tensor],
    recipe: Recipe | RecipeName | None = "delayed",
    keep: float = 0.9,
    *,
    saved_activations: SavedActivations | None = None,
    checks: int = 8,
    progress: bool = True,
) -> Suggestion:
    """Rank GEMMs by what their quantization does to the loss, and keep the first ones in high precision.

    GEMMs are those that `fp8_compile(model, recipe)` would run in FP8. With e the error that quantizing both operands adds to
    the result of a GEMM, L the loss of the step, G its gradient and all else in high precision, the expected effect is

        output         <dL/dy, e>           y: the result of the GEMM
        grad_input     -r <x', e>           x': how the GEMM's input changes along G
        grad_weight    -r <w', e>           w': how the weight changes along G, which is its own gradient

    The last two are the effect on the loss after a step of gradient descent with a learning rate r that takes 1 % off the
    loss to first order: r = 0.01 |L| / |G|^2. The error of a gradient does not change the loss of its own step. x' and w' are
    differences between two forwards. The spread is the root of the sum over the result's rows of the squares of their parts
    of the scalar product. GEMMs are ranked by |expected|, which may be small by accident, or by a quarter of the spread if
    that is larger. Delayed scaling's scales are those of tensors without a history.

    The first `checks` GEMMs are measured: the step runs with one of them in FP8, and the effect is the difference of losses;
    for gradients, of losses after the step of gradient descent.

    In the order of the ranking, a GEMM gets a rule that keeps it in high precision if the GEMMs without a rule still have at
    least `keep` of the FLOPs then.

    With `saved_activations="fp8"` the values that a module saves for the backward, the role `saved`, are ranked, too. Their
    expected effect is -r <G, e>, e being what rounding them adds to the gradients of all parameters; it takes a forward and a
    backward for each module. They get rules as GEMMs do, of the bytes that saving in FP8 takes away instead of the FLOPs.

    Two forwards and backwards and one forward give all effects of GEMMs; a measurement takes one forward, of a gradient two
    forwards and a backward. Memory: copies of the parameters and of the gradients, and, on the host, the operands and errors of
    all GEMMs in float32. The cost is printed before it starts.

    Args:
        model: an nn.Module that is not compiled. It is left as it was: parameters, buffers, gradients, modes and random number
            generators; an optimizer is not touched. With several ranks each calls this with the whole model, not wrapped, and
            a batch of its own: effects are those on the mean of the ranks' losses, and every rank gets the same rules.
        step: called as `step(compiled)`, returns the loss, a scalar tensor, before its backward. It calls `compiled` as it
            would call `model`, and uses the same batch in each call.
        recipe: as in `fp8_compile`.
        keep: share of the FLOPs that are to run in FP8, from 0 to 1; of saved values, of the bytes that FP8 takes away.
        saved_activations: as in `fp8_compile`.
        checks: how many GEMMs and modules with saved values are measured.
        progress: whether to print the cost and a progress bar, to stderr.

    Returns:
        A dict of rules, for `fp8_compile(model, recipe, rules=...)`, with the table as `gemms`.

    Raises:
        OptionError: an argument is invalid; ranks have a part of the model, or other parameters; step ran a backward or an
            optimizer, or is not repeatable; its loss has no gradient.
    """
    from rich.console import Console
    from rich.progress import Progress

    from fp8pass.scales.reduction import is_first_rank
    from fp8pass.tools.probe import StepPasses

    _check(model, step, keep, checks)
    rules = CompileOptions(recipe=recipe, saved_activations=saved_activations).first_rules
    is_shown = progress and is_first_rank()
    console = Console(file=sys.stderr, quiet=not is_shown)
    bar = Progress(console=console, transient=True, disable=not is_shown)
    say = functools.partial(console.print, markup=False, highlight=False)
    of_saved = ", one with a backward for each module that saves values" if saved_activations is not None else ""
    say(
        f"suggest_rules: 3 passes of the step (2 with a backward){of_saved}, then up to {checks} measurements of 1 to 3 passes"
        f" each. A pass runs eagerly and quantizes each GEMM's operands."
    )
    with StepPasses(model, step, rules, saved_activations is not None) as passes, bar:
        begun = time.perf_counter()
        task = bar.add_task("effects", total=1)
        loss = passes.effects()
        bar.advance(task)
        saved = _of_saved(passes)
        found = sorted([*_ranked(passes.probe), *saved], key=lambda g: -g.risk)
        seconds = time.perf_counter() - begun
        say(f"suggest_rules: {len(found) - len(saved)} GEMMs, {len(saved)} modules that save values, {seconds:.1f} s so far.")
        task = bar.add_task("measured", total=min(checks, len(found)))
        baselines: dict[str, float] = {}
        for i, gemm in enumerate(found[:checks]):
            measured = passes.measured((gemm.module, gemm.role), loss, baselines)
            found[i] = dataclasses.replace(gemm, measured=measured)
            bar.advance(task)
    return _suggestion(found, keep, loss)


def _check(model: object, step: object, keep: object, checks: object) -> None:
    from fp8pass.runtime.wrap import session_of
    from fp8pass.tools.probe import check_ranks

    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; pass an nn.Module")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or session_of(model) is not None:
        raise OptionError("model is compiled; pass the model itself to suggest_rules")
    if not callable(step):
        raise OptionError(f"step is {step!r}; pass a function that takes the model and returns the loss")
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 <= keep <= 1:
        raise OptionError(f"keep is {keep!r}; use a share of the FLOPs from 0 to 1, such as 0.9")
    if not is_int(checks) or checks < 0:
        raise OptionError(f"checks is {checks!r}; use a number of GEMMs to measure, 0 or more")
    check_ranks(model)


def _of_saved(passes: StepPasses) -> list[Sensitivity]:
    """The values that modules save in FP8. A pass with a backward for each module."""
    found = []
    for (module, role), size in sorted(passes.probe.saved.items()):
        expected = passes.effect_of_saved((module, role))
        gemm = Sensitivity(
            module=module, role=role, expected=expected, spread=0.0, measured=None, flops=None, saved_bytes=size, kept=False
        )
        found.append(gemm)
    return found


def _ranked(probe: Probe) -> list[Sensitivity]:
    found = [
        Sensitivity(
            module=module,
            role=role,
            expected=effect.total if effect.measured else None,
            spread=effect.squares**0.5,
            measured=None,
            flops=None if (module, role) in probe.unknown else probe.flops[module, role],
            kept=False,
        )
        for (module, role), effect in probe.effects.items()
    ]
    return sorted(found, key=lambda g: -g.risk)


def _suggestion(found: list[Sensitivity], keep: float, loss: float) -> Suggestion:
    budget = (1 - keep) * sum(g.flops or 0 for g in found) * (1 + 1e-9)
    bytes_left = (1 - keep) * sum(g.saved_bytes or 0 for g in found) * (1 + 1e-9)
    for i, gemm in enumerate(found):
        if gemm.saved_bytes is not None:
            is_kept = gemm.saved_bytes <= bytes_left
            bytes_left -= gemm.saved_bytes if is_kept else 0
            found[i] = dataclasses.replace(gemm, kept=is_kept)
        elif gemm.expected is not None and gemm.flops is not None and gemm.flops <= budget:
            budget -= gemm.flops
            found[i] = dataclasses.replace(gemm, kept=True)
    return Suggestion(found, loss)


# -- the rules, and the table that they come from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effect of quantizing one GEMM, or the values that a module saves, on the loss of the step. `suggest_rules` has the
    formulas."""

    module: str
    role: str
    expected: float | None
    """First-order effect on the loss; above 0 where quantization raises it. None where no gradient reaches the GEMM."""
    spread: float
    """Standard deviation of the effect over batches, as the rows of this one tell it."""
    measured: float | None
    """Effect that was measured by running the step with this GEMM alone in FP8; None if it was not."""
    flops: int | None
    """FLOPs of all its calls in the step; None where a size is dynamic, and for saved values."""
    saved_bytes: int | None = None
    """For the role `saved`: the bytes that FP8 takes away."""
    kept: bool
    """The rules keep it in high precision."""

    @property
    def risk(self) -> float:
        """The key of the ranking: the size of `expected`, which may be small by accident, or a quarter of `spread` if that is
        larger."""
        return 0.0 if self.expected is None else max(abs(self.expected), self.spread / 4)


class Suggestion(dict[str, None]):
    """Rules, to be passed as `rules=`; and what they come from. It prints as a table."""

    def __init__(self, gemms: Sequence[Sensitivity], loss: float):
        super().__init__(patterns(gemms))
        self.gemms: list[Sensitivity] = list(gemms)
        """Every GEMM that would run in FP8 and, with `saved_activations`, every module with saved values: the one that
        quantization hurts most first."""
        self.loss: float = loss
        """The loss of the step in high precision."""

    @property
    def rules(self) -> dict[str, None]:
        """The rules as a plain dict."""
        return dict(self)

    @property
    def fp8_share(self) -> float:
        """Share of the FLOPs, of GEMMs that would run in FP8 without the rules, that still do."""
        total = sum(g.flops or 0 for g in self.gemms)
        return sum(g.flops or 0 for g in self.gemms if not g.kept) / total if total else 1.0

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of expected and measured effects, of the GEMMs that were measured; None for fewer than
        three."""
        pairs = [(g.expected, g.measured) for g in self.gemms if g.expected is not None and g.measured is not None]
        return spearman([e for e, _ in pairs], [m for _, m in pairs]) if len(pairs) > 2 else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, dicts, strings and numbers."""
        return {
            "rules": dict(self),
            "loss": self.loss,
            "fp8_share": self.fp8_share,
            "rank_correlation": self.rank_correlation,
            "gemms": [dataclasses.asdict(g) for g in self.gemms],
        }

    def __str__(self) -> str:
        agreement = self.rank_correlation
        lines = [f"Loss of the step in high precision: {self.loss:.6g}."]
        if any(g.flops for g in self.gemms):
            lines[0] += f" With these rules, {self.fp8_share:.1%} of the FLOPs run in FP8."
        taken = [(g.saved_bytes, g.kept) for g in self.gemms if g.saved_bytes is not None]
        if taken:
            size = sum(taken_away for taken_away, is_kept in taken if not is_kept)
            lines.append(f"Saved values take {size:,} bytes less; without rules {sum(each for each, _ in taken):,}.")
        if agreement is not None:
            lines.append(f"Rank correlation of expected and measured effects: {agreement:.2f}.")
        return as_text([self.__rich__(), *lines])

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def __rich__(self) -> Table:
        columns = {c: {"justify": "right" if c in COLUMNS[3:7] else "left"} for c in COLUMNS}
        return make_table(columns, [[str(i), *_cells(g)] for i, g in enumerate(self.gemms, 1)])


def _cells(g: Sensitivity) -> list[str]:
    effects = ["-" if effect is None else f"{effect:+.2e}" for effect in (g.expected, g.spread, g.measured)]
    work = f"{g.saved_bytes:,} bytes" if g.saved_bytes is not None else "-" if g.flops is None else f"{g.flops:.3g}"
    return [g.module, g.role, *effects, work, "high precision" if g.kept else ""]


def patterns(gemms: Sequence[Sensitivity]) -> dict[str, None]:
    """Rules for those that are kept: one for a module all of whose GEMMs are, else one per role."""
    of_module = by_key(gemms, lambda g: g.module)
    found: dict[str, None] = {}
    for g in gemms:
        if g.kept:
            path = glob.escape(g.module)
            found[path if all(other.kept for other in of_module[g.module]) else f"{path}:{g.role}"] = None
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    x, y = _ranks(left), _ranks(right)
    mean = (len(x) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    variances = sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y)
    return covariance / math.sqrt(variances) if variances else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


# -- the last blocks

_NUMBERED = re.compile(r"\d+")


def last_blocks(model: nn.Module, share: float = 0.15) -> dict[str, None]:
    """Rules that keep the last blocks of a model in high precision, for `fp8_compile(model, recipe, rules=...)`.

    Blocks are repeated modules of one class: the children of an nn.Sequential, or siblings whose names differ in a number, as
    in an nn.ModuleList. Of several such chains it is the one with the most parameters, then the longest one. Their order is
    that of their numbers, in a Sequential that of its children.

    Args:
        model: the model, compiled or not; it is only read.
        share: of the blocks, above 0 and at most 1. The number of blocks is rounded up.

    Returns:
        An ordered `pattern -> None` for each block, such as "layers.30.*", and the block's own path where it has matrices
        itself.

    Raises:
        OptionError: `share` is out of range, `model` is not an nn.Module or has no repeated modules.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; last_blocks finds the blocks of an nn.Module")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise OptionError(f"share is {share!r}; use a number above 0 and at most 1, such as 0.15")
    chains = _chains(model)
    if not chains:
        children = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
        found = f"its children are {preview(children)}" if children else "it has no children"
        raise OptionError(
            f"{type(model).__name__} has no repeated modules of one class that hold matrices: {found}. Write the rules"
            f" yourself, such as {{'decoder.*': None}}"
        )
    blocks = max(
        chains, key=lambda chain: (sum(p.numel() for p in {p for _, module in chain for p in module.parameters()}), len(chain))
    )
    count = math.ceil(share * len(blocks) - 1e-9)  # 0.07 * 100 is a little more than 7
    rules: dict[str, None] = {}
    for path, block in blocks[len(blocks) - count :]:
        rules |= _patterns(path, block)
    return rules


def _chains(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules of one class that follow each other, by their paths in the user's model."""
    from fp8pass.runtime.instances import without_wrappers, wrapper_paths

    wrapped = wrapper_paths(model)
    found = []
    for path, parent in model.named_modules():
        groups: dict[tuple[type, str], list[tuple[int, str, nn.Module]]] = {}
        for position, (name, child) in enumerate(parent.named_children()):
            stem = "" if isinstance(parent, nn.Sequential) else _NUMBERED.sub("#", name)
            number = position if isinstance(parent, nn.Sequential) else int((_NUMBERED.findall(name) or [-1])[-1])
            if number >= 0 and any(_is_matrix(p) for p in child.parameters()):
                groups.setdefault((type(child), stem), []).append((number, name, child))
        for group in groups.values():
            if len(group) > 1:
                held = sorted(group, key=lambda entry: entry[0])
                full = [(joined(path, name), child) for _, name, child in held]
                blocks = [(without_wrappers(at, wrapped), child) for at, child in full]
                found.append(blocks)
    return found


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() >= 2 and min(parameter.shape[-2:]) > 1


def _patterns(path: str, block: nn.Module) -> dict[str, None]:
    """The patterns of the GEMMs of a block, none that matches nothing, which would be warned of."""
    escaped = glob.escape(path)
    own = any(_is_matrix(p) for p in block.parameters(recurse=False))
    inner = any(_is_matrix(p) for child in block.children() for p in child.parameters())
    return {**({escaped: None} if own else {}), **({f"{escaped}.*": None} if inner else {})}
