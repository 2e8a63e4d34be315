"""When a table of addresses may be kept: not where Inductor warms up a CUDA graph, whatever thread asks."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.cudagraph_trees as trees

from lowering.triton import launch

CUDA = torch.device("cuda", 0)


def in_a_thread(function):
    """The result of a function in a thread that imported nothing and that autograd did not start, such as one that serves."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


def test_a_thread_of_its_own_has_no_cuda_graphs():
    """torch 2.11 fails an assertion where such a thread asks for its manager of CUDA graphs."""
    assert in_a_thread(lambda: launch._inductor_warms_up(CUDA)) == [False]
    assert not launch._inductor_warms_up(CUDA)


@pytest.fixture
def on_device(monkeypatch):
    """Stands in for the tables' copies to a GPU, and for the stream that calls run in."""
    there = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7), copies=0, pinned=[])

    def copy(values, device):
        there.copies += 1
        return torch.tensor(values)

    def pin(count):
        there.pinned.append(count)
        return torch.empty(count, dtype=torch.int64)

    for name, value in (("_TABLES", {}), ("_TABLES_OF_GRAPHS", {}), ("_reserved", []), ("_on_device", copy), ("_pinned", pin)):
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: there.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return there


def test_cuda_graphs_of_one_model_leave_the_tables_of_others_alone(on_device, monkeypatch):
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(trees, "get_manager", lambda index, create=True: manager)
    first = launch.pinned_table([1, 2], CUDA)
    assert launch.pinned_table([1, 2], CUDA) is first, "a model without CUDA graphs, which another one of the process has"
    on_device.stream = manager.stream  # Inductor warms up in it
    assert launch.pinned_table([1, 2], CUDA) is not first
    assert launch.pinned_table([1, 2], CUDA) is not launch.pinned_table([1, 2], CUDA)
    assert len(launch._TABLES) == 1, "nothing of the graph's memory pool is kept"
    assert on_device.copies == 4
    assert launch._TABLES[CUDA, 7, (1, 2)] is first


def test_tables_are_kept_in_every_thread(on_device):
    """A table each: a copy is ordered within its stream."""
    first = launch.pinned_table([1, 2], CUDA)
    (again,) = in_a_thread(lambda: launch.pinned_table([1, 2], CUDA))
    assert again is first
    on_device.stream = SimpleNamespace(cuda_stream=8)
    (other,) = in_a_thread(lambda: launch.pinned_table([1, 2], CUDA))
    assert other is not first
    assert on_device.copies == 2


def test_inductors_stream_is_that_of_its_manager():
    """`_inductor_warms_up` relies on this: warm-ups switch to the manager's stream, and to its memory pool."""
    import inspect

    warm_up = inspect.getsource(trees.CUDAWarmupNode.run)
    assert "_use_cuda_memory_pool_manager(" in warm_up
    assert "self.stream" in warm_up
    assert "torch.cuda.stream(stream)" in inspect.getsource(trees._use_cuda_memory_pool_manager)
    assert "self.stream = torch.cuda.Stream()" in inspect.getsource(trees.CUDAGraphTreeManager.__init__)


def test_a_capture_allocates_no_pinned_memory(on_device, monkeypatch):
    """It may wait for the device, which capture forbids. What a replay reads belongs to it alone."""
    monkeypatch.setattr(launch, "_RESERVE", 8)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **options: self)  # to the GPU
    launch.pinned_table([1, 2], CUDA)
    launch.pinned_table([3], CUDA)
    assert on_device.pinned == [8], "at the first call, which warms up"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    values = [[1, 2], [3, 4, 5], [1, 2], [6, 7]]
    tables = [launch.pinned_table(each, CUDA) for each in values]
    assert on_device.pinned == [8]
    assert [table.tolist() for table in tables] == values
    assert tables[2] is tables[0]
    assert len({table.untyped_storage().data_ptr() for table in tables}) == 1
    assert launch.pinned_table([8, 9], CUDA).tolist() == [8, 9]
    assert on_device.pinned == [8, 2], "more than is left"
    assert launch.pinned_table([10], CUDA).tolist() == [10]
    assert on_device.pinned == [8, 2]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch.pinned_table([1, 2], CUDA)
    assert on_device.pinned == [8, 2, 8], "for the next graph"
    assert [table.tolist() for table in tables] == values
