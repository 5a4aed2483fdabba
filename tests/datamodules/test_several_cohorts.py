"""Several cohorts in one table, and whole cohorts or sites held out."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from datamodules import ADNIDataModule
from datamodules.cli import main
from datamodules.errors import SplitError
from datamodules.joining import joined
from datamodules.labels import TASKS
from datamodules.records import ScanRecord, read_manifest, write_manifest
from datamodules.space import name_grids
from datamodules.split_drawing import make_split
from datamodules.synth import CohortSpec, generate

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory) -> Path:
    """Folders ``here`` (a portal download) and ``there`` (BIDS, another hospital)."""
    folder = tmp_path_factory.mktemp("cohorts")
    generate(folder / "here", CohortSpec((("AD", 4), ("NC", 4)), 8.0), workers=1)
    other = CohortSpec((("AD", 3), ("NC", 3)), 8.0, seed=1, elsewhere=True, layout="bids")
    generate(folder / "there", other, workers=1)
    return folder


@pytest.fixture(scope="module")
def table(cohorts) -> Path:
    path = cohorts / "out" / "all.csv"
    named = [f"here={cohorts / 'here'}", f"there={cohorts / 'there'}"]
    assert main(["join", *named, "--out", str(path)]) == 0
    return path


def person(name: str, cohort: str = "", **known: object) -> ScanRecord:
    known = {"label": int(name[-1]) % 2, "image_id": f"I{name}"} | known
    return ScanRecord(subject=name, path=f"{name}.nii", cohort=cohort, **known)


def test_one_table_holds_the_scans_of_both_and_says_where_each_is_from(table):
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cohort"] for row in rows] == ["here"] * 8 + ["there"] * 6
    assert {row["label"] for row in rows} == {"AD", "NC"}
    assert all(Path(row["path"]).is_file() for row in rows)


def test_it_is_checked_as_any_other_and_the_cohort_is_in_the_manifest(table, tmp_path, capsys):
    assert main(["check", str(table), "--out", str(tmp_path / "check")]) == 0
    records = read_manifest(tmp_path / "check" / "manifest.tsv")
    assert sum(record.used for record in records) == 14
    assert [r.cohort for r in records].count("there") == 6
    assert "here: 8, there: 6" in capsys.readouterr().out


def test_a_person_in_two_cohorts_is_refused(cohorts, tmp_path, capsys):
    twice = [f"{name}={cohorts / 'here'}" for name in "ab"]
    assert main(["join", *twice, "--out", str(tmp_path / "all.csv")]) == 1
    assert "TWO_COHORTS: 8 name(s) of people occur in a and in b" in capsys.readouterr().err
    assert not (tmp_path / "all.csv").exists()


def test_an_image_id_that_two_cohorts_have_gets_the_name_of_its_cohort():
    found = {"a": [person("p1", image_id="I1")], "b": [person("p2", image_id="I1")]}
    assert [row["image_id"] for row in joined(found, TASKS["ad_nc"])] == ["I1", "b_I1"]


def test_a_cohort_that_is_left_out_is_the_test_set_and_nothing_else_is(table, tmp_path):
    command = ["split", str(table), "--val", "0.3", "--leave-out", "cohort=there"]
    assert main([*command, "--out", str(tmp_path / "split.json")]) == 0
    split = json.loads((tmp_path / "split.json").read_text())
    assert len(split["test"]) == 6
    assert all(subject.startswith("998") for subject in split["test"])
    assert not any(subject.startswith("998") for subject in split["train"] + split["val"])


def test_the_data_module_leaves_a_cohort_out(table, tmp_path):
    module = ADNIDataModule(
        table, leave_out="cohort=here", val_fraction=0.34, cache_dir=tmp_path / "cache"
    )
    module.prepare_data()
    module.setup()
    assert {record.cohort for record in module.scans("test")} == {"here"}
    assert {r.cohort for part in ("train", "val") for r in module.scans(part)} == {"there"}


def test_a_site_is_left_out_likewise_and_one_that_is_not_there_is_named():
    people = [person(f"p{n:02}", site=str(n // 10)) for n in range(30)]
    split = make_split(people, 0.2, 0.2, 0, leave_out="site=2")
    assert split.test == tuple(f"p{n}" for n in range(20, 30))
    with pytest.raises(SplitError, match=r"(?s)none of 30 people have site 7.*0: 10, 1: 10"):
        make_split(people, 0.2, 0.2, 0, leave_out="site=7")
    with pytest.raises(SplitError, match="all of 30 people have cohort x"):
        make_split([replace(p, cohort="x") for p in people], 0.2, 0.2, 0, leave_out="cohort=x")
    with pytest.raises(SplitError, match="nothing can be left out by 'age=70'"):
        make_split(people, 0.2, 0.2, 0, leave_out="age=70")


def test_without_a_test_set_every_fold_tests_once_and_another_one_chooses_the_epoch():
    people = [person(f"p{n:02}") for n in range(40)]
    split = make_split(people, 0.2, 0.0, 0, folds=4)
    parts = [split.of_fold(number) for number in range(4)]
    assert sorted(s for part in parts for s in part.test) == [p.subject for p in people]
    for part in parts:
        assert sorted((*part.train, *part.val, *part.test)) == [p.subject for p in people]
        assert len(part.val) == len(part.test) == 10
    with pytest.raises(SplitError, match="LEAK"):  # a file in which somebody made a fold the test
        replace(split, test=split.folds[0]).of_fold(0)
    with pytest.raises(SplitError, match="2 folds cannot test, validate and train"):
        make_split(people, 0.2, 0.0, 0, folds=2).of_fold(0)


def test_grids_are_named_with_the_cohorts_that_have_them():
    near = [person(f"p{n}", "a", shape="9 9 9", middle_mm="0 0 0", dx="AD") for n in range(2)]
    far = [person(f"q{n}", "b", shape="8 8 8", middle_mm="1 0 0", dx="NC") for n in range(3)]
    named = [replace(record, registered="yes") for record in near + far]
    assert "3 (3 NC b) on 8x8x8" in name_grids(named)[0].detail


def test_a_manifest_of_one_cohort_is_as_it_was(tmp_path):
    write_manifest(tmp_path / "one.tsv", [person("p1")])
    write_manifest(tmp_path / "two.tsv", [person("p1", "a")])
    heads = [(tmp_path / f"{n}.tsv").read_text().splitlines()[0] for n in ("one", "two")]
    assert ["cohort" in head for head in heads] == [False, True]
    assert read_manifest(tmp_path / "one.tsv") == [person("p1")]
    assert read_manifest(tmp_path / "two.tsv") == [person("p1", "a")]
