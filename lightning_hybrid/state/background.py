"""Jobs that run beside training, one after the other: the writes of asynchronous checkpoints."""

from collections.abc import Callable

from lightning_hybrid.comm import BackgroundThread


class Background:
    """Runs one job after the other, each in a thread that ends with the process."""

    def __init__(self) -> None:
        self._last: BackgroundThread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job in a thread when all earlier ones are over; if one has failed, skip it."""
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
            timeout_s: the longest time to wait; ``None``: no limit.

        Raises:
            BaseException: the error of the first job that has failed since the last call.
        """
        if self._last is not None:
            self._last.join(timeout_s)
        error, self._error = self._error, None
        if error is not None:
            raise error
