from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from test_adni_datamodule import prepared
from test_splits_by_subject import cohort

from datamodules.cli import main
from datamodules.records import ScanRecord, read_manifest, write_manifest
from datamodules.report import demographics, first_scans, p_values, shareable
from datamodules.space import name_grids
from datamodules.synth import CohortSpec, generate

pytestmark = pytest.mark.usefixtures("undrawn")


def patients() -> list[ScanRecord]:
    named = [
        replace(r, dx="AD" if r.label else "NC", mmse=29.0 - 6 * r.label) for r in cohort(8, 2)
    ]
    return [*named, replace(named[0], subject="999_S_0099", reason="short_follow_up")]


def test_demographic_table_counts_people_at_their_first_scan():
    normal, ill, everybody = demographics(patients())
    assert (normal.diagnosis, normal.subjects, normal.scans) == ("NC", 4, 8)
    assert (ill.diagnosis, ill.males_females, ill.mmse) == ("AD", "2/2", "23.00 ± 0.00")
    assert ill.age == "64.00 ± 2.58"  # 61, 63, 65, 67
    assert (everybody.subjects, everybody.scans, everybody.males_females) == (8, 16, "4/4")


def test_unknown_values_are_counted_and_not_guessed():
    bare = [replace(record, age=None, sex="", mmse=None) for record in patients()]
    group = demographics(bare)[0]
    assert (group.age, group.mmse, group.males_females) == ("-", "-", "0/0 (4 unknown)")
    half = [replace(r, mmse=28.0 if r.subject == "999_S_0000" else None) for r in patients()]
    assert demographics(half)[0].mmse == "28.00 (3 unknown)"


def test_table_comes_from_any_manifest(tmp_path):
    write_manifest(tmp_path / "manifest.tsv", patients())
    assert demographics(read_manifest(tmp_path / "manifest.tsv")) == demographics(patients())


def test_merged_classes_have_one_name():
    mixed = [replace(r, dx="pMCI" if r.label else "sMCI", label=1) for r in patients()]
    assert [group.diagnosis for group in demographics(mixed)] == ["MCI"]


def test_shareable_report_names_nobody(tiny_cohort, tmp_path):
    module = prepared(tiny_cohort, tmp_path / "cache")
    text = (module.state_dir / "shareable.json").read_text()
    for record in module.records:
        assert record.subject not in text
        assert record.image_id not in text
        assert record.acq_date not in text
    assert str(tiny_cohort) not in text
    assert not re.search(r"\d{3}_S_\d{4}|I9\d{6}|\d{4}-\d\d-\d\d", text)
    content = json.loads(text)
    assert content["used"] == len(content["scans"]) == sum(r.used for r in module.records)
    assert content["found"] == content["used"] + sum(content["excluded"].values())
    assert content["rule"]["horizon_months"] == 36
    assert {scan["part"] for scan in content["scans"]} == {"train", "val", "test"}


def test_report_tells_whether_the_same_scans_were_used():
    records = patients()
    moved = [replace(r, path=f"/elsewhere/{r.path}", mtime_ns=5) for r in records[::-1]]
    same, other = shareable(moved, "ad_nc", {}), shareable(records[1:], "ad_nc", {})
    assert same == shareable(records, "ad_nc", {})
    assert same["sha256_of_all"] != other["sha256_of_all"]


@pytest.mark.parametrize("command", ["check", "manifest"])
def test_commands_print_full_names_and_the_table(
    tiny_cohort, tmp_path, capsys, command, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / ("a" * 60) / "report"
    assert main([command, str(tiny_cohort), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed
    assert str(tiny_cohort) in printed.splitlines()[0]
    assert re.search(r"\n +NC +AD +all +p\nsubjects +6 +6 +12", printed)
    for row in (
        "M/F",
        "age",
        "MMSE",
        "CDR-SB",
        "APOE4 carriers",
        "field strength",
        "phase",
        "site",
    ):
        assert re.search(rf"\n{row} +\S+", printed)


@pytest.mark.conformance
def test_site_bias_of_a_cohort_shows_in_the_table(tmp_path, capsys):
    p = {}
    for bias in ("0", "1"):
        root = tmp_path / f"bias{bias}"
        spec = CohortSpec((("AD", 20), ("NC", 20)), 10.0, layout="csv", site_bias=float(bias))
        generate(root, spec)
        assert main(["manifest", str(root), "--out", str(tmp_path / f"{bias}.tsv")]) == 0
        printed = capsys.readouterr().out
        assert ("note: the classes differ in site (p <0.001)" in printed) is (bias == "1")
        p[bias] = p_values(read_manifest(tmp_path / f"{bias}.tsv"))["sites"]
    assert p["1"] < 0.001 < 0.01 < p["0"]


def test_p_values_are_those_of_the_usual_tests():
    records = patients()
    ages = [[r.age for r in first_scans(records) if r.label == label] for label in (0, 1)]
    sexes = [Counter(r.sex for r in first_scans(records) if r.label == label) for label in (0, 1)]
    found = p_values(records)
    assert found["age"] == pytest.approx(stats.ttest_ind(*ages).pvalue)
    table = [[counts[sex] for sex in "FM"] for counts in sexes]
    assert found["males_females"] == pytest.approx(stats.chi2_contingency(table).pvalue)
    assert "sites" not in found  # the same for all
    # the same within each class, and another one in the other class
    table = np.diag([count.total() for count in sexes])
    assert found["mmse"] == pytest.approx(stats.chi2_contingency(table).pvalue)


def test_what_a_confound_may_be_is_counted_by_value():
    facts = [
        {"field_strength": f, "phase": "ADNI1", "site": f"9{n}", "apoe4": n % 3, "cdr_sb": n / 2}
        for n, f in enumerate((1.5, 3.0, 3.0, None))
    ]
    people = [replace(r, **fact) for r, fact in zip(first_scans(patients())[::2], facts)]
    group = demographics([replace(r, label=0) for r in people])[0]
    assert group.field_strength == "1.5 T: 1, 3 T: 2 (1 unknown)"
    assert (group.phase, group.apoe4, group.cdr_sb) == ("ADNI1: 4", "2/4", "0.75 ± 0.65")
    assert group.sites == "4 (90: 1)"
    many = [replace(r, site=str(n)) for n, r in enumerate(first_scans(patients()))]
    assert demographics(many)[-1].sites == "8 (0: 1)"


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_voxel_sizes_that_go_with_the_classes_are_a_confound(spread):
    random = np.random.default_rng(0)
    sizes = [(1.0, 1.2)[n % 2] + spread * random.normal() for n in range(24)]
    records = [
        ScanRecord(
            subject=f"P{n}",
            image_id=f"I{n}",
            path="",
            label=n % 2,
            dx="NA"[n % 2],
            zooms=f"{s} 1 1",
        )
        for n, s in enumerate(sizes)
    ]
    assert p_values(records)["voxel_mm"] < 1e-4
    mixed = [replace(record, label=(n // 2) % 2) for n, record in enumerate(records)]
    assert p_values(mixed)["voxel_mm"] > 0.05


def test_grids_that_go_with_the_classes_are_named_where_nothing_is_registered():
    def scans(grid_of) -> list[ScanRecord]:
        return [
            ScanRecord(
                subject=f"P{n}",
                image_id=f"I{n}",
                path="p",
                label=n % 2,
                dx=("NC", "AD")[n % 2],
                registered="no",
                shape=grid_of(n),
                zooms="1 1 1",
                middle_mm=f"{n} 0 0",
            )
            for n in range(40)
        ]

    torn = name_grids(scans(lambda n: ("256 256 166", "256 256 180")[n % 2]))
    assert [warning.code for warning in torn] == ["GRIDS"]
    assert "20 AD" in torn[0].detail
    assert name_grids(scans(lambda n: ("256 256 166", "256 256 180")[n // 2 % 2])) == []
    assert name_grids(scans(lambda n: f"256 256 {160 + n}")) == []  # no two alike
