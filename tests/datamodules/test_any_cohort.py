"""Cohorts that are not ADNI's: BIDS of any sessions and words, OASIS and AIBL as Clinica writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from datamodules.cli import main
from datamodules.errors import DataError, TableError
from datamodules.labels import TASKS
from datamodules.sources import Names
from datamodules.sources.people import label_map
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def bids(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bids") / "cohort"
    generate(root, CohortSpec((("AD", 4), ("NC", 4)), 8.0, layout="bids"))
    return root


def own(bids: Path, to: Path, column: str, words: dict[str, str]) -> Path:
    """Somebody's own study: names and sessions of its own, one column of groups for people."""
    shutil.copytree(bids, to)
    people = to / "participants.tsv"
    rows = [line.split("\t") for line in people.read_text().splitlines()]
    group, name = rows[0].index("diagnosis_sc"), rows[0].index("participant_id")
    lines = [f"participant_id\t{column}\tage\tsex"]
    for number, row in enumerate(rows[1:]):
        old, new = row[name], f"sub-{'P' if number % 2 else 'Q'}{number + 10}"
        lines.append(f"{new}\t{words[row[group]]}\t71.5\tF")
        for path in sorted(to.rglob(f"*{old}*"), key=lambda p: -len(p.parts)):
            path.rename(path.with_name(path.name.replace(old, new).replace("ses-M000", "ses-a")))
    for folder in to.glob("sub-*/ses-M000"):
        folder.rename(folder.with_name("ses-a"))
    for table in [*to.rglob("*_sessions.tsv"), *to.rglob("*_scans.tsv")]:
        table.unlink()
    people.write_text("\n".join(lines) + "\n")
    shutil.rmtree(to / "truth", ignore_errors=True)
    return to


@pytest.mark.parametrize("column", ["diagnosis", "group", "diagnosis_bl"])
def test_a_group_of_each_person_is_taken_from_the_usual_columns(bids, tmp_path, column):
    root = own(bids, tmp_path / "own", column, {"CN": "CN", "AD": "AD"})
    found = survey(root, TASKS["ad_nc"], None)
    assert [r.used for r in found.records] == [True] * 8
    assert sorted(r.label for r in found.records) == [0] * 4 + [1] * 4
    assert {(r.age, r.sex, r.session) for r in found.records} == {(71.5, "F", "a")}
    assert column.replace("_", "") in found.labels


def test_a_column_and_words_of_ones_own_are_named(bids, tmp_path, capsys):
    root = own(bids, tmp_path / "own", "status", {"CN": "HC", "AD": "patient"})
    with pytest.raises(TableError, match=r"(?s)NO_TABLE.*columns are: participantid, status"):
        survey(root, TASKS["ad_nc"], None)
    named = Names(label_column="status")
    assert {p.code for p in survey(root, TASKS["ad_nc"], None, names=named).problems} == {
        "UNKNOWN_LABEL"
    }
    options = ["--label-column", "status", "--label-map", "HC=NC,patient=AD"]
    assert main(["check", str(root), "--out", str(tmp_path / "out"), *options]) == 0
    assert "found 8 = used 8" in capsys.readouterr().out


def test_a_column_that_is_not_there_is_refused(bids, tmp_path):
    root = own(bids, tmp_path / "own", "group", {"CN": "CN", "AD": "AD"})
    with pytest.raises(TableError, match=r"no diagnose in participants\.tsv"):
        survey(root, TASKS["ad_nc"], None, names=Names(label_column="diagnose"))


def test_words_of_tables_of_sessions_are_mapped_too(bids, tmp_path):
    root = Path(shutil.copytree(bids, tmp_path / "mapped"))
    for table in root.rglob("*_sessions.tsv"):
        table.write_text(table.read_text().replace("\tCN\t", "\thealthy\t"))
    with pytest.raises(TableError, match=r"(?s)UNKNOWN_LABEL.*--label-map"):
        survey(root, TASKS["ad_nc"], None)
    found = survey(root, TASKS["ad_nc"], None, names=Names(label_map=(("Healthy", "NC"),)))
    assert {r.dx for r in found.records if r.used} == {"NC", "AD"}


def test_a_table_of_scans_may_call_its_labels_anything(bids, tmp_path):
    scans = sorted(bids.glob("sub-*/ses-M000/anat/*.nii.gz"))[:4]
    table = tmp_path / "mine.csv"
    words = ("DAT", "HC")
    lines = [f"{path},person{chr(97 + n)},{words[n % 2]}" for n, path in enumerate(scans)]
    table.write_text("\n".join(["path,subject,clinical group", *lines]) + "\n")
    names = Names(label_column="Clinical_Group", label_map=label_map("HC=NC, DAT=AD"))
    found = survey(table, TASKS["ad_nc"], None, names=names)
    assert [r.dx for r in found.records] == ["AD", "NC", "AD", "NC"]


@pytest.mark.parametrize("text", ["HC", "HC=healthy"])
def test_a_map_to_nothing_known_is_refused(bids, text, capsys):
    assert main(["check", str(bids), "--label-map", text]) == 1
    assert "BAD_LABEL_MAP" in capsys.readouterr().err
    with pytest.raises(DataError, match="BAD_LABEL_MAP"):
        Names(label_map=label_map(text))


def test_a_table_of_people_beside_the_diagnoses_is_named_and_not_ignored(tmp_path):
    root = tmp_path / "ida"
    generate(root, CohortSpec((("AD", 2), ("NC", 2)), 8.0))
    merge = next(root.glob("ADNIMERGE*"))
    (root / "ADSL_2026.csv").write_text("STUDYID,USUBJID,SUBJID,AGE,SEX\nADNI,1,1,70,F\n")
    notes = survey(root, TASKS["ad_nc"], None).notes
    assert any("ADSL_2026.csv: not used" in note for note in notes)
    merge.unlink()
    with pytest.raises(TableError, match=r"(?s)one row for each person.*ADSL_2026.*DXSUM"):
        survey(root, TASKS["ad_nc"], None)
