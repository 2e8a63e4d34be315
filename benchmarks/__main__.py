"""The benchmarks that time or count, as far as this machine can run them, each in a process of its own.

`--out FOLDER` takes the results. Estimates (`kernel_cost`, `cost_model`), limits (`kernel_limits`) and losses (`accuracy`) have
commands of their own.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from benchmarks.common import RESULTS, SKIPPED

NAMES = ("traffic", "overhead", "compile_time", "casts", "gemm_layer", "tune", "train_step", "whole_model")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke runs: small sizes, few repetitions, CPU allowed")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    failed = []
    for name in NAMES:
        options = ["--out", str(arguments.out), *(["--quick"] if arguments.quick else [])]
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=False).returncode
        if status not in (0, SKIPPED):
            failed.append(f"{name} (exit status {status})")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
