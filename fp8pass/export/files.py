"""safetensors files, written tensor by tensor, with their index.

The library safetensors serializes a file from memory, so that as much as a file would be held; here one tensor is. A file is
the length of its header (8 bytes, little endian), the header (JSON: names, dtypes, shapes, offsets) and the data without gaps.
Source: the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import torch

from fp8pass.errors import ExportError
from fp8pass.export.contents import Entry, Layer

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
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
INDEX = "model.safetensors.index.json"


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
    folder: pathlib.Path, files: Sequence[Sequence[Layer]], tied: Mapping[str, str], advance: Callable[[Layer], None]
) -> list[str]:
    """Write files and index. They get their names, and those of an earlier export are removed, when all are complete.

    tied: other names of tensors -> the names in the files, which the header of the first file notes. advance: called after
    each layer.
    """
    names = file_names(len(files))
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
        entries = [(entry, name) for name, layers in zip(names, files, strict=True) for la in layers for entry in la.entries]
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry, _ in entries)},
            "weight_map": {entry.name: name for entry, name in entries},
        }
        write_json(folder / INDEX, index)
    return names


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
