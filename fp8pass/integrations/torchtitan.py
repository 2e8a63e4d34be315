"""FP8 in torchtitan: a converter for its model registries, beside its own ones for torchao.

    from fp8pass.integrations.torchtitan import Fp8Converter

    model_registry("8B", converters=[Fp8Converter.Config(recipe="delayed", rules={"output": None})])

and `--compile.enable`. examples/torchtitan_llama3.py is a registry file of such configurations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8pass.api import inspect
from fp8pass.errors import OptionError
from fp8pass.integrations.saved import show
from fp8pass.options import CompileOptions
from fp8pass.recipes import Recipe, RecipeName
from fp8pass.runtime.named_backend import named_session, prepare
from fp8pass.scales.reduction import is_first_rank


class Fp8Converter:
    """Lets torchtitan train in FP8, as a `ModelConfigConverter`: `Fp8Converter.Config(...).build().convert(model_config)`.

    It changes no module. The blocks that torchtitan compiles, by whatever backend, are compiled by the backend "fp8pass" with
    these options instead, when the model is first called. (torchtitan itself refuses any name but "inductor" and "aot_eager"
    for models with FlexAttention.) All blocks share one state: `inspect` and `state` take the built model, rules
    name modules by their paths in it, and amaxes are reduced once per step. A step of delayed scaling ends at the
    first forward with gradients after a backward. torchtitan's checkpoints do not hold the FP8 state; save `state(model)`
    beside them.

    The first forward of the model raises OptionError if torchtitan compiled none of its blocks.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the converter."""

        recipe: Recipe | RecipeName = "delayed"
        """As in `fp8_compile`."""
        rules: Mapping[str, Recipe | RecipeName | None] | None = None
        """As in `fp8_compile`."""
        options: dict[str, Any] = dataclasses.field(default_factory=dict)
        """Further arguments of `fp8_compile`, such as `select` or `weight_copies`."""
        print_table: bool = True
        """The first rank prints the table of GEMMs when the second forward begins."""

        def build(self, **_: Any) -> Fp8Converter:
            """The converter. Raises RecipeError, RuleError or OptionError for invalid options."""
            return Fp8Converter(self)

    def __init__(self, config: Config):
        self.config = config
        self._options = {"recipe": config.recipe, "rules": config.rules, **config.options}
        CompileOptions.named(None, self._options, None)  # to refuse what is invalid now, not at the first step

    def convert(self, model_config: Any) -> Any:
        """The config of the same model, which holds the FP8 options once it is built."""
        options, print_table = self._options, self.config.print_table

        def build(self: Any, **arguments: Any) -> Any:
            model = original.build(self, **arguments)
            prepare(model, **options)
            model.register_forward_pre_hook(_FirstCalls(print_table))
            return model

        original = type(model_config)
        model_config.__class__ = type(original.__name__, (original,), {"__slots__": (), "build": build})
        return model_config


class _FirstCalls:
    """A hook of the model: compiles its blocks at the first call, prints the table of GEMMs at the second."""

    def __init__(self, print_table: bool):
        self._print_table = print_table
        self._calls = 0

    def __call__(self, model: nn.Module, _: Any) -> None:
        self._calls += 1
        if self._calls == 1:
            _compile_blocks(model)
        elif self._calls == 2 and self._print_table and is_first_rank():
            show(str(inspect(model)))


def _compile_blocks(model: nn.Module) -> None:
    """torch.compile is lazy: before its first call, another one costs nothing."""
    blocks = [module for module in model.modules() if module._compiled_call_impl is not None]
    if not blocks:
        raise OptionError(
            "Fp8Converter was given, and torchtitan has compiled no block; pass --compile.enable, with 'model' among"
            " --compile.components"
        )
    for block in blocks:
        if named_session(block) is None:
            block.compile(backend="fp8pass", fullgraph=True)  # as torchtitan's apply_compile does
