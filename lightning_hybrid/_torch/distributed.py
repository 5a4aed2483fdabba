"""Process groups: their time-out."""

from datetime import timedelta
from typing import Any


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the options for a new process group; for NCCL there is no other way."""
    options._timeout = timeout
