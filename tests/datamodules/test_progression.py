from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta

import pytest

from datamodules import ADNIDataModule
from datamodules.adnimerge import read_histories
from datamodules.errors import DataError, TableError
from datamodules.progression import Visit, label_scan
from datamodules.synth import CohortSpec, generate

START = date(2010, 3, 1)


def history(text: str) -> list[Visit]:
    """``MCI 0 12, AD 24`` as visits."""
    visits = []
    for run in text.split(","):
        dx, *months = run.split()
        visits += [Visit(START + timedelta(days=round(int(m) * 30.44)), dx) for m in months]
    return visits


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
    label, reason = label_scan(history(text), START)
    assert bool(label) != bool(reason)
    assert label + reason == expected


def test_order_of_visits_and_days_around_the_month_do_not_matter():
    visits = history("MCI 0 12, AD 36")
    late = [replace(v, day=v.day + timedelta(days=17)) for v in visits]
    assert label_scan(late[::-1], START) == label_scan(visits, START)


def test_missing_values_and_old_words_are_understood(tmp_path):
    path = tmp_path / "ADNIMERGE.csv"
    rows = ["2010-03-01,MCI", "2011-03-01,MCI to Dementia", "2012-03-01,", "2013-03-01,-4"]
    path.write_text("PTID,EXAMDATE,DX\n" + "".join(f"999_S_0001,{row}\n" for row in rows))
    visits = read_histories(path)["999_S_0001"]
    assert [visit.dx for visit in visits] == ["MCI", "AD"]
    path.write_text("PTID,EXAMDATE,DX\n999_S_0001,2010-03-01,perhaps\n")
    with pytest.raises(TableError, match="UNKNOWN_LABEL: line 2: diagnosis 'perhaps'"):
        read_histories(path)


def test_stable_and_progressive_mci_can_be_trained_on(tmp_path):
    spec = CohortSpec(subjects=(("sMCI", 4), ("pMCI", 4)), resolution_mm=8.0)
    root = tmp_path / "cohort"
    generate(root, spec)
    options = {"cache_dir": tmp_path / "cache", "val_fraction": 0.25, "test_fraction": 0.25}
    with pytest.raises(
        DataError, match=r"(?s)NEEDS_HISTORY.*--data\.diagnosis_csv / --diagnosis-csv"
    ):
        ADNIDataModule(root, "pmci_smci", **options).prepare_data()
    table = next(root.glob("ADNIMERGE*.csv"))
    module = ADNIDataModule(root, "pmci_smci", diagnosis_csv=table, **options)
    module.prepare_data()
    used = [record for record in module.records if record.used]
    truth = dict(
        row.split("\t")[1:3] for row in (root / "truth" / "truth.tsv").read_text().splitlines()
    )
    assert len(used) == 8
    assert all(module.class_names[r.label] == truth[r.image_id] == r.dx for r in used)
