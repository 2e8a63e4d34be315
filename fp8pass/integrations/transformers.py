"""FP8 in transformers.Trainer: one callback.

    from fp8pass.integrations.transformers import Fp8Callback
    from transformers import Trainer

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[Fp8Callback("delayed")])
    trainer.train()

A runnable example: `examples/finetune_trainer.py`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from fp8pass.api import fp8_compile, fp8_uncompile, inspect, state
from fp8pass.api import monitor as start_monitor
from fp8pass.errors import CheckpointMismatchError, OptionError
from fp8pass.integrations import saved
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.runtime.named_backend import named_session
from fp8pass.runtime.wrap import is_called_in_place, is_in_place, session_of
from fp8pass.tools.monitoring import Monitor

log = logging.getLogger(__name__)

#: The file in each checkpoint folder.
FILE = "fp8_state.safetensors"
_RULES = "rules"


class Fp8Callback(TrainerCallback):
    """Compiles the Trainer's model in place, so that it trains in FP8, and keeps the FP8 state in the Trainer's checkpoints.

    The model is compiled when the Trainer is made, so that `evaluate()` and `predict()` run in FP8 without training. It remains
    compiled afterwards. A step of delayed scaling ends at each optimizer step, so with gradient accumulation it spans all
    micro-batches; after training the next forward ends steps again, as with `fp8_compile(step="auto")`. Each checkpoint folder
    gets `fp8_state.safetensors`, unless `save_only_model` is set: `train(resume_from_checkpoint=...)` continues from it, the
    best model at the end gets the state of its own folder, and so does a model from `from_pretrained(folder)`. The model's
    weights are saved under its own keys.

    A callback serves several trainings and models in turn, and a model that is compiled with the same arguments already.

    Args:
        recipe: as in `fp8_compile`.
        rules: as in `fp8_compile`.
        print_table: print the table of GEMMs once, after the first step, on the main process.
        monitor: measure every n-th step, as `fp8pass.monitor` does. The numbers go to the Trainer's reporters, such as W&B and
            TensorBoard (`report_to`), and not to the console or the log history; `callback.monitor.latest` has them, too.
        options: further arguments of `fp8_compile`, except `step` and `in_place`.

    Raises:
        RecipeError, RuleError, OptionError: an argument is invalid.
        OptionError: with `TrainingArguments(torch_compile=True)`, which would compile the model a second time, and where the
            Trainer would use nn.DataParallel, whose copies of the model are not compiled; and for a model that is compiled with
            other arguments already.
        CheckpointMismatchError: on resume, if the checkpoint was trained with another recipe or other rules.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName = "delayed",
        rules: Mapping[str, Recipe | RecipeName | None] | None = None,
        *,
        print_table: bool = True,
        monitor: int | None = None,
        **options: Any,
    ):
        saved.check_monitor(monitor)
        self._compiling = saved.callback_options(recipe, rules, options)  # refuses what is invalid now, not in training
        self._recipe = recipe
        self._rules = rules
        self._options = options
        self._print_table = print_table
        self._every = monitor
        self._numbers: list[dict[str, float]] = []
        """Measured and not reported yet."""
        self.monitor: Monitor | None = None
        """The monitor of the model; None before training begins, and without one."""
        self._model: Any = None
        """The model that this callback trains, or trained last."""
        self._said = False
        """It was said that an evaluation ran in high precision."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Compile the model, which may be evaluated only. What training refuses is left to `on_train_begin`."""
        if isinstance(model, nn.Module) and _obstacle(args) is None:
            _uncompile_early(model)
            if _is_free(model):
                self._compile(model)
                _early.add(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Compile the model and load the FP8 state of the checkpoint that training resumes from."""
        if (obstacle := _obstacle(args)) is not None:
            raise OptionError(obstacle)
        _uncompile_early(model)  # and compile it as it is now: accelerate has prepared it
        _early.discard(model)
        if is_in_place(model):
            saved.check_alike(model, self._compiling)
        else:
            self._compile(model)
        self._model = model
        saved.use_steps(model, "manual")
        if self.monitor is not None:
            self.monitor.stop()  # of a training that an error ended
        if self._every is not None:
            self.monitor = start_monitor(model, self._every, self._numbers.append)
        folder = _folder_resumed_from(args, state)
        if folder is not None:
            _load(model, folder)

    def _compile(self, model: nn.Module) -> None:
        """Compile a model, with the FP8 state beside the weights that it was loaded from."""
        fp8_compile(model, self._recipe, rules=self._rules, in_place=True, **self._options)
        folder = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
        if folder and os.path.isfile(os.path.join(folder, FILE)):
            try:
                _load(model, folder)
            except CheckpointMismatchError as error:  # another recipe may well follow
                log.warning("the amax histories of %s are not those of its weights: %s", type(model).__name__, error)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let the model end its steps by itself, and give the best model, if the Trainer has loaded it, its own FP8 state."""
        model = self._model
        if model is None or not is_in_place(model):
            return
        saved.use_steps(model, "auto")
        if self.monitor is not None:
            self.monitor.stop()
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is None or not saved.keeps_state(model):
            return
        if os.path.isfile(os.path.join(best, FILE)):
            _load(model, best)
        elif os.path.isdir(best):
            _state(model).forget_weights()
            log.warning(
                "%s has the best weights and no %s (save_only_model?): weights are scaled by their own amaxes, other"
                " tensors keep those of the last step",
                best,
                FILE,
            )

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Say that an evaluation runs in high precision."""
        if model is not None and not is_in_place(model) and not self._said:
            self._said = True
            log.warning(
                "%s is evaluated in high precision: Fp8Callback compiles it when the Trainer is made with"
                " callbacks=[Fp8Callback(...)], or when training begins",
                type(model).__name__,
            )

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the step of delayed scaling."""
        _state(self._model).step()
        while self._numbers:
            _report(self._numbers.pop(0), args, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the table of GEMMs after the first step."""
        if self._print_table and state.is_world_process_zero:
            saved.show(str(inspect(self._model)))
        self._print_table = False
        self._save_just_in_time(args, state, control)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Complete a checkpoint that the Trainer wrote just now, on a signal."""
        self._save_just_in_time(args, state, control)

    on_pre_optimizer_step = on_epoch_end = on_step_begin

    def _save_just_in_time(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Write the FP8 state into a checkpoint that `enable_jit_checkpoint` wrote without the event `on_save`."""
        if getattr(args, "enable_jit_checkpoint", False) and control.should_training_stop:
            folder = _checkpoint_folder(args, state)
            if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, FILE)):
                self.on_save(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the FP8 state into the checkpoint folder that the Trainer has just written. Called by every rank."""
        if args.save_only_model:
            return
        tensors = saved.collect_state(self._model)
        folder = _checkpoint_folder(args, state)
        if args.should_save and os.path.isdir(folder):
            metadata = {_RULES: json.dumps(saved.describe_rules(self._model))}
            safetensors.torch.save_file(tensors, os.path.join(folder, FILE), metadata)


def _report(numbers: dict[str, float], args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Hand numbers to the Trainer's reporters, which are callbacks; those that print would print them all."""
    variables = _variables_of_trainer("self")
    if variables is None:
        return
    for callback in variables["self"].callback_handler.callbacks:
        if not isinstance(callback, (PrinterCallback, ProgressCallback)):
            callback.on_log(args, state, control, logs=dict(numbers))


_state = state  # the events of a TrainerCallback call the Trainer's own state by this name


_early: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a callback compiled when a Trainer was made, and that have not begun to train."""


def _uncompile_early(model: Any) -> None:
    """Uncompile a model that a callback compiled when a Trainer was made, unless it has run."""
    if model in _early and is_in_place(model) and not saved.sessions_of(model)[0].num_graph_calls:
        fp8_uncompile(model)


def _is_free(model: nn.Module) -> bool:
    """True if nothing has compiled a model."""
    return session_of(model) is None and not is_called_in_place(model) and named_session(model) is None


def _obstacle(args: TrainingArguments) -> str | None:
    """Why a Trainer cannot train in FP8 with these arguments; None if it can."""
    if args.torch_compile:
        return (
            f"TrainingArguments(torch_compile=True, torch_compile_backend={args.torch_compile_backend!r}) and Fp8Callback would"
            f" both compile the model; leave torch_compile out"
        )
    if args.n_gpu > 1:
        return (
            f"the Trainer would use nn.DataParallel on {args.n_gpu} GPUs, whose copies of the model are not compiled; start one"
            f" process per GPU (torchrun --nproc-per-node {args.n_gpu} ...), or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    return None


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> str:
    """The folder of the checkpoint that the Trainer writes at this step."""
    variables = _variables_of_trainer("trial") if state.is_hyper_param_search else None
    folder = str(args.output_dir) if variables is None else variables["self"]._get_output_dir(trial=variables["trial"])
    return os.path.join(folder, f"checkpoint-{state.global_step}")


def _folder_resumed_from(args: TrainingArguments, state: TrainerState) -> str | None:
    """The checkpoint folder that training resumes from; None if it begins anew.

    No event hands it to callbacks, but it is an argument of `Trainer.train`.
    """
    variables = _variables_of_trainer("resume_from_checkpoint")
    if variables is None:
        return _checkpoint_folder(args, state) if state.global_step else None
    found = variables["resume_from_checkpoint"]
    return os.fspath(found) if isinstance(found, (str, os.PathLike)) else None


def _variables_of_trainer(name: str) -> dict[str, Any] | None:
    """The variables of the Trainer's innermost method on the stack that has a variable of this name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        variables = frame.f_locals
        if name in variables and isinstance(variables.get("self"), Trainer):
            return variables
        frame = frame.f_back
    return None


def _load(model: Any, folder: str) -> None:
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        log.warning("%s has no %s: it was trained without Fp8Callback, so amax histories start empty", folder, FILE)
        return
    with safe_open(path, framework="pt") as file:
        rules = json.loads((file.metadata() or {}).get(_RULES, "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    saved.check_rules(rules, model, folder)
    state(model).load_state_dict(tensors)
