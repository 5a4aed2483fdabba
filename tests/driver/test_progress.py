"""What is said while a network is prepared."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lightning.pytorch import Trainer

from lightning_hybrid.driver import progress as module
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.run.run import progress_beside


class Lines(list[str]):
    """Notes what is said, and tells when."""

    def __init__(self) -> None:
        super().__init__()
        self.said = threading.Event()

    def __call__(self, line: str) -> None:
        self.append(line)
        self.said.set()


@contextmanager
def preparing(lines: Lines) -> Iterator[StartProgress]:
    progress = StartProgress(lines)
    progress.begin("capturing 'net'")
    try:
        yield progress
    finally:
        progress.over()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)


def test_what_is_done_soon_is_not_said() -> None:
    lines = Lines()
    with preparing(lines) as progress:
        progress.doing("planning 'net'")
    assert not lines


@pytest.mark.usefixtures("impatient")
def test_what_lasts_is_said_with_what_is_done_now() -> None:
    lines = Lines()
    with preparing(lines) as progress:
        assert lines.said.wait(30)
        lines.said.clear()
        progress.doing("profiling 'net'")
        assert lines.said.wait(30)
    assert lines[0] == "Before the first step: capturing 'net' ..."
    assert lines[-1] == "Before the first step: profiling 'net' ..."


@pytest.mark.usefixtures("impatient")
def test_no_thread_is_left_and_the_next_network_is_told_anew() -> None:
    lines = Lines()
    for _ in range(2):
        with preparing(lines):
            assert lines.said.wait(30)
            lines.said.clear()
        assert all(thread.name != "start progress" for thread in threading.enumerate())


def test_without_a_progress_bar_nothing_is_said() -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    progress = progress_beside(trainer)
    progress.begin("capturing 'net'")
    assert all(thread.name != "start progress" for thread in threading.enumerate())
    progress.over()


def test_the_time_of_each_piece_of_work_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 7.0, 8.0, 8.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    progress = StartProgress(None)
    progress.begin("capturing 'net'")
    progress.doing("planning 'net'")
    progress.over()
    progress.begin("capturing 'net'")
    progress.over()
    assert progress.seconds == {"capturing 'net'": 2.5, "planning 'net'": 4}
