"""Files that are either complete or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .errors import FolderError


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name beside the target, then replace it.

    Raises:
        FolderError: it cannot be written there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise not_writable(path, error) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def not_writable(path: Path, error: OSError) -> FolderError:
    """What to say when ``path`` cannot be written."""
    return FolderError(
        "NOT_WRITABLE",
        f"cannot be written: {error.strerror or error}",
        str(path),
        "check rights and free space, or give another folder (--out, --data.cache_dir)",
    )
