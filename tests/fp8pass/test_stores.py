"""The stores of tensors and their names there, without compiling anything."""

import weakref

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, Format
from fp8pass.errors import CheckpointMismatchError
from fp8pass.graph.origin import TensorName
from fp8pass.rules import parse_rules
from fp8pass.scales import view
from fp8pass.scales.store import DelayedStore
from fp8pass.scales.stores import Stores
from fp8pass.scales.view import HELD
from tests.support.training import same

HYBRID = DelayedScaling(amax_history_len=3)
E4M3 = DelayedScaling(amax_history_len=5, fp8_format=Format.E4M3)
CPU, OTHER = torch.device("cpu"), torch.device("cpu", 1)


def make(rules=None, model=None):
    return Stores(parse_rules(HYBRID, rules), weakref.ref(model) if model is not None else lambda: None)


def with_tensors(*names, entries=None):
    """Stores with one store on the CPU, and this store."""
    stores = make()
    store = stores.store(HYBRID, CPU)
    store.add(list(names), [448.0] * len(names), entries)
    return stores, store


def name(text):
    return TensorName.parse(text)


def test_a_store_per_recipe_and_device_is_made_once_and_fits_the_model_and_what_a_graph_needs():
    stores = make({"b": E4M3})
    first = stores.store(HYBRID, CPU)
    assert stores.store(HYBRID, CPU) is first
    assert stores.store(HYBRID, OTHER) is not first
    assert [s.recipe for s in stores.one_per_recipe()] == [HYBRID, HYBRID, E4M3]
    assert len(stores.one_per_recipe()) == 3
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    stores = make(model=model)
    # 90 tensors of 30 linears; it never shrinks
    assert [stores.capacity(HYBRID, CPU, needed) for needed in (0, 129, 10)] == [128, 256, 256]


@pytest.mark.parametrize("first", [0, 1, 63, 129])
def test_windows_begin_where_cuda_graphs_take_them_for_static(first):
    """At a multiple of 16 bytes, whatever the column of the first tensor; a graph with 64 entries has up to 61 tensors.

    Slots of many instances, such as experts that a loop calls, take the memory of a few.
    """
    store = DelayedStore(HYBRID, CPU, 256)
    names = [f"{i}:input" for i in range(256)]
    store.add(names, [448.0] * 256)
    store.scale.copy_(torch.arange(256.0))
    mine = names[first : first + 61]
    window = store.window(mine, 64)
    others = [store.window(names[i : i + 3], 64) for i in range(200)]
    for shown in (window.scale, window.amax, window.scratch, window.slots, others[0].slots):
        assert shown.data_ptr() % 16 == 0
        assert shown.shape == (64,)
    assert window.scale[window.slots[: len(mine)]].tolist() == list(range(first, first + 61))
    for i, other in enumerate(others):
        assert other.scale[other.slots[:3]].tolist() == [i, i + 1, i + 2]
    memory = {w.slots.untyped_storage().data_ptr(): w.slots.untyped_storage().nbytes() for w in others}
    assert sum(memory.values()) <= 200 * 64 * 8 / 2


@pytest.mark.parametrize(
    ("rules", "text", "recipe", "expected"),
    [
        ({"b": E4M3}, "b:input#2", E4M3, "b:input#2"),
        ({"b": E4M3}, "b:weight", HYBRID, "b:weight@recipe0"),
        ({"*:grad_weight": E4M3}, "a:grad_output", E4M3, "a:grad_output@recipe1"),
        ({"*:output": Float8CurrentScaling(), "*:grad_weight": E4M3}, "a:input", E4M3, "a:input@recipe1"),
    ],
)
def test_the_name_under_a_recipe_leads_back_to_its_store(rules, text, recipe, expected):
    stores = make(rules)
    named = stores.name_under(recipe, name(text))
    assert str(named) == expected
    assert stores.expected_store(name(expected)).recipe == recipe


def test_a_name_under_an_unknown_recipe_or_its_own_is_refused():
    for rules, text, message in (
        (None, "a:input@recipe1", r"'a:input@recipe1' was saved under recipe 1.* have 1\. Load"),
        # A model whose first rules gave its module the other recipe saved it: its plain name meant that one.
        ({"b": E4M3}, "b:input@recipe1", "'b:input@recipe1' was saved by a model .* call use_rules before loading"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            make(rules).expected_store(name(text))


def test_claiming_takes_over_what_another_device_holds():
    model = nn.Linear(4, 4)
    stores = make(model=model)
    old, new = stores.store(HYBRID, OTHER), stores.store(HYBRID, CPU)
    old.add(["a:input", "b:input"], [448.0, 448.0])
    old.scale[:2] = torch.tensor([2.0, 3.0])
    old.num_non_finite[:2] = torch.tensor([4, 5])
    old.amax_history[:, 1] = torch.tensor([0.0, 7.0, 8.0])
    stores.claim(new, [("b:input", 448.0)])
    column = new.column("b:input")
    assert new.scale[column] == 3
    assert new.num_non_finite[column] == 5
    assert new.amax_history[:, column].tolist() == [0, 7, 8]
    assert old.names == ["a:input"], "the model is on the CPU, so it has left the other device"


def test_claiming_refuses_what_a_loaded_state_lacks():
    stores, store = with_tensors("a:input")
    store.restored.add("a:input")
    store.is_complete = True
    with pytest.raises(CheckpointMismatchError, match="it lacks b:input; it was saved by another model, with other"):
        stores.claim(store, [("b:input", 448.0)])
    stores.claim(store, [("a:weight", 448.0)])  # a state saved before any weight was quantized
    assert store.restored == {"a:input"}
    stores.claim(store, [("a:input", 448.0)])
    assert store.restored == set()


# -- tensors with several entries: a scale for each matrix of a stack


def stacked() -> DelayedStore:
    store = DelayedStore(HYBRID, CPU, 16)
    store.add(["a:input", "a:weight", "b:weight"], [448.0] * 3, [1, 4, 2])
    store.scale[:7] = torch.arange(7.0)
    return store


def test_a_stack_has_columns_side_by_side_which_a_store_gives_up_and_another_device_takes():
    store = stacked()
    assert len(store) == 7
    assert store.names == ["a:input", "a:weight", "b:weight"]
    assert [store.columns(n) for n in store.names] == [[0], [1, 2, 3, 4], [5, 6]]
    assert store.scale[store.where("a:input")].shape == ()
    assert store.scale[store.where("a:weight")].tolist() == [1, 2, 3, 4]
    assert store.fp8_max[:8].tolist() == [448] * 7 + [1]
    window = store.window(["b:weight", "a:input"], 64)
    assert window.slots[:3].tolist() == [5, 6, 0]
    store.num_non_finite[5] = 3
    store.grow(1000)
    assert store.num_non_finite[5] == 3
    assert store.scale[store.where("b:weight")].tolist() == [5, 6]
    other = DelayedStore(HYBRID, CPU, 16)
    other.add(["c:input", "a:weight"], [448.0] * 2, [1, 4])
    other.take_from(store, ["a:weight"])
    assert other.scale[:5].tolist() == [1, 1, 2, 3, 4]
    store.give_up(["a:weight"])
    assert [store.columns(n) for n in store.names] == [[0], [1, 2]]
    assert store.scale[:3].tolist() == [0, 5, 6]
    assert len(store) == 3


def test_a_stack_is_empty_until_all_its_entries_are_written():
    store = stacked()
    store.scale[:7] = 1
    store.empty.clear()
    store.note_empty(store.names)
    assert store.empty == set(store.names)
    assert store.marked(store.scale, store.names)[:8].tolist() == [0] * 7 + [1]
    store.started.update(store.names)
    store.amax_history[0, :7] = torch.tensor([1.0, 1, 2, 3, 4, 5, 0])
    store.note_staged()
    assert store.empty == {"b:weight"}
    assert store.started == set(), "what is read back at a boundary is not read at the next one"


# -- keys and entries of a saved state

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
