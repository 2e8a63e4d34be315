"""The timing of contestants: in turns, long enough, each with its clocks, and without those that fail."""

import datetime
import os
import stat

import pytest
import torch

from benchmarks import gpu_clocks, timing
from benchmarks.isolation import Bench

CPU = torch.device("cpu")


def named(label):
    return f"turn {label}"


def test_contestants_take_turns():
    calls: list[str] = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = timing.in_turns(functions, CPU, Bench(), named, repeat=4)
    assert "".join(calls) == "aaabbb" + "abab" * 2 + "aaabbb" + "aabb" * timing.WINDOWS
    assert all(t.ms >= 0 and t.back_to_back_ms >= 0 for t in times.values())


def test_each_contestant_runs_back_to_back_for_so_many_seconds(monkeypatch):
    """Whatever a call takes; but for those whose seconds are given."""
    clock = [0.0]
    calls: list[str] = []
    lengths = {"quick": 1e-3, "slow": 0.1, "copy": 1e-3}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(name):
        calls.append(name)
        clock[0] += lengths[name]

    functions = {name: (lambda name=name: call(name)) for name in lengths}
    steady = dict.fromkeys(("quick", "slow"), timing.STEADY_SECONDS)
    times = timing.in_turns(functions, CPU, Bench(), named, repeat=1, seconds=steady)
    assert timing.STEADY_SECONDS >= 2
    for name, length in lengths.items():
        assert times[name].back_to_back_ms == pytest.approx(1e3 * length)
        assert calls.count(name) * length >= steady.get(name, 0)
    assert calls.count("copy") < 20


def test_a_contestant_that_fails_in_any_call_costs_one_row():
    """In the first call, among the single ones, and at the very end."""
    for last in (0, 6, 20):
        counts = dict.fromkeys("abc", 0)

        def call(name, counts=counts, last=last):
            counts[name] += 1
            if name == "b" and counts[name] > last:
                raise RuntimeError(f"call {last}")

        bench = Bench()
        functions = {name: (lambda name=name, call=call: call(name)) for name in "abc"}
        times = timing.in_turns(functions, CPU, bench, named, repeat=10)
        assert list(times) == ["a", "c"]
        assert bench.failed == [{"what": "turn b", "failed": f"RuntimeError: call {last}"}]
        assert counts["b"] == last + 1
        assert counts["a"] == counts["c"] > 20


def test_clocks_belong_to_contestants():
    """Samples of a contestant's windows alone, by nvidia-smi's own times; what is no number is left out."""
    sampler = gpu_clocks.Sampler()
    day = datetime.datetime(2026, 11, 23, 10)
    at = [day + datetime.timedelta(seconds=s) for s in range(6)]
    sampler._windows = {"a": [(at[0], at[1]), (at[4], at[5])], "b": [(at[2], at[3])], "c": []}
    samples = [
        (0.5, "1980, 3201, 690.10, 60"),
        (1.5, "100, 3201, 90.0, 30"),  # between two of them
        (2.5, "1200, 3201, [N/A], 61"),
        (4.2, "1755, 3201, 650.00, 62"),
        (4.8, "1700, 3201, 640.00, 64"),
    ]
    lines = [f"{(day + datetime.timedelta(seconds=s)).strftime('%Y/%m/%d %H:%M:%S.%f')[:-3]}, {text}" for s, text in samples]
    sampler.read("\n".join([*lines, "2026/11/23 10:00:04.9", "No devices were found"]))
    assert sampler.medians == {
        "a": {"SM MHz": 1755, "memory MHz": 3201, "W": 650, "°C": 62},
        "b": {"SM MHz": 1200, "memory MHz": 3201, "°C": 61},
    }


def test_clocks_come_with_the_times(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi, which prints a sample whenever it is asked to."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ntrap 'exit 0' TERM\nwhile true; do date '+%Y/%m/%d %H:%M:%S.%3N, 1500, 3201, 700.0, 50'; sleep 0.02; done\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    x = torch.randn(64, 64)
    times = timing.in_turns({"a": lambda: x @ x}, CPU, Bench(), named, repeat=1, seconds={"a": 0.9})
    assert times["a"].clocks == {"SM MHz": 1500, "memory MHz": 3201, "W": 700, "°C": 50}
    columns = timing.columns("a", times["a"])
    assert columns.keys() == {"a ms", "a back-to-back ms", "a SM MHz", "a W"}


def test_without_nvidia_smi_there_are_no_clocks(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    times = timing.in_turns({"a": lambda: None}, CPU, Bench(), named, repeat=1)
    assert times["a"].clocks == {}
