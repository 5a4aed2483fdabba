"""Tells the user what is done before the first step, if it takes longer than a few seconds.

A network is captured, checked and profiled inside the first training step, where Lightning's
progress bar does not move. After 3 s a line says what is done, and further ones follow in ever
longer pauses. ``Trainer(enable_progress_bar=False)`` disables them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from lightning_hybrid.comm import BackgroundThread

PATIENCE_S = 3.0
"""Seconds before the first line; the pause before each further one is twice as long."""


class StartProgress:
    """Tells the user what is done before the first step, if that takes longer than `PATIENCE_S`.

    A thread, from `begin` to `over`, watches the time, since some work (a capture) takes long
    without calling any method of this class.

    Args:
        say: prints a line; ``None``: nothing is ever said.

    Attributes:
        seconds: how long each piece of work took, by its description.
    """

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say
        self.seconds = defaultdict[str, float](float)
        self._what = ""
        self._since = 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, what: str) -> None:
        """Begin the first piece of work, which ``what`` describes, and start the thread."""
        self._what = what
        self._since = time.perf_counter()
        if self._say is not None:
            self._end.clear()
            self._thread = BackgroundThread(self._watch, "start progress", self._say)
            self._thread.start()

    def doing(self, what: str) -> None:
        """Note that the piece of work that ``what`` describes begins now, and the last one ends."""
        now = time.perf_counter()
        if self._what:
            self.seconds[self._what] += now - self._since
        self._what = what
        self._since = now

    def over(self) -> None:
        """Note that the last piece of work has ended or failed, and stop the thread."""
        self.doing("")
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end.set()
            thread.join()

    def _watch(self, say: Callable[[str], None]) -> None:
        pause_s = PATIENCE_S
        while not self._end.wait(pause_s):
            say(f"Before the first step: {self._what} ...")
            pause_s *= 2
