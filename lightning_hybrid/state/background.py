"""Work that goes on beside training, in order: what asynchronous checkpoints write."""

from collections.abc import Callable

from lightning_hybrid.comm import BackgroundThread


class Background:
    """Does one job after the other, each in a thread that ends with the process."""

    def __init__(self) -> None:
        self._last: BackgroundThread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job in a thread when all earlier ones are over; after a failure leave it out."""
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
        """Whether something is not done yet, or has failed."""
        alive = self._last is not None and self._last.is_alive()
        return alive or self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all is done.

        Args:
            timeout_s: at most so long.

        Raises:
            BaseException: of the first job that has failed since the last call.
        """
        if self._last is not None:
            self._last.join(timeout_s)
        error, self._error = self._error, None
        if error is not None:
            raise error
