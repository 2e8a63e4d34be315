"""Oracles and tools of the tests and the benchmarks."""
