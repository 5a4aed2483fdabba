"""Predictions of several runs in one table: of everybody once, or of the same people by all."""

import pytest

from models.errors import UseError
from models.folds import _measured, _parts, _same_people, out_of_fold


def rows(*people: str, right: bool = True) -> list[dict[str, str]]:
    found = []
    for name in people:
        label = int(name[1:]) % 2
        positive = 0.9 if (label == 1) is right else 0.1
        scores = {"p_NC": str(1 - positive), "p_AD": str(positive)}
        found.append({"image_id": f"I{name}", "subject": name, "label": str(label), **scores})
    return found


def test_everybody_has_one_row_that_says_which_run_it_is_from() -> None:
    tables = {"fold_0": rows("p0", "p1"), "fold_1": rows("p2", "p3")}
    assert not _same_people(tables)
    table = out_of_fold(tables)
    assert [(row["run"], row["subject"]) for row in table] == [
        ("fold_0", "p0"),
        ("fold_0", "p1"),
        ("fold_1", "p2"),
        ("fold_1", "p3"),
    ]


def test_intervals_are_those_of_all_people_together() -> None:
    tables = {str(n): rows(*(f"p{10 * n + k}" for k in range(10)), right=n != 0) for n in range(4)}
    values, bounds = _measured(out_of_fold(tables))
    assert values["accuracy"] == pytest.approx(0.75)
    low, high = bounds["accuracy"]  # Wilson of 30 of 40
    assert (low, high) == pytest.approx((0.598, 0.858), abs=1e-3)


def test_the_same_people_are_told_from_others_and_a_mixture_is_refused() -> None:
    assert _same_people({"a": rows("p0", "p1"), "b": rows("p1", "p0")})
    with pytest.raises(UseError, match="different scans"):
        _same_people({"a": rows("p0", "p1"), "b": rows("p1", "p2")})


def test_each_group_that_is_left_out_is_a_run_of_its_own() -> None:
    assert _parts(0, ["cohort=A B", "site=7"]) == {
        "without_cohort_A_B": {"leave_out": "cohort=A B"},
        "without_site_7": {"leave_out": "site=7"},
    }
    assert _parts(2, None)["fold_1"] == {"folds": 2, "fold": 1}
