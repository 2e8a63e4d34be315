"""`export_fp8` and `state_dict_fp8`: the weights of a compiled model in FP8, in a folder or one after the other."""

from __future__ import annotations

import copy
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8pass.errors import ExportError, Fp8Warning
from fp8pass.notices import tell
from fp8pass.runtime.instances import wrapper_paths
from fp8pass.runtime.session import Part
from fp8pass.tools.export.contents import Contents, Layer, plan_contents
from fp8pass.tools.export.files import TRANSFORMERS_INDEX, split, write_files, write_json
from fp8pass.tools.export.formats import Kind, format_called
from fp8pass.tools.export.names import is_pretrained, output_embedding
from fp8pass.tools.export.report import ExportReport


def plan_export(parts: Sequence[Part], model: nn.Module, format: object) -> Contents:
    """What an export of a model writes. A step of delayed scaling that the next forward would end is ended now, so that the
    scales are those that it reads; where amaxes are reduced, this is a collective call."""
    model = unwrapped(model)
    if getattr(model, "peft_config", None):
        raise ExportError(
            f"{type(model).__name__} has adapters, which the formats do not hold; compile and export what"
            f" model.merge_and_unload() returns"
        )
    fmt = format_called(format)
    for part in parts:
        clock = part.session.clock
        if clock.is_step_due(trains=True) or clock.is_step_due_at_graph(trains=True):
            part.session.end_step()
    with torch.no_grad():
        return plan_contents(parts, model, fmt)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model within DistributedDataParallel and what torch.compile returns."""
    while (child := next(iter(path for path in wrapper_paths(model) if "." not in path), None)) is not None:
        model = model.get_submodule(child)
    return model


def iterate(contents: Contents) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an export by their names on disk."""
    with torch.no_grad():
        for layer in contents.layers:
            yield from layer.tensors()


def write_folder(
    contents: Contents, model: nn.Module, folder: str | os.PathLike[str], format: str, max_shard_bytes: int
) -> ExportReport:
    """Write files of tensors, the index and config.json, on rank 0 alone; the others take part in gathering what is sharded."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    path = pathlib.Path(folder)
    files = split(contents.layers, max_shard_bytes)
    num_bytes = sum(entry.num_bytes for layer in contents.layers for entry in layer.entries)
    names: list[str] = []
    remarks: list[str] = []
    with torch.no_grad():
        if dist.is_initialized() and dist.get_rank() != 0:
            for layer in contents.layers:
                layer.gather()
        else:
            if path.exists() and not path.is_dir():
                raise ExportError(f"{path} is a file; pass a folder")
            path.mkdir(parents=True, exist_ok=True)
            console = Console(stderr=True)
            with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task(f"Writing {escape(str(path))}", total=num_bytes)

                def advance(layer: Layer) -> None:
                    progress.advance(task, sum(entry.num_bytes for entry in layer.entries))

                names = write_files(path, files, contents.tied, contents.renamed, advance)
            remarks = _write_config(unwrapped(model), path, contents)
            remarks += _for_loaders(unwrapped(model), contents)
            if (text := _mixed_groups(unwrapped(model), contents.config)) is not None:
                remarks.append(text)
                tell(text, Fp8Warning, strict=False)
    return ExportReport(path, format, names, num_bytes, contents.written, contents.kept, tuple(remarks))


def _mixed_groups(model: nn.Module, quantization: dict[str, Any]) -> str | None:
    """Where transformers does not dequantize a checkpoint with several kinds of scales: `get_dense_scheme` in its
    integrations/compressed_tensors.py. Scales of tensors and rows are read alike, and those of tensors also as blocks."""
    groups = quantization.get("config_groups", {})
    strategies = [group["weights"]["strategy"] for group in groups.values()]
    alike = ({"tensor", "channel"}, {"tensor", "block"}, {"group"})
    if any(set(strategies) <= known for known in alike) or not is_pretrained(model):
        return None
    return (
        f"config.json has {len(groups)} groups of weights ({', '.join(strategies)}). With"
        f" CompressedTensorsConfig(dequantize=True) transformers reads all of them as the first says, and raises an error."
        f" Without it transformers reads each group as it is, and so do engines. To dequantize it: one recipe for all weights"
        f" in FP8"
    )


def _for_loaders(model: nn.Module, contents: Contents) -> list[str]:
    """What only some loaders of transformers' models read."""
    if not is_pretrained(model):
        return []
    remarks = []
    head = output_embedding(model)
    written = next((w for w in contents.written if w.name == f"{head}.weight"), None)
    if written is not None and (contents.config["quant_method"] == "fp8" or written.scales == Kind.BLOCK.value):
        remarks.append(
            f"{head} is in FP8: transformers reads it, and engines do not, in format 'fp8' and in blocks. For them:"
            f" rules={{{head!r}: None}}, or format='compressed-tensors' with a recipe without blocks."
        )
    dtype: object = model.dtype
    if _is_mx(contents) and dtype is not torch.bfloat16:
        remarks.append(
            f"config.json says bfloat16: compressed-tensors makes weights of it where it dequantizes blocks of 32. The other"
            f" tensors in the files are in {str(dtype).removeprefix('torch.')}."
        )
    return remarks


def _is_mx(contents: Contents) -> bool:
    return any(w.scales == Kind.MX.value for w in contents.written)


def _write_config(model: nn.Module, folder: pathlib.Path, contents: Contents) -> list[str]:
    """config.json with `quantization_config`: the model's own, else what the folder has, else a new one."""
    path = folder / "config.json"
    remarks = []
    if is_pretrained(model):
        held: Any = model
        config = copy.deepcopy(held.config)
        config.dtype = "bfloat16" if _is_mx(contents) else str(held.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        content = json.loads(config.to_json_string())
        content.pop("transformers_weights", None)  # of the files that the model was loaded from
        if contents.renamed:
            content["transformers_weights"] = TRANSFORMERS_INDEX
        if held.can_generate():
            held.generation_config.save_pretrained(folder)
    elif path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        remarks.append("config.json: quantization_config was added to the one in the folder.")
    else:
        content = {}
        remarks.append(
            f"config.json holds quantization_config alone: {type(model).__name__} is not a model of transformers, so that the"
            f" rest is not known."
        )
    write_json(path, {**content, "quantization_config": contents.config})
    return remarks
