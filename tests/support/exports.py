"""The loaders of exports: a matrix of models, recipes, formats and loaders; tests/fp8pass/export/test_loaders.py compares.

A loader reads an export if no tensor is missing, each weight is the exported one (its FP8 value times its scale, where both the
scale and the product may be rounded to the dtype of the model), and logits agree with those of the compiled model that was
exported. How far they may differ: both compute with the same weights, and each may quantize inputs in its own way, or not at
all. Quantizing the inputs once is about as large an error as quantizing the weights. So logits differ by what two quantizations
of inputs make, which is as much as the exported model itself differs from the model in high precision (inputs and weights, once
each); `SPREAD` is for chance. A weight that misses its scale, or is not loaded, makes a difference of the size of the logits
and more.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fp8pass import export_fp8, fp8_compile, state_dict_fp8
from fp8pass.errors import ExportError
from tests.support import engines

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
SPREAD = 1.25
TOKENS = 128


def _model(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": TOKENS, "head_dim": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **heads, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def _merged() -> Any:
    """A model with merged adapters."""
    import peft

    model = peft.get_peft_model(_model("Llama"), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=8))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.merge_and_unload().requires_grad_(True)


_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
_MIXTRAL = {"num_local_experts": 4, "experts_implementation": "grouped_mm", "intermediate_size": 128}

CASES: dict[str, tuple[Callable[[], Any], dict[str, str | None]]] = {
    "llama": (lambda: _model("Llama"), {}),
    "tied": (lambda: _model("Qwen3", tie_word_embeddings=True), {}),
    "biases": (lambda: _model("Qwen2", torch.float16), {}),
    "fused": (lambda: _model("Phi3", torch.float32), {}),
    "experts": (lambda: _model("Qwen3Moe", tie_word_embeddings=True, **_EXPERTS), {}),
    "mixtral": (lambda: _model("Mixtral", **_MIXTRAL), {}),
    "lora": (_merged, {}),
    "partly": (lambda: _model("Llama", num_hidden_layers=2), {"model.layers.0.*": None}),
    "mixed": (lambda: _model("Llama"), {"*.mlp.*": "current"}),
    "head": (lambda: _model("Llama"), {"lm_head": "the recipe"}),
    "odd": (lambda: _model("Llama", hidden_size=256, intermediate_size=200, head_dim=104), {}),
}
"""Models and their rules."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported model."""

    folder: pathlib.Path
    logits: torch.Tensor
    noise: float
    """The relative difference between its logits and those of the model in high precision."""
    weights: dict[str, torch.Tensor]
    """The exported Parameters, by their names on disk."""


def run(model: Any, recipe: str, **options: Any) -> Any:
    """The compiled model after such a call."""
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    with torch.set_grad_enabled(recipe == "delayed"):
        loss = compiled(input_ids=_tokens(), labels=_tokens()).loss
    if recipe == "delayed":
        loss.backward()
        model.zero_grad()
    return compiled


def _tokens() -> torch.Tensor:
    return torch.randint(0, TOKENS, (2, 24), generator=torch.Generator().manual_seed(1))


def export(name: str, compiled: Any, fmt: str, folder: pathlib.Path) -> Exported:
    """Raises ExportError if the format has nothing for the model."""
    export_fp8(compiled, folder, fmt, max_shard_bytes=120_000 if name == "tied" else 5 * 2**30)
    with torch.no_grad():
        logits, high = (call(input_ids=_tokens()).logits.float() for call in (compiled, compiled._orig_mod))
    return Exported(folder, logits, difference(logits, high), dict(weights(compiled, fmt)))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def weights(compiled: Any, fmt: str) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = dict(state_dict_fp8(compiled, fmt))
    for name, tensor in tensors.items():
        scale = next((tensors[name + end] for end in ("_scale", "_scale_inv") if name + end in tensors), None)
        if not name.endswith(("_scale", "_scale_inv")):
            yield name, tensor.float() if scale is None else engines.dequantized(tensor, scale)


# -- loaders: each returns the loaded model


def load(folder: pathlib.Path, **options: Any) -> Any:
    """As `from_pretrained` loads it. Raises NotRead for a tensor that is missing, and for one that it does not know."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager", **options
    )
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise NotRead(f"missing {sorted(map(str, missing))[0]}")
    # Static input scales, where inputs stay in high precision (those of experts are then called weights), and scales as
    # engines call them.
    known = ("input_scale", "activation_scale", "weight_scale", "_proj_weight")
    if odd := [k for k in info["unexpected_keys"] if not k.endswith(known)]:
        raise NotRead(f"unexpected {sorted(odd)[0]}")
    return model


def load_dequantized(folder: pathlib.Path, **options: Any) -> Any:
    """In high precision."""
    import transformers

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kinds = {"fp8": transformers.FineGrainedFP8Config, "compressed-tensors": transformers.CompressedTensorsConfig}
    return load(folder, quantization_config=kinds[config["quant_method"]](dequantize=True), **options)


@contextlib.contextmanager
def fp8_modules() -> Iterator[None]:
    """transformers makes the modules and Parameters of a GPU, and their GEMMs are computed with dequantized weights."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def linear(input: Any, weight: Any, scale: Any, block: Any, bias: Any = None, *others: Any) -> Any:
        scale = scale if scale.numel() > 1 else scale.reshape(())
        return torch.nn.functional.linear(input, engines.dequantized(weight, scale).to(input.dtype), bias)

    with (
        mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", return_value=None),
        mock.patch.object(finegrained_fp8, "fp8_linear", linear),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Loader:
    """The format that it reads, and how."""

    fmt: str
    load: Callable[[pathlib.Path], Any]
    machine: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


LOADERS = {
    "compressed-tensors plain": Loader("compressed-tensors", load),
    "compressed-tensors dequantize": Loader("compressed-tensors", load_dequantized),
    "fp8 plain": Loader("fp8", load),
    "fp8 dequantize": Loader("fp8", load_dequantized),
    "fp8 modules": Loader("fp8", load, fp8_modules),
}


class NotRead(Exception):
    """A loader does not read an export as it was meant; the text says how."""


def check(exported: Exported, loader: Loader) -> None:
    """Load an export and compare. Raises NotRead, or what the loader raises."""
    with loader.machine(), torch.no_grad():
        model = loader.load(exported.folder)
        logits = model(input_ids=_tokens()).logits.float()
    error = difference(logits, exported.logits)
    if not error <= SPREAD * exported.noise:
        raise NotRead(f"logits differ by {error:.3g}, and FP8 by {exported.noise:.3g}")
    for name, parameter in model.named_parameters():
        wanted = exported.weights.get(name)
        if wanted is None or parameter.dtype is torch.float8_e4m3fn or parameter.shape != wanted.shape:
            continue  # experts have other names on disk
        eps = torch.finfo(parameter.dtype).eps
        smallest = torch.finfo(parameter.dtype).smallest_normal * eps
        if not ((parameter.float() - wanted).abs() <= eps * wanted.abs() + 448 * smallest).all():
            raise NotRead(f"{name} is not what was exported")


def outcomes(name: str, recipe: str, folder: pathlib.Path) -> dict[str, str]:
    """Loader -> "" where an export is read, "refused" where the export refuses, or what the loader says."""
    make, rules = CASES[name]
    rules = {pattern: recipe if rule == "the recipe" else rule for pattern, rule in rules.items()}
    compiled = run(make(), recipe, rules=rules or None)
    found = {}
    for fmt in ("compressed-tensors", "fp8"):
        loaders = {key: loader for key, loader in LOADERS.items() if loader.fmt == fmt}
        try:
            exported = export(name, compiled, fmt, folder / fmt)
        except ExportError:
            found |= dict.fromkeys((*loaders, f"{fmt} engines"), "refused")
            continue
        found |= {key: outcome(exported, loader) for key, loader in loaders.items()}
        found[f"{fmt} engines"] = next(engines.obstacles(exported.folder), "")
    return found


def outcome(exported: Exported, loader: Loader) -> str:
    """ "" if a loader reads an export, else what it says."""
    try:
        check(exported, loader)
    except (NotRead, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
