"""One person is one person under every name; names that may be one person's are refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cohorts import made

from datamodules.cli import main
from datamodules.errors import DataError, TableError
from datamodules.labels import TASKS
from datamodules.sources.people import Names, refuse_two_names
from datamodules.survey import survey
from datamodules.synth import CohortSpec

pytestmark = pytest.mark.usefixtures("undrawn")

READ = {
    "OAS1_0001_MR1": ("OAS1_0001", "MR1"),
    "oas2_0012_mr2": ("OAS2_0012", "mr2"),
    "OAS30001_MR_d0129": ("OAS30001", "d0129"),
    "OAS30001_Freesurfer53_d0757": ("OAS30001", "d0757"),
    "sub-01_ses-M000": ("01", "M000"),
    "sub-ADNI999S0001_ses-M12": ("999_S_0001", "M012"),
    "sub-01_ses-M000_T1w": ("01", "M000"),
    "999_S_0001": ("999_S_0001", ""),
    "site1_007": ("site1_007", ""),
}


@pytest.mark.parametrize("name", READ)
def test_names_of_known_studies_are_read_by_themselves(name):
    assert (Names().person(name), Names().session(name)) == READ[name]


ALIKE = [
    ("007", "7"),
    ("Sub01", "SUB01"),
    ("1", "1.0"),
    ("P1_v1", "P1_v2"),
    ("P1-visit01", "P1-visit02"),
    ("P1_bl", "P1_m12"),
    ("P1", "P1_followup"),
    ("sub01", "01"),
    ("A_0012_scan1", "a_12_scan2"),
    ("P1_y0_t1", "P1_y1_t1"),
]


@pytest.mark.parametrize("names", ALIKE)
def test_names_that_may_be_one_persons_are_refused(names):
    with pytest.raises(TableError, match="TWO_NAMES") as caught:
        refuse_two_names(names, "table.csv")
    assert all(name in str(caught.value) for name in names)
    assert "--subject-pattern" in str(caught.value)


DIFFERENT = [
    ("007", "008"),
    ("1_11", "11_1"),
    ("site1_001", "site2_001"),
    ("P10", "P100"),
    ("A1", "B1"),
    ("999_S_0001", "999_S_10001"),
    ("m1", "m2"),
    ("NACC000123", "NACC001230"),
]


@pytest.mark.parametrize("names", DIFFERENT)
def test_names_of_different_people_are_not_refused(names):
    refuse_two_names(names, "table.csv")


def test_a_pattern_says_what_the_person_is():
    names = Names(r"^(P\d+)_(?P<session>v\d+)$")
    assert (names.person("P1_v2"), names.session("P1_v2")) == ("P1", "v2")
    assert Names("^(.+)$").person("P1_v2") == "P1_v2"
    with pytest.raises(TableError, match=r"BAD_PATTERN.*'Q1'"):
        names.person("Q1")
    with pytest.raises(DataError, match="no regular expression"):
        Names("(")


def renamed(root: Path, table: Path, suffixes: tuple[str, str]) -> None:
    """Every person's visits get names of their own, and no session."""
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    subject, session = rows[0].index("subject"), rows[0].index("session")
    seen: dict[str, int] = {}
    for row in rows[1:]:
        number = seen.setdefault(row[subject], 0)
        seen[row[subject]] += 1
        row[subject] = f"OAS1_{row[subject][-4:]}{suffixes[number]}"
        row[session] = ""
    table.write_text("\n".join("\t".join(row) for row in rows) + "\n")


@pytest.fixture
def plain_table(tmp_path, tmp_path_factory) -> Path:
    spec = CohortSpec((("AD", 6), ("NC", 6)), 8.0, visits=("bl", "m12"), layout="csv")
    root = shutil.copytree(made(tmp_path_factory, spec), tmp_path / "plain")
    (table,) = root.glob("*.[ct]sv")
    if table.suffix == ".csv":
        table.write_text(table.read_text().replace('"', "").replace(",", "\t"))
    return table


def test_two_sessions_of_a_person_in_a_table_are_one_person(plain_table, tmp_path):
    before = survey(plain_table, TASKS["ad_nc"], None)
    renamed(plain_table.parent, plain_table, ("_MR1", "_MR2"))
    after = survey(plain_table, TASKS["ad_nc"], None)
    people = {record.subject for record in after.records}
    assert len(people) == len({record.subject for record in before.records}) == 12
    assert {record.session for record in after.records} == {"MR1", "MR2"}
    assert sum(record.used for record in after.records) == len(after.records) > 12


def test_unknown_sessions_are_refused_until_a_pattern_is_given(plain_table, tmp_path, capsys):
    renamed(plain_table.parent, plain_table, ("_v1", "_v2"))
    out = str(tmp_path / "out")
    assert main(["check", str(plain_table), "--out", out]) == 1
    assert "TWO_NAMES" in capsys.readouterr().err
    assert main(["check", str(plain_table), "--out", out, "--subject-pattern", r"(.+)_v\d"]) == 0
    split = ["split", str(plain_table), "--val", "0.3", "--test", "0.3", "--out", f"{out}/s.json"]
    assert main([*split, "--subject-pattern", r"(.+)_v\d"]) == 0
    sizes = re.search(r"train (\d+), val (\d+), test (\d+) subjects", capsys.readouterr().out)
    assert sizes is not None
    assert sum(map(int, sizes.groups())) == 12
