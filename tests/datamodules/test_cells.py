"""What cells of tables say, in many spellings, and the account of those that say nothing."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from datamodules.cells import Cells, quantity_in, sex_in
from datamodules.cli import main
from datamodules.errors import TableError
from datamodules.labels import TASKS
from datamodules.report import p_values
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate

pytestmark = pytest.mark.usefixtures("undrawn")

READ = [
    ("age", "71.5", 71.5),
    ("age", "71,5", 71.5),
    ("age", "082Y", 82.0),
    ("age", "82 years", 82.0),
    ("age", "89+", 89.0),
    ("age", ">89", 89.0),
    ("age", "≥ 90", 90.0),
    ("age", "\uff17\uff11", 71.0),
    ("age", "82 y.o.", 82.0),
    ("age", "\u200e'71.", 71.0),  # what Excel writes before a text, after a mark of direction
    ("mmse", "28 of 30", 28.0),
    ("mmse", "28 / 30", 28.0),
    ("field_strength", "3T", 3.0),
    ("field_strength", "1,5 Tesla", 1.5),
    ("field_strength", "1.5 Tesla MRI", 1.5),
    ("mmse", "28/30", 28.0),
    ("mmse", "28,0", 28.0),
]


@pytest.mark.parametrize(("name", "text", "value"), READ, ids=[text for _, text, _ in READ])
def test_a_number_is_read_in_every_spelling_that_means_one_thing(name, text, value):
    assert quantity_in(text, name) == value


UNREAD = [
    ("age", "999"),
    ("age", "0"),
    ("age", "071M"),  # months, in DICOM
    ("age", "70-75"),
    ("age", "-71"),
    ("age", "1948-03-02"),
    ("mmse", "99"),
    ("mmse", "31"),
    ("cdr_sb", "4 (of 18)"),
    ("field_strength", "15000"),
    ("field_strength", "0.9 mm"),
]


@pytest.mark.parametrize(("name", "text"), UNREAD, ids=[text for _, text in UNREAD])
def test_what_may_mean_something_else_or_nobody_has_is_not_read(name, text):
    assert quantity_in(text, name) is None


def test_sexes_are_read_in_words_and_by_a_standards_numbers_of_a_whole_column():
    assert [sex_in(t) for t in ("F", " male", "Female", "weiblich", "2", "x")] == [*"FMFF", "", ""]
    rows = [{"gender": cell} for cell in ("1", "2", "2.0", "9", "")]
    cells = Cells("t.csv", rows, range(2, 7))
    assert [cells.sex(row) for row in rows] == ["M", "F", "F", "", ""]
    assert any("ISO/IEC 5218" in note for note in cells.notes())
    zeros = Cells("t.csv", [{"sex": "0"}, {"sex": "1"}], (2, 3))  # either may be either
    assert zeros.notes() == ["t.csv: sex: 2 of 2 not read, for example '0' (line 2)"]


def test_a_high_age_is_a_code_where_it_repeats_and_nobody_else_is_near_it():
    rows = [{"age": text} for text in ("71", "99", "82", "99")]
    cells = Cells("t.csv", rows, range(2, 6))
    assert [cells.number(row, "age") for row in rows] == [71, None, 82, None]
    assert cells.notes() == ["t.csv: age: 2 of 4 not read, for example '99' (line 3)"]
    others = [{"age": text} for text in ("71", "98", "94", "98")]
    assert [Cells("t.csv", others, range(4)).number(row, "age") for row in others] == [
        71,
        None,
        94,
        None,
    ]
    old = [{"age": text} for text in ("96", "99", "99")]
    assert [Cells("t.csv", old, range(3)).number(row, "age") for row in old] == [96, 99, 99]


def test_the_account_counts_cells_with_an_example_and_knows_missing_ones():
    rows = [
        {"age": text, "sex": "F"} for text in ("71,5", "old", "", "n/a", "-9", "unknown", "999")
    ]
    cells = Cells("t.csv", rows, range(2, 9))
    assert cells.notes() == ["t.csv: age: 2 of 7 not read, for example 'old' (line 3)"]
    assert cells.unread(rows[1]) == {"age": "old"}
    ends = Cells("t.csv", [{"age": "89+"}, {"age": "70"}], (2, 3))
    assert ends.notes() == ["t.csv: age: 1 of 2 open, '89+' read as its number"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("plain") / "cohort"
    generate(root, CohortSpec((("AD", 6), ("NC", 6)), 8.0, layout="csv"))
    return root


def rewritten(plain: Path, to: Path, change) -> Path:
    """The table of a copy, every row changed by a function of its cells."""
    shutil.copytree(plain, to)
    (table,) = to.glob("*.[ct]sv")
    sign = "," if table.suffix == ".csv" else "\t"
    rows = [line.replace('"', "").split(sign) for line in table.read_text().splitlines()]
    own = [change(dict(zip(rows[0], row))) for row in rows[1:]]
    lines = ["\t".join(row.values()) for row in own]
    table.write_text("\n".join(["\t".join(own[0]), *lines]) + "\n")
    return table


SPELLINGS = {
    "commas and words": lambda row: row | {"age": row["age"].replace(".", ",") + " years"},
    "DICOM": lambda row: row | {"age": f"{round(float(row['age'])):03}Y"},
    "another name": lambda row: {("gender" if k == "sex" else k): v for k, v in row.items()},
    "numbers": lambda row: row | {"sex": {"M": "1", "F": "2"}[row["sex"]]},
    "units": lambda row: row | {"field_strength": f"{row['field_strength']} T"},
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_confound_keeps_its_p_value_in_every_spelling(plain, tmp_path, kind):
    expected = p_values(survey(plain, TASKS["ad_nc"], None).records)
    table = rewritten(plain, tmp_path / "cohort", SPELLINGS[kind])
    found = p_values(survey(table, TASKS["ad_nc"], None).records)
    assert found.keys() == expected.keys()
    assert {"age", "males_females"} <= found.keys()
    assert found["males_females"] == expected["males_females"]
    assert found["age"] == pytest.approx(expected["age"], abs=0.2 if kind == "DICOM" else 1e-9)


def test_cells_that_are_lost_are_said_by_the_check(plain, tmp_path, capsys):
    ages = iter(["999", "about 70", *map(str, random.Random(0).choices(range(60, 80), k=40))])
    columns = {"sex": "Geschlecht"}
    table = rewritten(
        plain,
        tmp_path / "cohort",
        lambda row: {columns.get(k, k): v for k, v in (row | {"age": next(ages)}).items()},
    )
    assert main(["manifest", str(table), "--out", str(tmp_path / "scans.tsv")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"age: 2 of \d+ not read, for example '999' \(line 2\)", printed)
    assert re.search(r"no column sex; columns not used: .*geschlecht", printed)
    assert "264" not in printed


@pytest.mark.parametrize("layout", ["ida", "bids", "caps", "csv"])
def test_nothing_is_said_of_good_tables(tmp_path, layout):
    root = tmp_path / "cohort"
    generate(root, CohortSpec((("AD", 2), ("NC", 2)), 8.0, layout=layout))
    given = next(root.glob("*.tsv"), None) if layout == "caps" else None
    found = survey(root, TASKS["ad_nc"], None, diagnosis_csv=given)
    assert not [note for note in found.notes if "read" in note or "column" in note]


def test_two_rows_of_a_person_are_refused_unless_they_are_the_same(tmp_path):
    root = tmp_path / "cohort"
    generate(root, CohortSpec((("AD", 2), ("NC", 2)), 8.0, layout="bids"))
    people = root / "participants.tsv"
    lines = people.read_text().splitlines()
    people.write_text("\n".join([*lines, lines[1]]) + "\n")
    assert survey(root, TASKS["ad_nc"], None).problems == []
    wrong = lines[1].replace("\tAD\t", "\tCN\t")
    assert wrong != lines[1]
    people.write_text("\n".join([*lines, wrong]) + "\n")
    with pytest.raises(TableError, match=r"TWO_ROWS: lines 2 and 6 are both of .* 'AD' and 'CN'"):
        survey(root, TASKS["ad_nc"], None)


@pytest.mark.parametrize("spelling", ["sub-p-00{}", "sub-P 0{}", "p_{}"])
def test_a_row_under_another_spelling_is_named(tmp_path, spelling):
    root = tmp_path / "cohort"
    generate(root, CohortSpec((("AD", 2), ("NC", 2)), 8.0, layout="bids"))
    for folder in sorted(root.glob("sub-*")):
        shutil.move(folder, folder.with_name(f"sub-P{folder.name[-2:]}"))
    for path in sorted(root.rglob("*sub-ADNI*")):
        path.rename(path.with_name(re.sub(r"sub-ADNI999S\d\d(\d\d)", r"sub-P\1", path.name)))
    people = root / "participants.tsv"
    own = spelling.format(r"\1")
    text = re.sub(r"sub-ADNI999S\d\d(\d\d)", own, people.read_text())
    people.write_text(text)
    for table in root.rglob("*_sessions.tsv"):
        table.unlink()
    with pytest.raises(TableError, match=r"OTHER_SPELLING: the scan of sub-P\d\d has no row"):
        survey(root, TASKS["ad_nc"], None)
