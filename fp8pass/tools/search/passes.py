"""The passes of `suggest_rules`: the user's step, run with the probe, on a model that is left as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.errors import Fp8Error, OptionError
from fp8pass.rules import Rules
from fp8pass.tools.search.probe import Key, Probe, ProbeBackend
from fp8pass.tools.search.ranks import average, average_effects, mean_of

#: The share of the loss that the step of gradient descent takes away to first order, after which effects of gradients are told.
DESCENT = 0.01
#: How often Dynamo may compile one function: a search compiles the model anew, and beyond the limit it would run eagerly.
_COMPILATIONS = 1024
#: How far parameters move for tangents, relative to their norm: further where they have fewer digits.
_MOVE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
#: Two runs of the step in high precision may differ by this share of the loss: atomics of a GPU.
REPEATABLE = 1e-4


class Passes:
    """Runs the step. Every pass begins with the same parameters, buffers, modes and random numbers; see `restored`."""

    def __init__(self, model: nn.Module, step: Callable[[Any], torch.Tensor], rules: Rules):
        self.model = model
        self.step = step
        self.probe = Probe()
        self.compiled = torch.compile(model, backend=ProbeBackend(model, rules, self.probe), dynamic=False)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.start = _Saved(model)
        self.gradients: list[torch.Tensor | None] = []
        self.first_gradients: list[torch.Tensor | None] = []
        """Those in high precision."""
        self.learning_rate = 0.0

    def run(self, *, backward: bool = True, descend: list[torch.Tensor | None] | None = None, **settings: Any) -> float:
        """The loss of one pass, with gradients in `self.gradients`. descend: gradients that parameters are moved along before,
        by the learning rate."""
        self.start.restore()
        for p in self.trained:
            p.grad = None
        if descend is not None:
            self._move(descend, -self.learning_rate)
        self.probe.begin(**settings)
        versions = [p._version for p in self.model.parameters()]
        with torch.enable_grad(), torch._dynamo.config.patch(recompile_limit=_COMPILATIONS):
            try:
                loss = self.step(self.compiled)
            except BackendCompilerFailed as failure:
                if isinstance(failure.inner_exception, Fp8Error):
                    raise failure.inner_exception from None
                raise
        self._check(loss, versions)
        mean = mean_of(float(loss.detach()))
        if not math.isfinite(mean):
            raise OptionError(f"the loss of step is {mean} in high precision; effects are told of a finite one")
        if backward:
            loss.backward()
            self.gradients = average([p.grad for p in self.trained])
        return mean

    def _move(self, along: list[torch.Tensor | None], factor: float) -> None:
        with torch.no_grad():
            for p, g in zip(self.trained, along, strict=True):
                if g is not None:
                    p.add_(g.to(p.dtype), alpha=factor)

    def _check(self, loss: object, versions: list[int]) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dim() > 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise OptionError(f"step returned {given}; return the loss, a scalar tensor, before its backward")
        if any(p.grad is not None for p in self.trained):
            raise OptionError("step ran a backward; return the loss and leave the backward to suggest_rules")
        if [p._version for p in self.model.parameters()] != versions:
            raise OptionError("step changed parameters; leave optimizer.step() out and return the loss")
        if not loss.requires_grad:
            raise OptionError(
                "the loss of step has no gradient; run the model without torch.no_grad, with parameters that train"
            )

    def effects(self) -> float:
        """Fill the probe's effects; returns the loss in high precision."""
        loss = self.run(outputs=True)
        if not mean_of(len(self.probe.effects)):
            raise OptionError(
                "no GEMM of the step would run in FP8: step must call the model that it is given, and inspect(compiled) says"
                " why GEMMs stay in high precision"
            )
        gradients = [None if g is None else g.clone() for g in self.gradients]
        self.first_gradients = gradients
        norm = _norm(gradients)
        if norm == 0.0:
            raise OptionError("the gradients of the step are 0, so that no effect on the loss can be told")
        self.learning_rate = DESCENT * abs(loss) / norm**2
        move = max(_MOVE.get(p.dtype, 1e-3) for p in self.trained)
        distance = move * max(_norm([p.detach() for p in self.trained]), 1e-6) / norm
        rate, self.learning_rate = self.learning_rate, -distance
        self.run(backward=False, keeps_operands=True, descend=gradients)
        self.learning_rate = rate
        self.probe.step_size = distance
        again = self.run(gradient_scale=-rate)
        self.probe.kept.clear()
        average_effects(self.probe)
        if abs(again - loss) > REPEATABLE * abs(loss):
            raise OptionError(
                f"step is not repeatable: its loss was {loss:.8g}, then {again:.8g} with the same parameters and random"
                f" numbers. Use the same batch in each call"
            )
        return loss

    def measured(self, key: Key, loss: float, baselines: dict[str, float]) -> float:
        """The effect of one GEMM, run in FP8 alone; see `suggest_rules`."""
        if key[1] == "output":
            return self.run(backward=False, toggled=key) - loss
        if "descended" not in baselines:
            baselines["descended"] = self.run(backward=False, descend=self.first_gradients)
        self.run(toggled=key)
        changed = [None if g is None else g.clone() for g in self.gradients]
        return self.run(backward=False, descend=changed) - baselines["descended"]


def _norm(tensors: list[torch.Tensor | None] | list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors if t is not None))


class _Saved:
    """What a pass could change of a model, and of the random number generators."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self.modes = [(m, m.training) for m in model.modules()]
        self.gradients = [(p, p.grad) for p in model.parameters()]
        self.devices = sorted({t.device.index or 0 for t, _ in self.tensors if t.device.type == "cuda"})
        self.random = torch.get_rng_state()
        self.random_of_devices = [torch.cuda.get_rng_state(d) for d in self.devices]

    def restore(self) -> None:
        """Everything but gradients."""
        with torch.no_grad():
            for tensor, saved in self.tensors:
                tensor.copy_(saved)
        for module, mode in self.modes:
            module.training = mode
        torch.set_rng_state(self.random)
        for device, found in zip(self.devices, self.random_of_devices, strict=True):
            torch.cuda.set_rng_state(found, device)

    def restore_gradients(self) -> None:
        """The same tensors as before."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def restored(passes: Passes) -> Iterator[Passes]:
    """Leave the model as it was, whatever happens."""
    try:
        yield passes
    finally:
        passes.start.restore()
        passes.start.restore_gradients()
