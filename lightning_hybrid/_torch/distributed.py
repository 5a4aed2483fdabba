"""Groups of ranks, and what is on its way in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from lightning_hybrid._torch.private_names import find

_IS_ON = "_is_profiler_enabled"
_knows = find(f"torch.autograd.profiler:{_IS_ON}") is not None
_record = find("torch:_C._autograd._enable_record_function")


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
    if not _knows or _record is None or not getattr(torch.autograd.profiler, _IS_ON):
        yield
        return
    _record(False)
    try:
        yield
    finally:
        _record(True)
