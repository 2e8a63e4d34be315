"""Tensors that have shapes and no content: a model's copy that takes no memory, and attention that stays one operation.

torch takes `scaled_dot_product_attention` apart where no fused kernel fits, and on the CPU, which these tensors are on, fewer
fit than on a GPU: with dropout, or values of another width than queries, batched GEMMs would appear that no GPU runs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

_CPU = torch.device("cpu")


def fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype on the CPU, without content."""
    with torch.utils._python_dispatch._disable_current_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made: Any = FakeTensor(mode, meta, _CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_() if tensor.requires_grad else made


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model, wherever its tensors are, the meta device included; tied ones stay tied."""
    plain = (value for module in model.modules() for value in tree_leaves(_attributes(module)))
    tensors = [*model.parameters(), *model.buffers(), *(value for value in plain if isinstance(value, torch.Tensor))]
    memo = {id(tensor): fake(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def _attributes(module: nn.Module) -> list[Any]:
    """What a module holds besides Parameters, buffers and modules."""
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    """Arguments with fake tensors in place of tensors."""
    return tree_map(lambda value: fake(value, mode) if isinstance(value, torch.Tensor) else value, inputs)


# -- attention


@torch.library.custom_op("fp8pass_estimate::attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("an operation for tracing")


@_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == 4:  # as fused kernels leave it: heads beside each other
        out = query.new_empty(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    else:
        out = query.new_empty(shape)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fp8pass_estimate::attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("an operation for tracing")


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of_mask = query.new_empty(0) if mask is None else torch.empty_like(mask)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, mask, is_causal = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.is_causal = is_causal
    ctx.has_mask = mask is not None and mask.is_floating_point()


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    of_query, of_key, of_value, of_mask = _attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return of_query, of_key, of_value, of_mask if ctx.has_mask else None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _one_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What takes the place of `scaled_dot_product_attention`."""
    result: torch.Tensor = _attention(query, key, value, attn_mask, is_causal)[0]
    return result


def keep_attention_whole(graph: fx.Graph) -> None:
    """Replace attention in a graph of Dynamo's by one operation."""
    for node in graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
        node.target = _one_attention


def attention_flops(graph: fx.Graph) -> list[tuple[fx.Node, float, bool, bool]]:
    """The attention of a joint graph: node, FLOPs, whether it is a gradient, whether it has a mask.

    Two products of [query tokens, head width] by [head width, key tokens] a head, five in the backward; half of it where
    attention is causal. A mask's zeros count as work.
    """
    found = []
    for target, products, is_gradient in ((_attention, 2.0, False), (_attention_backward, 5.0, True)):
        for node in graph.find_nodes(op="call_function", target=target._opoverload):
            query, key, value = (argument.meta["val"] for argument in node.args[is_gradient : is_gradient + 3])
            scores = query[..., 0].numel() * key.shape[-2]
            share = 0.5 if node.args[-1] is True else 1.0
            flops = share * products * scores * (query.shape[-1] + value.shape[-1])
            found.append((node, flops, is_gradient, node.args[is_gradient + 3] is not None))
    return found
