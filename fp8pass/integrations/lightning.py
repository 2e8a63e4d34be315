"""FP8 in Lightning: one callback.

    import lightning
    from fp8pass.integrations.lightning import Fp8Callback

    trainer = lightning.Trainer(callbacks=[Fp8Callback("delayed")])
    trainer.fit(module, dataloader)

A runnable example: `docs/training-setups.md`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from fp8pass.api import inspect, state
from fp8pass.api import monitor as start_monitor
from fp8pass.errors import OptionError, nearest
from fp8pass.integrations import saved
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.runtime.session import Session
from fp8pass.runtime.wrap import compile_in_place, is_in_place, share_session
from fp8pass.tools.monitoring import Monitor

log = logging.getLogger(__name__)


class Fp8Callback(Callback):
    """Compiles the modules of a LightningModule in place, so that they train in FP8, and keeps the FP8 state in checkpoints.

    The modules are compiled when fitting, validation, testing or prediction begins, and remain compiled afterwards. They share
    one state: `inspect` and `state` take the LightningModule, whose paths name modules in rules. A step of delayed scaling ends
    before each optimizer step, so with `accumulate_grad_batches` it spans all batches; after fitting the next forward ends
    steps again, as with `fp8_compile(step="auto")`. Checkpoints that are more than weights hold the FP8 state under the
    callback's key, and whatever takes `ckpt_path`, "best" among others, continues from it. The keys of weights do not change.
    Weights that `StochasticWeightAveraging` puts in at the end are scaled by their own amaxes.

    A callback serves several LightningModules in turn, and modules that are compiled with the same arguments already.

    Args:
        recipe: as in `fp8_compile`.
        rules: as in `fp8_compile`.
        module: path of the module to compile, "model" for `self.model`; "" compiles the LightningModule's own `forward`, for
            steps that call `self(x)`. By default all modules that are attributes of the LightningModule and have Parameters
            are compiled, each alone; those in an nn.ModuleList or nn.ModuleDict as well.
        print_table: print the table of GEMMs once, after the first step, on the first rank.
        monitor: measure every n-th step, as `fp8pass.monitor` does. The numbers go to the Trainer's loggers;
            `callback.monitor.latest` has them, too.
        options: further arguments of `fp8_compile`, except `step` and `in_place`.

    Raises:
        RecipeError, RuleError, OptionError: an argument is invalid.
        OptionError: there is no such module, nothing to compile, or the first step ran no compiled module.
        CheckpointMismatchError: on resume, if the checkpoint was trained with another recipe or other rules.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName = "delayed",
        rules: Mapping[str, Recipe | RecipeName | None] | None = None,
        *,
        module: str | None = None,
        print_table: bool = True,
        monitor: int | None = None,
        **options: Any,
    ):
        saved.check_monitor(monitor)
        self._options = saved.callback_options(recipe, rules, options)
        self._compiling = {name: options[name] for name in ("dynamic", "fullgraph") if name in options}
        self._module = module
        self._print_table = print_table
        self._every = monitor
        self._numbers: list[dict[str, float]] = []
        """Measured and not reported yet."""
        self.monitor: Monitor | None = None
        """The monitor of the modules; None before fitting begins, and without one."""
        self._root: Any = None
        """The LightningModule whose modules this callback compiled, or took over."""
        self._loaded: dict[str, Any] | None = None
        """The content of a checkpoint, until there is a session."""
        self._was_loaded = False
        """The checkpoint that this run of the Trainer began with held an FP8 state."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of another LightningModule, before the checkpoint of this one is loaded."""
        if self._root is not pl_module:
            self._root = self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile the modules."""
        self._begin(trainer, pl_module)
        saved.use_steps(pl_module, "manual")
        if self._every is not None:
            self.monitor = start_monitor(pl_module, self._every, self._numbers.append)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile the modules, where it is not a part of fitting."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._begin(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile the modules."""
        self._begin(trainer, pl_module)

    on_predict_start = on_test_start

    def _begin(self, trainer: Trainer, root: LightningModule) -> None:
        """Compile the modules or take over what is compiled alike, and load what the checkpoint holds of their state."""
        if self._root is not root:
            modules = self._modules_of(root)
            if all(map(is_in_place, modules)):
                saved.check_alike(root, self._options)
            else:
                session = Session(root, self._options)
                for module in modules:
                    compile_in_place(module, session, **self._compiling, **self._options.torch_options)
                share_session([root], session)
            self._root = root
        self._load()
        if trainer.ckpt_path is not None and not self._was_loaded and saved.keeps_state(root):
            state(root).forget_weights()
            log.warning(
                "%s holds no FP8 state: it was saved without this callback, or with save_weights_only. Weights take their"
                " scales from their own amaxes until a step has recorded them",
                trainer.ckpt_path,
            )
        self._was_loaded = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the modules end their steps by themselves."""
        self._end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the modules end their steps by themselves."""
        self._end(trainer, pl_module)

    def _end(self, trainer: Trainer, root: LightningModule) -> None:
        if self._root is not root or trainer.state.fn != TrainerFn.FITTING:
            return
        saved.use_steps(root, "auto")
        if self.monitor is not None:
            self.monitor.stop()
        if any(isinstance(other, StochasticWeightAveraging) for other in trainer.callbacks):
            state(root).forget_weights()  # the average may hold values that are older, and larger, than the histories

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """End the step of delayed scaling: the backward of its last batch has run."""
        state(pl_module).step()
        while self._numbers:
            numbers = self._numbers.pop(0)
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the first batch, make sure that compiled modules ran, and print the table of GEMMs."""
        if not any(session.num_graph_calls for session in saved.sessions_of(pl_module)):
            raise OptionError(
                f"training_step called none of the modules that are compiled (module={self._module!r}); pass"
                f" Fp8Callback(module=...) the path of the module that it calls, '' if it calls self(x)"
            )
        if self._print_table and trainer.is_global_zero:
            saved.show(str(inspect(pl_module)))
        self._print_table = False

    def state_dict(self) -> dict[str, Any]:
        """The content of checkpoints. Called by every rank."""
        if self._root is None:
            return self._loaded or {}
        return {"rules": saved.describe_rules(self._root), "tensors": saved.collect_state(self._root)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, at once or when the modules are compiled."""
        self._loaded = state_dict or None
        self._was_loaded = True
        self._load()

    def _load(self) -> None:
        if self._root is None or self._loaded is None:
            return
        saved.check_rules(self._loaded["rules"], self._root, "the checkpoint")
        state(self._root).load_state_dict(self._loaded["tensors"])
        self._loaded = None

    def _modules_of(self, root: LightningModule) -> list[nn.Module]:
        if self._module is not None:
            known = dict(root.named_modules())
            if self._module not in known:
                raise OptionError(
                    f"module is {self._module!r}, and {type(root).__name__} does not have.{nearest(self._module, known)}"
                )
            found = [known[self._module]]
        else:
            found = list(_callable_children(root))
        if not found:
            raise OptionError(f"{type(root).__name__}: no module has Parameters; there is nothing for Fp8Callback to compile")
        compiled = [type(m).__name__ for m in found if is_in_place(m)]
        if compiled and len(compiled) < len(found):
            raise OptionError(
                f"{type(root).__name__}: {', '.join(compiled)} is compiled in place already, and other modules are not; pass"
                f" Fp8Callback(module=...) the path of one, or call fp8_uncompile on the compiled modules"
            )
        return found


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Children with Parameters; those of containers, which are not called themselves, in their place."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        elif next(child.parameters(), None) is not None:
            yield child
