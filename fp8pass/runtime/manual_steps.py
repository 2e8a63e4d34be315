"""Manual steps that nobody makes: a model that was compiled with step="manual", trained on without `state(model).step()`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim.optimizer import Optimizer

from fp8pass.weights.optimizers import listen, take_compiled_steps

#: So many optimizer steps without a step boundary are no schedule of anybody's: several backwards per step of SAM or of a
#: penalty on gradients change the weights twice.
MAX_UPDATES = 4
#: So many forwards with gradients are none either, where updates leave no trace, as writes through `.data`.
MAX_FORWARDS = 1024


class ManualSteps:
    """Counts the optimizer steps since the last step boundary of one model. Invariant: holds no reference to the model.

    Optimizers say that they have made a step; updates by hand raise the version of a Parameter that trains.
    """

    def __init__(self, root: Callable[[], nn.Module | None]):
        self._root = root
        self._version: int | None = None
        self._is_updated = False
        self.num_updates = 0
        """Updates of the weights, each followed by a forward with gradients."""
        self.num_forwards = 0
        """Outermost forwards with gradients."""
        listen(self)

    def begin_forward(self) -> None:
        """An outermost forward with gradients begins."""
        take_compiled_steps()
        parameter = self._trained()
        version = None if parameter is None else parameter._version
        if self._is_updated or (self._version is not None and version != self._version):
            self.num_updates += 1
        self._version, self._is_updated = version, False
        self.num_forwards += 1

    def end_step(self) -> None:
        """A step boundary."""
        self.num_updates = self.num_forwards = 0

    @property
    def complaint(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.num_updates < MAX_UPDATES and self.num_forwards < MAX_FORWARDS:
            return ""
        found = f"{self.num_updates} updates of the weights" if self.num_updates else f"{self.num_forwards} forwards"
        return (
            f'step="manual", and {found} without state(model).step(): the scales of delayed scaling stay as they are, and'
            f' tensors that grow saturate. Call state(model).step() once per optimizer step, or compile with step="auto"'
        )

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has made a step; None: a compiled one, of whichever model."""
        parameter = self._trained()
        if optimizer is None or any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            self._is_updated = True

    def _trained(self) -> nn.Parameter | None:
        """The first matrix that trains."""
        root = self._root()
        return None if root is None else next((p for p in root.parameters() if p.requires_grad and p.ndim > 1), None)
