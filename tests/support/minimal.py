"""A machine with few packages: processes in which only these, and what they require, can be imported of what is installed."""

import os
import pathlib
import re
import sysconfig
from importlib import metadata

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("torch", "triton", "numpy")
_SITE = pathlib.Path(sysconfig.get_path("purelib"))

#: Python runs it at its start, in the processes of processes, too.
_SITECUSTOMIZE = """
import importlib.machinery, sys

real = importlib.machinery.PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    top = name.partition(".")[0]
    if top not in {absent}:
        return real(name, path, target)
    folders = sys.path if path is None else path
    return real(name, [folder for folder in folders if folder not in ({site!r}, {site!r} + "/" + top)], target)

importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""


def required_by(names: tuple[str, ...]) -> set[str]:
    """The distributions of these names, what they require, and so on, as far as they are installed."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in found:
            found.add(name)
            waiting += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return found


def environment(folder: pathlib.Path) -> dict[str, str]:
    """That of a process on a machine with these packages, and with what is in a folder, which gets a file."""
    there = required_by(NAMES)
    absent = {
        package
        for package, owners in metadata.packages_distributions().items()
        if not there & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} and not (ROOT / package).exists()
    }
    text = _SITECUSTOMIZE.format(absent=sorted(absent), site=str(_SITE))
    (folder / "sitecustomize.py").write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # pytest finds plugins by what is installed, not by what can be imported.
    return kept | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
