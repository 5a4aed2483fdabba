"""Diagnoses over time, in the words of every table and release."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from datamodules.errors import DataError, TableError
from datamodules.progression import LabelRule
from datamodules.sources.clinical import find_clinical, read_clinical
from datamodules.sources.ids import canonical_session, canonical_subject

ADNIMERGE = """RID,PTID,VISCODE,COLPROT,EXAMDATE,DX_bl,AGE,PTGENDER,MMSE,FLDSTRENG,DX
1,999_S_0001,bl,ADNI1,2010-03-01,LMCI,70.5,Female,27,1.5 Tesla MRI,MCI
1,999_S_0001,m12,ADNI1,2011-03-01,LMCI,70.5,Female,25,,MCI to Dementia
1,999_S_0001,m24,ADNI1,2012-03-01,LMCI,70.5,Female,-4,,
1,999_S_0001,m36,ADNI1,2013-03-01,LMCI,70.5,Female,NA,,-4
"""
DXSUM_OLD = """"Phase","RID","VISCODE","VISCODE2","EXAMDATE","DXCHANGE","DXCURREN"
"ADNI1","1","bl","bl","2010-03-01","","2"
"ADNI1","1","m12","m12","","-4","3"
"ADNI2","2","v03","bl","2011-05-01","1",""
"ADNI2","2","v11","m12","2012-05-03","4.0",""
"ADNI2","2","v21","m24","2013-05-03","5",""
"ADNI2","2","v31","m36","2014-05-03","8",""
"ADNI2","3","v03","bl","2011-05-01","9",""
"""
DXSUM_NEW = """PTID,RID,VISCODE,VISCODE2,EXAMDATE,DIAGNOSIS,PHASE
999_S_0001,1,bl,bl,2010-03-01,2,ADNI1
999_S_0001,1,m12,m12,2011-03-01,3.0,ADNI1
999_S_0001,1,y4,m96,2018-03-01,Dementia,ADNI3
999_S_10002,10002,4_bl,bl,2023-03-01,1,ADNI4
"""


def table(folder: Path, text: str, name: str = "TABLE.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def course(path: Path, subject: str) -> list[str]:
    person = read_clinical(path).person(subject)
    return [] if person is None else [visit.dx for visit in person.visits]


def test_adnimerge_gives_diagnoses_and_facts_of_each_visit(tmp_path):
    person = read_clinical(table(tmp_path, ADNIMERGE)).person("999_S_0001")
    assert [visit.dx for visit in person.visits] == ["MCI", "AD", "", ""]
    assert [visit.session for visit in person.visits] == ["M000", "M012", "M024", "M036"]
    assert [visit.age for visit in person.visits] == [70.5, 71.5, 72.5, 73.5]
    assert [visit.mmse for visit in person.visits] == [27, 25, None, None]
    assert (person.sex, person.dx_bl, person.visits[0].field_strength) == ("F", "LMCI", 1.5)


def test_all_releases_of_dxsum_are_read(tmp_path):
    old, new = table(tmp_path, DXSUM_OLD, "old"), table(tmp_path, DXSUM_NEW, "new")
    assert course(old, "999_S_0001") == ["MCI", "AD"]  # by RID: old releases have no PTID
    assert course(old, "998_S_0002") == ["NC", "MCI", "AD", "MCI"]
    assert course(old, "999_S_0003") == ["NC"]
    assert course(old, "999_S_0004") == []
    assert course(new, "999_S_0001") == ["MCI", "AD", "AD"]
    assert course(new, "999_S_10002") == ["NC"]


@pytest.mark.parametrize("code", ["2", "2.0", "02"])
def test_a_dementia_of_another_cause_is_told_apart_and_said(tmp_path, code):
    lines = DXSUM_NEW.splitlines()
    own = [f"{lines[0]},DXDDUE", f"{lines[1]},{code}", f"{lines[2]},{code}", f"{lines[3]},1"]
    path = table(tmp_path, "\n".join([*own, f"{lines[4]},-4"]))
    assert course(path, "999_S_0001") == ["MCI", "OD", "AD"]  # the cause of a dementia alone
    (note,) = read_clinical(path).notes
    assert "1 visits of 1 people are dementia of another cause (DXDDUE 2)" in note
    assert "--other-dementia" in note


def test_a_visit_without_a_date_is_placed_by_its_month(tmp_path):
    person = read_clinical(table(tmp_path, DXSUM_OLD)).person("999_S_0001")
    assert [visit.dated for visit in person.visits] == [True, False]
    assert abs((person.visits[1].day - date(2011, 3, 1)).days) <= 1


@pytest.mark.parametrize("wrong", ["perhaps", "4", "NL2"])
def test_unknown_diagnosis_is_named_with_its_line_and_number(tmp_path, wrong):
    path = table(tmp_path, DXSUM_NEW.replace(",1,ADNI4", f",{wrong},ADNI4"))
    message = rf"UNKNOWN_LABEL: line 5: diagnosis '{wrong}' .*; 1 rows have it"
    with pytest.raises(TableError, match=message):
        read_clinical(path)


def test_a_table_of_something_else_shows_its_header(tmp_path):
    with pytest.raises(TableError, match=r"(?s)BAD_TABLE.*rid, viscode.*give ADNIMERGE"):
        read_clinical(table(tmp_path, "RID,VISCODE\n1,bl\n"))


def test_the_only_table_of_diagnoses_in_the_folder_is_taken(tmp_path):
    assert find_clinical(tmp_path, None) is None
    table(tmp_path, "Image Data ID,Subject,Description\n1,2,3\n", "collection.csv")
    first = table(tmp_path, ADNIMERGE, "ADNIMERGE_31Jan2026.csv")
    assert find_clinical(tmp_path, None).path == first
    second = table(tmp_path, DXSUM_NEW, "DXSUM_31Jan2026.csv")
    with pytest.raises(TableError, match=r"SEVERAL_TABLES: 2 tables.*ADNIMERGE_31.*DXSUM_31"):
        find_clinical(tmp_path, None)
    assert find_clinical(tmp_path, second).path == second


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ADNIMERGE_31Jan2026.csv", "<!DOCTYPE html><html>log in</html>", "a web page"),
        ("adnimerge.csv", ADNIMERGE.replace("PTID", "WHO"), "the header is: rid, who"),
        ("DXSUM_PDXCONADNIALL.csv", "", "an empty file"),
        ("DXSUM_31Jan2026.csv", DXSUM_NEW.replace("DIAGNOSIS", "STATE"), "the header is: ptid"),
        ("ADNIMERGE.xlsx", "PK\3\4\0\0", "not a text file"),
    ],
)
def test_a_broken_table_of_that_name_is_an_error_and_no_other_takes_its_place(
    tmp_path, name, content, message
):
    table(tmp_path, DXSUM_NEW, "good.csv")
    path = table(tmp_path, content, name)
    with pytest.raises(TableError, match=rf"(?s)BAD_TABLE: .*{message}.*{name}"):
        find_clinical(tmp_path, None)
    path.rename(tmp_path / "ADNIMERGE_DICT_31Jan2026.csv")  # the portal's list of columns
    assert find_clinical(tmp_path, None).path.name == "good.csv"


def test_numbers_that_pandas_made_floats_are_understood(tmp_path):
    floats = DXSUM_NEW.replace(",1,bl", ",1.0,bl").replace(",2,ADNI1", ",2.0,ADNI1")
    path = table(tmp_path, floats.replace("999_S_0001,", ","))
    assert course(path, "999_S_0001")[0] == "MCI"


@pytest.mark.parametrize(
    "spelling",
    [
        "999_S_0001",
        "999_s_0001",
        "sub-ADNI999S0001",
        "sub-999S0001",
        "ADNI999S0001",
        " 999_S_0001 ",
    ],
)
def test_every_spelling_of_a_subject_is_one_subject(spelling):
    assert canonical_subject(spelling) == "999_S_0001"


def test_subjects_of_adni4_and_other_studies_keep_their_names():
    assert canonical_subject("sub-ADNI100S10029") == "100_S_10029"
    assert canonical_subject("sub-OAS30001") == "OAS30001"


@pytest.mark.parametrize(
    ("text", "month"),
    [("bl", "M000"), ("m0", "M000"), ("ses-M00", "M000"), ("m06", "M006"), ("ses-M108", "M108")],
)
def test_sessions_are_months(text, month):
    assert canonical_session(text) == month


def test_screening_is_not_baseline():
    assert [canonical_session(text) for text in ("sc", "f", "uns1", "4_init", "")] == [""] * 5


def test_senseless_rule_is_refused():
    with pytest.raises(DataError, match="BAD_RULE: horizon 2, tolerance 3"):
        LabelRule(horizon_months=2)


ADSL = """STUDYID,USUBJID,SUBJID,SITEID,AGE,SEX,ENRLFL,ENRLDT,DX
ADNI,ADNI-901-00001,00001,901,70.5,Female,Yes,2010-03-01,CN
ADNI,ADNI-902-10002,10002,902,80,Male,Yes,2023-03-01,DEM
ADNI,ADNI-901-00003,00003,901,75,Male,No,NA,NA
"""


def test_a_table_of_people_gives_the_diagnosis_at_enrolment_and_says_so(tmp_path):
    found = find_clinical(table(tmp_path, ADSL, "ADSL_2026.csv").parent, None)
    person = found.person("999_S_10002")
    assert [(v.dx, v.day, v.age) for v in person.visits] == [("AD", date(2023, 3, 1), 80)]
    assert (person.sex, person.site) == ("M", "902")
    assert found.person("999_S_0001").visits[0].dx == "NC"
    assert found.person("999_S_0003") is None  # never enrolled
    assert any("who changed later is not known" in note for note in found.notes)


def test_a_table_of_people_adds_age_and_sex_to_diagnoses_over_time(tmp_path):
    table(tmp_path, ADSL, "ADSL_2026.csv")
    found = find_clinical(table(tmp_path, DXSUM_NEW, "DXSUM.csv").parent, None)
    person = found.person("999_S_0001")
    assert [visit.dx for visit in person.visits] == ["MCI", "AD", "AD"]
    assert [visit.age for visit in person.visits] == [70.5, 71.5, 78.5]
    assert person.sex == "F"
    assert any(note.startswith("ADSL_2026.csv: age, sex and site") for note in found.notes)
