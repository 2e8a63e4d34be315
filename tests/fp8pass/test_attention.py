"""The attention that torch chooses on a GPU: cuDNN's, on Hopper. Its operation is another one than the CPU's."""

import pytest
import torch

from benchmarks.contestants import steady
from benchmarks.cross_codegen import capture
from fp8pass import fp8_compile, inspect
from tests.support.models import LlamaBlock


def cudnn_attention(q, k, v, is_causal):
    """The operation that `scaled_dot_product_attention` calls there, in training."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_a_block_with_cudnns_attention(recipe, num_kv_heads, monkeypatch):
    """Every GEMM runs in FP8, and what attention gives and takes is quantized as with any other."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", cudnn_attention)
    block = LlamaBlock(256, 512, 4, num_kv_heads).bfloat16()
    compiled = fp8_compile(block, steady(recipe))
    x = torch.zeros(1, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    with capture() as graphs:
        compiled(x).sum().backward()
    gemms = inspect(compiled).gemms
    assert (sum(gemm.quantized for gemm in gemms), len(gemms)) == (21, 21)
    targets = [str(node.target) for _, graph, _ in graphs.graphs for node in graph.graph.nodes]
    assert sum("_scaled_dot_product_cudnn_attention.default" in target for target in targets) == 1
    assert sum("_scaled_dot_product_cudnn_attention_backward" in target for target in targets) == 1
