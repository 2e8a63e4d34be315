"""Distinct kernels of a stack of Llama blocks: Inductor writes equal ones once, so equal layers can share theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.cross_codegen import Report, capture, report
from tests.support.models import LlamaBlock


def reports_of_stack(
    compile_model: Callable[[nn.Module], Callable[[torch.Tensor], Any]], layers: int, sizes: tuple[int, int, int, int]
) -> list[Report]:
    """The H200 code of forward and of backward. sizes: dim, ffn, heads, tokens of a block. Computes nothing."""
    dim, ffn, heads, tokens = sizes
    torch._dynamo.reset()
    model = nn.Sequential(*(LlamaBlock(dim, ffn, heads) for _ in range(layers))).bfloat16()
    x = torch.zeros(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        compile_model(model)(x).sum().backward()
    assert len(graphs.graphs) == 2
    return report(graphs)


def distinct(code: str) -> int:
    """Kernels that Inductor wrote into the code of a graph; hand-written ones do not count."""
    return len(set(re.findall(r"^def (triton_\w+)\(", code, re.MULTILINE)))
