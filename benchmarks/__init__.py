"""Benchmarks: `python -m benchmarks.NAME [--quick]` each; `python3 -m benchmarks.gpu` for a machine with a GPU."""
