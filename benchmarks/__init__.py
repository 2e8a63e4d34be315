"""Benchmarks: `python -m benchmarks.NAME [--quick]` each, `python -m benchmarks` for all that the machine can run."""

from benchmarks.without_rich import import_fp8pass

import_fp8pass()
