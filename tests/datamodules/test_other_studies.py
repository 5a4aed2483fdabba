"""Studies and hospitals that are not ADNI, from what they give away to records with labels."""

from __future__ import annotations

import csv
import locale
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from cohorts import made

from datamodules.cli import main
from datamodules.errors import DataError, TableError
from datamodules.labels import TASKS
from datamodules.prepare.cohort import find
from datamodules.sources import Names
from datamodules.sources.diagnoses import find_diagnoses
from datamodules.sources.uds import find_uds, read_uds
from datamodules.survey import Survey, survey
from datamodules.synth import CohortSpec
from datamodules.synth.cohort import plan_cohort
from datamodules.synth.generate import render_plan

SPEC = CohortSpec(
    subjects=(("AD", 3), ("NC", 3), ("sMCI", 2), ("pMCI", 2)),
    resolution_mm=10.0,
    visits=("bl", "m12"),
)
RAW = replace(SPEC, subjects=(("AD", 1), ("NC", 1)), visits=("bl",), difficulty="L2", raw=True)
STUDIES = ("aibl", "oasis3")
needs_dicom = pytest.mark.skipif(
    find_spec("SimpleITK") is None or find_spec("dcm2niix") is None,
    reason="SimpleITK and dcm2niix are not installed: pip install '.[prepare]'",
)


def cohort(tmp_path_factory, layout: str, spec: CohortSpec = SPEC) -> Path:
    return made(tmp_path_factory, replace(spec, layout=layout))


def look(folder: Path, task: str = "three_way", **options) -> Survey:
    return survey(folder, TASKS[task], None, **options)


def _name(layout: str, ptid: str) -> str:
    number = int(ptid[-4:])
    return {"aibl": f"AIBL_{999_000 + number}", "oasis3": f"OAS{39_000 + number}"}[layout]


def truth(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "truth" / "truth.tsv").open(newline="") as file:
        return {row["image_id"]: row for row in csv.DictReader(file, delimiter="\t")}


@pytest.mark.parametrize("layout", STUDIES)
def test_a_study_as_downloaded_gives_the_classes_and_people_of_its_own_tables(
    tmp_path_factory, layout
):
    folder = cohort(tmp_path_factory, layout)
    planned = truth(folder)
    records = look(folder, "ad_nc").records
    assert {record.image_id for record in records} == set(planned)
    used = [record for record in records if record.used]
    assert {record.dx for record in used} == {"AD", "NC"}
    for record in records:
        row = planned[record.image_id]
        assert record.subject == _name(layout, row["subject"])
        assert record.sex == row["sex"]
        if row["diagnosis"] in ("AD", "NC"):
            assert record.dx == row["diagnosis"]
            assert record.mmse == pytest.approx(float(row["mmse"]), abs=1)
            assert record.age == pytest.approx(float(row["age"]), abs=1)
    progressive = [r for r in look(folder, "pmci_smci").records if r.used]
    assert {planned[r.image_id]["diagnosis"] for r in progressive if r.dx == "pMCI"} == {"pMCI"}
    assert {planned[r.image_id]["diagnosis"] for r in progressive if r.dx == "sMCI"} == {"sMCI"}


def test_scans_of_oasis3_keep_their_sessions_and_have_the_nearest_visit(tmp_path_factory):
    folder = cohort(tmp_path_factory, "oasis3")
    for record in look(folder).records:
        assert record.session[0] == "d"
        assert f"ses-{record.session}" in record.path
        if record.used:
            assert -90 <= record.days_apart <= -11  # scanned one to three months after the visit
            assert record.scanner.startswith("SYNTHETIC Model")


D1 = "OASISID,OASIS_session_label,days_to_visit,NORMCOG,DEMENTED,MCIAMEM,MCINON2,IMPNOMCI,PROBAD"
D1 += ",PROBADIF,alzdis,alzdisif,DLB"


@pytest.mark.parametrize(
    ("flags", "dx"),
    [
        ("1,0,0,0,0,0,,,,", "NC"),
        ("1.0,0.0,0,0,0,0,,,,", "NC"),
        ("0,1,0,0,0,1,1,,,0", "AD"),
        ("0,1,0,0,0,0,,1,1,", "AD"),
        ("0,1,0,0,0,1,2,,,1", "OD"),  # contributes to another cause
        ("0,1,0,0,0,0,,1,3,1", "OD"),
        ("0,1,0,0,0,0,,,,1", "OD"),
        ("0,0,1,0,0,1,1,,,", "MCI"),  # MCI, and AD as its presumed cause
        ("0,0,0,1,0,0,,,,", "MCI"),
        ("0,0,0,0,1,0,,,,", "other"),
        (",,,,,,,,,", ""),
    ],
)
def test_a_form_d1_says_who_has_alzheimers_disease_and_who_another_dementia(tmp_path, flags, dx):
    (tmp_path / "d1.csv").write_text(f"{D1}\nOAS39001,OAS39001_UDSd1_d0010,0010,{flags}\n")
    (visit,) = read_uds(find_uds(tmp_path, everywhere=True)).persons["OAS39001"].visits
    assert (visit.dx, visit.session) == (dx, "d0010")


@pytest.mark.parametrize(
    ("words", "cdr", "dx"),
    [
        ("Cognitively normal", 0, "NC"),
        ("No dementia", "0.0", "NC"),
        ("AD Dementia", 0.5, "AD"),
        ("AD dem distrubed social- prior", 1, "AD"),
        ("DAT w/depresss not contribut", 1, "AD"),
        ("DLBD- primary", 1, "OD"),
        ("AD dem cannot be primary", 1, "OD"),
        ("Vascular Demt- primary", 1, "OD"),
        ("uncertain  possible NON AD dem", 0.5, "other"),
        ("Incipient Non-AD dem", 0.5, "other"),
        ("Cognitively normal", 0.5, "other"),  # which of them is wrong, nobody knows
        (".", 0, ""),
    ],
)
@pytest.mark.parametrize(
    "header",
    [
        "OASISID,days_to_visit,age at visit,MMSE,CDRSUM,CDRTOT,dx1\nOAS39001,339,70.1,29,0",
        "ADRC_ADRCCLINICALDATA ID,Subject,Age,mmse,sumbox,cdr,dx1\n"
        "OAS39001_ClinicalData_d0339,OAS39001,70.1,29,0",
    ],
)
def test_a_form_b4_of_new_and_old_exports_is_read_by_its_words(tmp_path, header, words, cdr, dx):
    path = tmp_path / "b4.csv"
    path.write_text(f"{header},{cdr},{words}\n")
    clinical = find_diagnoses(None, path, Names())
    (visit,) = clinical.persons["OAS39001"].visits
    assert (visit.dx, visit.session, visit.age, visit.mmse) == (dx, "d0339", 70.1, 29)
    assert any("knows no MCI" in note for note in clinical.notes)


def test_whoever_gets_another_dementia_later_is_no_control(tmp_path, tmp_path_factory):
    folder = cohort(tmp_path_factory, "oasis3")
    before = [r for r in look(folder, "ad_nc").records if r.used and r.dx == "NC"]
    form = next(folder.rglob("OASIS3_UDSd1_diagnoses.csv"))
    header, *rows = form.read_text().splitlines()
    who = before[0].subject
    row = next(row for row in rows if row.startswith(who))
    first, label, _, *_ = row.split(",")
    later = f"{first},{label[:-4]}4000,4000,,0,1,0,0,0,"
    table = tmp_path / form.name
    table.write_text("\n".join([header, *rows, later]) + "\n")
    found = look(folder, "ad_nc", diagnosis_csv=table)
    reasons = {r.reason.partition(":")[0] for r in found.records if r.subject == who}
    assert "other_dementia" in reasons
    assert reasons <= {"other_dementia", "other_series"}
    assert any("dementia of another cause" in note for note in found.notes)


def test_visits_of_aibl_are_dated_by_their_scan_and_by_the_first_visit_without_a_date(tmp_path):
    tables = {
        "pdxconv": "RID,SITEID,VISCODE,DXCURREN\n999001,1,bl,1\n999001,1,m18,2\n999001,1,m36,-4",
        "mmse": "RID,SITEID,VISCODE,EXAMDATE,MMSCORE\n"
        "999001,1,bl,03/20/2007,29\n999001,1,m18,-4,28",
        "mri3meta": "RID,SITEID,VISCODE,EXAMDATE\n999001,1,bl,05/25/2007",
    }
    for name, text in tables.items():
        (tmp_path / f"aibl_{name}_01-Jun-2018.csv").write_text(text + "\n")
    person = find_diagnoses(tmp_path, None, Names()).persons["AIBL_999001"]
    first, second, third = person.visits
    assert (first.day.isoformat(), first.dx, first.mmse) == ("2007-05-25", "NC", 29)
    assert (second.day.year, second.dx, second.mmse) == (2008, "MCI", 28)
    assert (third.dx, person.site) == ("", "1")
    (tmp_path / "aibl_mmse_28-Apr-2015.csv").write_text(tables["mmse"] + "\n")
    with pytest.raises(TableError, match=r"SEVERAL_TABLES.*aibl_mmse"):
        find_diagnoses(tmp_path, None, Names())


def test_images_of_oasis1_are_turned_as_the_heads_lie_and_have_the_rating_as_diagnosis(
    tmp_path, tmp_path_factory
):
    spec = replace(RAW, subjects=(("AD", 2), ("NC", 5)), layout="oasis1")
    folder = made(tmp_path_factory, spec)
    assert main(["check", str(folder), "--out", str(tmp_path / "check")]) == 1  # says what to do
    found = find(folder, None, Names(), tmp_path / "out")
    rated = {record.subject: record for record in found.records}
    assert len(rated) == 6  # one of seven was not rated
    for plan in plan_cohort(spec):
        record = rated.get(f"OAS1_{9000 + plan.subject.number}")
        if record is None or plan.kind != "t1":
            continue
        assert record.dx_bl == {"NC": "CN", "AD": "AD"}[plan.subject.diagnosis]
        rendered, form = render_plan(spec, plan)
        image = nib.as_closest_canonical(nib.load(record.path))
        assert np.allclose(np.asarray(image.dataobj), rendered.image, atol=1)
        assert np.allclose(image.header.get_zooms(), form.grid.spacing_mm, atol=1e-4)


@needs_dicom
def test_dicom_folders_become_the_same_volumes_and_no_name_is_kept(tmp_path, tmp_path_factory):
    spec = replace(RAW, layout="dicom")
    before = locale.setlocale(locale.LC_CTYPE)
    folder = made(tmp_path_factory, spec)
    found = find(folder, None, Names(), tmp_path / "out")
    assert locale.setlocale(locale.LC_CTYPE) == before
    assert found.notes[0] == "2 T1-weighted series of 2 people by their patient IDs"
    assert "2 x localizer" in found.notes[1]
    records = {record.subject: record for record in found.records}
    for plan in plan_cohort(spec):
        record = records[f"999-{plan.subject.number:04d}"]
        assert record.acq_date == f"{plan.acquired:%Y-%m-%d}"
        assert record.sex == plan.subject.sex
        assert record.age == pytest.approx(plan.age, abs=1)
        assert record.field_strength == plan.subject.field_strength
        rendered, form = render_plan(spec, plan)
        image = nib.as_closest_canonical(nib.load(record.path))
        # of an oblique scan the nearest axes are taken
        assert image.shape == form.grid.shape
        assert np.allclose(np.asarray(image.dataobj), rendered.image, atol=1)
        assert np.allclose(image.affine, form.grid.affine, atol=0.01)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"SYNTHETIC^PERSON" not in kept
    again = find(folder, None, Names(), tmp_path / "out")
    assert again.records == found.records


def test_dicom_files_without_the_tool_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "dicom").mkdir()
    (tmp_path / "dicom" / "IM0001").write_bytes(b"\0" * 128 + b"DICM")
    monkeypatch.setitem(__import__("sys").modules, "dcm2niix", None)
    with pytest.raises(DataError, match=r"(?s)MISSING_TOOL.*pip install"):
        find(tmp_path / "dicom", None, Names(), tmp_path / "out")


@pytest.mark.parametrize(
    ("header", "words"),
    [("patient_id,diagnosis", "AD CN"), ("Subject ID;Group", "Dementia HC"), ("subject,label", "")],
)
def test_a_table_of_people_gives_every_scan_of_a_person_its_diagnosis(tmp_path, header, words):
    scans = tmp_path / "scans.csv"
    for name in ("a1", "a2", "b1", "c1"):
        (tmp_path / f"{name}.nii").write_bytes(b"1")
    lines = [f"{name}.nii,{name[0]},{name}" for name in ("a1", "a2", "b1", "c1")]
    scans.write_text("\n".join(["path,subject,session,label", *(f"{x}," for x in lines)]) + "\n")
    mark = ";" if ";" in header else ","
    first, second = words.split() or ("AD", "NC")
    table = tmp_path / "people.csv"
    table.write_text(f"{header}\na{mark}{first}\nb{mark}{second}\n")
    names = Names(label_map=(("HC", "NC"),))
    found = look(scans, "ad_nc", diagnosis_csv=table, names=names)
    said = [(r.subject, r.dx if r.used else r.reason) for r in found.records]
    assert said == [("a", "AD"), ("a", "AD"), ("b", "NC"), ("c", "missing")]
    assert found.labels.startswith("people.csv:")
    table.write_text(f"{header}\na{mark}{first}\na{mark}{second}\n")
    with pytest.raises(TableError, match=r"TWO_ROWS: lines 2 and 3 are both of a"):
        look(scans, "ad_nc", diagnosis_csv=table, names=names)


def test_cells_of_a_table_of_people_are_accounted_for_and_may_not_contradict(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.nii").write_bytes(b"1")
    scans, table = tmp_path / "scans.csv", tmp_path / "people.csv"
    scans.write_text("path,subject\na.nii,a\nb.nii,b\nc.nii,c\n")  # labels lie elsewhere
    table.write_text('subject,label,Age (y),gender\na,AD,"71,5",2\nb,NC,unclear,1\nc,NC,999,1\n')
    found = look(scans, "ad_nc", diagnosis_csv=table)
    assert [(r.dx, r.age, r.sex) for r in found.records] == [
        ("AD", 71.5, "F"),
        ("NC", None, "M"),
        ("NC", None, "M"),
    ]
    assert "people.csv: age: 2 of 3 not read, for example 'unclear' (line 3)" in found.notes
    assert any(note.startswith("people.csv: sex: 1 is read as male") for note in found.notes)
    table.write_text("subject,label,sex\na,AD,F\na,ad,f\nb,NC,F\nb,NC,M\n")
    with pytest.raises(TableError, match=r"TWO_ROWS: lines 4 and 5 are both of b: sex 'F' and 'M'"):
        look(scans, "ad_nc", diagnosis_csv=table)


def test_names_of_oasis3_in_bids_that_leave_out_the_session_have_that_of_the_folder(tmp_path):
    anat = tmp_path / "sub-OAS39001" / "ses-d0129" / "anat"
    anat.mkdir(parents=True)
    (anat / "sub-OAS39001_T1w.nii.gz").write_bytes(b"1")
    (tmp_path / "d1.csv").write_text(f"{D1}\nOAS39001,OAS39001_UDSd1_d0010,0010,1,0,0,0,0,0,,,,\n")
    (record,) = look(tmp_path, "ad_nc").records
    assert (record.subject, record.session, record.dx) == ("OAS39001", "d0129", "NC")
