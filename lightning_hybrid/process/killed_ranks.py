"""A thread that notices started ranks of this host that end too early, killed or by an error."""

import subprocess
import threading
from collections.abc import Collection, Sequence

from lightning_hybrid.comm import BackgroundThread, end_process
from lightning_hybrid.process.children import Children, not_caught
from lightning_hybrid.process.watchdogs import GRACE_S

_LOOK_EVERY_S = 0.2


class KilledRanksWatch(BackgroundThread):
    """A thread that looks for started processes that have been killed or have ended with an error.

    The launcher starts one for each run. If a process has ended so, the thread asks
    ``Children.lose`` whether the run goes on without it. If so, the thread kills the rest of the
    replica. Otherwise the run has some seconds (``GRACE_S``) to end by itself; after these the
    thread kills all started processes and this one.

    Args:
        children: the started processes: those with the local ranks 1, 2, ... of this host, in this
            order.
    """

    def __init__(self, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        super().__init__(self._watch, "hybrid-observer")
        self._children = children
        self._over = threading.Event()
        self._after_a_failure = bool(Children.failed)

    def close(self) -> None:
        """End the thread: the run is over."""
        self._over.set()
        self.join()

    def _codes(self, given_up: Collection[int]) -> list[int | None]:
        """The exit code of each child: ``None`` while it runs, 0 for one that was given up.

        Args:
            given_up: indices of children without which the run goes on.
        """
        return [0 if n in given_up else child.poll() for n, child in enumerate(self._children)]

    def _watch(self) -> None:
        """Wait until all children have ended well or the run is over; act if a child has failed."""
        given_up = set[int]()  # children of lost replicas, which the run goes on without
        while True:
            codes = self._codes(given_up)
            if any(codes):
                lost = None
                if Children.lose is not None:
                    self._over.wait(_LOOK_EVERY_S)  # others may be lost at the same time
                    failed_ranks = [1 + n for n, code in enumerate(self._codes(given_up)) if code]
                    lost = Children.lose(failed_ranks)  # (counted from this process)
                if lost is None:
                    break
                given_up |= {rank - 1 for rank in lost}
                for number in given_up:
                    self._children[number].kill()
            elif all(code == 0 for code in codes) or self._over.wait(_LOOK_EVERY_S):
                return
        if self._over.wait(GRACE_S):
            return
        codes = self._codes(given_up)
        number, code = next((1 + n, code) for n, code in enumerate(codes) if code)
        for child in self._children:
            child.kill()
        end_process(self._last_words(number, code))

    def _last_words(self, number: int, code: int) -> str:
        """What is said where nobody else has told of the first failure before the others ended.

        Args:
            number: local rank of the process that has ended.
            code: its exit code, negative if it was killed by a signal.
        """
        pid = self._children[number - 1].pid
        name = "A process of this run" if Children.name_of is None else Children.name_of(number)
        first = f"{name} (PID {pid}) ended with code {code};"
        if code < 0 and Children.name_of is not None:
            first = f"Lost {name}. Its process (PID {pid}) was killed by signal {-code};"
        reason = f" {not_caught()};" if self._after_a_failure else ""
        return f"{first}{reason} the others did not end within {GRACE_S:.0f} s and are killed."
