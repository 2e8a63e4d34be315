"""The model of an estimate, by the name that the command line gives it: that of a configuration of transformers, or what a
function returns, on the meta device."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError, nearest

#: The names that transformers gives to tables of positions.
_POSITIONS = re.compile(r"wpe|position(al)?_embeddings?|embed_positions|pos_embed(ding)?s?")

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
