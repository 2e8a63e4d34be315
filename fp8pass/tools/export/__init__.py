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

import collections
import contextlib
import copy
import dataclasses
import functools
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
from fp8pass.scales.reduction import is_first_rank
from fp8pass.tools.export.contents import Contents, Entry, Layer, MakeWhole, NamedTensors, Written, plan_contents, whole
from fp8pass.tools.export.formats import ScaleKind, format_called
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
CONFIG = "config.json"
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
            f"{type(model).__name__} has adapters, which the formats do not hold; compile and export the result"
            f" of model.merge_and_unload()"
        )
    fmt = format_called(format)
    for part in parts:
        clock = part.session.clock
        if clock.is_step_due(trains=True) or clock.is_step_due_at_graph(trains=True):
            part.session.end_step()
    with torch.no_grad():
        contents = plan_contents(parts, model, fmt)
    if contents.unequal and is_first_rank():
        tell(". ".join(contents.unequal), Fp8Warning, strict=False)
    return contents


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model within DistributedDataParallel and what torch.compile returns."""
    while (child := next(iter(path for path in wrapper_paths(model) if "." not in path), None)) is not None:
        model = model.get_submodule(child)
    return model


def iterate(contents: Contents) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an export by their names on disk."""
    with torch.no_grad():
        for layer in contents.layers:
            yield from layer.tensors(whole)


def write_folder(
    contents: Contents, model: nn.Module, folder: str | os.PathLike[str], format: str, max_shard_bytes: int
) -> ExportReport:
    """Write files of tensors, the index and config.json, on rank 0 alone; the others take part in gathering what is sharded.
    Where rank 0 cannot write, every rank raises, and files of an earlier export are as they were."""
    path = pathlib.Path(folder)
    num_bytes = sum(layer.num_bytes for layer in contents.layers)
    names: list[str] = []
    remarks: list[str] = []
    error: Exception | None = None
    left = collections.deque(tensor for layer in contents.layers for tensor in layer.sources)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        """`whole`, and note that the sources up to this one are gathered."""
        found = whole(tensor)
        while left and left.popleft() is not tensor:
            pass
        return found

    with torch.no_grad():
        if is_first_rank():
            try:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except FileExistsError:
                    raise ExportError(f"{path} is a file; pass a folder") from None
                names, remarks = _write_on_one(contents, unwrapped(model), path, max_shard_bytes, gather)
            except Exception as raised:
                error = raised
        for tensor in left:  # also on a rank that failed: the others wait for it in gathering
            whole(tensor)
    # The other ranks wait here until rank 0 has written.
    told = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        raise ExportError(f"rank 0 could not write the export: {told[0]}")
    return ExportReport(path, format, names, num_bytes, contents.written, contents.kept, tuple(remarks))


def _write_on_one(
    contents: Contents, model: nn.Module, path: pathlib.Path, max_shard_bytes: int, gather: MakeWhole
) -> tuple[list[str], list[str]]:
    """Write everything; returns the names of the files of tensors, and remarks."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    config, remarks = _config(model, path, contents)
    files = split(contents.layers, max_shard_bytes)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Writing {escape(str(path))}", total=sum(layer.num_bytes for layer in contents.layers))

        def advance(layer: Layer) -> None:
            progress.advance(task, layer.num_bytes)

        names = write_files(path, files, config, contents.tied, contents.renamed, gather, advance)
    remarks += [*_for_loaders(model, contents), *contents.unequal]
    if (text := _mixed_groups(model, contents.config)) is not None:
        remarks.append(text)
        tell(text, Fp8Warning, strict=False)
    return names, remarks


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
        f" CompressedTensorsConfig(dequantize=True) transformers reads all of them like the first, and raises an error."
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
    if written is not None and (contents.config["quant_method"] == "fp8" or written.scales == ScaleKind.BLOCK.value):
        remarks.append(
            f"{head} is in FP8: transformers reads it, and engines do not, in format 'fp8' and in blocks. For them:"
            f" rules={{{head!r}: None}}, or format='compressed-tensors' with a recipe without blocks."
        )
    dtype: object = model.dtype
    if _is_mx(contents) and dtype is not torch.bfloat16:
        remarks.append(
            f"config.json says bfloat16: compressed-tensors dequantizes blocks of 32 to it. The other"
            f" tensors in the files are in {str(dtype).removeprefix('torch.')}."
        )
    return remarks


def _is_mx(contents: Contents) -> bool:
    return any(w.scales == ScaleKind.MX.value for w in contents.written)


def _config(model: nn.Module, folder: pathlib.Path, contents: Contents) -> tuple[dict[str, Any], list[str]]:
    """The content of config.json with `quantization_config`: the model's own, else what the folder has, else a new one; and
    remarks on it. The configuration of generation is written at once."""
    path = folder / CONFIG
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
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ExportError(f"{path}, which gets quantization_config, is not JSON ({error}); correct or remove it") from error
        remarks.append("config.json: quantization_config was added to the one in the folder.")
    else:
        content = {}
        remarks.append(
            f"config.json holds only quantization_config: {type(model).__name__} is not a model of transformers, so the"
            f" rest is not known."
        )
    return {**content, "quantization_config": contents.config}, remarks


# -- files


def split(layers: Iterable[Layer], max_bytes: int) -> list[list[Layer]]:
    """Layers in files of at most `max_bytes`; a layer that is larger has a file of its own."""
    files: list[list[Layer]] = []
    size = 0
    for layer in layers:
        more = layer.num_bytes
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
    config: Mapping[str, Any],
    tied: Mapping[str, str],
    renamed: Mapping[str, Entry],
    gather: MakeWhole,
    advance: Callable[[Layer], None],
) -> list[str]:
    """Write files of tensors, their indices and config.json. They get their names, and those of an earlier export are removed,
    when all are complete: config.json and indices first, so that no loader takes for whole what a crash leaves. config: the
    content of config.json. tied: other names of tensors -> the names in the files, which the header of the first file notes.
    renamed: scales that transformers reads under other names, see NOTE [names of scales]. advance: called after each layer.
    Returns the names of the files of tensors."""
    held: dict[str, torch.Tensor] = {}
    files = [[_holding(layer, renamed, held) for layer in layers] for layers in files]
    names = file_names(len(files))
    entries = [(entry, name) for name, layers in zip(names, files, strict=True) for la in layers for entry in la.entries]
    theirs = [(entry, TRANSFORMERS_SCALES) for entry in renamed.values()]
    if renamed:
        files.append([_again(renamed, held)])
        names.append(TRANSFORMERS_SCALES)
    texts = {CONFIG: config}
    if len(names) > 1:
        texts[INDEX] = _index(entries)
    if renamed:
        texts[TRANSFORMERS_INDEX] = _index(entries + theirs)
    partial = {name: folder / f".{name}.partial" for name in (*texts, *names)}
    try:
        for name, layers in zip(names, files, strict=True):
            with open(partial[name], "wb") as file:
                metadata = {**tied, "format": "pt"} if name == names[0] else {"format": "pt"}
                _write(file, layers, metadata, gather, advance)
        for name, content in texts.items():
            partial[name].write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for old in [p for p in folder.iterdir() if _OURS.fullmatch(p.name)]:
            old.unlink()
        for name, path in partial.items():
            os.replace(path, folder / name)
    finally:
        for path in partial.values():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return names


def _holding(layer: Layer, names: Collection[str], held: dict[str, torch.Tensor]) -> Layer:
    """A layer that puts some of its tensors in `held` as they are made."""

    def make(gather: MakeWhole) -> NamedTensors:
        for name, tensor in layer.make(gather):
            if name in names:
                held[name] = tensor
            yield name, tensor

    return dataclasses.replace(layer, make=make)


def _again(renamed: Mapping[str, Entry], held: Mapping[str, torch.Tensor]) -> Layer:
    """The held tensors under other names."""

    def make(gather: MakeWhole) -> NamedTensors:
        full = functools.partial(torch.full, dtype=torch.float32)
        return ((its_name, full(like.shape, held[name].item())) for name, (its_name, like) in renamed.items())

    return Layer(TRANSFORMERS_SCALES, tuple(renamed.values()), make, ())


def _index(entries: Sequence[tuple[Entry, str]]) -> dict[str, Any]:
    """The content of an index: which file each tensor is in."""
    return {
        "metadata": {"total_size": sum(like.nbytes for (_, like), _ in entries)},
        "weight_map": {name: file for (name, _), file in entries},
    }


def _write(
    file: IO[bytes], layers: Sequence[Layer], metadata: Mapping[str, str], gather: MakeWhole, advance: Callable[[Layer], None]
) -> None:
    entries = [entry for layer in layers for entry in layer.entries]
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for name, like in sorted(entries, key=lambda e: -e[1].itemsize):  # so that every tensor begins at a multiple of its dtype
        if like.dtype not in _DTYPES:
            raise ExportError(f"{name} is {like.dtype}, which safetensors files cannot hold; convert it before the export")
        offsets[name], begin = end, end
        end += like.nbytes
        header[name] = {"dtype": _DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    start = file.tell()
    file.truncate(start + end)
    for layer in layers:
        for name, tensor in layer.tensors(gather):
            file.seek(start + offsets[name])
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        advance(layer)
