"""The trace of a model that is not run: on tensors without content, without a GPU, weights or code generation.

Dynamo traces the model once, AOTAutograd makes one joint graph of it, and each recipe gets a copy: its decisions, expected
seconds and saved bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

from fp8pass.cost import DEVICES, Device, Estimate, device_called
from fp8pass.errors import Fp8Error, OptionError
from fp8pass.graph.gemms import GraphContext
from fp8pass.graph.origin import input_index, is_gradient, maker_path, module_path
from fp8pass.graph.traces import Snapshot
from fp8pass.inputs import CapacityExceeded, ExtraInput, Needed
from fp8pass.options import CompileOptions
from fp8pass.recipes import PRESETS, Recipe, RecipeName, as_recipe
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.runner import planned, rewrite, without
from fp8pass.rewrite.saved import plan_saved, saved_memory
from fp8pass.rules import Rules
from fp8pass.runtime.dynamo_graphs import (
    copied,
    describe_inputs,
    find_extra_inputs,
    real_inputs,
    surroundings_of,
    traced_value,
    with_extra_inputs,
    without_regions,
)
from fp8pass.runtime.session import Session
from fp8pass.tools.estimation.repeats import Kept, copies_of, cut_repeats, num_copies
from fp8pass.tools.estimation.report import ATTENTION_SHARE, Estimation, GemmEstimate, RecipeEstimate

_CPU = torch.device("cpu")
#: The name of high precision among the recipes.
_BASELINE = ""


def estimate_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: str | Device,
    recipe: Recipe | RecipeName | str,
    **options: Any,
) -> Estimation:
    """`fp8pass.estimate`, whose docstring describes it. options: those of `fp8_compile` that decide about GEMMs."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise OptionError(f"model is {given!r}, a {type(given).__name__}; pass an nn.Module, on the meta device for example")
    if not isinstance(device, (str, Device)):
        raise OptionError(f"device is {device!r}; use one of {', '.join(DEVICES)}, or a fp8pass.cost.Device of your own")
    target = device if isinstance(device, Device) else device_called(device)
    recipes = _recipes(recipe)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A copy of the model, wherever its tensors are, the meta device included; tied ones remain tied.
    registered = ("_parameters", "_buffers", "_modules")
    plain = tree_leaves([[v for name, v in vars(m).items() if name not in registered] for m in model.modules()])
    tensors = [*model.parameters(), *model.buffers(), *(value for value in plain if isinstance(value, torch.Tensor))]
    memo = {id(tensor): fake(tensor, mode) for tensor in tensors}
    model = copy.deepcopy(model, memo)
    compile_options = {name: CompileOptions(recipe=r, backend="aot_eager", **options) for name, r in recipes.items()}
    compile_options[_BASELINE] = CompileOptions(rules={"*": None}, backend="aot_eager")
    tracer = _Tracer(model, mode, {name: Session(model, each) for name, each in compile_options.items()}, target)

    def call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return model(*args, **kwargs)

    # Dynamo counts how often code is compiled: a copy of the code leaves the counts of the user's models alone.
    own = types.FunctionType(call.__code__.replace(co_name="estimated"), globals())
    try:
        torch.compile(own, backend=tracer, dynamic=False)(model, list(fake_inputs(args, mode)), fake_inputs(dict(kwargs), mode))
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp8Error):
            raise failure.inner_exception from None
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise OptionError(
            f"the code of {type(model).__name__} depends on values of tensors, which an estimate does not have ({error}): pass"
            f" arguments that avoid this code, or estimate the modules around it"
        ) from error
    seconds = sum(flops / (target.bf16_flops * ATTENTION_SHARE[is_gradient]) for flops, is_gradient in tracer.attention)
    for each in tracer.found.values():
        each.attention_seconds = seconds
    if len(tracer.refused) == len(recipes):
        reason = next(iter(tracer.refused.values()))
        raise OptionError(f"recipe {recipe!r} does not run on {target.name}: {reason}. Use another recipe or device='b200'")
    for name in tracer.refused:
        del tracer.found[name]
    bf16 = tracer.found.pop(_BASELINE)
    bf16_seconds = sum(gemm.expected.bf16_seconds for gemm in bf16.gemms if gemm.expected is not None)
    return Estimation(target, tracer.found, tracer.refused, bf16_seconds, seconds, bf16.saved_bytes, tracer.has_masks)


def _recipes(recipe: Recipe | RecipeName | str) -> dict[str, Recipe]:
    """The recipes to estimate by name."""
    if recipe == "all":
        return {name: make() for name, make in PRESETS.items()}
    one = as_recipe(recipe)
    return {one.name: one}


def _lack(gemms: Iterable[GemmEstimate]) -> str | None:
    """The reason why a device does not run these GEMMs; None where it does."""
    for gemm in gemms:
        record = gemm.record
        is_sized = all(isinstance(size, int) for size in (record.m, record.n, record.k))
        if record.quantized and is_sized and gemm.expected is None:
            return f"it has no GEMM with scales per {record.a_scaling} values, which {record.module or record.op} needs"
    return None


class _AllKnown(BaseException):
    """Ends a compilation: everything is known."""


class _Tracer:
    """A backend of torch.compile that estimates each graph of Dynamo's under every recipe. Its graphs compute nothing."""

    compiler_name = "fp8pass estimate"

    def __init__(self, model: nn.Module, mode: FakeTensorMode, sessions: Mapping[str, Session], device: Device):
        self._model, self._mode, self._sessions, self._device = model, mode, sessions, device
        self.found = {name: RecipeEstimate(name) for name in sessions}
        self.attention: list[tuple[float, bool]] = []  # FLOPs of each attention, and whether it is a gradient.
        self.has_masks = False
        self.refused: dict[str, str] = {}  # Recipes that the device does not run, with the reason.

    def __call__(self, gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        results = [traced_value(node) for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        outputs = [fake(value, self._mode) if isinstance(value, torch.Tensor) else value for value in results]
        needed = Needed()
        while True:
            try:
                self._trace(gm, examples, needed)
                return lambda *args: outputs
            except CapacityExceeded as exceeded:
                needed = Needed(entries=exceeded.needed)

    def _trace(self, gm: fx.GraphModule, examples: list[Any], needed: Needed) -> None:
        inputs = describe_inputs(gm.graph, self._model)
        placement = self._sessions[_BASELINE].names.place(inputs, real_inputs(gm.graph))
        surroundings = surroundings_of(gm, self._model)
        gm = without_regions(gm)
        reduced = copied(gm)
        kept = cut_repeats(reduced.graph)
        # Inputs that only removed layers read are erased.
        placeholders = list(zip(reduced.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder"), strict=True))
        positions = [i for i, (node, before) in enumerate(placeholders) if node.users or not before.users]
        for i, (node, _) in enumerate(placeholders):
            if i not in positions:
                reduced.graph.erase_node(node)
        keep_attention_whole(reduced)
        inputs, examples = tuple(inputs[i] for i in positions), [examples[i] for i in positions]
        extra = {
            name: [e for provider in session.providers for e in provider.inputs(_CPU, needed)] if name != _BASELINE else []
            for name, session in self._sessions.items()
        }
        module, examples = with_extra_inputs(reduced, examples, [e for given in extra.values() for e in given], _CPU)
        context = GraphContext(inputs, placement.name_module, surroundings)

        def estimate(traced: fx.GraphModule, given: Any, partition: Mapping[str, Any] | None) -> None:
            made, start = [], len(inputs)
            for name in self._sessions:
                made.append(self._estimate(name, traced, given, partition, context, start, extra[name], kept))
                start += len(extra[name])
            for each, (gemms, chosen, saved_bytes, in_fp8) in zip(self.found.values(), made, strict=True):
                each.gemms += gemms
                each.chosen += chosen
                each.saved_bytes += saved_bytes
                each.saved_bytes_in_fp8 += in_fp8
            for node, flops, is_backward, has_mask in attention_flops(traced.graph):
                self.attention += [(flops, is_backward)] * num_copies(module_path(node), kept)
                self.has_masks |= has_mask

        _aot(module, examples, estimate)

    def _estimate(
        self,
        name: str,
        traced: fx.GraphModule,
        inputs: Any,
        partition: Mapping[str, Any] | None,
        context: GraphContext,
        start: int,
        extra: Sequence[ExtraInput],
        kept: Kept,
    ) -> tuple[list[GemmEstimate], list[GemmEstimate], int, int]:
        """GEMMs as a recipe has them, and with `min_speedup=1.0`, and the bytes that the forward saves, also with
        `saved_activations`. start: the position of its session's extra inputs. partition: the arguments of the partitioner;
        None in inference."""
        given = self._sessions[name].options
        options = Options(trains=partition is not None, contiguous_outputs=True, given=given, device=self._device)
        rules, joint = given.first_rules, Snapshot.take(traced.graph)

        def run(runner: Callable[..., Any], graph: fx.Graph, rules: Any) -> Any:
            return runner(graph, context, rules, find_extra_inputs(graph, start, extra, input_index), options)

        gemms, estimates = run(planned, joint.restore(), dataclasses.replace(rules, min_speedup=1.0))
        chosen = _all_layers(gemms, estimates, context, kept)
        if (lack := self.refused.get(name) or _lack(chosen)) is not None:
            self.refused[name] = lack
            return [], [], 0, 0
        graph = joint.restore()
        with without("verify"):
            rewritten = run(rewrite, graph, rules)
        saved = (0, 0)
        if partition is not None:
            saved = _saved_bytes(fx.GraphModule(traced, graph), inputs, partition, kept, rules, context)
        return _all_layers(rewritten.gemms, rewritten.estimates, context, kept), chosen, *saved


def _aot(module: fx.GraphModule, examples: list[Any], estimate: Callable[..., None]) -> None:
    """Trace the joint graph, or that of inference, and hand it over."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def joint(traced: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        estimate(traced, inputs, kwargs)
        raise _AllKnown

    def inference(traced: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        estimate(traced, inputs, None)
        raise _AllKnown

    backend = aot_autograd(
        fw_compiler=boxed_nop, inference_compiler=inference, partition_fn=joint, keep_inference_input_mutations=True
    )
    fake_mode = detect_fake_mode(examples)
    try:
        with functorch_config.patch(enable_autograd_cache=False), tracing(TracingContext(fake_mode)):
            backend(module, examples)
    except _AllKnown:
        return


def _all_layers(
    gemms: Sequence[GemmRecord], estimates: Sequence[Estimate | None], context: GraphContext, kept: Kept
) -> list[GemmEstimate]:
    """The GEMMs of a reduced graph, and of the layers that its layers stand for."""
    found = []
    for record, expected in zip(gemms, estimates, strict=True):
        others = (path for path in copies_of(record.path, kept) if path != record.path)
        records = [record, *(dataclasses.replace(record, module=context.name_module(path), path=path) for path in others)]
        found += [GemmEstimate(each, expected) for each in records]
    return found


def _saved_bytes(
    joint: fx.GraphModule, inputs: Any, partition: Mapping[str, Any], kept: Kept, rules: Rules, context: GraphContext
) -> tuple[int, int]:
    """Bytes that the forward saves, without `saved_activations` and with it."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    num_outputs = sum(not is_gradient(described) for described in joint.graph.output_node().meta["desc"])
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **partition)
    results: Any = forward.graph.output_node().args[0]
    placeholders = forward.graph.find_nodes(op="placeholder")
    saved = saved_memory([r if isinstance(r, fx.Node) else None for r in results], placeholders, num_outputs)
    before = sum(size * num_copies(maker_path(node), kept) for node, size in saved)
    plan = plan_saved(forward.graph, backward.graph, num_outputs, rules, context)
    gained = sum((value.bytes_before - value.bytes_after) * num_copies(maker_path(value.node), kept) for value in plan)
    return before, before - gained


# -- tensors without content


def fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype on the CPU, without content."""
    with torch.utils._python_dispatch._disable_current_modes():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made: Any = FakeTensor(mode, meta, _CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_() if tensor.requires_grad else made


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    """Arguments with fake tensors in place of tensors."""
    return tree_map(lambda value: fake(value, mode) if isinstance(value, torch.Tensor) else value, inputs)


# -- attention. torch takes `scaled_dot_product_attention` apart where no fused kernel fits, and on the CPU, which these tensors
# are on, fewer fit than on a GPU: with dropout, or values of another width than queries, batched GEMMs would appear that no GPU
# runs. So it remains one operation.


@torch.library.custom_op("fp8pass_estimate::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("an operation for tracing")


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == 4:  # as fused kernels leave it: heads beside each other
        out = query.new_empty(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    else:
        out = query.new_empty(shape)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fp8pass_estimate::attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError("an operation for tracing")


@_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_mask = query.new_empty(0) if mask is None else torch.empty_like(mask)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, is_causal = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.is_causal = is_causal
    ctx.has_mask = mask is not None and mask.is_floating_point()


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    of_query, of_key, of_value, of_mask = _attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return of_query, of_key, of_value, of_mask if ctx.has_mask else None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _one_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for `scaled_dot_product_attention`."""
    result: Tensor = _attention(query, key, value, attn_mask, is_causal)[0]
    return result


def keep_attention_whole(gm: fx.GraphModule) -> None:
    """Replace attention in a graph of Dynamo's by one operation, in those of checkpointed layers, too. It is left as it is."""
    for node in gm.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
        node.target = _one_attention
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            own = copied(child)
            keep_attention_whole(own)
            setattr(gm, name, own)
    gm.recompile()


def attention_flops(graph: fx.Graph) -> list[tuple[fx.Node, float, bool, bool]]:
    """The attention of a joint graph: node, FLOPs, whether it is a gradient, whether it has a mask. Two products of [query
    tokens, head width] by [head width, key tokens] a head, five in the backward; half of it where attention is causal. A mask's
    zeros count as work."""
    found = []
    for target, products, is_backward in ((_attention, 2.0, False), (_attention_backward, 5.0, True)):
        for node in graph.find_nodes(op="call_function", target=target._opoverload):
            query, key, value = (argument.meta["val"] for argument in node.args[is_backward : is_backward + 3])
            scores = query[..., 0].numel() * key.shape[-2]
            share = 0.5 if node.args[-1] is True else 1.0
            flops = share * products * scores * (query.shape[-1] + value.shape[-1])
            found.append((node, flops, is_backward, node.args[is_backward + 3] is not None))
    return found
