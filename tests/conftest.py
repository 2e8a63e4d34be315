"""What every test starts from: compiled nothing, seeded, and no GPU test where there is no GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device with FP8 tensor cores")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_start():
    """Dynamo knows no graph yet, and random numbers are the same in every order of tests."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
