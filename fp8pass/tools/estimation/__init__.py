"""Expected speed-up and memory of a model that is not run: without a GPU, and without weights.

`fakes.py`     tensors without content, attention as one operation
`repeats.py`   equal layers, of which one of each kind is traced
`tracing.py`   what every recipe makes of the model's graphs
`report.py`    the result, as text, HTML and JSON
`models.py`    models for the command line, on the meta device
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from fp8pass.cost import DEVICES, Device, device_called
from fp8pass.errors import Fp8Error, OptionError
from fp8pass.options import CompileOptions
from fp8pass.recipes import PRESETS, Recipe, RecipeName, as_recipe
from fp8pass.runtime.session import Session
from fp8pass.tools.estimation.fakes import fake_inputs, fake_model
from fp8pass.tools.estimation.report import Estimation, RecipeEstimate, make_estimation
from fp8pass.tools.estimation.tracing import GemmEstimate, trace

__all__ = ["Estimation", "GemmEstimate", "RecipeEstimate", "estimate_model"]

_NO_MX = "scales per 1x32 values need compute capability 10.0"


def estimate_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: str | Device,
    recipe: Recipe | RecipeName | str,
    **options: Any,
) -> Estimation:
    """`fp8pass.estimate`, whose docstring describes it. options: those of `fp8_compile` that decide about GEMMs."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise OptionError(f"model is {given!r}, a {type(given).__name__}; pass an nn.Module, on the meta device for example")
    if not isinstance(device, (str, Device)):
        raise OptionError(f"device is {device!r}; use one of {', '.join(DEVICES)}, or a fp8pass.cost.Device of your own")
    target = device if isinstance(device, Device) else device_called(device)
    recipes, refused = _recipes(recipe, target)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy = fake_model(model, mode)
    compile_options = {name: CompileOptions(recipe=r, backend="aot_eager", **options) for name, r in recipes.items()}
    sessions = {name: Session(copy, each) for name, each in compile_options.items()}
    baseline = Session(copy, CompileOptions(rules={"*": None}, backend="aot_eager"))
    try:
        found = trace(copy, fake_inputs(args, mode), fake_inputs(dict(kwargs), mode), mode, sessions, baseline, target)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp8Error):
            raise failure.inner_exception from None
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise OptionError(
            f"what {type(model).__name__} does depends on values, which an estimate has none of ({error}): call it with"
            f" arguments that leave this code out, or estimate the modules around it"
        ) from error
    return make_estimation(found, target, refused)


def _recipes(recipe: Recipe | RecipeName | str, device: Device) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Those to estimate by name, and those that the device does not run, with the reason."""
    wanted: dict[str, Recipe] = {}
    if recipe == "all":
        wanted.update((name, make()) for name, make in PRESETS.items())
    else:
        one = as_recipe(recipe)
        wanted[one.name] = one
    refused = dict.fromkeys((name for name in wanted if name == "mxfp8" and device.mx_flops is None), _NO_MX)
    if len(refused) == len(wanted):
        raise OptionError(f"recipe {recipe!r} does not run on {device.name}: {_NO_MX}. Use another recipe or device='b200'")
    return {name: each for name, each in wanted.items() if name not in refused}, refused
