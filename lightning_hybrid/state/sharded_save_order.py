"""When sharded checkpoints are saved and removed: in order, at once or in the background.

What is written to their folders, and how it is read, is in `sharded_checkpoint`.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from lightning_hybrid.comm import BackgroundThread
from lightning_hybrid.state.replaced_files import becoming, new_folder, remove, remove_checkpoint
from lightning_hybrid.state.sharded_checkpoint import LAST_S


class Background:
    """Runs one job after the other, each in a thread that ends with the process."""

    def __init__(self) -> None:
        self._last: BackgroundThread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job in a thread when all earlier jobs are over; return at once.

        If an earlier job has failed, and :meth:`wait` has not raised its error yet, the job is
        skipped.
        """
        before = self._last

        def run() -> None:
            # in order: a later job may remove what an earlier one replaces
            if before is not None:
                before.join()
            # after a failed save the checkpoint before it must not be removed
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error

        self._last = BackgroundThread(run, "checkpoints")
        self._last.start()

    @property
    def busy(self) -> bool:
        """Whether a job is not done yet, or has failed since the last `wait`."""
        alive = self._last is not None and self._last.is_alive()
        return alive or self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            timeout_s: the longest time to wait in seconds, after which it returns while jobs go on;
                ``None``: no limit.

        Raises:
            BaseException: the error of the first job that has failed since the last call.
        """
        if self._last is not None:
            self._last.join(timeout_s)
        error, self._error = self._error, None
        if error is not None:
            raise error


class Stager(Protocol):
    """What `ShardedSaves` needs of a session: copies of tensors, written while it trains."""

    def stage_shards(
        self, checkpoint: dict[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        """Copy the tensors on all ranks; return what writes the copies and completes the folder.

        Args:
            checkpoint: the ordinary checkpoint.
            folder: an empty folder that all ranks can write to.
            given_up: an event that is set when workers may be gone.
        """

    def await_shards(self) -> None:
        """Wait until workers have written what :meth:`stage_shards` has copied."""


class ShardedSaves:
    """Saves and removes sharded checkpoints, in order, also in the background of training.

    A checkpoint is removed only when all saves that were begun before are complete: else a kill
    could leave none.
    """

    def __init__(self) -> None:
        self._background = Background()
        self._given_up = Event()

    def __reduce__(self) -> Any:
        """Have a copy or pickle (of the strategy) begin without saves under way."""
        return ShardedSaves, ()

    def save(self, write: Callable[[Path], None], target: Path) -> None:
        """Save a checkpoint, and return when that is done.

        Args:
            write: writes the checkpoint to a folder.
            target: the path that this folder gets when it is complete.
        """
        with becoming(new_folder(target), target) as folder:
            write(folder)

    def begin(self, stager: Stager, checkpoint: dict[str, Any], target: Path) -> None:
        """Begin to save, and return when tensors are copied: they are written in the background.

        Args:
            stager: the session, which copies the tensors on all ranks.
            checkpoint: the ordinary checkpoint that is saved.
            target: the path that the folder of the checkpoint gets when it is complete.

        Raises:
            OSError: the save before this one has failed.
        """
        self.finish(stager)  # so that there are copies of one checkpoint at most
        # an event for each save: that of one which was given up must not end this one
        folder, self._given_up = new_folder(target), Event()
        try:
            write = stager.stage_shards(checkpoint, folder, self._given_up)
        except BaseException:
            with suppress(OSError):
                remove(folder)
            raise

        def become() -> None:
            with becoming(folder, target):
                write()

        self._background.submit(become)

    def remove(self, target: Path) -> None:
        """Remove a checkpoint: now, or after the saves that are under way.

        If one of these fails, it is not removed.
        """
        if self._background.busy:
            # after these saves: until they are done this may be the only complete checkpoint
            self._background.submit(partial(remove_checkpoint, target))
        else:
            remove_checkpoint(target)

    def finish(self, stager: Stager) -> None:
        """Wait until all saves are done, on all ranks of the replica.

        Args:
            stager: the session.

        Raises:
            OSError: a save has failed.
        """
        if self._background.busy:
            stager.await_shards()
        self._background.wait()

    def give_up(self) -> None:
        """After an error of the run: wait at most `LAST_S` seconds for saves, then give them up."""
        with suppress(Exception):  # the first error is what counts
            self._background.wait(LAST_S)
        self._given_up.set()
