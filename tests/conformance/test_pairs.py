"""Two habits at once: pairs of rows under two stages, equal to one device or refused by name."""

from collections.abc import Callable
from functools import cache
from inspect import getsource, isfunction
from itertools import islice
from typing import Any, ClassVar

import pytest
from pairs import pairs
from suite import ONE_OF_TWO, Conformance, Record, Row, all_rows, assert_trained_the_same
from test_conformance import OneDevice, _Hybrid
from torch import Tensor

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]
Records = Callable[[type[Conformance], type[Row]], list[Record]]
SEED, COUNT = 1, 60
# these are about themselves: they catch errors, add weights that no other code uses, or diverge
WITHOUT = ("SavesAfterAnException", "ReplacesALayer", "PerturbsWeightsByHand")


@cache
def drawn() -> list[type[Row]]:
    rows = [row for row in all_rows() if ONE_OF_TWO in row.shapes and 2 in row.cuts]
    rows = [r for r in rows if not r.__name__.startswith("Refused") and r.__name__ not in WITHOUT]
    return list(islice(pairs(rows, SEED), COUNT))


class PairsOnOneDevice(OneDevice):
    @classmethod
    def catalogue(cls) -> list[type[Row]]:
        return drawn()


class TestPairs(_Hybrid):
    stages: ClassVar = 2
    reference = PairsOnOneDevice
    also_refused = "lightning_hybrid.errors."  # as a trace names the kinds of errors

    @classmethod
    def catalogue(cls) -> list[type[Row]]:
        return drawn()

    def test_row(self, row: type[Row], records: Records) -> None:
        ranks, [expected] = records(type(self), row), records(PairsOnOneDevice, row)
        if expected["error"]:
            pytest.skip("the two do not go together on one device")
        errors = [record["error"] for record in ranks]
        if any(errors):
            named = any(record.get("refusal") for record in ranks)
            begun = any(r.get("trained", True) and r.get("gradients", True) for r in ranks)
            assert all(errors), "a rank knows nothing of the refusal"
            assert named, "\n".join(errors)
            assert not begun, "\n".join(errors)
            return
        if largest(expected) < 1e6:  # else what is rounded otherwise is no measure
            assert_trained_the_same(ranks, [expected], row)


def largest(record: Any) -> float:
    """The largest number in a nested record."""
    if isinstance(record, Tensor):
        return float(record.abs().max()) if record.numel() else 0.0
    if isinstance(record, dict):
        record = list(record.values())
    if isinstance(record, list | tuple):
        return max(map(largest, record), default=0.0)
    return abs(record) if isinstance(record, float) else 0.0


def test_a_habit_is_not_replaced_by_the_other_one() -> None:
    for row in drawn():
        first, second = row.__bases__
        both = vars(first).keys() & vars(second).keys()
        methods = [vars(first)[name] for name in both if isfunction(vars(first)[name])]
        assert all("super()" in getsource(method) for method in methods)
