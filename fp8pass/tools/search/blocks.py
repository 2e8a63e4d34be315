"""`last_blocks`: the field's habit of keeping the last blocks in high precision, as rules."""

from __future__ import annotations

import glob
import math
import re

import torch
from torch import nn

from fp8pass.errors import OptionError, preview
from fp8pass.graph.origin import joined

_NUMBERED = re.compile(r"\d+")


def last_blocks(model: nn.Module, share: float = 0.15) -> dict[str, None]:
    """Rules that keep the last blocks of a model in high precision, for `fp8_compile(model, recipe, rules=...)`.

    Blocks are repeated modules of one class: the children of an nn.Sequential, or siblings whose names differ in a number, as
    in an nn.ModuleList. Of several such chains it is the one with the most parameters, then the longest one. Their order is
    that of their numbers, in a Sequential that of its children.

    Args:
        model: the model, compiled or not; it is only read.
        share: of the blocks, above 0 and at most 1. The number of blocks is rounded up.

    Returns:
        An ordered `pattern -> None` for each block, such as "layers.30.*", and the block's own path where it has matrices
        itself.

    Raises:
        OptionError: `share` is out of range, `model` is not an nn.Module or has no repeated modules.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {model!r}, a {type(model).__name__}; last_blocks finds the blocks of an nn.Module")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise OptionError(f"share is {share!r}; use a number above 0 and at most 1, such as 0.15")
    chains = _chains(model)
    if not chains:
        children = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
        found = f"its children are {preview(children)}" if children else "it has no children"
        raise OptionError(
            f"{type(model).__name__} has no repeated modules of one class that hold matrices: {found}. Write the rules"
            f" yourself, such as {{'decoder.*': None}}"
        )
    blocks = max(
        chains, key=lambda chain: (sum(p.numel() for p in {p for _, module in chain for p in module.parameters()}), len(chain))
    )
    count = math.ceil(share * len(blocks) - 1e-9)  # 0.07 * 100 is a little more than 7
    rules: dict[str, None] = {}
    for path, block in blocks[len(blocks) - count :]:
        rules |= _patterns(path, block)
    return rules


def _chains(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The modules of one class that follow each other, by their paths in the user's model."""
    from fp8pass.runtime.instances import without_wrappers, wrapper_paths

    wrapped = wrapper_paths(model)
    found = []
    for path, parent in model.named_modules():
        groups: dict[tuple[type, str], list[tuple[int, str, nn.Module]]] = {}
        for position, (name, child) in enumerate(parent.named_children()):
            stem = "" if isinstance(parent, nn.Sequential) else _NUMBERED.sub("#", name)
            number = position if isinstance(parent, nn.Sequential) else int((_NUMBERED.findall(name) or [-1])[-1])
            if number >= 0 and any(_is_matrix(p) for p in child.parameters()):
                groups.setdefault((type(child), stem), []).append((number, name, child))
        for group in groups.values():
            if len(group) > 1:
                held = sorted(group, key=lambda entry: entry[0])
                full = [(joined(path, name), child) for _, name, child in held]
                blocks = [(without_wrappers(at, wrapped), child) for at, child in full]
                found.append(blocks)
    return found


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() >= 2 and min(parameter.shape[-2:]) > 1


def _patterns(path: str, block: nn.Module) -> dict[str, None]:
    """The patterns of the GEMMs of a block, none that matches nothing, which would be warned of."""
    escaped = glob.escape(path)
    own = any(_is_matrix(p) for p in block.parameters(recurse=False))
    inner = any(_is_matrix(p) for child in block.children() for p in child.parameters())
    return {**({escaped: None} if own else {}), **({f"{escaped}.*": None} if inner else {})}
