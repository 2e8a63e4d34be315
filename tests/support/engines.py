"""The way in which vLLM and SGLang read the tensors of an FP8 checkpoint, name by name, by their sources; neither runs here.

Read in vLLM 0.33.0 (4ba787ec9; vllm/model_executor: layers/quantization/fp8.py, utils/quant_utils.py, compressed_tensors/,
models/utils.py) and SGLang 0.5.23 (sglang/srt: layers/quantization/fp8.py, utils.py, compressed_tensors/). Both build the
modules, register for each Linear in FP8 the Parameters named below, and load by name: in vLLM a tensor of the file that has no
Parameter is an error, and in both nothing fills a scale without a tensor.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "experts": ("w1", "w3")}
BLOCK = 128


def dequantized(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of a matrix and its scales, by the shapes alone."""
    scale = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()
    if scale.numel() > 1:
        for dim, size in enumerate(data.shape):
            block = next(b for b in (1, 32, BLOCK, size) if -(-size // b) == scale.shape[dim])
            scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return data.float() * scale


def obstacles(folder: pathlib.Path) -> Iterator[str]:
    """Why an engine would not read an export: nothing, if it reads it."""
    tensors = dict(_tensors(folder))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    modules = sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".weight")})
    modules = [m for m in modules if tensors[f"{m}.weight"].dim() == 2 and not m.endswith(("embed_tokens", "shared"))]
    in_fp8 = {}
    expected: set[str] = set()
    for module in modules:
        wanted = _parameters(config, module, tensors[f"{module}.weight"])
        in_fp8[module] = wanted is not None
        for name, (dtypes, shapes) in (wanted or {"weight": ((torch.bfloat16, torch.float16, torch.float32), None)}).items():
            held = tensors.get(f"{module}.{name}")
            if held is None:
                yield f"{module}.{name} is missing"
            elif held.dtype not in dtypes or (shapes is not None and tuple(held.shape) not in shapes):
                yield f"{module}.{name} is {held.dtype} {list(held.shape)}"
            expected.add(f"{module}.{name}")
        if module.endswith("lm_head") and wanted is not None and _is_blocked(tensors, module):
            yield f"{module} is in blocks, which the loader of vocabularies cannot divide"
    for name in tensors:
        if re.search(r"_scale(_inv)?$", name) and name not in expected:
            yield f"{name} has no Parameter"
    for fused, shards in FUSED.items():
        yield from _mixed(fused, shards, in_fp8, tensors)


def _mixed(fused: str, shards: tuple[str, ...], in_fp8: dict[str, bool], tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """Parts that the engines fuse must be alike, and blocks must not cross from one part into the next."""
    for first in [m for m in in_fp8 if m.endswith(f".{shards[0]}")]:
        parts = [first.removesuffix(shards[0]) + shard for shard in shards]
        if len({in_fp8[part] for part in parts}) > 1:
            yield f"{fused}: some of {', '.join(parts)} are in FP8"
        elif in_fp8[first] and len({_kind(tensors, part) for part in parts}) > 1:
            yield f"{fused}: {', '.join(parts)} have several kinds of scales"
        elif in_fp8[first] and _is_blocked(tensors, first):
            rows = [tensors[f"{part}.weight"].shape[0] for part in parts[:-1]]
            if any(count % BLOCK for count in rows):
                yield f"{fused}: blocks of {first} are not whole"


def _kind(tensors: dict[str, torch.Tensor], module: str) -> tuple[torch.dtype, str, bool]:
    """The kind of scales: their dtype, the elements that share one, and whether those of inputs are static."""
    scale = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.weight_scale_inv"))
    assert scale is not None
    shared_by = "block" if _is_blocked(tensors, module) else "tensor" if scale.numel() == 1 else "row"
    return scale.dtype, shared_by, f"{module}.input_scale" in tensors


def _is_blocked(tensors: dict[str, torch.Tensor], module: str) -> bool:
    scale = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.weight_scale_inv"))
    return scale is not None and scale.dim() == 2 and scale.shape[0] == -(-tensors[f"{module}.weight"].shape[0] // BLOCK)


def _parameters(config: dict[str, Any], module: str, weight: torch.Tensor) -> dict[str, Any] | None:
    """The tensors of a Linear in FP8: names, each with dtypes and shapes that load; None for one in high precision."""
    rows, columns = weight.shape
    e4m3, f32, scalar = (torch.float8_e4m3fn,), (torch.float32,), ((), (1,))
    blocks = ((-(-rows // BLOCK), -(-columns // BLOCK)),)
    if config["quant_method"] == "fp8":
        ignored = config["modules_to_not_convert"]
        if module in ignored or module.endswith("lm_head"):  # ParallelLMHead gets no method
            return None
        if config["weight_block_size"] is not None:
            return {"weight": (e4m3, None), "weight_scale_inv": ((*f32, torch.float8_e8m0fnu), blocks)}
        static = {"input_scale": (f32, scalar)} if config["activation_scheme"] == "static" else {}
        return {"weight": (e4m3, None), "weight_scale": (f32, scalar), **static}
    if any(_matches(module, name) for name in config["ignore"]):
        return None
    for group in config["config_groups"].values():
        types = () if module.endswith("lm_head") else ("Linear",)  # ParallelLMHead is matched by its name alone
        if any(target in types or _matches(module, target) for target in group["targets"]):
            shapes = {"tensor": scalar, "channel": ((rows, 1),), "block": blocks, "group": ((rows, columns // 32),)}
            strategy = group["weights"]["strategy"]
            dtypes = (torch.uint8,) if strategy == "group" else f32
            static = {} if group["input_activations"]["dynamic"] else {"input_scale": (f32, scalar)}
            return {"weight": (e4m3, None), "weight_scale": (dtypes, shapes[strategy]), **static}
    return None


def _matches(module: str, target: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else module == target


def _tensors(folder: pathlib.Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the files that the index names, or of all files if there is no index."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else found
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
