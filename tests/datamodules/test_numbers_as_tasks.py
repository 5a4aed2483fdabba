"""Age and MMSE as tasks: who takes part, with which number, and how people are divided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from datamodules import ADNIDataModule
from datamodules.errors import SplitError
from datamodules.joining import joined
from datamodules.labelling import label_records
from datamodules.labels import TASKS
from datamodules.progression import LabelRule
from datamodules.records import ScanRecord, fingerprint, read_manifest, write_manifest
from datamodules.split_drawing import make_split
from datamodules.splits import permuted


def scan(number: int, group: str = "CN", **known) -> ScanRecord:
    values = {"age": 60.0 + number, "mmse": 20.0 + number % 10, **known}
    name = f"999_S_{number:04d}"
    return ScanRecord(subject=name, image_id=f"I{number}", path=f"{number}", dx_bl=group, **values)


def labelled(task: str, *records: ScanRecord, rule: LabelRule | None = None) -> list[ScanRecord]:
    found, problems = label_records(records, TASKS[task], rule or LabelRule(), None)
    assert not problems
    return found


def test_ages_are_those_of_controls_and_mmse_is_everybodys():
    people = [scan(1), scan(2, "AD"), scan(3, "MCI"), scan(4, "OD"), scan(5, "other"), scan(6, "")]
    reasons = ["", "not_in_task", "not_in_task", "other_dementia", "other_diagnosis"]
    found = labelled("age", *people[:5])
    assert [record.reason for record in found] == reasons
    assert [record.target for record in found] == [61.0, None, None, None, None]
    found = labelled("mmse", *people)
    assert [record.target for record in found if record.used] == [21, 22, 23, 24, 25, 26]


def test_the_rule_says_who_is_a_control_for_ages_too():
    (found,) = labelled("age", scan(1, "SMC"), rule=LabelRule(smc="normal"))
    assert found.used
    assert labelled("ad_nc", scan(1, "OD"), rule=LabelRule(other_dementia="ad"))[0].dx == "AD"


@pytest.mark.parametrize("task", ["age", "mmse"])
def test_a_scan_without_its_number_is_left_out_with_the_reason(task):
    (found,) = labelled(task, scan(1, **{task: None}))
    assert (found.used, found.reason) == (False, f"no_{task}")


def test_somebody_whose_diagnosis_changes_keeps_both_scans_and_both_scores():
    first = scan(1, "MCI", session="M000", mmse=28.0)
    later = replace(first, image_id="I9", path="9", dx_bl="AD", session="M012", mmse=21.0)
    assert [record.target for record in labelled("mmse", first, later)] == [28.0, 21.0]


def test_parts_have_low_and_high_numbers_alike():
    people = labelled("age", *(scan(n) for n in range(100)))
    split = make_split(people, 0.2, 0.2, seed=3)
    assert split.stratified_on.startswith("number")
    ages = {record.subject: record.age for record in people}
    groups = np.linspace(60, 160, 6)
    for part in (split.train, split.val, split.test):
        counts, _ = np.histogram([ages[name] for name in part], groups)
        assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("people", [9, 12, 20, 33])
@pytest.mark.parametrize("fractions", [(0.15, 0.15), (0.2, 0.4), (0.3, 0.0)])
def test_few_people_are_divided_too(people, fractions):
    records = labelled("mmse", *(scan(n, mmse=28.0) for n in range(people)))
    split = make_split(records, *fractions, seed=0)
    assert len({*split.train, *split.val, *split.test}) == people
    folds = make_split(records, *fractions, seed=0, folds=3).folds
    assert max(map(len, folds)) - min(map(len, folds)) <= 3


def test_shuffled_numbers_are_those_of_others_of_the_part():
    records = [replace(r, split="train") for r in labelled("age", *(scan(n) for n in range(30)))]
    found = permuted(records, seed=1)
    assert sorted(r.target or 0 for r in found) == sorted(r.target or 0 for r in records)
    assert sum(new.target == old.target for new, old in zip(found, records)) < 8
    assert [record.age for record in found] == [record.age for record in records]


def test_numbers_survive_a_manifest_and_decide_its_hash(tmp_path):
    records = labelled("age", scan(1), scan(2))
    write_manifest(tmp_path / "manifest.tsv", records)
    assert read_manifest(tmp_path / "manifest.tsv") == records
    other = [replace(records[0], target=50.0), records[1]]
    assert fingerprint(other) != fingerprint(records)


def test_joined_cohorts_keep_diagnoses_and_not_the_name_of_the_number():
    records = labelled("mmse", scan(1, "AD"), scan(2))
    rows = joined({"ONE": records}, TASKS["mmse"])
    assert [row["label"] for row in rows] == ["AD", "NC"]


def test_items_have_the_number_and_the_module_its_scale(tiny_cohort, tmp_path):
    data = ADNIDataModule(
        tiny_cohort,
        "mmse",
        spatial_shape=(16, 16, 16),
        spacing_mm=12.0,
        val_fraction=0.3,
        test_fraction=0.3,
        cache_dir=tmp_path,
        augment=False,
    )
    data.prepare_data()
    data.setup()
    records = data.scans("train")
    item = data.dataset("train")[0]
    assert item["label"].dtype == torch.float32
    assert float(item["label"]) == records[0].mmse
    values = [record.mmse for record in records]
    assert data.target_scale == pytest.approx((np.mean(values), np.std(values)))
    assert "MMSE" in data.describe()
    data.records = [replace(record, target=30.0) for record in data.records]
    with pytest.raises(SplitError, match="MMSE is 30 in all"):
        _ = data.target_scale
