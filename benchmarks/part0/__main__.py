"""`python3 -m benchmarks.gpu --part 0` runs this: part 0, or some of its groups. Exit status 1 if anything is wrong."""

from __future__ import annotations

import argparse
import pathlib
import sys

from benchmarks import processes
from benchmarks.part0.groups import groups
from benchmarks.part0.run import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.part0", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of part0.jsonl and part0-groups.log")
    parser.add_argument("--group", nargs="+", default=(), choices=list(groups()), help="some of the groups")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU")
    arguments = parser.parse_args()
    processes.raise_on_sigterm()
    sys.exit(0 if run(arguments.out, arguments.group, "cpu" if arguments.cpu else "cuda") else 1)


if __name__ == "__main__":
    main()
