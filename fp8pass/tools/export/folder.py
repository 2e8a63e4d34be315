"""`export_fp8` and `state_dict_fp8`: the weights of a compiled model in FP8, in a folder of safetensors files or one by one.

The library safetensors serializes a file from memory, so that as much as a file would be held; here one tensor is. A file is
the length of its header (8 bytes, little endian), the header (JSON: names, dtypes, shapes, offsets) and the data without gaps.
Source: the format's description in the README of huggingface/safetensors.

NOTE [names of scales]: where engines and transformers call scales differently, each reads its own names. The scales, a number
each, are written twice: among the other tensors as engines call them, and in a small file as transformers does. Engines read
the files of the usual index, which this one is not in; transformers those of the index that `transformers_weights` in
config.json names, which has all. Sources: `filter_duplicate_safetensors_files` in vLLM 0.33 and SGLang 0.5.23
(model_loader/weight_utils.py), `_get_resolved_checkpoint_files` in transformers 5.24 (modeling_utils.py).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8pass.errors import ExportError, Fp8Warning, tell
from fp8pass.graph.origin import family
from fp8pass.runtime.instances import wrapper_paths
from fp8pass.runtime.session import Part
from fp8pass.tools.export.contents import Contents, Entry, Layer, Written, plan_contents
from fp8pass.tools.export.formats import Kind, format_called
from fp8pass.tools.export.weights import is_pretrained, output_embedding

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OURS = re.compile(r"(model(-\d{5}-of-\d{5})?|transformers(-scales)?)\.safetensors(\.index\.json)?")
INDEX = "model.safetensors.index.json"
TRANSFORMERS_INDEX = "transformers.safetensors.index.json"
TRANSFORMERS_SCALES = "transformers-scales.safetensors"


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport:
    """The weights that an export has written in FP8, and why it has not written the others. Equal layers print as one line."""

    folder: pathlib.Path
    format: str
    files: list[str]
    """The files of tensors, in order; none on a rank that writes nothing."""
    num_bytes: int
    """Bytes of all tensors, without the scales that are written once more for transformers."""
    written: list[Written]
    """Weights in FP8."""
    kept: dict[str, str]
    """Parameters with two dimensions or more that are in high precision -> why."""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines = [f"{len(self.written)} weights in FP8 as {self.format!r}, {self.num_bytes:,} bytes in {files}: {self.folder}"]
        for title, held in (
            ("in FP8", {w.name: f"{w.recipe}: {w.scales}" for w in self.written}),
            ("in high precision", self.kept),
        ):
            counts: dict[tuple[str, str], int] = {}
            for name, text in held.items():
                counts[family(name), text] = counts.get((family(name), text), 0) + 1
            for (name, text), count in counts.items():
                lines.append(f"  {title}: {name}{f' (x{count})' if count > 1 else ''}: {text}")
        return "\n".join([*lines, *self.remarks])

    def __repr__(self) -> str:
        return str(self)


def plan_export(parts: Sequence[Part], model: nn.Module, format: object) -> Contents:
    """Plan the export of a model. A step of delayed scaling that the next forward would end is ended now, so that the
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
    _make_folder(path)
    with torch.no_grad():
        if _only_gathers():
            for layer in contents.layers:
                layer.gather()
        else:
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


def _only_gathers() -> bool:
    return dist.is_initialized() and dist.get_rank() != 0


def _make_folder(path: pathlib.Path) -> None:
    """Make the folder on rank 0; where it cannot, every rank raises, for the others would wait in gathering for it."""
    error: Exception | None = None
    if not _only_gathers():
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            error = ExportError(f"{path} is a file; pass a folder")
        except OSError as raised:
            error = raised
    told = [None if error is None else str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        raise ExportError(told[0])


def _mixed_groups(model: nn.Module, quantization: dict[str, Any]) -> str | None:
    """A remark if transformers does not dequantize a checkpoint with several kinds of scales: `get_dense_scheme` in its
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
    """Remarks on what only some loaders of transformers' models read."""
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


# -- files


def split(layers: Iterable[Layer], max_bytes: int) -> list[list[Layer]]:
    """Layers in files of at most `max_bytes`; a layer that is larger has a file of its own."""
    files: list[list[Layer]] = []
    size = 0
    for layer in layers:
        more = sum(entry.num_bytes for entry in layer.entries)
        if not files or size + more > max_bytes:
            files.append([])
            size = 0
        files[-1].append(layer)
        size += more
    return files


def file_names(count: int) -> list[str]:
    """As `save_pretrained` calls them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_files(
    folder: pathlib.Path,
    files: Sequence[Sequence[Layer]],
    tied: Mapping[str, str],
    renamed: Mapping[str, Entry],
    advance: Callable[[Layer], None],
) -> list[str]:
    """Write files and index. They get their names, and those of an earlier export are removed, when all are complete.

    tied: other names of tensors -> the names in the files, which the header of the first file notes. renamed: scales that
    transformers reads under other names, see NOTE [names of scales]. advance: called after each layer.
    """
    held: dict[str, torch.Tensor] = {}
    files = [[_holding(layer, renamed, held) for layer in layers] for layers in files]
    names = file_names(len(files))
    entries = [(entry, name) for name, layers in zip(names, files, strict=True) for la in layers for entry in la.entries]
    theirs = [(entry, TRANSFORMERS_SCALES) for entry in renamed.values()]
    if renamed:
        files.append([_again(renamed, held)])
        names.append(TRANSFORMERS_SCALES)
    partial = [folder / f".{name}.partial" for name in names]
    try:
        for path, layers in zip(partial, files, strict=True):
            with open(path, "wb") as file:
                _write(file, layers, {**tied, "format": "pt"} if path is partial[0] else {"format": "pt"}, advance)
        for old in [p for p in folder.iterdir() if _OURS.fullmatch(p.name)]:
            old.unlink()
        for path, name in zip(partial, names, strict=True):
            os.replace(path, folder / name)
    finally:
        for path in partial:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    if len(names) > 1:
        _write_index(folder / INDEX, entries)
    if renamed:
        _write_index(folder / TRANSFORMERS_INDEX, entries + theirs)
    return names


def _holding(layer: Layer, names: Collection[str], held: dict[str, torch.Tensor]) -> Layer:
    """A layer that puts some of its tensors in `held` as they are made."""

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in layer.make():
            if name in names:
                held[name] = tensor
            yield name, tensor

    return dataclasses.replace(layer, make=make)


def _again(renamed: Mapping[str, Entry], held: Mapping[str, torch.Tensor]) -> Layer:
    """The held tensors under other names."""

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        return ((entry.name, torch.full(entry.shape, held[name].item())) for name, entry in renamed.items())

    return Layer(TRANSFORMERS_SCALES, tuple(renamed.values()), make, ())


def _write_index(path: pathlib.Path, entries: Iterable[tuple[Entry, str]]) -> None:
    """Write which file each tensor is in."""
    entries = list(entries)
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entry, _ in entries)},
        "weight_map": {entry.name: name for entry, name in entries},
    }
    write_json(path, index)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(file: IO[bytes], layers: Sequence[Layer], metadata: Mapping[str, str], advance: Callable[[Layer], None]) -> None:
    entries = [entry for layer in layers for entry in layer.entries]
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for entry in sorted(entries, key=lambda e: -e.dtype.itemsize):  # so that every tensor begins at a multiple of its dtype
        offsets[entry.name], begin = end, end
        end += entry.num_bytes
        header[entry.name] = {"dtype": _name(entry), "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    start = file.tell()
    file.truncate(start + end)
    for layer in layers:
        for name, tensor in layer.tensors():
            file.seek(start + offsets[name])
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        advance(layer)


def _name(entry: Entry) -> str:
    if entry.dtype not in _DTYPES:
        raise ExportError(f"{entry.name} is {entry.dtype}, which safetensors files cannot hold; convert it before the export")
    return _DTYPES[entry.dtype]
