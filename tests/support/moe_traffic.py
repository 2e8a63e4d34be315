"""Memory traffic besides GEMMs of the experts of Qwen3-30B-A3B, transformers' own code: forward and backward on an H200.

What casts of weights move does not grow with the number of tokens, so it is counted apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.cross_codegen import Report, capture, report

EXPERTS, TOP_K, HIDDEN, FFN = 128, 8, 2048, 768
#: The two stacks of weights.
STACKS = {(EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What kernels besides GEMMs read and write."""

    weight_bytes: int
    """By kernels that read a stack of weights."""
    other_bytes: int
    kernels: int
    gemms: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.other_bytes


def moe_block(experts: int = EXPERTS) -> nn.Module:
    """The router and the experts of a layer in bfloat16, uninitialized."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, num_experts=experts, num_experts_per_tok=TOP_K, num_hidden_layers=1
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block: nn.Module = Qwen3MoeSparseMoeBlock(config).bfloat16()
    return block.to_empty(device="cpu")


def reports_of(compile_model: Callable[[nn.Module], Any], tokens: int) -> list[Report]:
    """The generated code of forward and backward. Computes nothing."""
    torch._dynamo.reset()
    model = compile_model(moe_block())
    x = torch.zeros(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return report(graphs)


def traffic_of(reports: list[Report]) -> Traffic:
    """The sums of some graphs."""
    kernels = [kernel for reported in reports for kernel in reported.elementwise]
    of_weights = [k for k in kernels if not STACKS.isdisjoint(k.inputs.values())]
    weight_bytes = sum(k.num_bytes for k in of_weights)
    other_bytes = sum(k.num_bytes for k in kernels) - weight_bytes
    gemms = sum(k.is_gemm for reported in reports for k in reported.kernels)
    return Traffic(weight_bytes, other_bytes, len(kernels), gemms)


@contextlib.contextmanager
def torchao_rowwise() -> Iterator[None]:
    """Inside, transformers' grouped GEMMs are those of torchao's rowwise conversion of mixtures of experts.

    The conversion wraps the weights in a tensor subclass that takes `torch._grouped_mm`; transformers calls
    `torch.nn.functional.grouped_mm`, which it does not know. So its function is called here. It registers its operations, the
    shape functions included, only where Triton has a device. Groups must be multiples of 16, which nothing here pads.
    """
    import torch.utils._triton
    import transformers.integrations.moe

    with mock.patch.object(torch.utils._triton, "has_triton", return_value=True):
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as convert

    def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        return convert(input, weight, offs, torch.bfloat16, torch.float8_e4m3fn, False)

    with mock.patch.object(transformers.integrations.moe, "_grouped_mm", grouped_mm):
        yield
