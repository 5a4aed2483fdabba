"""Two paths change places at once: a kill finds both as before, or both exchanged."""

import ctypes
import os
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders. Returns whether this system and file system can do it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    paths = [os.fsencode(path) for path in (one, other)]
    return not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
