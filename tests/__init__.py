"""The tests: a package of its own, so that no installed package named `tests` hides `tests.support`."""
