from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import permutations

import pytest

from datamodules import ADNIDataModule
from datamodules.cli import main
from datamodules.errors import DataError, Problem, ProblemsError, ScanReadError, SplitError
from datamodules.labels import TASKS
from datamodules.records import ScanRecord
from datamodules.report import first_scans
from datamodules.split_drawing import extend_split, make_split, rarest_classes
from datamodules.splits import SPLITS, Split, assign, check_leak, load_split, save_split
from datamodules.synth import CohortSpec, generate


def cohort(subjects: int = 60, visits: int = 3) -> list[ScanRecord]:
    return [
        ScanRecord(
            subject=f"999_S_{n:04d}",
            image_id=f"I{9_000_000 + 10 * n + visit}",
            path="",
            label=n % 2,
            sex="FM"[n // 2 % 2],
            age=60.0 + n % 25,
            acq_date=f"2010-{visit + 1:02d}-01",
            sha256=f"{n}-{visit}",
        )
        for n in range(subjects)
        for visit in range(visits)
    ]


def test_no_subject_is_in_two_parts_and_classes_are_balanced():
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    parts = [set(split.train), set(split.val), set(split.test)]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 60
    assert [len(part) for part in parts] == [36, 12, 12]
    for part in parts:
        assert sum(int(subject[-4:]) % 2 for subject in part) == len(part) / 2
    assert split.stratified_on == "label, sex, age"
    check_leak(assign(cohort(), split))


def test_split_depends_on_the_seed_and_not_on_the_order_of_rows():
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    assert make_split(cohort()[::-1], 0.2, 0.2, seed=0) == split
    assert make_split(cohort(), 0.2, 0.2, seed=1) != split


def test_small_cohorts_are_stratified_on_what_is_possible():
    assert make_split(cohort(8), 0.25, 0.25, seed=0).stratified_on == "label"
    with pytest.raises(SplitError, match=r"(?s)TOO_FEW_SUBJECTS.*2 of label 0.*more subjects"):
        make_split(cohort(4), 0.25, 0.25, seed=0)


def test_unknown_age_and_sex_do_not_stop_a_split():
    bare = [replace(record, age=None, sex="") for record in cohort()]
    assert make_split(bare, 0.2, 0.2, seed=0).stratified_on == "label, sex, age"


def test_senseless_fractions_are_refused():
    for fractions in ((0.0, 0.2), (0.5, 0.5), (1.2, 0.1), (0.2, -0.1)):
        with pytest.raises(SplitError, match="BAD_FRACTION"):
            make_split(cohort(), *fractions, seed=0)


def test_test_set_may_be_left_out():
    assert make_split(cohort(), 0.2, 0.0, seed=0).test == ()


def test_leaks_are_refused_wherever_they_come_from(tmp_path):
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    save_split(tmp_path / "split.json", split)
    content = json.loads((tmp_path / "split.json").read_text())
    content["test"].append(content["train"][0])
    (tmp_path / "leak.json").write_text(json.dumps(content))
    with pytest.raises(SplitError, match=r"(?s)LEAK.*in train and in test.*leak\.json"):
        load_split(tmp_path / "leak.json")
    records = assign(cohort(), split)
    records[0] = replace(records[0], split="val" if records[0].split != "val" else "test")
    with pytest.raises(SplitError, match=r"LEAK.*subject in two parts.*999_S_0000"):
        check_leak(records)


def test_one_scan_under_two_subjects_is_a_leak():
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    records = assign(cohort(), split)
    other = next(i for i, r in enumerate(records) if r.split != records[0].split)
    records[other] = replace(records[other], sha256=records[0].sha256)
    with pytest.raises(SplitError, match=r"LEAK.*file content of image.*I9000000"):
        check_leak(records)


def test_split_file_is_kept_and_must_fit_the_data(tmp_path):
    path = tmp_path / "split.json"
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    save_split(path, split)
    save_split(path, split)
    assert load_split(path) == split
    with pytest.raises(SplitError, match="SPLIT_EXISTS"):
        save_split(path, make_split(cohort(), 0.2, 0.2, seed=1))
    with pytest.raises(SplitError, match=r"(?s)NOT_IN_SPLIT: 4 subject.*999_S_0060.*split\.json"):
        assign(cohort(64), split, str(path))
    path.write_text("{}")
    with pytest.raises(SplitError, match=r"(?s)BAD_SPLIT.*split\.json"):
        load_split(path)


def test_split_command_writes_once(tiny_cohort, tmp_path, capsys):
    command = ["split", str(tiny_cohort), "--out", str(tmp_path / "s.json"), "--val", "0.2"]
    assert main([*command, "--test", "0.2"]) == 0
    assert "stratified on" in capsys.readouterr().out
    assert main([*command, "--test", "0.3"]) == 1
    assert "SPLIT_EXISTS" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        DataError("CODE", "what", "where", "next"),
        ScanReadError("UNREADABLE", "what", "/a/b.nii", "next"),
        ProblemsError([Problem("EMPTY", "0 bytes", "again", "/a", "999_S_0001", "I1")], "/a", "/r"),
    ],
)
def test_errors_survive_the_way_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_split_of_two_tasks_holds_out_the_same_people_in_both(tmp_path, capsys):
    groups = (("AD", 4), ("NC", 4), ("sMCI", 4), ("pMCI", 4))
    generate(tmp_path / "adni", CohortSpec(groups, 8.0, "L1", visits=("bl", "m36")))
    command = ["split", str(tmp_path / "adni"), "--val", "0.25", "--test", "0.25"]
    both = tmp_path / "both.json"
    assert main([*command, "--task", "ad_nc", "--task", "pmci_smci", "--out", str(both)]) == 0
    parts = []
    for task in ("ad_nc", "pmci_smci"):
        data = ADNIDataModule(
            tmp_path / "adni", task=task, split_file=both, cache_dir=tmp_path / "cache"
        )
        data.prepare_data()
        data.setup()
        parts.append({part: {r.subject for r in data.scans(part)} for part in SPLITS})
        for part in SPLITS:
            assert {record.label for record in data.scans(part)} == {0, 1}
    assert parts[0]["train"] & parts[1]["train"], "nobody is in both tasks, so this shows nothing"
    for one, other in permutations(SPLITS, 2):
        assert not parts[0][one] & parts[1][other]

    third = ADNIDataModule(tmp_path / "adni", task="three_way", split_file=both, cache_dir=tmp_path)
    with pytest.raises(SplitError, match=r"(?s)OTHER_RULE.*ad_nc\+pmci_smci.*--task ONE"):
        third.prepare_data()
    more = ["--extend", str(both), "--out", str(tmp_path / "more.json")]
    capsys.readouterr()
    assert main([*command, "--task", "ad_nc", *more]) == 1
    assert "OTHER_TASKS: the split serves ad_nc+pmci_smci" in capsys.readouterr().err
    assert main([*command, *more]) == 0
    assert load_split(tmp_path / "more.json") == load_split(both)
    # of an old file it is not known for which tasks it was made
    save_split(tmp_path / "old.json", replace(load_split(both), task=""))
    more = ["--extend", str(tmp_path / "old.json"), "--out", str(tmp_path / "new.json")]
    assert main([*command, *more]) == 0


def test_who_is_in_two_tasks_counts_for_the_rarer_class():
    ad_nc = [ScanRecord(subject=s, image_id="", path="", label=int(s < "d")) for s in "abcdef"]
    mci = [ScanRecord(subject=s, image_id="", path="", label=int(s == "c")) for s in "cg"]
    unused = [replace(mci[0], subject="h", reason="not_in_task", label=None)]
    found = rarest_classes({TASKS["ad_nc"]: ad_nc, TASKS["pmci_smci"]: [*mci, *unused]})
    assert found == dict.fromkeys("ab", "AD") | dict.fromkeys("def", "NC") | {
        "c": "pMCI",
        "g": "sMCI",
    }


def test_folds_share_nobody_and_hold_every_class():
    split = make_split(cohort(), 0.2, 0.2, seed=0, folds=4)
    assert [len(fold) for fold in split.folds] == [12] * 4
    assert len({s for fold in (*split.folds, split.test) for s in fold}) == 60
    for number in range(4):
        today = split.of_fold(number)
        assert today.val == split.folds[number]
        assert len(today.train) == 36
        assert sum(int(subject[-4:]) % 2 for subject in today.val) == 6
        assert {r.fold for r in assign(cohort(), today) if r.split == "val"} == {number}
        assert {r.fold for r in assign(cohort(), today) if r.split == "test"} == {None}
        check_leak(assign(cohort(), today))
    assert len({split.of_fold(n).fingerprint for n in range(4)}) == 4
    with pytest.raises(SplitError, match="NO_FOLD: fold 4 of a split with 4"):
        split.of_fold(4)
    with pytest.raises(SplitError, match=r"(?s)TOO_FEW_SUBJECTS.*40 folds of 48.*24 of label 0"):
        make_split(cohort(), 0.2, 0.2, seed=0, folds=40)


def test_folds_survive_their_file(tmp_path):
    split = make_split(cohort(), 0.2, 0.2, seed=0, folds=4)
    save_split(tmp_path / "folds.json", split)
    assert load_split(tmp_path / "folds.json") == split
    content = json.loads((tmp_path / "folds.json").read_text())
    content["folds"][1].append(content["folds"][0][0])
    (tmp_path / "leak.json").write_text(json.dumps(content))
    with pytest.raises(SplitError, match=r"LEAK.*in fold 0 and in fold 1"):
        load_split(tmp_path / "leak.json")


def test_field_strength_is_stratified_where_it_is_known():
    fields = [
        replace(r, field_strength=1.5 if int(r.subject[-4:]) % 8 < 4 else 3.0) for r in cohort(240)
    ]
    split = make_split(fields, 0.2, 0.2, seed=0)
    assert split.stratified_on == "label, sex, age, field strength"
    weak = {r.subject for r in fields if r.field_strength == 1.5}
    for part in (split.train, split.val, split.test):
        assert abs(len(weak & set(part)) / len(part) - 0.5) < 0.03


def test_new_subjects_join_training_and_move_nobody():
    split = make_split(cohort(), 0.2, 0.2, seed=0)
    longer = extend_split(split, cohort(64))
    assert (longer.val, longer.test) == (split.val, split.test)
    assert set(longer.train) - set(split.train) == {f"999_S_{n:04d}" for n in range(60, 64)}
    folds = make_split(cohort(), 0.2, 0.2, seed=0, folds=4)
    longer = extend_split(folds, cohort(64))
    assert [len(fold) for fold in longer.folds] == [13] * 4
    assert longer.test == folds.test


def test_two_spellings_of_one_subject_in_two_parts_are_a_leak():
    with pytest.raises(SplitError, match="LEAK: subject 002_S_0295 is in train and in val"):
        Split(("sub-ADNI002S0295",), ("002_S_0295",), (), 0, 0.5, 0.0, "label")


def test_one_picture_in_two_parts_is_a_leak():
    records = assign(cohort(), make_split(cohort(), 0.2, 0.2, seed=0))
    other = next(i for i, r in enumerate(records) if r.split != records[0].split)
    records[0] = replace(records[0], content="I9000000")
    records[other] = replace(records[other], content="I9000000")
    with pytest.raises(SplitError, match=r"LEAK: picture of image in two parts.*I9000000"):
        check_leak(records)


def test_split_command_makes_folds_and_extends(tiny_cohort, tmp_path, capsys):
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert main(["split", str(tiny_cohort), "--out", old, "--folds", "3", "--test", "0.3"]) == 0
    assert "fold 2" in capsys.readouterr().out
    assert main(["split", str(tiny_cohort), "--out", new, "--extend", old]) == 0
    assert load_split(tmp_path / "new.json") == load_split(tmp_path / "old.json")
    assert load_split(tmp_path / "old.json").task == "ad_nc"
    assert load_split(tmp_path / "old.json").rule["horizon_months"] == 36


def test_the_first_of_ten_sessions_is_not_the_tenth():
    visits = [
        ScanRecord(subject="p", image_id=f"p_{name}", path="", session=name, label=0)
        for name in ("10", "9", "2")
    ]
    assert [record.session for record in first_scans(visits)] == ["2"]
