"""Estimates of the speed-up and memory of a model that is not run: on tensors without content, without a GPU or weights.

Dynamo traces the model once, AOTAutograd makes one joint graph of it, and each recipe gets a copy: its decisions, expected
seconds and saved bytes. No code is generated.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import glob
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

from fp8pass.cost import DEVICES, Device, Estimate, device_called, graph_speedup
from fp8pass.errors import Fp8Error, OptionError
from fp8pass.graph.gemms import GraphContext
from fp8pass.graph.origin import family, input_index, is_gradient, maker_path, module_path
from fp8pass.graph.traces import Snapshot
from fp8pass.graph.values import by_key
from fp8pass.inputs import ExtraInput, InputsMissing, Needed
from fp8pass.options import CompileOptions
from fp8pass.recipes import PRESETS, Recipe, RecipeName, as_recipe
from fp8pass.rewrite.plan import Options
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.runner import planned, rewrite, without
from fp8pass.rewrite.saved import plan_saved, saved_memory
from fp8pass.rules import Rules
from fp8pass.runtime import dynamo_graphs
from fp8pass.runtime.session import Session
from fp8pass.tools.repeats import Kept, copies_of, cut_repeats, num_copies
from fp8pass.tools.tables import as_html, as_text, folded_path, make_table, shape_text, terminal_width

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


def _refusal(gemms: Iterable[GemmEstimate]) -> str | None:
    """The reason why a device does not run these GEMMs; None where it does."""
    for gemm in gemms:
        record = gemm.record
        is_sized = all(isinstance(size, int) for size in (record.m, record.n, record.k))
        if record.quantized and is_sized and gemm.expected is None:
            return f"it has no GEMM with {record.a_scaling} scales, which {record.module or record.op} needs"
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
        results = [dynamo_graphs.traced_value(node) for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        outputs = [fake(value, self._mode) if isinstance(value, torch.Tensor) else value for value in results]
        needed = Needed()
        while True:
            try:
                self._trace(gm, examples, needed)
                return lambda *args: outputs
            except InputsMissing as missing:
                needed = missing.needed

    def _trace(self, gm: fx.GraphModule, examples: list[Any], needed: Needed) -> None:
        inputs = dynamo_graphs.describe_inputs(gm.graph, self._model)
        placement = dynamo_graphs.placement_in_trace(gm, inputs, self._sessions[_BASELINE].names)
        surroundings = dynamo_graphs.surroundings_of(gm, self._model)
        gm = dynamo_graphs.without_regions(gm)
        reduced = dynamo_graphs.copied(gm)
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
        asked = [e for given in extra.values() for e in given]
        module, examples = dynamo_graphs.with_extra_inputs(reduced, examples, asked, _CPU)
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
            return runner(graph, context, rules, dynamo_graphs.find_extra_inputs(graph, start, extra, input_index), options)

        gemms, estimates = run(planned, joint.restore(), dataclasses.replace(rules, min_speedup=1.0))
        chosen = _all_layers(gemms, estimates, context, kept)
        if (refusal := self.refused.get(name) or _refusal(chosen)) is not None:
            self.refused[name] = refusal
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
            own = dynamo_graphs.copied(child)
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
            first = 1 if is_backward else 0
            query, key, value = (argument.meta["val"] for argument in node.args[first : first + 3])
            scores = query[..., 0].numel() * key.shape[-2]
            share = 0.5 if node.args[-1] is True else 1.0
            flops = share * products * scores * (query.shape[-1] + value.shape[-1])
            found.append((node, flops, is_backward, node.args[first + 3] is not None))
    return found


# -- the result

#: Share of the bfloat16 rate that attention reaches in the forward (False) and in the backward (True), an assumption: about
#: what the plots of FlashAttention-3 (Shah et al., 2024) show for Hopper, causal, heads of 128, 8192 tokens.
ATTENTION_SHARE = {False: 0.75, True: 0.6}


@dataclasses.dataclass(frozen=True)
class GemmEstimate:
    """One GEMM of the model under one recipe."""

    record: GemmRecord
    """The decision about it."""
    expected: Estimate | None
    """Its expected seconds; None where a size is dynamic, or the device has no such GEMM."""


@dataclasses.dataclass
class RecipeEstimate:
    """The expected gain of one recipe. Times are those of the GPU, in seconds."""

    recipe: str
    """Its name."""
    gemms: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """Every GEMM of a training step, in the order of the graph."""
    chosen: list[GemmEstimate] = dataclasses.field(default_factory=list)
    """`gemms` with `min_speedup=1.0`: those that are expected to be slower in FP8 are in high precision."""
    saved_bytes: int = 0
    """Bytes of the tensors that the forward saves for the backward, Parameters not included."""
    saved_bytes_in_fp8: int = 0
    """`saved_bytes` with `saved_activations="fp8"`."""
    attention_seconds: float = 0.0
    """Expected seconds of attention, the same in every recipe."""

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of all GEMMs together, with their casts."""
        return graph_speedup([gemm.expected for gemm in self.gemms])

    @property
    def chosen_speedup(self) -> float | None:
        """`speedup` with `min_speedup=1.0`. It can be lower: a cast is paid for by the GEMMs that still read it."""
        return graph_speedup([gemm.expected for gemm in self.chosen])

    @property
    def chooses(self) -> bool:
        """True if `min_speedup=1.0` gains anything."""
        return (self.chosen_speedup or 0.0) > (self.speedup or 0.0)

    @property
    def best_speedup(self) -> float | None:
        """The higher of the two."""
        return self.chosen_speedup if self.chooses else self.speedup

    @property
    def speedup_with_attention(self) -> float | None:
        """`best_speedup` of GEMMs and attention together. Norms, the optimizer and communication would lower it further."""
        gemms = self.chosen if self.chooses else self.gemms
        known = [gemm.expected for gemm in gemms if gemm.expected is not None]
        if not known:
            return None
        bf16, fp8 = sum(e.bf16_seconds for e in known), sum(e.fp8_seconds for e in known)
        return (bf16 + self.attention_seconds) / (fp8 + self.attention_seconds)

    @property
    def rules(self) -> dict[str, None]:
        """The rules that keep the same GEMMs in high precision as `min_speedup=1.0` does, and that no estimate decides. A GEMM
        outside of all modules has none: no pattern matches it alone."""
        left = {(g.record.module, g.record.role): _is_slow(g) for g in self.chosen}
        found: dict[str, None] = {}
        for module, role in (key for key, slow in left.items() if slow and key[0]):
            name = glob.escape(module)
            alike = {m for m, r in left if r == role and family(m) == family(module)}
            matched = {m for m, r in left if r == role and fnmatch.fnmatchcase(m, family(name))}  # `*` matches dots, too
            is_exact = matched == alike and all(left[m, role] for m in alike)
            found[f"{family(name) if is_exact else name}:{role}"] = None
        return found


def _is_slow(gemm: GemmEstimate) -> bool:
    return (gemm.record.reason or "").startswith("slow")


@dataclasses.dataclass(frozen=True)
class Estimation:
    """The expected gain of FP8 in a training step of a model: an estimate, of nothing that has run."""

    device: Device
    """The device whose constants were used."""
    recipes: dict[str, RecipeEstimate]
    """By name."""
    refused: dict[str, str]
    """Recipes that the device has no GEMMs for, with the reason."""
    bf16_seconds: float
    """Expected seconds of all GEMMs in bfloat16."""
    attention_seconds: float
    """Expected seconds of attention. An assumption about the rate: see `ATTENTION_SHARE`."""
    bf16_saved_bytes: int
    """Bytes that the forward saves for the backward without FP8."""
    has_masks: bool = False
    """An attention has a mask: then the whole square of its scores counts."""

    @property
    def best(self) -> RecipeEstimate | None:
        """The recipe with the highest speed-up; None where none gains anything, or none is known."""
        known = [r for r in self.recipes.values() if r.best_speedup is not None and r.best_speedup > 1]
        return max(known, key=lambda r: r.best_speedup or 0.0, default=None)

    @property
    def call(self) -> str:
        """The call to write; "" where FP8 gains nothing."""
        best = self.best
        if best is None:
            return ""
        return f'fp8_compile(model, "{best.recipe}"{", min_speedup=1.0" if best.chooses else ""})'

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain lists, dicts, strings and numbers."""
        return {
            "device": self.device.name,
            **{name: getattr(self, name) for name in ("bf16_seconds", "attention_seconds", "bf16_saved_bytes")},
            "best": None if self.best is None else self.best.recipe,
            "call": self.call,
            "refused": self.refused,
            "recipes": {
                name: {
                    **{n: getattr(r, n) for n in ("speedup", "chosen_speedup", "speedup_with_attention")},
                    **{n: getattr(r, n) for n in ("saved_bytes", "saved_bytes_in_fp8")},
                    "rules": list(r.rules),
                    "gemms": [_gemm(g) for g in r.gemms],
                }
                for name, r in self.recipes.items()
            },
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        shown: list[Any] = []
        for heading, names, rows in (self._by_recipe(), self._by_layer()):
            titles = (name.replace("_with_", "\nwith_") for name in names)
            columns = {t: {"no_wrap": i > 0, "justify": "right" if i else "left"} for i, t in enumerate(titles)}
            shown += [heading, make_table(columns, rows, is_plain=True), ""]
        text = as_text([*shown, *self._remarks()], min(terminal_width(), 120))
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def to_html(self) -> str:
        """The tables as a page of HTML."""
        parts = [
            f"<h2>{escape(heading)}</h2>{as_html(columns, rows)}"
            for heading, columns, rows in (self._by_recipe(), self._by_layer())
        ]
        parts += [f"<p>{escape(line)}</p>" for line in self._remarks()]
        return _PAGE.format(title=escape(f"fp8pass: an estimate for {self.device.name}"), body="\n".join(parts))

    def _repr_html_(self) -> str:
        """The tables in a notebook."""
        return self.to_html()

    def _by_recipe(self) -> tuple[str, list[str], list[list[str]]]:
        columns = ["recipe", "GEMMs", "min_speedup=1.0", "with attention", "saved for backward", "saved_activations"]
        rows = [["bfloat16", "1.00", "1.00", "1.00", _gigabytes(self.bf16_saved_bytes, self.bf16_saved_bytes), ""]]
        rows += [
            [
                recipe.recipe,
                _number(recipe.speedup),
                _number(recipe.chosen_speedup),
                _number(recipe.speedup_with_attention),
                _gigabytes(recipe.saved_bytes, self.bf16_saved_bytes),
                _gigabytes(recipe.saved_bytes_in_fp8, self.bf16_saved_bytes),
            ]
            for recipe in self.recipes.values()
        ]
        return f"Expected speed-up over bfloat16 on {self.device.name} (an estimate; nothing was run)", columns, rows

    def _by_layer(self) -> tuple[str, list[str], list[list[str]]]:
        """Equal layers in one row; the three GEMMs of a module together, by the sizes of the first."""
        columns = ["layer, m x n x k of its output", *self.recipes]
        layers: dict[tuple[str, str], dict[str, list[GemmEstimate]]] = {}
        for name, recipe in self.recipes.items():
            for module, gemms in by_key(recipe.gemms, lambda gemm: gemm.record.module).items():
                first = gemms[0].record
                shape = shape_text(first.m, first.n, first.k, first.groups)
                layers.setdefault((family(module), shape), {}).setdefault(name, []).extend(gemms)
        rows = []
        for (_, shape), by_recipe in layers.items():
            modules = list(dict.fromkeys(g.record.module for gemms in by_recipe.values() for g in gemms))
            shown = [_layer_speedup(by_recipe.get(name, [])) for name in self.recipes]
            rows.append([f"{folded_path(modules)}\n  {shape}", *shown])
        return "Expected speed-up of each layer, forward and backward together", columns, rows

    def _remarks(self) -> list[str]:
        milliseconds = f"GEMMs {_milliseconds(self.bf16_seconds)}, attention {_milliseconds(self.attention_seconds)}"
        lines = [f"In bfloat16: {milliseconds} a step (estimates)."]
        if self.has_masks:
            lines.append(
                "The model gives its attention a mask, so all scores count. A kernel that leaves out those of causal"
                " attention takes half, and FP8 gains more."
            )
        best = self.best
        if best is None:
            lines.append("FP8 is not expected to be faster on this device at these sizes.")
        else:
            count = sum(_is_slow(g) for g in best.chosen) if best.chooses else 0
            lines.append(
                f"Best: {self.call}" + (f", which leaves {count} of {len(best.chosen)} GEMMs in bfloat16:" if count else "")
            )
            if count:
                lines.append("  as rules: {" + ", ".join(f"{pattern!r}: None" for pattern in best.rules) + "}")
        lines += [f"{name}: not on this device, because {reason}." for name, reason in self.refused.items()]
        lines.append("Not included: norms, the optimizer and communication, which take as long as before.")
        return lines


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root{{color-scheme:light dark}}
body{{font:15px sans-serif;margin:2em;max-width:70em}}
table{{border-collapse:collapse;display:block;overflow-x:auto}}
td,th{{padding:.2em .7em;border-bottom:1px solid #8888;text-align:right;white-space:nowrap}}
td:first-child,th:first-child{{text-align:left;white-space:normal}}
</style></head>
<body>
{body}
</body></html>
"""


def _layer_speedup(gemms: list[GemmEstimate]) -> str:
    """The speed-up of a layer, or why it is in high precision, in a word."""
    kept = next((g.record.reason.partition(":")[0] for g in gemms if g.record.reason), "-")
    return _number(graph_speedup([g.expected for g in gemms]), kept) if any(g.record.quantized for g in gemms) else kept


def _number(value: float | None, instead: str = "-") -> str:
    return instead if value is None else f"{value:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def _gigabytes(value: int, base: int) -> str:
    return f"{value / 1e9:.2f} GB" + (f" ({value / base:.2f})" if base and value != base else "")


def _gemm(gemm: GemmEstimate) -> dict[str, Any]:
    names = ("module", "role", "m", "n", "k", "groups", "quantized", "reason", "speedup")
    seconds = gemm.expected
    return {
        **{name: getattr(gemm.record, name) for name in names},
        "bf16_seconds": None if seconds is None else seconds.bf16_seconds,
        "seconds": None if seconds is None else seconds.fp8_seconds,
    }
