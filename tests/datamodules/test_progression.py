from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import pytest

from datamodules import ADNIDataModule
from datamodules.errors import DataError
from datamodules.progression import LabelRule, Visit, label_visit, visit_of_scan
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
