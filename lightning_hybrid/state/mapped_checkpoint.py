"""Checkpoints that are mapped into memory: what was read of them need not stay there.

A page of a mapped file that was read stays in memory until the system needs it for something
else. What a rank has read to send it to another one, or to copy it to its weights, it does not
read again.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux
_mapped: set[str] = set()


def remember_mapped(path: str | Path) -> None:
    """A checkpoint was mapped."""
    _mapped.add(str(Path(path).resolve()))


def let_go_of_checkpoints() -> None:
    """Give back the memory of all pages of mapped checkpoints.

    Where a number is read again it is what it was, changes included.
    """
    if not _mapped:
        return
    with suppress(OSError, AttributeError):  # other systems than Linux, and old ones
        madvise = ctypes.CDLL(None).madvise
        # torch keeps its mappings to itself; the system knows them all
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path in _mapped:
                begin, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGE_OUT)
