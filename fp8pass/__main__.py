"""The command line: `python -m fp8pass` for the environment, `python -m fp8pass estimate` for an estimate of a model.

The model is that of a configuration of transformers, or what a function returns, on the meta device.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import platform
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8pass.cost import DEVICES
from fp8pass.errors import Fp8Error, OptionError, nearest
from fp8pass.recipes import PRESETS
from fp8pass.tools.tables import counted
from lowering import hardware
from lowering.formats import E4M3, Granularity

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: The packages that fp8pass works with, and is built on.
_PACKAGES = ("triton", "transformers", "accelerate", "peft", "lightning", "torchtitan", "torchao", "numpy", "rich")
#: Folders in that of torch's caches, and what is in them.
_CACHES = {
    "aotautograd": "compiled graphs, with the decisions of fp8pass",
    "fxgraph": "generated code",
    "fp8pass": "the extra inputs of each graph",
    "triton": "kernels",
}
_SCALES = {
    "delayed, current": (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE),
    "rowwise": (Granularity.ROW_WISE, Granularity.ROW_WISE),
    "blockwise": (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
    "mxfp8": (Granularity.BLOCK_1X32, Granularity.BLOCK_1X32),
}
#: The names that transformers gives to tables of positions.
_POSITIONS = re.compile(r"wpe|position(al)?_embeddings?|embed_positions|pos_embed(ding)?s?")
_EXAMPLES = """examples:
  python -m fp8pass estimate LlamaConfig hidden_size=4096 intermediate_size=14336 num_key_value_heads=8 vocab_size=128256
  python -m fp8pass estimate path/to/config.json --gpu h100 --tokens 16384
  python -m fp8pass estimate my_project.model:build --recipe blockwise --html > estimate.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if any(text.startswith("-") or "=" not in text for text in rest) or (rest and given.command is None):
        parser.error(f"unrecognized arguments: {' '.join(rest)}; see `{parser.prog} estimate --help`")
    if given.command is None:
        print(report())
        return 0
    given.sizes = [*given.sizes, *rest]  # those behind an option
    try:
        print(_estimate(given))
    except Fp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8pass",
        description="Print the installed versions and the operations that run natively on this machine.",
    )
    commands = parser.add_subparsers(dest="command", metavar="estimate")
    estimate = commands.add_parser(
        "estimate",
        help="the expected speed-up of a model's training step",
        description="Estimate the gain of FP8 in a training step of a model. Needs no GPU and no weights, and runs nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = estimate.add_argument
    add("model", help="a config.json of transformers, its folder, a class such as LlamaConfig, or module:function that returns"
        " (model, *args)")  # fmt: skip
    add("sizes", nargs="*", default=[], metavar="NAME=VALUE", help="values that replace those of the configuration")
    add("--tokens", type=_positive, default=8192, help="tokens, or patches of images, of one forward (%(default)s)")
    add("--sequence", type=_positive, default=8192, help="tokens of one text (%(default)s)")
    add("--gpu", default="h200", help=f"{', '.join(DEVICES)} (%(default)s)")
    add("--recipe", default="all", help=f"all, {', '.join(PRESETS)} (%(default)s)")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of the Parameters of a configuration's model (%(default)s)")
    output = estimate.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print every GEMM as JSON")
    output.add_argument("--html", action="store_true", help="print a page of HTML")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _estimate(given: argparse.Namespace) -> str:
    from fp8pass.cost import device_called
    from fp8pass.tools.estimation import estimate_model

    device = device_called(given.gpu)  # before anything that takes time
    model, args, kwargs, note = load(given.model, given.sizes, given.tokens, given.sequence, _DTYPES[given.dtype])
    if note:
        print(f"note: {note}", file=sys.stderr)
    found = estimate_model(model, args, kwargs, device, given.recipe)
    return found.to_json() if given.json else found.to_html() if given.html else str(found).rstrip("\n")


# -- the model of an estimate


Example = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any], str]
"""A model on the meta device, its arguments, and a note about the difference from what was asked for, or ""."""


def load(name: str, sizes: Sequence[str], tokens: int, sequence: int, dtype: torch.dtype) -> Example:
    """The model that the command line names. name: a file or folder with a configuration of transformers, the name of a class
    of one, or "module:function". The function, called with no arguments on the meta device, returns (model, *args) or
    (model, args, kwargs as a dict). sizes: "NAME=VALUE", which replace values of the configuration. tokens, sequence: rows of
    the GEMMs, and how many of them are one text; images have as many rows as patches."""
    is_path = os.path.exists(name)
    if ":" in name and not is_path:
        if sizes:
            raise OptionError(f"{sizes[0]!r} is for a configuration of transformers; {name!r} is a function: set sizes there")
        return _of_function(name)
    config = _config(name, is_path, _values(sizes))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about options that no size depends on
        model: Any = _class_of(config)._from_config(config, dtype=dtype)
    longest = _positions(model)
    note = ""
    if longest is not None and sequence > longest and tokens > longest:
        note = f"{type(config).__name__} has {longest} positions: texts of {longest} tokens, not of {min(sequence, tokens)}"
        sequence = longest
    return model.train(), (), _inputs(model, config, tokens, sequence, dtype), note


def _positions(model: nn.Module) -> int | None:
    """The tokens of the longest text of a model that embeds positions by a table; None without one."""
    found = [
        table.num_embeddings - getattr(table, "offset", 0) - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2])
    ]
    return min(found, default=None)


def _of_function(name: str) -> Example:
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise OptionError(
            f"model is {name!r}: {error}. Write module:function, with the module in this folder or installed"
        ) from error
    finally:
        sys.path.pop(0)
    with torch.device("meta"):
        made = function()
    parts = made if isinstance(made, tuple) else (made,)
    if not isinstance(parts[0], nn.Module) or len(parts) < 2:
        raise OptionError(f"{name} returned {type(made).__name__}; let it return (model, *args): the model and its arguments")
    if len(parts) == 3 and isinstance(parts[1], tuple) and isinstance(parts[2], dict):
        return (*parts, "")
    return parts[0], parts[1:], {}, ""


def _values(sizes: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in sizes:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(f"{text!r} is not a size; write NAME=VALUE, such as hidden_size=4096")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def _config(name: str, is_path: bool, values: dict[str, Any]) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise OptionError(f"{name!r} is read by transformers: pip install transformers, or write module:function") from error
    if is_path:
        path = pathlib.Path(name)
        if path.is_dir() and not (path / "config.json").exists():
            raise OptionError(f"the folder {name!r} has no config.json")
        config = transformers.AutoConfig.from_pretrained(path)
    else:
        made = getattr(transformers, name, None)
        if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedConfig)):
            raise OptionError(
                f"model is {name!r}, which is neither a file or folder here nor a configuration of"
                f" transformers.{_meant(name, dir(transformers))}"
                f" Write a config.json, its folder, a class such as LlamaConfig, or module:function"
            )
        config = made()
    for key in values:
        if not hasattr(config, key) and not _reads(_class_of(config), key):
            raise OptionError(f"{type(config).__name__} has no {key!r}.{nearest(key, list(config.to_dict()))}")
    try:
        return type(config).from_dict({**config.to_dict(), **values}) if values else config
    except (TypeError, ValueError, _refusal()) as error:
        raise OptionError(f"{type(config).__name__} refuses {values}: {' '.join(str(error).split())}") from error


def _refusal() -> type[Exception]:
    """The error of transformers for a value of another type."""
    from huggingface_hub.errors import StrictDataclassError

    return StrictDataclassError


def _meant(name: str, known: Sequence[str]) -> str:
    if "/" in name or name.endswith(".json"):
        return " Names of the Hub are not looked up: nothing is downloaded."
    word = name if name.lower().endswith("config") else f"{name}Config"
    return nearest(word, [each for each in known if each.endswith("Config")])


def _reads(model: type, name: str) -> bool:
    """Say whether a model's code names a value that its configuration has none of so far, such as `head_dim`."""
    return re.search(rf"\b{name}\b", inspect.getsource(sys.modules[model.__module__])) is not None


def _class_of(config: Any) -> Any:
    """The class that a configuration is for: the one it names, a language model, or an image classifier."""
    import transformers

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if named and named[0] is not None:
        return named[0]
    for auto in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING):
        if type(config) in auto:
            found = auto[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise OptionError(
        f"{type(config).__name__} is neither that of a language model nor of an image classifier; write module:function, which"
        f" returns the model and its arguments"
    )


def _inputs(model: nn.Module, config: Any, tokens: int, sequence: int, dtype: torch.dtype) -> dict[str, Any]:
    """With labels, so that the loss and the head's gradients are there."""
    if getattr(model, "main_input_name", "") == "pixel_values":
        size, patch = (value if isinstance(value, int) else value[0] for value in (config.image_size, config.patch_size))
        images = max(1, tokens // (size // patch) ** 2)
        pixels = torch.empty(images, config.num_channels, size, size, dtype=dtype, device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(images, dtype=torch.long, device="meta")}
    length = min(sequence, tokens)
    texts = torch.empty(max(1, tokens // length), length, dtype=torch.long, device="meta")
    caches = {"use_cache": False} if hasattr(config, "use_cache") else {}
    return {"input_ids": texts, "labels": texts, **caches}


# -- the environment, for bug reports


def report() -> str:
    """Versions, GPUs, and for each GPU and recipe what multiplies FP8 operands."""
    import fp8pass

    lines = [f"fp8pass       {fp8pass.__version__}"]
    lines += [f"Python        {platform.python_version()}, {platform.platform()}"]
    lines += [f"torch         {torch.__version__}, CUDA {torch.version.cuda or 'no'}, {torch.get_num_threads()} CPU threads"]
    lines += [f"{name:13} {version(name) or 'not installed'}" for name in _PACKAGES]
    lines += _caches()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.version.cuda else []
    if not devices:
        return "\n".join([*lines, "GPU           none: FP8 is emulated, slower than float32, for development and tests"])
    for device in devices:
        lines += _gpu(device)
    return "\n".join(lines)


def _caches() -> list[str]:
    """Torch's compile caches: whether they are on, where, and what is in them."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    is_on = functorch_config.enable_autograd_cache and config.fx_graph_cache and not config.force_disable_caches
    found = [f"caches        {'on' if is_on else 'off'}, in {cache_dir()}"]
    for name, what in _CACHES.items():
        files = [path for path in pathlib.Path(cache_dir(), name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        found.append(f"  {name:18} {counted(len(files), 'file', 'files')}, {size:.1f} MB: {what}")
    return found


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> list[str]:
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9
    lines = [f"GPU {device.index}         {torch.cuda.get_device_name(device)}, capability {capability}, {memory:.0f} GB"]
    if not hardware.has_fp8_tensor_cores(device):
        return [*lines, f"  no FP8: it requires compute capability {'.'.join(map(str, hardware.FP8_CAPABILITY))}"]
    return [*lines, *(f"  {name:18} {_native(scales, device)}" for name, scales in _SCALES.items())]


def _native(scales: tuple[Granularity, Granularity], device: torch.device) -> str:
    gemm = hardware.Gemm(E4M3, E4M3, *scales)
    refusal = hardware.refusal(gemm, device)
    if refusal is None:
        return "torch's GEMM"
    if not gemm.has_blocks or Granularity.BLOCK_1X32 in scales:
        return f"no: {refusal}"
    return "MXFP8 GEMMs with the same numbers" if hardware.has_mx_scaled_mm(device) else f"Triton's GEMM: {refusal}"


if __name__ == "__main__":
    sys.exit(main())
