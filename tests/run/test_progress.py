"""What is said while a network is prepared, by a clock that the tests turn."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.progress import Progress

from lightning_hybrid.run.progress import PATIENCE_S, StartProgress, display_of


class Clock:
    """Stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Notes:
    """A display that notes what it is given."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, int, int | None]] = []
        self.closed = 0

    def show(self, what: str, done: int, total: int | None) -> None:
        self.shown.append((what, done, total))

    def close(self) -> None:
        self.closed += 1


@contextmanager
def preparing(clock: Clock, display: Any) -> Iterator[StartProgress]:
    progress = StartProgress(lambda: display, clock)
    progress.begin("capturing 'net'")
    try:
        yield progress
    finally:
        progress.over()


def test_what_is_done_within_three_seconds_is_not_shown() -> None:
    clock, notes = Clock(), Notes()
    with preparing(clock, notes) as progress:
        clock.now += PATIENCE_S - 0.1
        progress.doing("profiling 1 of 2 partitions of 'net'", 1, 2)
    assert (notes.shown, notes.closed) == ([], 0)


def test_from_the_third_second_on_all_that_is_done_is_shown() -> None:
    clock, notes = Clock(), Notes()
    with preparing(clock, notes) as progress:
        progress.doing("profiling 1 of 3 partitions of 'net'", 1, 3)
        clock.now += PATIENCE_S  # the thread may look at any time now
        for number in (2, 3):
            progress.doing(f"profiling {number} of 3 partitions of 'net'", number, 3)
    assert [*dict.fromkeys(notes.shown)][-2:] == [
        ("profiling 2 of 3 partitions of 'net'", 2, 3),
        ("profiling 3 of 3 partitions of 'net'", 3, 3),
    ]
    assert notes.closed == 1


def test_what_reports_nothing_is_shown_while_it_lasts() -> None:
    shown = threading.Event()

    class Hears(Notes):
        def show(self, what: str, done: int, total: int | None) -> None:
            super().show(what, done, total)
            shown.set()

    clock, notes = Clock(), Hears()
    with preparing(clock, notes):
        clock.now += PATIENCE_S
        assert shown.wait(30)
    assert notes.shown[0] == ("capturing 'net'", 0, None)


def test_no_thread_is_left_and_the_next_network_is_shown_anew() -> None:
    clock, notes = Clock(), Notes()
    for _ in range(2):
        with preparing(clock, notes) as progress:
            clock.now += PATIENCE_S
            progress.doing("planning 'net'")
        progress.doing("nothing has begun")
    assert notes.closed == 2
    assert ("nothing has begun", 0, None) not in notes.shown
    assert all(thread.name != "start progress" for thread in threading.enumerate())


# ---------------------------------------------------------------- displays


def trainer_with(bar: Any) -> Any:
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    if bar is None:
        return Trainer(**options, enable_progress_bar=False)
    return Trainer(**options, callbacks=[bar])


def test_without_a_progress_bar_nothing_is_shown() -> None:
    assert display_of(trainer_with(None), print) is None
    switched_off = TQDMProgressBar()
    switched_off.disable()
    opened = display_of(trainer_with(switched_off), print)
    assert opened is not None
    assert opened() is None


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_file_gets_one_line(kind: type[Any]) -> None:
    lines: list[str] = []
    bar = kind()
    if isinstance(bar, RichProgressBar):
        bar.progress = Progress(console=Console(file=io.StringIO()))
    opened = display_of(trainer_with(bar), lines.append)
    assert opened is not None
    with preparing(clock := Clock(), opened()) as progress:
        clock.now += PATIENCE_S
        for number in (1, 2):
            progress.doing(f"profiling {number} of 2 partitions of 'net'", number, 2)
    assert len(lines) == 1
    assert lines[0].startswith("Before the first step: ")


def test_rich_bars_get_a_task_that_goes_again() -> None:
    bar, screen = RichProgressBar(), io.StringIO()
    # rich's own thread would look as well
    bars = Progress(console=Console(file=screen, force_terminal=True), auto_refresh=False)
    bar.progress = bars
    opened = display_of(trainer_with(bar), print)
    assert opened is not None
    display = opened()
    assert display is not None
    with bars:
        display.show("capturing 'net'", 0, None)
        display.show("profiling 17 of 52 partitions of 'net'", 17, 52)
        (task,) = bars.tasks
        assert (task.completed, task.total) == (17, 52)
        display.close()
        assert bars.tasks == []
    assert "profiling 17 of 52 partitions of 'net'" in screen.getvalue()


def test_tqdm_gets_a_bar_that_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    opened = display_of(trainer_with(TQDMProgressBar()), print)
    assert opened is not None
    display = opened()
    assert display is not None
    display.show("capturing 'net'", 0, None)
    display.show("profiling 17 of 52 partitions of 'net'", 17, 52)
    display.close()
    assert "profiling 17 of 52 partitions of 'net'" in screen.getvalue()
    assert screen.getvalue().endswith("\r")
