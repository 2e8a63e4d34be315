"""Keys and entries of a saved state, without a model."""

import pytest
import torch

from fp8pass import DelayedScaling
from fp8pass.errors import CheckpointMismatchError
from fp8pass.scales import view
from fp8pass.scales.store import DelayedStore
from fp8pass.scales.view import HELD
from tests.support.training import same

TWO_FORMATS = ["wq:input", "wq:input@float8_e5m2"]


def filled_store(names, seed=0) -> DelayedStore:
    store = DelayedStore(DelayedScaling(amax_history_len=3), torch.device("cpu"), 8)
    store.add(names, [57344.0 if "e5m2" in name else 448.0 for name in names])
    generator = torch.Generator().manual_seed(seed)
    count = len(names)
    store.amax_history[:, :count] = torch.rand(3, count, generator=generator)
    store.scale[:count] = torch.rand(count, generator=generator)
    store.num_non_finite[:count] = torch.randint(0, 9, (count,), generator=generator, dtype=torch.int32)
    return store


def columns(store):
    return [[getattr(store, part)[..., store.column(name)] for part in HELD] for name in TWO_FORMATS]


def loaded(saved):
    store = filled_store([])
    view.check_entries(store, saved, TWO_FORMATS)
    view.load_store(store, saved, TWO_FORMATS)
    return store


@pytest.mark.parametrize(("options", "end"), [({"reduces": True}, ""), ({"is_shared": False}, "@1")], ids=["shared", "own"])
def test_two_formats_of_a_tensor_come_back_bit_for_bit_or_not_at_all(options, end):
    store = filled_store(TWO_FORMATS)
    state_dict = view.save_store(store, 1, **options)
    saved = view.read_entries(state_dict, 1)
    assert list(saved) == TWO_FORMATS
    assert same(columns(loaded(saved)), columns(store))
    del state_dict[f"wq:input@float8_e5m2.scale{end}"]
    with pytest.raises(CheckpointMismatchError, match="the saved state of 'wq:input@float8_e5m2' lacks scale"):
        view.read_entries(state_dict, 1)


def test_each_rank_reads_its_own_entries_or_the_largest_staged_amax():
    stores = [filled_store(TWO_FORMATS, seed) for seed in (0, 1)]
    own = {k: v for r, s in enumerate(stores) for k, v in view.save_store(s, r, is_shared=False).items()}
    for rank, store in enumerate(stores):
        assert same(columns(loaded(view.read_entries(own, rank))), columns(store))
    with pytest.raises(CheckpointMismatchError, match=r"none for rank 2 \(wq:input\.amax_history"):
        view.read_entries(own, 2)

    stores[1].amax_history[1:, :2] = stores[0].amax_history[1:, :2]
    shared = {k: v for r, s in enumerate(stores) for k, v in view.save_store(s, r, reduces=True).items()}
    saved = view.read_entries(shared, 5)
    for name in TWO_FORMATS:
        staged = max(store.amax_history[0, store.column(name)] for store in stores)
        assert saved[name]["amax_history"][0] == staged
