"""An exception that one rank raises is raised on the others as the same kind, whatever it holds."""

import pickle
import threading

import pytest
import torch

from lightning_hybrid.comm.travelling_errors import Failure, raised, told_text
from lightning_hybrid.errors import PlanError, RemoteError

WHERE = "rank 0 (driver, replica 0, stage 1)"


class WithParameters(Exception):
    """Does not survive pickling: Python would call it with its message alone."""

    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(f"sample {sample} is bad: {reason}")
        self.sample = sample


class WithALock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())


def travelled(error: BaseException) -> Exception:
    """What another rank raises when ``error`` is raised here."""
    try:
        raise error
    except BaseException as raised:
        return Failure.from_json(Failure.of(raised, WHERE).to_json()).exception()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("on purpose"),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "x.nii"),
        PlanError("stages(3)"),
        torch.cuda.OutOfMemoryError("no memory left"),
        WithParameters(3, "empty"),
    ],
)
def test_kind_and_message_travel(error: Exception) -> None:
    found = travelled(error)
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_the_cause_has_the_rank_and_the_traceback() -> None:
    found = travelled(ValueError("on purpose"))
    assert isinstance(found.__cause__, RemoteError)
    assert str(found.__cause__).startswith(f"{WHERE} failed:\nTraceback")
    assert "ValueError: on purpose" in str(found.__cause__)


def test_attributes_travel_where_they_can() -> None:
    error = FileNotFoundError(2, "No such file", "x.nii")
    error.attempt = 3  # type: ignore[attr-defined]
    found = travelled(error)
    assert vars(found)["attempt"] == 3
    assert isinstance(found, FileNotFoundError)
    assert found.filename == "x.nii"
    assert vars(travelled(WithParameters(3, "empty")))["sample"] == 3


def test_what_an_exception_holds_may_be_left_behind() -> None:
    found = travelled(WithALock("with a lock"))
    assert type(found) is WithALock
    assert "with a lock" in str(found)
    heavy = travelled(ValueError(torch.zeros(2**20)))
    assert type(heavy) is ValueError
    assert len(pickle.dumps(heavy)) < 2**20


def test_a_class_that_is_made_inside_of_a_function_is_a_remote_error_elsewhere() -> None:
    class Local(ZeroDivisionError):
        pass

    found = travelled(Local("on purpose", 3))
    assert type(found) is RemoteError
    assert "Local: ('on purpose', 3)" in str(found)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_one_process_is_no_such_end_elsewhere(error: BaseException) -> None:
    assert type(travelled(error)) is RemoteError


def test_what_was_told_is_told_on_as_it_was() -> None:
    first = Failure.of(ValueError("on purpose"), WHERE)
    told = first.exception()
    again = Failure.of(told, "rank 1 (worker, replica 0, stage 0)")
    assert again.text == first.text
    assert type(again.exception()) is ValueError
    assert told_text(ValueError("of this rank")) is None


def test_alike_are_equal_kinds_with_equal_messages() -> None:
    one, other = Failure.of(ValueError("a"), "rank 0"), Failure.of(ValueError("a"), "rank 1")
    assert one.headline == other.headline
    assert one.headline != Failure.of(ValueError("b"), "rank 0").headline
    assert one.headline != Failure.of(KeyError("a"), "rank 0").headline


@pytest.mark.parametrize("message", ["one line", "two lines:\n    and what\nto do"])
def test_the_line_that_names_an_error_is_found_before_the_rest_of_its_message(message: str) -> None:
    text = Failure.of(travelled(ValueError(message)), "rank 0").text
    assert raised(text) == f"ValueError: {message.splitlines()[0]}"
    assert raised("rank 1 is gone\nnobody knows why") == "nobody knows why"
