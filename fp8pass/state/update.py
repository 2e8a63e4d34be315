"""The step boundary: amaxes are reduced over ranks, then all histories and scales are updated at once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.errors import AmaxReductionError, RecipeError, preview
from fp8pass.state.store import DelayedStore
from lowering import reference, update_scales

_MESSAGE = 4096
_HEADER = 2


def end_step(store: DelayedStore, group: dist.ProcessGroup | None) -> None:
    """One update of every tensor in the store from its staged amax, after one all-reduce where there are ranks.

    Nothing is changed if the reduction fails.
    """
    count = len(store)
    if store.recipe.reduce_amax and is_distributed(group):
        staged = _reduced(store, group)
        store.amax_history[0, :count] = staged
    if not count:
        return
    with torch.no_grad():
        _update(store, count)
    store.version += 1


def _update(store: DelayedStore, count: int) -> None:
    recipe = store.recipe
    history, scale = store.amax_history[:, :count], store.scale[:count]
    limits, num_non_finite = store.fp8_max[:count], store.num_non_finite[:count]
    if isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None:
        update_scales(
            history, scale, limits, algo=recipe.amax_compute_algo, margin=recipe.margin, num_non_finite=num_non_finite
        )
        return
    staged = history[0].clone()
    rolled, window = reference.rolled_history(history)
    if callable(recipe.amax_compute_algo):
        amax = _checked(recipe.amax_compute_algo(window.clone()), "amax_compute_algo", staged)
    else:
        amax = window.amax(dim=0) if recipe.amax_compute_algo == "max" else staged
    if recipe.scaling_factor_compute_algo is not None:
        new_scale = recipe.scaling_factor_compute_algo(amax.clone(), scale.clone(), limits.clone(), recipe)
        new_scale = _checked(new_scale, "scaling_factor_compute_algo", staged)
    else:
        new_scale = reference.scale_of(amax, limits, recipe.margin)
    reference.update_from_amax(history, rolled, scale, staged, amax, new_scale, num_non_finite)


def _checked(value: object, option: str, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise RecipeError(f"{option} returned {got}; it must return a tensor of shape {tuple(like.shape)}, one entry per tensor")
    return value.to(device=like.device, dtype=like.dtype)


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """Whether there is more than one rank to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _reduced(store: DelayedStore, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The staged amaxes, largest over the ranks, by one all-reduce of fixed size; the store is not changed.

    The message starts with a digest of the names. Its size does not depend on them, so ranks that disagree find out in the
    same collective instead of hanging in it. Tensors beyond the message go in a second one, once the names are known to agree.
    """
    message = _reduce(_message(store), group)
    if int(message[0]) != -int(message[1]):
        _agree_on_names(store, group)
        message = _reduce(_message(store), group)
    staged = message[_HEADER : _HEADER + len(store)]
    if len(store) > staged.shape[0]:
        rest = _bits(store)[staged.shape[0] :]
        staged = torch.cat([staged, _reduce(rest, group)])
    return staged.view(torch.float32)


def _message(store: DelayedStore) -> torch.Tensor:
    digest = int.from_bytes(hashlib.sha256("\n".join(store.names).encode()).digest()[:4], "big") >> 1
    message = torch.zeros(_MESSAGE, dtype=torch.int32, device=store.device)
    message[0], message[1] = digest, -digest
    staged = _bits(store)[: _MESSAGE - _HEADER]
    message[_HEADER : _HEADER + staged.shape[0]] = staged
    return message


def _bits(store: DelayedStore) -> torch.Tensor:
    """As int32 the bit patterns of non-negative floats are ordered and NaN is above inf: MAX cannot lose either."""
    return store.amax_history[0, : len(store)].clone().view(torch.int32)


def _reduce(bits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits


def _agree_on_names(store: DelayedStore, group: dist.ProcessGroup | None) -> None:
    """Bring equal sets of names into one order; raise AmaxReductionError on every rank if the sets differ."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, store.names, group=group)
    union = set().union(*every)
    missing = {rank: sorted(union - set(names)) for rank, names in enumerate(every) if union - set(names)}
    if missing:
        lacks = "; ".join(f"rank {rank} lacks {preview(names)}" for rank, names in missing.items())
        raise AmaxReductionError(
            f"ranks of the amax reduction group quantize different tensors: {lacks}. Run the same modules once on every rank,"
            f" give ranks with other modules an amax_reduction_group of their own, or use reduce_amax=False"
        )
    store.reorder(sorted(store.names))
