"""Tests on emulated devices (`make as-gpu`): a torch without CUDA that has `cuda:0` to `cuda:3`."""

from pathlib import Path

import emulated_cuda
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("as_gpu")


@pytest.fixture(autouse=True, scope="session")
def emulated() -> None:
    """They stay for as long as the process, which therefore runs no other tests."""
    try:
        emulated_cuda.emulate()
    except emulated_cuda.CannotEmulate as reason:
        pytest.skip(f"no emulated devices: {reason}")
