"""Makes the mutations of `mutants.py`, one at a time, on a copy of the tree, and runs the tests that must notice.

    python -m tests.support.product_mutations                 # all of them; 10 to 20 minutes
    python -m tests.support.product_mutations --only oldest   # those whose names contain it
    python -m tests.support.product_mutations --list

The checkout is never written to. The exit code is 1 if one survives without a reason, or is noticed although one is
given.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.support.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[2]
_COPIED = ("fp8pass", "lowering", "tests", "examples", "benchmarks")
TIMEOUT = 600


def arguments(tests: str) -> list[str]:
    """The arguments of pytest for `tests` of a mutant, where "a_or_b" behind -k stands for "a or b"."""
    files, _, words = tests.partition(" -k ")
    found = [f"tests/{file}" for file in files.removesuffix(" -k").split()]
    return [*found, "-k", words.replace("_or_", " or ")] if words else found


def mutated(mutant: Mutant, root: pathlib.Path = ROOT) -> str:
    """The text of the file with the mutation. Raises ValueError unless the old text occurs once."""
    text = (root / "fp8pass" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}, and should once"
        )
    return text.replace(mutant.old, mutant.new)


def copy_to(folder: pathlib.Path) -> None:
    """Copy what the tests need."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def passes(folder: pathlib.Path, given: Sequence[str]) -> bool:
    """True if these tests pass in a copy of the tree. No test at all is a mistake in the table."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *given]
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:  # it hangs: noticed
        return False
    if run.returncode not in (0, 1, 2):  # 2: an error while a module is imported
        raise ValueError(f"pytest {' '.join(given)} ended with {run.returncode}:\n{run.stdout[-1000:]}")
    return run.returncode == 0


def survivors(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that their tests do not notice. Tests that fail without any mutation notice nothing."""
    found: list[Mutant] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        copy_to(folder)
        for tests in dict.fromkeys(m.tests for m in mutants):
            if not passes(folder, arguments(tests)):
                print(f"these fail without a mutation: {tests}", flush=True)
                found += [m for m in mutants if m.tests == tests]
                continue
            for mutant in (m for m in mutants if m.tests == tests):
                file, begin = folder / "fp8pass" / mutant.file, time.monotonic()
                before = file.read_text()
                file.write_text(mutated(mutant))
                if passes(folder, arguments(tests)):
                    found.append(mutant)
                file.write_text(before)
                outcome = "survived" if mutant in found else "noticed"
                print(f"{outcome:8}  {time.monotonic() - begin:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
    return found


def main() -> int:
    """Make the chosen mutations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="those whose name or file contains this")
    parser.add_argument("--list", action="store_true", help="name them and make none")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.name or options.only in m.file]
    if options.list:
        print(*(f"{m.file}: {m.name}" + (f" ({m.survives})" if m.survives else "") for m in chosen), sep="\n")
        return 0
    found = survivors(chosen)
    wrong = [m for m in chosen if (m in found) != bool(m.survives)]
    for m in (m for m in found if m.survives):
        print(f"survives: {m.file}: {m.name}: {m.survives}")
    for m in wrong:
        print(f"wrong: {m.file}: {m.name}: " + ("survives, and no reason is given" if m in found else "is noticed by now"))
    print(f"{len(chosen) - len(found)} of {len(chosen)} noticed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
