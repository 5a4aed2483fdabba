"""Groups of ranks, and what is on its way in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the options of a group; NCCL's take it in no other way."""
    options._timeout = timeout


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, torch's profiler does not note what begins.

    A transfer on a group of its own that is still on its way when a profiler ends makes the process
    crash later, in the collection of garbage (torch 2.13). There is no public switch, and no
    question whether it is on: it is left alone while no profiler is, in any thread
    (``torch._C._autograd._profiler_enabled`` is false for one that profiles all threads).
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
