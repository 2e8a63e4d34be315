"""The step boundary: all histories and scales of a store are updated at once, from their staged amaxes."""

from __future__ import annotations

import torch

from fp8pass.errors import RecipeError
from fp8pass.state.store import DelayedStore
from lowering import update_scales
from lowering.state import reference


def end_step(store: DelayedStore) -> None:
    """One update of every tensor in the store. Where there are ranks, `reduction` has made the staged amaxes equal before."""
    count = len(store)
    if not count:
        return
    with torch.no_grad():
        store.note_staged()
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
        raise RecipeError(
            f"{option} returned {got}; it must return a tensor of shape {tuple(like.shape)}, one entry per tensor"
        )
    return value.to(device=like.device, dtype=like.dtype)
