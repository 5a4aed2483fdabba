"""The same scans in four layouts give the same manifest; what a layout does not know is empty."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from datamodules.cli import main
from datamodules.errors import DataError, FolderError, TableError
from datamodules.labels import TASKS, TaskName
from datamodules.records import ScanRecord, count_line
from datamodules.sources import read_source
from datamodules.survey import Survey, survey
from datamodules.synth import CohortSpec, generate

SPEC = CohortSpec(
    subjects=(("AD", 2), ("NC", 2), ("sMCI", 1), ("pMCI", 1)),
    resolution_mm=10.0,
    visits=("bl", "m12"),
    courses=True,
)
EVERYWHERE = (
    "reason",
    "subject",
    "session",
    "dx",
    "label",
    "sex",
    "age",
    "mmse",
    "cdr_sb",
    "apoe4",
    "site",
    "phase",
)


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory) -> Path:
    """One folder for each layout; not to be changed."""
    folder = tmp_path_factory.mktemp("layouts")
    module = import_module("datamodules.synth.generate")
    rendered = cache(partial(module.render_plan, SPEC))  # the scans of each are the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "render_plan", lambda spec, plan: rendered(plan))
        for layout in ("ida", "bids", "caps", "csv"):
            generate(folder / layout, replace(SPEC, layout=layout))
    return folder


def look(folder: Path, task: TaskName = "ad_nc", **options) -> Survey:
    return survey(folder, TASKS[task], None, **options)


def truth(folder: Path) -> dict[str, dict[str, str]]:
    """Rows by image ID."""
    header, *rows = (
        r.split("\t") for r in (folder / "truth" / "truth.tsv").read_text().splitlines()
    )
    return {row[header.index("image_id")]: dict(zip(header, row)) for row in rows}


def scans(folder: Path, task: TaskName = "ad_nc") -> dict[tuple[str, str], ScanRecord]:
    """T1 scans by subject and visit."""
    visit = {image: (row["subject"], row["visit"]) for image, row in truth(folder).items()}
    found = look(folder, task).records
    return {visit[r.image_id]: r for r in found if r.reason != "not_t1"}


@pytest.mark.parametrize("task", get_args(TaskName))
def test_four_layouts_give_one_manifest(cohorts, task):
    expected = scans(cohorts / "ida", task)
    assert {r.label for r in expected.values() if r.used} == set(
        range(len(TASKS[task].class_names))
    )
    for layout in ("bids", "caps"):
        found = scans(cohorts / layout, task)
        assert found.keys() == expected.keys()
        for key, record in found.items():
            unseen = record.reason == "no_dx_near_scan"  # not in the tables of visits
            for column in EVERYWHERE[:1] if unseen else EVERYWHERE:
                same = getattr(expected[key], column)
                assert getattr(record, column) == same, (layout, key, column)
            assert record.layout == layout
            assert record.registered == {"bids": "no", "caps": "yes"}[layout]
            if layout == "bids" and not unseen:  # CAPS knows no image IDs
                assert record.image_id == expected[key].image_id
                assert record.field_strength == expected[key].field_strength


def test_a_table_of_scans_gives_the_labels_that_stand_in_it(cohorts):
    expected, found = (scans(cohorts / layout, "pmci_smci") for layout in ("ida", "csv"))
    assert found.keys() == expected.keys()
    for key, record in found.items():
        assert (record.used, record.image_id) == (expected[key].used, expected[key].image_id)
        assert record.label == expected[key].label
        unseen = expected[key].reason == "no_dx_near_scan"
        for column in () if unseen else ("sex", "age", "mmse", "phase", "field_strength"):
            assert getattr(record, column) == getattr(expected[key], column)


@pytest.mark.parametrize("layout", ["ida", "bids", "caps"])
def test_every_course_over_time_gets_its_class_or_reason_in_every_layout(cohorts, layout):
    rows = truth(cohorts / layout)
    expected = {image: row["expected"] for image, row in rows.items() if row["expected"]}
    assert len(expected) == 6 + 9
    for record in look(cohorts / layout, "three_way").records:
        if record.image_id in expected and record.dx != "MCI":
            assert expected[record.image_id] in (record.dx, record.reason)
    found = {r.image_id: r for r in look(cohorts / layout, "pmci_smci").records}
    for image, what in expected.items():
        if what not in ("AD", "NC"):
            assert what in (found[image].dx, found[image].reason)


@pytest.mark.parametrize("layout", ["ida", "bids", "caps", "csv"])
def test_layout_given_is_read_like_layout_found(cohorts, layout):
    given = look(cohorts / layout, layout=layout)
    assert given.layout == look(cohorts / layout).layout == layout
    assert given.records == look(cohorts / layout).records
    assert count_line(given.records).endswith("bad 0")


def test_folder_that_fits_no_layout_says_what_is_there(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "scan.nii.gz").touch()
    (tmp_path / "todo.txt").touch()
    with pytest.raises(FolderError, match=r"(?s)NO_SCANS.*1 x \.nii\.gz.*notes, todo\.txt"):
        read_source(tmp_path)
    for layout, message in (("bids", "sub-\\*"), ("caps", "subjects"), ("ida", "123_S_0456")):
        with pytest.raises(FolderError, match=f"(?s)NO_SCANS.*{message}.*1 x .nii.gz"):
            read_source(tmp_path, layout)
    with pytest.raises(FolderError, match="NO_TABLE: 0 tables with the columns path"):
        read_source(tmp_path, "csv")


def test_folder_that_fits_two_layouts_asks_which(cohorts, tmp_path):
    root = Path(shutil.copytree(cohorts / "bids", tmp_path / "both"))
    shutil.copytree(cohorts / "ida" / "ADNI", root / "ADNI")
    with pytest.raises(FolderError, match=r"(?s)SEVERAL_LAYOUTS.*bids and as ida.*--layout"):
        read_source(root)
    assert read_source(root, "bids").layout == "bids"


def test_old_session_names_and_runs_of_bids_are_understood(cohorts, tmp_path):
    root = Path(shutil.copytree(cohorts / "bids", tmp_path / "bids"))
    before = [(r.subject, r.session, r.label) for r in look(root).records]
    for path in sorted(root.rglob("*ses-M0*"), key=lambda p: -len(p.parts)):
        path.rename(path.with_name(path.name.replace("ses-M0", "ses-M")))
    assert [(r.subject, r.session, r.label) for r in look(root).records] == before
    used = next(r for r in look(root).records if r.used)
    second = Path(used.path.replace("_T1w", "_run-02_T1w"))
    shutil.copy(used.path, second)
    (record,) = (r for r in look(root).records if r.path == str(second))
    assert record.reason == f"other_series:{used.image_id}"


def test_bids_without_diagnoses_and_caps_without_tables_say_what_to_give(cohorts, tmp_path):
    root = Path(shutil.copytree(cohorts / "bids", tmp_path / "bids"))
    for path in root.glob("sub-*/*_sessions.tsv"):
        path.unlink()
    assert {r.dx for r in look(root).records if r.used} == {"NC", "AD"}  # those at screening
    with pytest.raises(DataError, match=r"(?s)NEEDS_HISTORY.*DXSUM"):
        look(root, "pmci_smci")
    (root / "participants.tsv").unlink()
    with pytest.raises(TableError, match=r"(?s)NO_TABLE.*sessions\.tsv.*--diagnosis-csv"):
        look(root)
    caps = Path(shutil.copytree(cohorts / "caps", tmp_path / "caps"))
    expected = look(caps).records
    merged = caps / "merged.tsv"
    merged.rename(tmp_path / "merged.tsv")
    with pytest.raises(TableError, match=r"(?s)NO_TABLE: a CAPS folder.*merge-tsv.*BIDS folder"):
        look(caps)
    adnimerge = next((cohorts / "ida").glob("ADNIMERGE*"))
    for table in (tmp_path / "merged.tsv", cohorts / "bids", adnimerge):
        again = look(caps, diagnosis_csv=table).records
        assert [(r.dx, r.label, r.reason) for r in again] == [
            (r.dx, r.label, r.reason) for r in expected
        ]


def test_cropped_image_of_caps_is_preferred_to_the_whole_one(cohorts, tmp_path):
    root = Path(shutil.copytree(cohorts / "caps", tmp_path / "caps"))
    crop = next(r for r in look(root).records if r.used)
    whole = crop.path.replace("_desc-Crop", "")
    shutil.copy(crop.path, whole)
    reasons = {r.path: r.reason for r in look(root).records}
    assert (reasons[crop.path], reasons[whole]) == ("", f"other_series:{crop.image_id}")


def plain(folder: Path, rows: str, header: str = "path,subject,label") -> Path:
    for name in ("a", "b"):
        (folder / f"{name}.nii.gz").touch()
    table = folder / "mine.csv"
    table.write_text(f"{header}\n{rows}")
    return table


def test_a_table_needs_three_columns_only(tmp_path):
    table = plain(tmp_path, "a.nii.gz,anna,AD\nb.nii.gz,sub-ADNI999S0001,cn\n")
    for root in (table, tmp_path):
        records = look(root).records
        assert [(r.subject, r.dx, r.used) for r in records] == [
            ("anna", "AD", True),
            ("999_S_0001", "NC", True),
        ]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ("a.nii.gz,anna,AD\nc.nii.gz,bea,NC\n", "NO_SCAN"),
        ("a.nii.gz,anna,AD\nb.nii.gz,,NC\n", "BAD_ROW"),
        ("a.nii.gz,anna,AD\na.nii.gz,bea,NC\n", "DUPLICATE_ID"),
        ("a.nii.gz,anna,AD\nb.nii.gz,bea,\n", "UNKNOWN_LABEL"),
        ("a.nii.gz,anna,AD\nb.nii.gz,bea,3\n", "UNKNOWN_LABEL"),
        ("a.nii.gz,anna,AD\nb.nii.gz,anna,NC\n", "LABEL_CONFLICT"),
    ],
)
def test_wrong_rows_of_a_table_are_named(tmp_path, rows, code):
    table = plain(tmp_path, rows)
    problems = look(table).problems
    assert {problem.code for problem in problems} == {code}
    assert all(problem.action and (problem.path or code) for problem in problems)
    assert all("mine.csv, line" in p.path for p in problems if code != "LABEL_CONFLICT")


@pytest.mark.parametrize(
    ("columns", "rows", "code"),
    [
        (
            "path,subject,label,session",
            ("a.nii.gz,anna,AD,v1", "b.nii.gz,anna,NC,v1"),
            "LABEL_CONFLICT",
        ),
        ("path,subject,label,acq_date", ("a.nii.gz,anna,AD,2019-03-04",) * 2, ""),
        ("path,subject,label,sex", ("a.nii.gz,anna,AD,F", "b.nii.gz,anna,AD,m"), "TWO_SEXES"),
        ("path,subject,label,sex", ("a.nii.gz,anna,AD,F", "b.nii.gz,anna,AD,"), ""),
    ],
)
def test_rows_of_a_person_contradict_each_other_whichever_of_them_is_used(
    tmp_path, columns, rows, code
):
    plain(tmp_path, "")
    table = tmp_path / "mine.csv"
    table.write_text("\n".join((columns, rows[0], rows[1].replace("a.nii", "b.nii"))))
    found = look(table)
    assert {problem.code for problem in found.problems} == {code} - {""}
    assert sum(bool(record.problem) for record in found.records) == (2 if code else 0)
    assert len(found.records) == 2


def test_columns_may_name_their_units(tmp_path):
    plain(tmp_path, "")
    table = tmp_path / "mine.csv"
    header = "path,subject,label,Age (years),Sex [m/f],MMSE (bl),MMSE (m12)"
    table.write_text(f"{header}\na.nii.gz,anna,AD,71.5,f,28,27\nb.nii.gz,bea,NC,70,F,29,29\n")
    records = look(table).records
    assert [(r.age, r.sex, r.mmse) for r in records] == [(71.5, "F", None), (70, "F", None)]


def test_an_unknown_word_of_a_table_says_how_to_give_its_meaning(tmp_path):
    table = plain(tmp_path, "a.nii.gz,anna,Kontrolle\nb.nii.gz,bea,AD\n")
    (problem,) = look(table).problems
    assert "--label-map 'Kontrolle=...'" in problem.action


def test_nothing_is_written_beside_listed_scans(tmp_path, capsys):
    (tmp_path / "scans").mkdir()
    plain(tmp_path / "scans", "")
    table = tmp_path / "mine.csv"
    table.write_text("path,subject,label\nscans/a.nii.gz,anna,AD\n")
    assert main(["check", str(table), "--out", str(tmp_path / "scans" / "report")]) == 1
    assert "INSIDE_DATA" in capsys.readouterr().err
    assert main(["check", str(table), "--out", str(tmp_path / "report")]) == 1  # an empty file
    assert "EMPTY" in capsys.readouterr().out


@pytest.mark.parametrize("entity", ["run-2", "run-02", "acq-fast", "rec-norm"])
def test_bids_without_sessions_has_one_scan_of_a_person(cohorts, tmp_path, entity):
    root = Path(shutil.copytree(cohorts / "bids", tmp_path / "bids"))
    for folder in sorted(root.glob("sub-*/ses-M000")):
        shutil.move(folder / "anat", folder.parent / "anat")
    for folder in (*root.glob("sub-*/ses-*"), root / "truth"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (*root.rglob("*_ses-M000_*"), *root.glob("sub-*/*_sessions.tsv")):
        if path.suffix == ".tsv":
            path.unlink()
        else:
            path.rename(path.with_name(path.name.replace("_ses-M000", "")))
    first = next(r for r in look(root).records if r.used)
    copied = Path(first.path).with_name(Path(first.path).name.replace("_T1w", f"_{entity}_T1w"))
    shutil.copy(first.path, copied)
    own = [r for r in look(root).records if r.subject == first.subject]
    assert sorted((r.used, r.reason.partition(":")[0]) for r in own) == [
        (False, "other_series"),
        (True, ""),
    ]


@pytest.mark.parametrize("spelling", ["./{}", "a//../{}", "//{}", "link.nii.gz", "..\\{1}\\{0}"])
def test_one_file_is_one_scan_however_its_path_is_written(cohorts, tmp_path, spelling):
    scan = sorted((cohorts / "ida").rglob("*.nii.gz"))[0]
    own = tmp_path / "own"
    (own / "a").mkdir(parents=True)
    shutil.copy(scan, own / "p.nii.gz")
    (own / "link.nii.gz").symlink_to(own / "p.nii.gz")
    name = f"{own.as_posix()[1:]}/p.nii.gz" if spelling.startswith("//") else "p.nii.gz"
    rows = ["path,subject,label", "p.nii.gz,P1,AD", f"{spelling.format(name, own.name)},P2,NC"]
    (own / "t.csv").write_text("\n".join(rows) + "\n")
    found = survey(own / "t.csv", TASKS["ad_nc"], None)
    assert [r.problem for r in found.records] == ["DUPLICATE_ID"] * 2


def test_paths_of_windows_are_read(cohorts, tmp_path):
    scan = sorted((cohorts / "ida").rglob("*.nii.gz"))[0]
    (tmp_path / "scans").mkdir()
    shutil.copy(scan, tmp_path / "scans" / "p.nii.gz")
    table = tmp_path / "t.csv"
    table.write_text("path,subject,label\nscans\\p.nii.gz,P1,AD\n")
    assert [r.used for r in survey(table, TASKS["ad_nc"], None).records] == [True]
    table.write_text("path,subject,label\nD:\\scans\\p.nii.gz,P1,AD\n")
    with pytest.raises(FolderError, match=r"(?s)NO_SCANS.*D:.*drive of Windows"):
        survey(table, TASKS["ad_nc"], None)
