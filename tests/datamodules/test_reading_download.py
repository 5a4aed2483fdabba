from __future__ import annotations

import re
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from datamodules.errors import FolderError, TableError, tally
from datamodules.labelling import label_records
from datamodules.labels import TASKS
from datamodules.progression import LabelRule
from datamodules.records import ScanRecord, count_line, fingerprint, read_manifest, write_manifest
from datamodules.series import is_t1, preference
from datamodules.sources.collection import find_collection, read_collection
from datamodules.sources.ida import discover, read_ida
from datamodules.sources.reading import Reading

AD_NC = TASKS["ad_nc"]


def read(root: Path) -> Reading:
    """With the groups of the collection table."""
    found = read_ida(root, discover(root))
    records, problems = label_records(found.records, AD_NC, LabelRule(), None)
    return replace(found, records=records, problems=[*found.problems, *problems])


def codes(root: Path) -> set[str]:
    return {problem.code for problem in read(root).problems}


def test_counts_add_up_and_every_exclusion_has_a_reason(tiny_cohort):
    reading = read(tiny_cohort)
    assert not reading.problems
    assert {r.reason for r in reading.records if not r.used} == {"not_t1", "not_in_task"}
    used = sum(record.used for record in reading.records)
    rest = len(reading.records) - used
    assert count_line(reading.records).endswith(f"used {used} + excluded {rest} + bad 0")


def test_label_one_is_ad(tiny_cohort):
    assert AD_NC.class_names == ("NC", "AD")
    labels = {record.dx: record.label for record in read(tiny_cohort).records if record.used}
    assert labels == {"NC": 0, "AD": 1}


def test_folder_depth_below_the_subject_does_not_matter(download):
    before = fingerprint(read(download).records)
    for path in sorted((download / "ADNI").rglob("*.nii.gz")):
        subject = download / "ADNI" / path.relative_to(download / "ADNI").parts[0]
        path.rename(subject / path.name)
    assert fingerprint(read(download).records) == before


def test_parts_of_a_download_may_lie_side_by_side(download):
    before = fingerprint(read(download).records)
    first = next((download / "ADNI").iterdir())
    shutil.move(first, download / "ADNI_part2" / "ADNI" / first.name)
    assert fingerprint(read(download).records) == before


def test_image_id_may_stand_in_the_folder_name_only(download):
    path = next((download / "ADNI").rglob("*.nii.gz"))
    path.rename(path.with_name("scan.nii.gz"))
    assert not codes(download)


def test_resource_forks_of_macos_are_ignored(download):
    path = next((download / "ADNI").rglob("*.nii.gz"))
    path.with_name(f"._{path.name}").write_bytes(b"\0")
    assert not codes(download)


def test_image_ids_without_their_letter_are_understood(download, edit):
    before = fingerprint(read(download).records)
    edit(lambda lines: [line.replace('"I9', '"9') for line in lines])
    assert fingerprint(read(download).records) == before


def test_image_ids_that_pandas_made_floats_are_understood(download, edit):
    before = fingerprint(read(download).records)
    edit(lambda lines: [re.sub(r'^"I(9\d+)"', r'"\1.0"', line) for line in lines])
    assert fingerprint(read(download).records) == before


def retouch(text: str, how: str) -> bytes:
    return {
        "bom": text.encode("utf-8-sig"),
        "utf16": text.encode("utf-16"),
        "cp1252": text.replace("MT1; GradWarp", "MT1; GradWarp\u2013").encode("cp1252"),
        "semicolon": text.replace('","', '";"').encode(),
        "tab": text.replace('","', '"\t"').encode(),
        "unquoted": text.replace('"', "").encode(),
        "renamed": text.replace("Image Data ID", "Image_Data_ID").encode(),
        "sep": b"sep=;\r\n" + text.replace('","', '";"').encode(),
        "comments": b"# exported\n#\n\n" + text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "iso dates": redated(text, "%Y-%m-%d"),
        "iso dates with time": redated(text, "%Y-%m-%d %H:%M:%S.0"),
        "german dates": redated(text, "%d.%m.%Y"),
        "british dates": redated(text, "%d/%m/%Y"),
        "dates of Excel": redated(text, "%d-%b-%y"),
    }[how]


def redated(text: str, written: str) -> bytes:
    def change(match: re.Match[str]) -> str:
        return f'"{datetime.strptime(match[1], "%m/%d/%Y"):{written}}"'

    return re.sub(r'"(\d+/\d+/\d{4})"', change, text).encode()


@pytest.mark.parametrize(
    "how",
    [
        *("bom", "utf16", "cp1252", "semicolon", "tab", "unquoted", "renamed", "crlf"),
        *("sep", "comments"),
        *("iso dates", "iso dates with time", "german dates", "british dates", "dates of Excel"),
    ],
)
def test_table_saved_again_by_a_spreadsheet_reads_the_same(download, table, how):
    before = [(r.image_id, r.label, r.acq_date, r.reason) for r in read(download).records]
    table.write_bytes(retouch(table.read_text(), how))
    after = [(r.image_id, r.label, r.acq_date, r.reason) for r in read(download).records]
    assert after == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"<!DOCTYPE html><html>log in</html>", "a web page"),
        (b"Image Data ID,Subject\0", "NUL bytes"),
        (b"Image Data ID,Subject,Group,Description,Acq Date\n", "a header and no rows"),
        (b"Image Data ID,Subject,Sex\nI9000001,999_S_0001,F\n", "no column desc.*Subject, Sex"),
        (b"Image Data ID,Subject,Group,Description,Acq Date,group\n1,2,3,4,5,6\n", "appears twice"),
        (
            b"Image Data ID,Subject,Group,Description,Acq Date\nI1,999_S_0001,AD,MPR,1/2/2006,x\n",
            "line 2 has 6 values for 5 columns",
        ),
    ],
)
def test_unreadable_table_says_what_was_found(download, table, content, message):
    table.write_bytes(content)
    with pytest.raises(TableError, match=f"(?s)BAD_TABLE: .*{message}.*{table.name}"):
        find_collection(download)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"I9000001"', '"unknown"', "BAD_ROW"),
        ('"999_S_0001"', '"999-1"', "BAD_ROW"),
        ("/2011", "-2011", "BAD_DATE"),
    ],
)
def test_unreadable_row_is_named(table, old, new, code):
    assert old in table.read_text()
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(TableError, match=rf"{code}: .*line \d+"):
        read_collection(table)


def test_one_image_in_two_rows_that_differ_is_refused(table, edit):
    edit(lambda lines: [*lines, lines[1].replace('"AD"', '"X"').replace('"CN"', '"X"')])
    with pytest.raises(TableError, match=r"DUPLICATE_ID: .*line 2 .*line \d+"):
        read_collection(table)


def test_missing_and_doubled_tables_are_named(download, table):
    shutil.copy(table, download / "again.csv")
    with pytest.raises(TableError, match=rf"SEVERAL_TABLES.*{table.name}, again\.csv"):
        find_collection(download)
    assert find_collection(download, table).path == table
    table.unlink()
    (download / "again.csv").unlink()
    with pytest.raises(TableError, match=r"NO_TABLE: .*ADNIMERGE_31.* diagnoses, not images"):
        find_collection(download)
    next(download.glob("ADNIMERGE*")).unlink()
    with pytest.raises(TableError, match=r"NO_TABLE: .*no \.csv file"):
        find_collection(download)


def test_other_tables_beside_the_collection_do_no_harm(download):
    (download / "notes.csv").write_text("RID,PTID,VISCODE\n1,999_S_0001,bl\n")
    assert next(download.glob("ADNIMERGE*.csv"))
    assert not codes(download)


def test_missing_folder_and_folder_without_scans(tmp_path):
    with pytest.raises(FolderError, match=r"(?s)NO_FOLDER.*nowhere.*synth"):
        discover(tmp_path / "nowhere")
    (tmp_path / "999_S_0001").mkdir()
    (tmp_path / "999_S_0001" / "slice.dcm").touch()
    with pytest.raises(FolderError, match=r"(?s)NO_SCANS.*1 x \.dcm.*dcm2niix"):
        discover(tmp_path)


def test_scan_without_row_and_row_without_scan_are_both_listed(download, edit):
    removed = next(
        path for path in (download / "ADNI").rglob("*.nii.gz") if "Mask" not in str(path)
    )
    removed.unlink()
    dropped: list[str] = []

    def drop(lines: list[str]) -> list[str]:
        index = next(i for i, line in enumerate(lines) if "Scaled" in line and i > 5)
        dropped.append(lines.pop(index))
        return lines

    edit(drop)
    problems = {problem.code: problem for problem in read(download).problems}
    assert problems["NO_SCAN"].image_id in removed.name
    assert problems["NO_ROW"].image_id in dropped[0]
    assert "line" in problems["NO_SCAN"].path
    assert count_line(read(download).records).endswith("bad 1")
    assert tally(problems.values()) == "bad: 1 x NO_ROW; rows without a file: 1 x NO_SCAN"


def lines_with(path: Path, word: str) -> list[int]:
    return [n for n, line in enumerate(path.read_text().splitlines(), 1) if word in line]


def test_unknown_group_is_one_problem_that_names_the_value(download, table, edit):
    edit(lambda lines: [lines[0], *(line.replace('"AD"', '"Patient"') for line in lines[1:])])
    reading = read(download)
    (problem,) = reading.problems
    assert "'Patient'" in problem.detail
    assert problem.scans == sum(r.problem == "UNKNOWN_LABEL" for r in reading.records) > 1
    assert problem.path.endswith(f"line {min(lines_with(table, 'Patient'))}")
    assert "--data.diagnosis_csv / --diagnosis-csv" in problem.action


def test_subject_in_two_classes_is_an_error_for_all_its_scans(download, edit):
    def tear(lines: list[str]) -> list[str]:
        twice = next(i for i, line in enumerate(lines[2:], 2) if line[13:24] == lines[i - 1][13:24])
        lines[twice] = (
            lines[twice].replace('"AD"', '"CN"', 1)
            if '"AD"' in lines[twice]
            else (lines[twice].replace('"CN"', '"AD"', 1))
        )
        return lines

    edit(tear)
    conflicts = [p for p in read(download).problems if p.code == "LABEL_CONFLICT"]
    assert len(conflicts) == 2
    assert len({problem.subject for problem in conflicts}) == 1


def test_one_image_id_in_two_files_is_an_error(download):
    path = next((download / "ADNI").rglob("*.nii.gz"))
    shutil.copy(path, path.with_name(path.name.replace("ADNI_", "COPY_")))
    assert codes(download) == {"DUPLICATE_ID"}


def test_scan_in_the_wrong_subject_folder_is_an_error(download):
    first, second = sorted((download / "ADNI").iterdir())[:2]
    path = next(first.rglob("*.nii.gz"))
    path.rename(second / path.name)
    assert codes(download) == {"SUBJECT_MISMATCH"}


def test_scan_without_image_id_is_an_error(download):
    path = next((download / "ADNI").rglob("*.nii.gz"))
    path.rename(path.parents[2] / "scan.nii.gz")
    assert "NO_IMAGE_ID" in codes(download)


@pytest.mark.parametrize(
    ("description", "wanted"),
    [
        ("MPR; GradWarp; B1 Correction; N3; Scaled", True),
        ("MPR____N3__Scaled_2", True),
        ("MT1; GradWarp; N3m", True),
        ("MP-RAGE REPEAT", True),
        ("MPRAGE_SENSE2", True),
        ("Accelerated Sagittal MPRAGE", True),
        ("IR-FSPGR", True),
        ("Accelerated Sagittal MPRAGE_ND", False),
        ("MPR; GradWarp; B1 Correction; Mask", False),
        ("Spatially Normalized, Masked and N3 corrected T1 image", False),
        ("HHP 6 DOF AC-PC registered MPRAGE", False),
        ("HarP 135 final release", False),
        ("Axial T2 STAR", False),
    ],
)
def test_only_whole_head_t1_series_are_taken(description, wanted):
    assert is_t1(description) is wanted


def test_best_series_of_a_visit_is_taken_and_the_others_name_it(download, edit):
    path = next(p for p in (download / "ADNI").rglob("*.nii.gz") if "Scaled" in p.name)
    image = path.parent.name
    twin = path.parent.parent / "I9999999" / path.name.replace(image, "I9999999")
    twin.parent.mkdir()
    shutil.copy(path, twin)

    def add(lines: list[str]) -> list[str]:
        row = next(line for line in lines if image in line)
        return [*lines, row.replace(image, "I9999999").replace("N3; Scaled", "N3")]

    edit(add)
    by_id = {record.image_id: record for record in read(download).records}
    assert by_id["I9999999"].reason == f"other_series:{image}"


def test_manifest_survives_writing_and_reading(tiny_cohort, tmp_path):
    records = read(tiny_cohort).records
    write_manifest(tmp_path / "manifest.tsv", records)
    assert read_manifest(tmp_path / "manifest.tsv") == records


def series(name: str, **facts: object) -> ScanRecord:
    return ScanRecord(subject="", path=name, description=name, **{"image_id": "I9"} | facts)


@pytest.mark.parametrize(
    ("best", "other"),
    [
        (series("MPR; GradWarp; N3; Scaled"), series("MPR; GradWarp; N3", image_id="I1")),
        (series("MT1; GradWarp; N3m"), series("MPRAGE", image_id="I1")),
        (series("MPRAGE"), series("MPRAGE REPEAT", image_id="I1")),
        (series("MPR"), series("MPR-R", image_id="I1")),
        (
            series("Accelerated Sagittal MPRAGE", phase="ADNI3"),
            series("Sagittal MPRAGE", phase="ADNI3", image_id="I1"),
        ),
        (
            series("MPRAGE", phase="ADNI1", field_strength=1.5),
            series("MPRAGE", phase="ADNI1", field_strength=3.0, image_id="I1"),
        ),
        (
            series("MPRAGE", phase="ADNI2", field_strength=3.0),
            series("MPRAGE", phase="ADNI2", field_strength=1.5, image_id="I1"),
        ),
        (series("MPRAGE", image_id="I9"), series("MPRAGE", image_id="I10")),
    ],
)
def test_series_are_preferred_in_the_documented_order(best, other):
    assert preference(best) < preference(other)


ADVANCED = """"Subject ID","Phase","Sex","Research Group","Visit","Study Date","Age","Modality",\
"Description","Imaging Protocol","Image ID"
"""


def test_advanced_search_and_new_image_tables_are_understood(tmp_path):
    path = tmp_path / "search.csv"
    row = '"999_S_0001","ADNI1","F","AD","m06","3/1/2010","75.3","MRI","MPR",'
    row += '"Field Strength=1.5","42"'
    path.write_text(ADVANCED.replace("\\\n", "") + row + "\n")
    found = read_collection(path).rows["I42"]
    assert (found.subject, found.group, found.age) == ("999_S_0001", "AD", 75.3)
    assert (found.field_strength, found.phase, found.visit) == (1.5, "ADNI1", "m06")
    path.write_text(
        "subject_id,image_date,image_id,series_id,image_type,image_description,VISCODE2\n"
        "999_S_0001,2010-03-01,42,7,Pre-processed,MPR; GradWarp,m06\n"
    )
    found = read_collection(path)
    assert found.rows["I42"].visit == "m06"
    assert not found.has_groups


def test_table_without_groups_needs_diagnoses(download, table):
    text = table.read_text().replace('"Group"', '"Something"')
    table.write_text(text)
    with pytest.raises(TableError, match=r"(?s)BAD_TABLE: no column group.*--diagnosis-csv"):
        read(download)
