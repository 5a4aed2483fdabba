"""A row that fails is reported, and takes no other with it."""

import os
from pathlib import Path

import pytest
from session import Session
from suite import Conformance, Row, assert_computed_elsewhere, assert_trained_the_same
from torch import Tensor


class _EndsAtStepTwo(Row):
    def end(self) -> None:
        raise ValueError("on purpose")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if len(self.seen) == 2:
            self.end()
        return super().loss(x, y)


class Raises(_EndsAtStepTwo):
    pass


class Dies(_EndsAtStepTwo):
    def end(self) -> None:
        os._exit(1)


class Works(Row):
    pass


class Doubles(Row):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * super().loss(x, y)


class OneProcess(Conformance):
    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "auto"

    @classmethod
    def catalogue(cls) -> list[type[Row]]:
        return [Raises, Dies, Works, Doubles]


@pytest.mark.conformance
def test_rows_that_fail_are_found_and_the_others_go_on(tmp_path: Path) -> None:
    names = [row.__name__ for row in OneProcess.catalogue()]
    records = Session(OneProcess, names, tmp_path).records
    assert "on purpose" in records["Raises"][0]["error"]
    assert "ended or hung" in records["Dies"][0]["error"]
    works, doubles = records["Works"], records["Doubles"]
    assert not works[0]["error"]
    assert_trained_the_same(works, works, Works)
    with pytest.raises(AssertionError, match=r"record\['seen'\]\[0\]: off by"):
        assert_trained_the_same(doubles, works, Doubles)
    with pytest.raises(AssertionError, match="no stage is apart"):
        assert_computed_elsewhere(works, works, Works, freely=False)
