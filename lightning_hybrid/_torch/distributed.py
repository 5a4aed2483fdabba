"""Process groups: their time-out, and their transfers, which the profiler must not record."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from lightning_hybrid._torch.private_names import find

_knows = find("torch.autograd.profiler:_is_profiler_enabled") is not None
_record = find("torch:_C._autograd._enable_record_function")


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the options of a group; for NCCL there is no other way."""
    options._timeout = timeout


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, torch's profiler does not record the transfers that begin.

    If a transfer on a group beside torch's default one is unfinished when the profiler ends, the
    process crashes later, in the garbage collection (torch 2.13). There is no public switch for
    recording. It is left alone unless a profiler is on in some thread, which
    ``torch._C._autograd._profiler_enabled`` does not tell of one that profiles all threads.
    """
    if not _knows or _record is None or not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    _record(False)
    try:
        yield
    finally:
        _record(True)
