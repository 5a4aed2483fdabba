"""Days are read, or asked for; never guessed in silence."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from datamodules.dates import Dates, find_dates
from datamodules.errors import TableError


def column(*texts: str) -> Dates:
    return find_dates([(Path("t.csv"), n, text) for n, text in enumerate(texts, 2)], "examdate")


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("4/24/2006", date(2006, 4, 24)),
        ("24/4/2006", date(2006, 4, 24)),
        ("2006-04-05", date(2006, 4, 5)),
        ("2006/04/05", date(2006, 4, 5)),
        ("20060405", date(2006, 4, 5)),
        ("24.10.2006", date(2006, 10, 24)),
        ("05.04.2006", date(2006, 4, 5)),
        ("12-Dec-11", date(2011, 12, 12)),
        ("12-DEC-2011", date(2011, 12, 12)),
        ("4/24/06", date(2006, 4, 24)),
        ("2006-04-05 10:22:33", date(2006, 4, 5)),
        ("2006-04-05T10:22:33.0", date(2006, 4, 5)),
        ("4/24/2006 12:00:00 AM", date(2006, 4, 24)),
        ("5/5/2006", date(2006, 5, 5)),
    ],
)
def test_dates_are_read_as_spreadsheets_write_them(text, day):
    assert column("", text, "NA").day(text) == day


def test_empty_cells_have_no_day():
    assert column("", "-4").day("NA") is None


def test_one_cell_may_decide_for_the_column():
    assert column("4/5/2006", "24/5/2006").day("4/5/2006") == date(2006, 5, 4)
    assert column("4/5/2006", "5/24/2006").day("4/5/2006") == date(2006, 4, 5)
    assert column("04-05-2006", "24-05-2006").day("04-05-2006") == date(2006, 5, 4)


def test_what_could_be_either_is_read_as_the_portal_writes_it_and_said():
    read = column("4/5/2006", "6/7/2006")
    assert read.day("4/5/2006") == date(2006, 4, 5)
    assert "could be month/day/year or day/month/year" in read.note
    assert "'4/5/2006' is 2006-04-05" in read.note
    assert column("4/25/2006", "6/7/2006").note == ""
    assert "'12-Dec-11' read as 2011-12-12" in column("12-Dec-11").note


@pytest.mark.parametrize("text", ["04-05-2006", "4/5/06"])
def test_what_could_be_either_and_is_not_the_portals_way_is_asked(text):
    with pytest.raises(TableError, match=r"BAD_DATE: line 2.*could be 2006-0.* or 2006-0") as error:
        column(text)
    assert "YYYY-MM-DD" in error.value.action


@pytest.mark.parametrize(("text", "day"), [("38831", "2006-04-24"), ("38831.5", "2006-04-24")])
def test_a_spreadsheets_number_of_a_day_is_named_with_that_day(text, day):
    with pytest.raises(TableError, match=rf"(?s)BAD_DATE.*'{text}' .*{day}.*1904.*YYYY-MM-DD"):
        column(text, "", "38840")


def test_a_cell_of_another_kind_is_named():
    with pytest.raises(TableError, match=r"BAD_DATE: line 4: examdate '2006-04-05'; others are m"):
        column("4/25/2006", "5/26/2006", "2006-04-05")
    with pytest.raises(TableError, match=r"BAD_DATE: line 2: examdate '39012'"):
        column("39012")
