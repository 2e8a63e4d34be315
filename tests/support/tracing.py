"""Settings for a process that traces many small graphs: a fifth of its time, and nothing that a test looks at."""

import gc

import torch
import torch._dynamo
from torch._functorch._aot_autograd import graph_compile
from torch._logging._internal import trace_log


def collect_seldom() -> None:
    """Tracing makes objects by the million, few of them garbage: by Python's thresholds its collector takes a tenth of the
    time. Dynamo itself collects what is young after each compilation."""
    gc.set_threshold(50_000, 20, 10)


def describe_nothing() -> None:
    """pytest listens to the loggers that do not propagate; to this one torch describes every graph as soon as one listens. The
    text of graphs and a copy of all settings are made even where no one does."""
    trace_log.propagate = True
    graph_compile._log_joint_graph = lambda *args: None  # type: ignore[attr-defined]
    graph_compile._log_fw_bw_graphs = lambda *args: (None, None)  # type: ignore[attr-defined]
    torch._dynamo.utils.record_compilation_metrics = lambda *args: None  # type: ignore[attr-defined]


def measure_no_guards() -> None:
    """Dynamo measures for its log how long the guards of each graph take, for which it first empties the processor's caches:
    20 ms."""
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # type: ignore[attr-defined]
