"""safetensors files, written tensor by tensor, with their index.

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
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from fp8pass.errors import ExportError
from fp8pass.tools.export.contents import Entry, Layer

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
    """The same layer, which puts some of its tensors in `held` as they are made."""

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
