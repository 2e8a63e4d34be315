"""Every change that `verify` does not notice is on a list, which may only shrink. `tests/support/mutations.py` makes them."""

import pytest

from tests.support.mutations import MODELS, RECIPES, pairs, read_unseen, score


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_verify_does_not_notice(recipe):
    """The list is made by `python -m tests.support.mutations --write`."""
    found = score([pair for pair in pairs() if pair[1] == recipe])[recipe]
    assert found.seen > len(found.unseen)
    harmful = [found.examples[key] for key, count in found.unseen.items() if found.harmless[key] < count]
    assert harmful == [], "these change a result"
    known = {key for key, entry in read_unseen().items() if recipe in entry.recipes}
    new = [found.examples[key] for key in sorted(found.unseen.keys() - known)]
    seen = sorted(known - found.unseen.keys())
    assert (new, seen) == ([], []), "new changes pass unseen, or some of the list are seen or gone: take them off it"


def test_every_model_and_recipe_is_sampled_and_every_unseen_change_has_a_reason():
    assert {model for model, _ in pairs()} == set(MODELS)
    assert {recipe for _, recipe in pairs()} == set(RECIPES)
    assert [key for key, entry in read_unseen().items() if not entry.reason] == []
