"""Benchmarks: `python -m benchmarks.NAME [--quick]` each, `python -m benchmarks` for all that the machine can run."""
