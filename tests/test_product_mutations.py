"""The table of hand-made mutations: each still applies, and names tests that exist. `make` runs them, not this file."""

from tests.support.cases import each
from tests.support.mutants import MUTANTS
from tests.support.product_mutations import ROOT, arguments, mutated


def test_there_are_many_and_each_has_its_name():
    assert len(MUTANTS) >= 60
    assert len({(m.file, m.name) for m in MUTANTS}) == len(MUTANTS)


@each("mutant", MUTANTS)
def test_the_old_text_occurs_once_and_the_new_one_is_python(mutant):
    compile(mutated(mutant), mutant.file, "exec")


@each("mutant", MUTANTS)
def test_the_tests_of_a_mutation_exist(mutant):
    files = [word for word in arguments(mutant.tests) if word.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files), files
