"""Which programs of the net train otherwise than with fresh copies and scales, and where they first differ.

    python -m tests.lifecycles              # the whole table
    python -m tests.lifecycles hooks        # those whose name contains it: program-recipe-option

The exit code is 1 if a program differs.
"""

import sys

from tests.lifecycles.harness import failures
from tests.lifecycles.table import cases, name


def main() -> int:
    """Print a line for each case that differs, and how many there are."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [case for case in cases() if part in name(case)]
    num_failed = 0
    for case in chosen:
        try:
            lines = failures(*case)
        except Exception as error:
            lines = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        num_failed += bool(lines)
        if lines:
            worst = min(lines, key=lambda line: float(line.split(": ")[1].split(" dB")[0]) if " dB" in line else -1e9)
            print(f"{name(case)}  {worst}" + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""), flush=True)
    print(f"{num_failed} of {len(chosen)} differ")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
