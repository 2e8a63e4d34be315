"""FP8 in torchtitan: a converter for its model registries, beside its own ones for torchao.

    from fp8pass.integrations.torchtitan import Fp8Converter

    model_registry("8B", converters=[Fp8Converter.Config(recipe="delayed", rules={"output": None})])

and `--compile.enable --compile.backend fp8pass`. With the default recipe, the backend's name alone is enough.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

from fp8pass.arguments import CompileOptions
from fp8pass.by_name import prepare
from fp8pass.capture.session import Session
from fp8pass.errors import OptionError
from fp8pass.recipes import Recipe, RecipeName


class Fp8Converter:
    """Lets torchtitan train in FP8, as a `ModelConfigConverter`: `Fp8Converter.Config(...).build().convert(model_config)`.

    It changes no module. The model that the converted config builds carries the options for torch.compile's backend "fp8pass",
    with which torchtitan compiles each block. All blocks share one state: `inspect` and `state` take the built model, rules
    name modules by their paths in it, and amaxes are reduced once per step. A step of delayed scaling ends at the
    first forward with gradients after a backward. torchtitan's checkpoints do not hold the FP8 state; save `state(model)`
    beside them.

    The first forward of the model raises OptionError unless its blocks were compiled with the backend "fp8pass".
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

        def build(self, **_: Any) -> Fp8Converter:
            """The converter. Raises RecipeError, RuleError or OptionError for invalid options."""
            return Fp8Converter(self)

    def __init__(self, config: Config):
        self.config = config
        self._options = {"recipe": config.recipe, "rules": config.rules, **config.options}
        CompileOptions.named(None, self._options, None)  # to refuse what is invalid now, not at the first step

    def convert(self, model_config: Any) -> Any:
        """The config of the same model, which holds the FP8 options once it is built."""
        options = self._options

        def build(self: Any, **arguments: Any) -> Any:
            model = original.build(self, **arguments)
            watched = weakref.ref(prepare(model, **options))

            def check(*_: Any) -> None:
                handle.remove()
                _check_compiled(watched())

            handle = model.register_forward_hook(check)
            return model

        original = type(model_config)
        model_config.__class__ = type(original.__name__, (original,), {"__slots__": (), "build": build})
        return model_config


def _check_compiled(session: Session | None) -> None:
    if session is not None and not session.num_graph_calls:
        raise OptionError(
            "Fp8Converter was given, and no block ran in a graph of the backend 'fp8pass'; pass"
            " --compile.enable --compile.backend fp8pass, with 'model' among --compile.components"
        )
