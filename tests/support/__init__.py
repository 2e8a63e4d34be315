"""Oracles and tools of the tests."""
