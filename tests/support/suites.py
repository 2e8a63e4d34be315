"""The fast suite and the exhaustive one: which cases belong to the latter, by the CPU seconds that they take.

`tests/exhaustive.txt` lists the cases above `LISTED` seconds; the marker `exhaustive` says the same of a test by its nature,
such as all combinations of what the fast suite tests by turns. `make test` leaves both out, and fails a case of its own that
takes more than 3 seconds (`--cpu-limit`) twice in a row: what a process does once, such as an import, falls to whichever case
comes first. On a slower or busier machine the limit is higher by as much. Processes that a case starts count. To make the list
again:

    rm -r /tmp/torchinductor_$USER    # as on a new machine
    make test-all PYTEST_ARGS=--junitxml=out/cases.xml
    python -m tests.support.suites out/cases.xml

A file of the fast suite alone adds to the list.
"""

import os
import pathlib
import sys
import xml.etree.ElementTree

import pytest
from _pytest.runner import runtestprotocol

LISTED = 2.0
"""Less than the limit of the fast suite: a busy machine, and one without compiled code in its caches, takes more CPU time."""
SPARED = 0.8
"""Cases above this are listed, too, where the fast suite has another case of the same test."""

LIST = pathlib.Path(__file__).parent.parent / "exhaustive.txt"
_TICK = os.sysconf("SC_CLK_TCK")
_COMPILATIONS = 0.45
"""CPU seconds of three times `_compile_once` on the machine where the list was made, idle."""
_started = pytest.StashKey[float]()
_exceeded = pytest.StashKey[bool]()
_limit = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """CPU time of this process, of those that it has started, and of theirs."""
    if not pathlib.Path("/proc/self/stat").exists():
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system
    found: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            found[int(entry)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    size = 0
    while size != len(ours):
        size = len(ours)
        ours |= {process for process, (parent, _) in found.items() if parent in ours}
    return sum(ticks for process, (_, ticks) in found.items() if process in ours) / _TICK


def listed() -> frozenset[str]:
    """The node ids in the list, and files of which every case is in it: what they share costs whoever comes first."""
    lines = LIST.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def add_options(parser: pytest.Parser) -> None:
    """The plugin's command line."""
    parser.addoption(
        "--cpu-limit", type=float, metavar="SECONDS", help="fail a case that takes more CPU time, children counted"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names, ids = listed(), {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in ids}
    missing = {name for name in names if not (LIST.parent.parent / name.partition("::")[0]).exists()}
    unknown = sorted(missing | {name for name in names - ids - files if name.partition("::")[0] in files})
    if unknown and not any("::" in arg for arg in config.args):  # each file is collected whole
        raise pytest.UsageError(f"{LIST.name} lists cases that do not exist: {', '.join(unknown)}")
    for item in items:
        if item.nodeid in names or item.nodeid.partition("::")[0] in names:
            item.add_marker("exhaustive")


def _compile_once() -> None:
    import torch

    from fp8pass import fp8_compile

    torch._dynamo.reset()
    fp8_compile(torch.nn.Linear(32, 32), "delayed", backend="aot_eager", select="all")(torch.zeros(32, 32)).sum().backward()


def _slowness() -> float:
    """How much slower this machine is now than that where the list was made, at least 1: other work may have begun."""
    started = cpu_seconds()
    for _ in range(3):
        _compile_once()
    return max(1.0, (cpu_seconds() - started) / _COMPILATIONS)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Import what compiling imports, and measure the machine, before the first case."""
    limit = session.config.getoption("--cpu-limit")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("numprocesses", None)
    if limit and is_worker and session.items:
        import torch

        from benchmarks.cross_codegen import capture, report
        from fp8pass import fp8_compile

        fp8_compile(torch.nn.Linear(32, 32), "delayed", select="all")(torch.zeros(32, 32)).sum().backward()
        with capture() as graphs:  # what generates code for GPUs
            fp8_compile(torch.nn.Linear(32, 32), "current", select="all")(torch.zeros(32, 32)).sum().backward()
        report(graphs)
        _compile_once()
        session.config.stash[_limit] = limit * _slowness()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a case that passes in more CPU time than it may take once more; the second run's report is the one that counts."""
    if _limit not in item.config.stash or item.get_closest_marker("exhaustive") is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    item.stash[_exceeded] = False
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if item.stash[_exceeded]:
        limit = item.config.getoption("--cpu-limit") * _slowness()
        item.config.stash[_limit] = max(item.config.stash[_limit], limit)
        item._initrequest()  # type: ignore[attr-defined]
        item.user_properties.clear()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    item.stash[_started] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    result = yield
    spent = cpu_seconds() - item.stash[_started]
    item.user_properties.append(("cpu_seconds", f"{spent:.2f}"))
    limit = item.config.stash.get(_limit, None)
    if limit and spent > limit and item.get_closest_marker("exhaustive") is None:
        if item.stash[_exceeded]:
            pytest.fail(
                f"{item.nodeid} took {spent:.1f} CPU seconds, and a case of the fast suite may take {limit:.1f}: make it"
                f" smaller, or add it to tests/{LIST.name}",
                pytrace=False,
            )
        item.stash[_exceeded] = True
    return result


def measured(junit: str) -> dict[str, float]:
    """Node id -> CPU seconds, of a junit file that this plugin took part in."""
    found: dict[str, float] = {}
    for case in xml.etree.ElementTree.parse(junit).iter("testcase"):
        for value in case.iterfind("properties/property[@name='cpu_seconds']"):
            parts = case.get("classname", "").split(".")
            of_file = 1 + next(i for i, part in enumerate(parts) if part.startswith("test_"))  # classes follow
            name = "::".join(["/".join(parts[:of_file]) + ".py", *parts[of_file:], case.get("name", "")])
            found[name] = float(value.get("value", 0))
    return found


def long_cases(times: dict[str, float]) -> set[str]:
    """Cases that the fast suite leaves out: above `LISTED`, or above `SPARED` where a shorter one of the same test stays."""
    stays = {name.partition("[")[0] for name, seconds in times.items() if seconds <= SPARED}
    return {n for n, seconds in times.items() if seconds > LISTED or (seconds > SPARED and n.partition("[")[0] in stays)}


def main(junit: str) -> None:
    """Write the list."""
    times, before = measured(junit), listed()
    files = {name for name in before if "::" not in name}
    has_fast_ones_alone = times.keys().isdisjoint(before)
    kept = before if has_fast_ones_alone else files
    long = sorted(kept | {name for name in long_cases(times) if name.partition("::")[0] not in files})
    head = f"# Cases above {LISTED:g} CPU seconds, which the fast suite leaves out. Made by `python -m tests.support.suites`.\n"
    LIST.write_text(head + "".join(f"{name}\n" for name in long))
    spent = sum(times.values())
    print(f"{len(long)} cases are listed; here they take {sum(times.get(n, 0) for n in long):.0f} of {spent:.0f} CPU seconds")


if __name__ == "__main__":
    main(*sys.argv[1:])
