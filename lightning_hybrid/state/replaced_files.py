"""Files and folders that replace others: a kill in the middle leaves the previous ones whole.

What is new is written beside what it replaces, as ``.NAME.part``, and gets its name when it is on
the disk. If one of the two is a folder, their paths are exchanged in one step, where the system
can: after a kill there is always a checkpoint of that name.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_hybrid.state.sharded_checkpoint import is_sharded

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def exchange_files(one: Path, other: Path) -> bool:
    """Exchange the paths of two files or folders in one step.

    Returns:
        Whether it was done; False: the system or the file system cannot do it.
    """
    try:
        # `os` has no call that exchanges two names
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    paths = [os.fsencode(path) for path in (one, other)]
    return not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)


def new_file(target: Path) -> Path:
    """Prepare to write a file or folder that is to replace ``target``; see :func:`becoming`.

    The folder around it is made, and what an earlier attempt has left is removed.

    Returns:
        The path to write to, in the folder of ``target``; nothing is there.

    Raises:
        IsADirectoryError: ``target`` is a folder, and no sharded checkpoint.
    """
    if target.is_dir() and not is_sharded(target):
        raise IsADirectoryError(
            errno.EISDIR, "a checkpoint cannot take the place of a folder", str(target)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target, "part")
    remove(new)
    return new


def new_folder(target: Path) -> Path:
    """Make an empty folder that is to replace ``target``, as :func:`new_file`; return its path."""
    folder = new_file(target)
    folder.mkdir()
    return folder


@contextmanager
def becoming(new: Path, target: Path) -> Iterator[Path]:
    """Inside, a new file or folder is written. At the end it replaces ``target``.

    After an error it is removed. A kill leaves it, under a name that begins with a dot, and the
    next attempt removes it.

    Args:
        new: path of the new one, from :func:`new_file` or :func:`new_folder`.
        target: the path that it gets.
    """
    try:
        yield new
        _put_in_place(new, target)
    except BaseException:
        with suppress(OSError):  # (a rank of a failed run may still write to a folder)
            remove(new)
        raise


def remove_checkpoint(target: Path) -> None:
    """Remove a checkpoint: a file, or the folder of a sharded one.

    A kill leaves all or nothing under its name. Other folders stay; it is no error if nothing is
    there.
    """
    if is_sharded(target):  # renamed first: a kill must not leave a part under its name
        gone = _beside(target, "gone")
        remove(gone)
        target.rename(gone)
        remove(gone)
    elif target.is_file():
        target.unlink()


def _beside(target: Path, what: str) -> Path:
    # (Lightning takes what has `hpc_ckpt_` in its name for a checkpoint that a job of SLURM left)
    return target.with_name(f".{target.name}.{what}".replace("hpc_ckpt_", "hpc_ckpt-"))


def _put_in_place(new: Path, target: Path) -> None:
    """Move a file or folder to ``target``, and remove what was there; return when it is on disk."""
    before = _beside(target, "before")
    if not (target.is_dir() or (new.is_dir() and target.exists())):
        new.replace(target)
    elif exchange_files(new, target):
        remove(new)
    else:  # (a kill in between leaves the old one, as `.NAME.before`)
        remove(before)
        target.rename(before)
        new.rename(target)
    remove(before)
    # a rename is on the disk when the folder is
    folder = os.open(target.parent, os.O_RDONLY)
    with suppress(OSError):  # not every file system can
        os.fsync(folder)
    os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
