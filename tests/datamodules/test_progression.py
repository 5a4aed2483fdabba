from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from itertools import permutations
from pathlib import Path

import pytest

from datamodules import ADNIDataModule
from datamodules.errors import DataError
from datamodules.labelling import label_records
from datamodules.labels import TASKS
from datamodules.progression import LabelRule, Visit, filled, label_visit, visit_of_scan
from datamodules.records import ScanRecord
from datamodules.sources.clinical import Clinical, Person, read_clinical
from datamodules.synth import CohortSpec, generate

START = date(2010, 3, 1)


def history(text: str) -> list[Visit]:
    """``MCI 0 12, AD 24`` as visits."""
    visits = []
    for run in text.split(","):
        dx, *months = run.split()
        visits += [Visit(START + timedelta(days=round(int(m) * 30.44)), dx) for m in months]
    return visits


def label_scan(visits: list[Visit], rule: LabelRule | None = None) -> tuple[str, str]:
    near = visit_of_scan(visits, START, "", (rule or LabelRule()).max_days_apart)
    return label_visit(visits, near, rule) if near else ("", "no_dx_near_scan")


@pytest.mark.parametrize(
    "text",
    [
        "MCI 0 24, AD 24",
        "MCI 0, AD 0",
        "NC 0 12, MCI 12",
        "AD 0 12, NC 12 24",
        "MCI 0 36, AD 36 48",
    ],
)
@pytest.mark.parametrize("reverters", ["exclude", "visit"])
def test_two_diagnoses_of_one_day_are_unstable_in_any_order_of_rows(text, reverters):
    rule = LabelRule(reverters=reverters)
    found = {label_scan(list(order), rule) for order in permutations(history(text))}
    assert found == {("", "unstable")}


def test_of_two_visits_as_near_one_is_taken_in_any_order_of_rows():
    visits = [
        Visit(START - timedelta(days=9), "MCI", mmse=27),
        Visit(START + timedelta(days=9), "NC"),
        Visit(START - timedelta(days=9), "MCI", mmse=26),
    ]
    found = {visit_of_scan(order, START, "", 60) for order in permutations(visits)}
    assert found == {visits[2]}


def test_sessions_that_name_no_time_may_stand_in_any_order(tmp_path):
    header, rows = "participant_id\tsession_id\tdiagnosis", ["a\tMCI", "a\tAD", "b\tMCI"]
    found = set()
    for order in permutations(rows):
        path = tmp_path / "sessions.tsv"
        path.write_text("\n".join([header, *(f"sub-1\tses-{row}" for row in order)]) + "\n")
        person = read_clinical(path).person("1")
        near = visit_of_scan(person.visits, None, "b", 60)
        found.add(label_visit(person.visits, near))
    assert found == {("", "unstable")}


def test_a_dementia_of_another_cause_is_what_the_rule_says():
    visits = history("MCI 0, OD 12 24")
    assert label_scan(visits) == ("", "other_dementia")
    assert label_scan(visits, LabelRule(other_dementia="ad")) == ("pMCI", "")
    ill = history("OD 0 12")
    assert label_scan(ill) == ("", "other_dementia")
    assert label_scan(ill, LabelRule(other_dementia="ad")) == ("AD", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MCI 0 12 24 36 48", "sMCI"),
        ("MCI 0 12, AD 24 36", "pMCI"),
        ("MCI 0, AD 36", "pMCI"),
        ("MCI 0 12 24 36, AD 48", "converts_after_horizon"),
        ("MCI 0 6 12", "short_follow_up"),
        ("MCI 0 24, AD 48", "interval_censored"),
        ("MCI 0, AD 12, MCI 24 36", "unstable"),
        ("MCI 0, NC 12 24 36", "reverted"),
        ("MCI 0, NC 6, MCI 12 24, NC 36, AD 72", "unstable"),
        ("MCI 0", "short_follow_up"),
        ("AD 0 12 24", "AD"),
        ("AD 0, MCI 12", "reverted"),
        ("AD 0", "AD"),
        ("NC 0 12 36", "NC"),
        ("NC 0 12, MCI 24", "unstable"),
        ("SMC 0 12", "smc"),
        ("MCI 12 24 48", "no_dx_near_scan"),
    ],
)
def test_each_course_gets_its_class_or_its_reason(text, expected):
    label, reason = label_scan(history(text))
    assert bool(label) != bool(reason)
    assert label + reason == expected


def test_order_of_visits_and_days_around_the_month_do_not_matter():
    visits = history("MCI 0 12, AD 36")
    late = [replace(v, day=v.day + timedelta(days=17)) for v in visits]
    assert label_scan(late[::-1]) == label_scan(visits)


def test_horizon_and_late_converters_are_a_choice():
    late = history("MCI 0 12 24 36, AD 48")
    assert label_scan(late, rule=LabelRule(late_converters="stable")) == ("sMCI", "")
    assert label_scan(late, rule=LabelRule(horizon_months=48)) == ("pMCI", "")
    early = history("MCI 0 12 24")
    assert label_scan(early, rule=LabelRule(horizon_months=24)) == ("sMCI", "")
    assert label_scan(history("SMC 0 12"), rule=LabelRule(smc="normal")) == ("NC", "")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("AD 0 12", {"ad": "baseline"}, "AD"),
        ("MCI -12, AD 0 12", {}, "AD"),
        ("MCI -12, AD 0 12", {"ad": "baseline"}, "demented_later"),
        ("AD 0, MCI 12", {}, "reverted"),
        ("AD 0, MCI 12", {"reverters": "visit"}, "AD"),
        ("AD -12, MCI -6, AD 0 12", {}, "AD"),  # left and came back: demented ever after
        ("AD -12, MCI -6, AD 0, NC 12", {"reverters": "visit", "ad": "baseline"}, "AD"),
        ("MCI -12, AD 0, MCI 12", {"reverters": "visit", "ad": "baseline"}, "demented_later"),
        ("AD -12, MCI 0 12", {"reverters": "visit"}, "unstable"),  # neither stable nor progressive
    ],
)
def test_who_counts_as_demented_is_a_choice(text, options, expected):
    assert "".join(label_scan(history(text), rule=LabelRule(**options))) == expected


def test_gaps_are_filled_between_equal_diagnoses_only():
    visits = history("MCI -12, AD 12 36, MCI 48")
    gap = [replace(visits[0], day=START + timedelta(days=30 * m), dx="") for m in (0, 24, 42, 60)]
    assert [visit.dx for visit in filled([*gap, *visits])] == [
        "MCI",
        "",
        "AD",
        "AD",
        "AD",
        "",
        "MCI",
        "",
    ]


def record(**facts: object) -> ScanRecord:
    return ScanRecord(subject="999_S_0001", image_id="I9", path="", acq_date=str(START), **facts)


@pytest.mark.parametrize(
    ("text", "task", "options", "expected"),
    [
        ("AD -12 12", "ad_nc", {}, "no_dx_near_scan"),
        ("AD -12 12", "ad_nc", {"gaps": "fill"}, "AD"),
        ("MCI -12, AD 12", "ad_nc", {"gaps": "fill"}, "no_dx_near_scan"),
        ("AD -12, MCI 0 12", "three_way", {}, "unstable"),
        ("AD -12, MCI 0 12", "three_way", {"reverters": "visit"}, "MCI"),
        ("NC -12, MCI 0, NC 12", "three_way", {"reverters": "visit"}, "reverted"),
        ("MCI 0, NC 12, AD 24", "three_way", {"reverters": "visit"}, "unstable"),
        ("AD -12, NC 0 12", "ad_nc", {"reverters": "visit"}, "unstable"),
    ],
)
def test_options_of_the_rule_reach_the_label_of_a_scan(text, task, options, expected):
    visits = tuple(history(text))
    if not any(visit.day == START for visit in visits):
        visits += (replace(visits[0], day=START, dx=""),)
    clinical = Clinical(Path("t.csv"), "t.csv:DX", {"999_S_0001": Person(visits)})
    (found,), _ = label_records([record()], TASKS[task], LabelRule(**options), clinical)
    assert (found.reason or found.dx) == expected
    assert found.used == (found.reason == "")


def test_tolerance_moves_the_horizon_for_visits_only():
    nearly = history("MCI 0 12 34")
    assert label_scan(nearly) == ("sMCI", "")
    assert label_scan(nearly, rule=LabelRule(tolerance_months=1)) == ("", "short_follow_up")
    assert label_scan(history("MCI 0 24, AD 38")) == ("pMCI", "")
    assert label_scan(history("MCI 0 24 37, AD 38")) == ("", "converts_after_horizon")


def test_scan_without_a_date_belongs_to_its_session():
    visits = [
        replace(v, session=f"M{12 * n:03d}") for n, v in enumerate(history("MCI 0 12, AD 24"))
    ]
    assert visit_of_scan(visits, None, "M024", 60) == visits[2]
    assert visit_of_scan(visits, None, "M036", 60) is None
    assert visit_of_scan(visits, START + timedelta(days=50), "M024", 60) == visits[0]


def test_stable_and_progressive_mci_can_be_trained_on(tmp_path):
    spec = CohortSpec(subjects=(("sMCI", 4), ("pMCI", 4)), resolution_mm=8.0)
    root = tmp_path / "cohort"
    generate(root, spec)
    options = {"cache_dir": tmp_path / "cache", "val_fraction": 0.25, "test_fraction": 0.25}
    (table,) = root.glob("ADNIMERGE*.csv")
    moved = table.rename(tmp_path / table.name)
    with pytest.raises(
        DataError, match=r"(?s)NEEDS_HISTORY.*--data\.diagnosis_csv / --diagnosis-csv"
    ):
        ADNIDataModule(root, "pmci_smci", **options).prepare_data()
    module = ADNIDataModule(root, "pmci_smci", diagnosis_csv=moved, **options)
    module.prepare_data()
    used = [record for record in module.records if record.used]
    truth = dict(
        row.split("\t")[1:3] for row in (root / "truth" / "truth.tsv").read_text().splitlines()
    )
    assert len(used) == 8
    assert all(module.class_names[r.label] == truth[r.image_id] == r.dx for r in used)
