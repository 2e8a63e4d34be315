"""The models whose rewritten graphs are compared between versions: real ones and small ones, each with what it shows.

A case runs a model under one recipe and returns what `fp8_compile` returned, or None if the recipe has no such case. Only the
public API is used, so that versions of the package can be compared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    fp8_compile,
    monitor,
)
from fp8pass.recipes import as_recipe
from tests.emulation.cases import Ragged, Tiles
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.moe import Experts, MoE, offsets
from tests.zoo.models import MIXTURES, TORCH, TRANSFORMERS

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")

Run = Callable[[str, bool], Any]
"""(recipe, whether it trains) -> what `fp8_compile` returned, after its calls, or None."""


def _call(
    compiled: Any, inputs: Any, trains: bool, select: Callable[[Any], torch.Tensor] = lambda out: out, calls: int = 1
) -> Any:
    for _ in range(calls):
        with torch.set_grad_enabled(trains):
            out = compiled(**inputs) if isinstance(inputs, dict) else compiled(*inputs)
        if trains:
            select(out).square().mean().backward()
    return compiled


def _compile(model: Any, recipe: Any, **options: Any) -> Any:
    return fp8_compile(model, recipe, backend="aot_eager", **{"select": "all", **options})


def _zoo(name: str, **options: Any) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        case = {**TRANSFORMERS, **TORCH, **MIXTURES}[name]()
        model, inputs = case.model, case.inputs
        if name in MIXTURES:
            assert isinstance(model, nn.Module)
            model = model.bfloat16()  # of which alone torch traces grouped GEMMs
        return _call(_compile(model, recipe, **options), inputs, trains, case.select)

    return run


def _own(
    build: Callable[[], nn.Module],
    *shape: int,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module, bool], None] | None = None,
    watched: bool = False,
    **options: Any,
) -> Run:
    """prepare: changes the model before it is compiled. A frozen or watched one is called twice: caches are written, then
    read, and the second step is measured."""

    def run(recipe: Any, trains: bool) -> Any:
        model = build().to(dtype)
        if prepare is not None:
            prepare(model, trains)
        compiled = _compile(model, recipe, **options)
        if watched:
            monitor(compiled, every=1)
        x = torch.randn(shape, dtype=dtype, requires_grad=trains)
        return _call(compiled, (x,), trains, calls=2 if watched or prepare is _freeze else 1)

    return run


def _freeze(model: nn.Module, trains: bool) -> None:
    """The first matrix and all vectors."""
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(trains and i > 1 and p.dim() > 1)


def _shard(model: nn.Module, trains: bool) -> None:
    """Each layer by FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert isinstance(model, nn.Sequential)
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _under(run: Run, **changes: Any) -> Run:
    """A model under a recipe with other options, where the recipe has them and takes them."""

    def changed(name: Any, trains: bool) -> Any:
        recipe: Any = as_recipe(name)
        known = {field.name for field in dataclasses.fields(recipe)}
        no_override = "backward_override" in changes and (name == "delayed" or name == "rowwise_with_gw_hp")
        return run(dataclasses.replace(recipe, **changes), trains) if set(changes) <= known and not no_override else None

    return changed


def _only(recipe: Any, run: Run) -> Run:
    """A model under one recipe with options of its own."""

    def chosen(name: Any, trains: bool) -> Any:
        return run(recipe, trains) if name == recipe.name else None

    return chosen


class _Checkpointed(LlamaBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, 0] * 0).long()
        return self.head(self.up(self.embedding(tokens))) + self.head(x)


class Batched(nn.Module):
    """Products with one weight of a batch, with a stack of weights, and of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.stack = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(3, 48, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bsd,df->bsf", x, self.shared)
        return torch.bmm(h, self.stack) @ h.new_ones(40, 16)


def wide() -> Net:
    """More matrices that are ready together than one launch takes."""
    return Net(
        lambda self, x: torch.cat([layer(x) for layer in self.layers], -1),
        layers=nn.ModuleList(nn.Linear(48, 48 if i % 3 else 20) for i in range(20)),
    )


class SortedExperts(nn.Module):
    """Experts whose rows are sorted already, in groups of odd sizes, one of them empty; rows beyond the last belong to none."""

    def __init__(self, inputs: int = 48, outputs: int = 80) -> None:
        super().__init__()
        self.up, self.down = (Experts(4, k, n) for k, n in ((inputs, outputs), (outputs, inputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offs = offsets((5, 0, 33, 17))
        return self.down(torch.tanh(self.up(x, offs)), offs)


def _sequence_parallel(bias: bool, **options: Any) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        from tests.distributed.models import BATCH, TOKENS, seeded, tensor_parallel

        model = seeded(bias=bias)
        tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence=True)
        return _call(_compile(model, recipe, **options), (torch.zeros(BATCH, TOKENS, dtype=torch.long),), trains)

    return run


class Gathering(nn.Module):
    """A module that reads what both ranks have, along a dimension."""

    def __init__(self, inner: nn.Module, dim: int = 0) -> None:
        super().__init__()
        self.inner, self.dim = inner, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        return self.inner(all_gather_tensor_autograd(x, self.dim, torch.distributed.group.WORLD))


def _gathered(recipe_of_blockwise: Any, dim: int, *shape: int, model: Any = None, dtype: torch.dtype = torch.float32) -> Run:
    def run(recipe: str, trains: bool) -> Any:
        inner = nn.Linear(shape[-1], 48) if model is None else model()
        chosen = recipe_of_blockwise if recipe == "blockwise" and recipe_of_blockwise else recipe
        compiled = _compile(Gathering(inner, dim).to(dtype), chosen)
        return _call(compiled, (torch.randn(shape).to(dtype).requires_grad_(trains),), trains)

    return run


def cases() -> dict[str, Run]:
    """Every model that is dumped."""
    rules = {"2:grad_weight": None, "2": "current", "0:output": "blockwise"}
    bf16: Any = {"dtype": torch.bfloat16}
    tiles = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    found = {f"zoo-{name}": _zoo(name) for name in (*TORCH, *TRANSFORMERS, *MIXTURES)}
    found |= {
        "llama-bf16": _own(LlamaBlock, 2, 64, 128, **bf16),
        "llama-save": _own(LlamaBlock, 2, 64, 128, weight_copies="save"),
        "llama-recompute": _own(LlamaBlock, 2, 64, 128, weight_copies="recompute"),
        "llama-many-rows": _own(lambda: LlamaBlock(32, 48, 2), 1, 4096, 32),
        "llama-checkpointed": _own(_Checkpointed, 2, 32, 128),
        "mlp": _own(mlp, 16, 64),
        "mlp-rules": _own(mlp, 16, 64, rules=rules),
        "mlp-odd": _own(lambda: nn.Sequential(nn.Linear(50, 37), nn.GELU(), nn.Linear(37, 50)), 33, 50),
        "mlp-dynamic": _own(mlp, 24, 64, dynamic=True),
        "tied": _own(Tied, 48, 32),
        "ragged": _own(Ragged, 33, 50),
        "tiles": _own(Tiles, 80, 192),
        "parallel-sequence": _sequence_parallel(False),
        "parallel-bias": _sequence_parallel(True),
        "parallel-rule": _sequence_parallel(False, rules={"layers.*.up": None}),
        "parallel-1d": _gathered(Float8BlockScaling(), 0, 128, 144),
        "parallel-1d-3": _gathered(Float8BlockScaling(use_f32_scales=True), 1, 3, 128, 144),
        "parallel-2d": _gathered(tiles, 0, 256, 96),
        "parallel-2d-bf16": _gathered(tiles, 0, 256, 96, **bf16),
        "parallel-crossing": _gathered(Float8BlockScaling(), 0, 96, 144, **bf16),
    }
    found |= {
        "llama-auto": _own(LlamaBlock, 2, 64, 128, select="auto"),
        "llama-min-speedup": _own(LlamaBlock, 2, 64, 128, select="auto", min_speedup=1.0),
        "mlp-float16": _own(mlp, 16, 64, dtype=torch.float16),
        "mlp-save": _own(mlp, 16, 64, weight_copies="save"),
        "mlp-recompute": _own(mlp, 16, 64, weight_copies="recompute"),
        "odd-recompute": _own(Ragged, 33, 50, weight_copies="recompute"),
        "tied-recompute": _own(Tied, 48, 32, weight_copies="recompute"),
        "batched": _own(Batched, 3, 16, 32),
        "batched-bf16": _own(Batched, 3, 16, 32, **bf16),
        "wide": _own(wide, 16, 48),
        "moe": _own(MoE, 40, 64, **bf16),
        "moe-auto": _own(MoE, 40, 64, select="auto", **bf16),
        "moe-float32": _own(MoE, 40, 64),
        "moe-odd": _own(lambda: MoE(56, 40, 3), 37, 56, **bf16),
        "moe-save": _own(MoE, 40, 64, weight_copies="save", **bf16),
        "moe-recompute": _own(MoE, 40, 64, weight_copies="recompute", **bf16),
        "experts": _own(SortedExperts, 64, 48, **bf16),
        "experts-odd": _own(lambda: SortedExperts(40, 24), 61, 40, **bf16),
        "parallel-moe": _gathered(None, 0, 40, 64, model=MoE, dtype=torch.bfloat16),
        "zoo-auto-qwen3_moe": _zoo("qwen3_moe", select="auto"),
    }
    overridden = {"llama-bf16", "mlp", "mlp-odd", "ragged", "tied", "batched", "moe", "experts"}
    for choice in ("high_precision", "dequantized"):
        found |= {f"{name}-{choice}": _under(found[name], backward_override=choice) for name in sorted(overridden)}
    plain, ragged, block = found["mlp"], found["ragged"], found["llama-bf16"]
    e4m3, hybrid = Format.E4M3, Format.HYBRID
    found |= {
        "ragged-power-of-2": _under(ragged, use_power_2_scales=True),
        "ragged-any-scale": _under(ragged, use_power_2_scales=False),
        "ragged-epsilon": _under(ragged, amax_epsilon=1e-3),
        "ragged-e4m3": _under(ragged, fp8_format=e4m3),
        "ragged-hybrid": _under(ragged, fp8_format=hybrid),
        "mlp-fast": _under(plain, fast_accum_output=False, fast_accum_grad_input=True, fast_accum_grad_weight=True),
        "mlp-from-one": _only(DelayedScaling(initial_scale="one", margin=2, amax_compute_algo="most_recent"), plain),
        "mlp-current-all": _only(Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1e-4), plain),
        "ragged-squares": _only(MXFP8BlockScaling(enable_2d_quantization=True), ragged),
        "llama-squares": _only(MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=hybrid), block),
        "moe-squares": _only(MXFP8BlockScaling(enable_2d_quantization=True), found["moe"]),
        "ragged-tiles": _only(tiles, ragged),
        "llama-vectors": _only(Float8BlockScaling(w_block_scaling_dim=1, use_f32_scales=True), block),
        "llama-grad-tiles": _only(Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2), block),
        "moe-vectors": _only(Float8BlockScaling(w_block_scaling_dim=1), found["moe"]),
        "ragged-rows": _only(Float8RowwiseScaling(use_power_2_scales=False, high_precision_grad_weight=True), ragged),
    }
    frozen: Any = {"prepare": _freeze}
    released: Any = {**frozen, "release_frozen": True, "weight_copies": "cache"}
    sharded: Any = {"prepare": _shard, "fsdp_gather": "fp8"}
    found |= {
        "frozen-cached": _own(mlp, 16, 64, **frozen, weight_copies="cache"),
        "frozen-auto": _own(mlp, 16, 64, **frozen),
        "frozen-released": _own(mlp, 16, 64, **released),
        "frozen-llama-released": _own(LlamaBlock, 2, 64, 128, **bf16, **released),
        "frozen-moe-cached": _own(MoE, 40, 64, **bf16, **frozen, weight_copies="cache"),
        "trained-cached": _own(mlp, 16, 64, weight_copies="cache"),
        "ragged-cached": _own(Ragged, 33, 50, **frozen, weight_copies="cache"),
        "measured-mlp": _own(mlp, 16, 64, watched=True),
        "measured-ragged": _own(Ragged, 33, 50, watched=True),
        "measured-moe": _own(lambda: MoE(32, 48, 3), 20, 32, watched=True),
        "parallel-fsdp": _own(lambda: nn.Sequential(LlamaBlock(), LlamaBlock()), 2, 64, 128, **sharded),
        "parallel-fsdp-ragged": _own(lambda: nn.Sequential(Ragged(), Ragged()), 33, 50, **sharded),
    }
    for engine in ("vllm", "deepgemm", "vllm-per-tensor", "hf"):
        found[f"engine-{engine}"] = _own(LlamaBlock, 2, 64, 128, dtype=torch.bfloat16, match=engine)
    return found
