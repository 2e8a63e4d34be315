"""Every benchmark that this machine can run."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.common import SkipBenchmark, run_and_report

NAMES = ("traffic", "overhead", "compile_time", "casts", "gemm_layer", "train_step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke runs: small sizes, few repetitions, CPU allowed")
    quick = parser.parse_args().quick
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        try:
            run_and_report(name, module.run, quick)
        except SkipBenchmark as skipped:
            print(f"{name}: skipped, {skipped}")


if __name__ == "__main__":
    main()
