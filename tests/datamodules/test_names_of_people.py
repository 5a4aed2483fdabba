"""One person is one person under every name; names that may be one person's are refused."""

from __future__ import annotations

import random
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cohorts import made

from datamodules.cli import main
from datamodules.errors import DataError, TableError
from datamodules.labels import TASKS
from datamodules.sources.people import Named, Names, refuse_two_names
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
    "999-S-4001": ("999_S_4001", ""),
    "sub-ADNI999.S.4001": ("999_S_4001", ""),
    "Mu\u0308ller\u00a0\uff13": ("Müller 3", ""),
    "P\u200b01\u00ad ": ("P01", ""),
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
    ("P-001", "P001"),
    ("AB_001", "AB001"),
    ("AB 1", "ab-0001"),
    ("P001", "P001 (2)"),
    ("P001", "P001.neu"),
    ("Müller1", "Mu\u0308ller1"),
    ("P\u00a01", "P 1"),
    ("P7", "P\uff17"),
    ("P1_20190304", "P1_2021-05-06"),
    ("P1 4Mar2019", "P1_20210506"),
    ("20190304_P1", "20210506-p01"),
    ("José7", "JOSE07"),
    ("P1", "\u04201"),  # a Cyrillic letter
    ("\u0391\u03921", "AB1"),  # Greek ones
    ("P1_201903", "P1_202105"),
    ("999_S_0001", "999_S_0001_m12"),
    ("999_S_0001", "ADNI999S0001V2"),
]


@pytest.mark.parametrize("names", ALIKE)
def test_names_that_may_be_one_persons_are_refused(names):
    with pytest.raises(TableError, match="TWO_NAMES") as caught:
        refuse_two_names(map(Named, names), "table.csv")
    assert all(name in str(caught.value) for name in names)
    assert "--subject-pattern" in str(caught.value)


DIFFERENT = [
    ("007", "008"),
    ("1_11", "11_1"),
    ("site1_001", "site2_001"),
    ("P10", "P100"),
    ("A1", "B1"),
    ("999_S_0001", "999_S_10001"),
    ("999_S_0001", "999_S_0002_m12"),
    ("m1", "m2"),
    ("NACC000123", "NACC001230"),
]


@pytest.mark.parametrize("names", DIFFERENT)
def test_names_of_different_people_are_not_refused(names):
    refuse_two_names(map(Named, names), "table.csv")


DRAW = random.Random(0)


def day() -> str:
    return f"20{DRAW.randint(10, 22)}{DRAW.randint(1, 12):02d}{DRAW.randint(1, 28):02d}"


def described(names: Iterable[str]) -> list[Named]:
    """Different people: their sexes and diagnoses have nothing to do with their names."""
    return [Named(name, DRAW.choice("FM"), DRAW.choice(("AD", "NC"))) for name in names]


# two visits of a person, as nobody has listed them
VISITS: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {
    "days": (lambda n: f"P{n:03}_{day()}", lambda n: f"P{n:03}_{day()}"),
    "days and times": (lambda n: f"{n}-{day()}1012", lambda n: f"{n}-{day()}1544"),
    "letters": (lambda n: f"P{n:03}a", lambda n: f"P{n:03}b"),
    "numbers": (lambda n: f"P{n:03}_1", lambda n: f"P{n:03}_2"),
    "in front of numbers": (lambda n: f"P{n:03}_E1", lambda n: f"P{n:03}_E2"),
    "attached": (lambda n: f"P{n:03}V1", lambda n: f"P{n:03}V2"),
    "before": (lambda n: f"P{n:03}_pre", lambda n: f"P{n:03}_post"),
    "German": (lambda n: f"P{n:03}.Erstscan", lambda n: f"P{n:03}.Zweitscan"),
    "behind": (lambda n: f"P{n:03}", lambda n: f"P{n:03}_ffup"),
    "years": (lambda n: f"{n:03}/2012", lambda n: f"{n:03}/2014"),
    "in front": (lambda n: f"scan1.P{n:03}", lambda n: f"scan2.P{n:03}"),
    "days in front": (lambda n: f"{day()} P{n:03}", lambda n: f"{day()} P{n:03}"),
    "two places": (lambda n: f"P{n}_rest_T1", lambda n: f"P{n}_task_T1"),
}


@pytest.mark.parametrize("told", [True, False], ids=["sex known", "names alone"])
@pytest.mark.parametrize("kind", VISITS)
def test_visits_in_names_are_found_by_the_whole_cohort(kind, told):
    first, second = VISITS[kind]
    people = described(first(n) for n in range(24))
    people += [Named(second(n), one.sex, one.group) for n, one in enumerate(people[:17])]
    if not told:
        people = [Named(one.name) for one in people]
    with pytest.raises(TableError, match="TWO_NAMES: 17 people"):
        refuse_two_names(people, "table.csv")


@pytest.mark.parametrize("name", ["P017b", "p-17", "P017 (2)", "P017 again", "P017_20190304"])
def test_one_person_with_two_names_among_many_is_found(name):
    people = described(f"P{n:03}" for n in range(330))
    again = Named(name, people[17].sex, people[17].group)
    with pytest.raises(TableError, match=r"TWO_NAMES: 1 people.*P017"):
        refuse_two_names([*people, again], "table.csv")


# how studies number people, sexes and diagnoses as chance will have it
NUMBERED: dict[str, Callable[[], list[str]]] = {
    "numbers": lambda: [str(n) for n in range(1, 331)],
    "letters and numbers": lambda: [f"P{n:03}" for n in range(1, 331)],
    "three hospitals": lambda: [f"site{s}_{n:03}" for s in (1, 2, 3) for n in range(60)],
    "many hospitals": lambda: [f"{s:02}-{n:03}" for s in range(40) for n in range(5)],
    "pairs of hospitals": lambda: [f"{s}-{n}" for s in range(60) for n in (1, 2)],
    "three levels": lambda: [f"AB-{s:03}-{n:03}" for s in range(20) for n in range(8)],
    "groups": lambda: [f"{g}{n:02}" for g in ("CON", "PAT") for n in range(40)],
    "matched": lambda: [f"{n:02}_{g}" for n in range(40) for g in "ab"],
    "by year": lambda: [f"{n:03}/{y}" for y in range(2012, 2018) for n in range(40)],
    "by day": lambda: [f"{own}_{n}" for own in (day() for _ in range(99)) for n in (1, 2)],
    "initials": lambda: [f"{DRAW.choice('AEIOU')}{DRAW.choice('LMN')}_{n % 4}" for n in range(150)],
    "random": lambda: [f"{DRAW.getrandbits(32):08x}" for _ in range(300)],
    "two numbers": lambda: [f"IXI{n:03}-HH-{DRAW.randint(500, 2000)}" for n in range(300)],
    "visits' word": lambda: [f"{s:02}T{n:03}" for s in range(4) for n in range(40)],
    "few": lambda: [f"S{n}" for n in range(8)],
    "wards like visits": lambda: [f"V{w}-{n:03}" for w in range(1, 7) for n in range(30)],
    "day and number of it": lambda: [
        f"{d}_{n}" for d in sorted({day() for _ in range(40)}) for n in (1, 2)
    ],
    "check digits": lambda: [f"{n}-{n % 7}" for n in range(190000, 250000, 777)],
    "ADNI's": lambda: [f"{s:03}_S_{s * 40 + n:04}" for s in (2, 11, 22) for n in range(40)],
    "accents": lambda: [f"{name}{n}" for n in range(20) for name in ("Ñ", "M", "É", "か", "が")],
}


@pytest.mark.parametrize("kind", NUMBERED)
def test_numbers_of_people_are_no_alarm(kind):
    for _ in range(5):
        refuse_two_names(described(NUMBERED[kind]()), "table.csv")


def test_composed_letters_are_those_that_a_file_system_has_taken_apart():
    apart = unicodedata.normalize("NFD", "sub-Jürg")
    assert Names().person(apart) == Names().person("sub-Jürg") == "Jürg"


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
