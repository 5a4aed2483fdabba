"""External validation: a cohort of another hospital is tested on, people trained on are refused."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from cohorts import made
from test_predict_scans import scans_of

from datamodules.errors import DataError, SplitError
from datamodules.synth import CohortSpec, generate
from datamodules.synth.cohort import plan_cohort
from models.cli import main
from models.commands.external import main as external
from models.commands.predict_scans import load
from models.report.cohorts import external as external_part
from models.tables import read_table
from models.transfer import is_among

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    spec = CohortSpec((("AD", 8), ("NC", 8)), 8.0, seed=3, elsewhere=True)
    return made(tmp_path_factory, spec)


def run(trained: Path, cohort: Path, out: Path, *more: str) -> dict[str, float]:
    arguments = ["--ckpt_path", str(trained / "best.ckpt"), "--cohort", str(cohort)]
    assert external([*arguments, "--out", str(out), *more]) == 0
    found: dict[str, float] = json.loads((out / "external_metrics.json").read_text())["metrics"]
    return found


def test_everybody_of_another_cohort_is_tested_on(trained, elsewhere, tmp_path):
    metrics = run(trained, elsewhere, tmp_path / "out")
    rows = read_table(tmp_path / "out" / "predictions.tsv")
    assert len({row["subject"] for row in rows}) == len(rows) == 16
    right = [row["class"] == row["predicted"] for row in rows]
    assert metrics["external/accuracy"] == pytest.approx(sum(right) / 16)
    assert metrics["external/accuracy_low"] < metrics["external/accuracy"] + 1e-9
    beside = {row["metric"] for row in read_table(tmp_path / "out" / "internal_and_external.tsv")}
    assert beside >= {"auroc", "brier", "threshold", "sensitivity_at_threshold"}
    kinds = {row["by"] for row in read_table(tmp_path / "out" / "groups.tsv")}
    assert kinds == {"site", "sex", "age", "field strength", "scanner", "phase"}
    names = [row["probabilities"] for row in read_table(tmp_path / "out" / "calibration.tsv")]
    assert names[:2] == ["network", "temperature of the validation scans"]
    assert (tmp_path / "out" / "montage.png").is_file()
    likeness = [row["likeness"] for row in read_table(tmp_path / "out" / "manifest.tsv")]
    assert all(float(value) > 0.6 for value in likeness if value)
    page = report_of(tmp_path)
    assert re.search(r"The threshold is that of \d validation scans: so few say nothing", page)
    assert re.search(r"\d+ groups have \d+ intervals, of which about \d\.\d miss", page)


def report_of(folder: Path) -> str:
    """What the report says of the cohort whose results lie in ``out``."""
    (folder / "external").mkdir()
    shutil.copytree(folder / "out", folder / "external" / "other")
    return external_part(folder)


def test_numbers_of_another_hospital_may_be_given_a_name_of_their_own(
    trained, elsewhere, tmp_path, capsys
):
    own = trained / "adni"
    person = sorted(path.name for path in (own / "ADNI").iterdir())
    seen = load(trained / "best.ckpt").people
    name = next(one for one in person if is_among(one, seen))
    cohort = Path(shutil.copytree(elsewhere, tmp_path / "cohort"))
    first = sorted((cohort / "ADNI").iterdir())[0]
    for path in [*cohort.glob("*.csv")]:
        path.write_text(path.read_text().replace(first.name, name))
    for path in sorted(first.rglob("*"), reverse=True):
        path.rename(path.with_name(path.name.replace(first.name, name)))
    first.rename(first.with_name(name))
    with pytest.raises(SplitError, match=rf"(?s)LEAK.*{name}.*none of their scans.*--rename"):
        run(trained, cohort, tmp_path / "out")
    run(trained, cohort, tmp_path / "out", "--rename", "OTHER_")
    assert f"OTHER_{name}" in (tmp_path / "out" / "predictions.tsv").read_text()


@pytest.mark.conformance
def test_the_shift_of_another_scanner_is_told_and_none_of_the_same(
    trained,
    elsewhere,
    tmp_path,
    capsys,
):
    run(trained, elsewhere, tmp_path / "a")
    assert "shift: " in capsys.readouterr().out
    other = Path(shutil.copytree(trained / "new", tmp_path / "same"))
    for path in other.rglob("*.csv"):  # the same scanner, other people
        path.write_text(path.read_text().replace("999_S_", "997_S_"))
    for folder in (other / "ADNI").iterdir():
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rename(path.with_name(path.name.replace("999_S_", "997_S_")))
        folder.rename(folder.with_name(folder.name.replace("999_S_", "997_S_")))
    run(trained, other, tmp_path / "b")

    def outside(folder: Path) -> float:
        rows = read_table(folder / "shift.tsv")
        return sum(float(row["outside"]) for row in rows if row["input"].startswith("intensity"))

    assert outside(tmp_path / "a") > outside(tmp_path / "b") + 1


def test_people_that_were_trained_on_are_refused(trained, tmp_path):
    with pytest.raises(SplitError, match=r"LEAK: \d+ people of the cohort were trained on"):
        run(trained, trained / "adni", tmp_path / "out")


def test_scans_that_were_trained_on_are_refused_under_another_name(
    trained,
    tmp_path,
):
    table, rows = tmp_path / "plain" / "scans.csv", []
    table.parent.mkdir()
    for number, path in enumerate(scans_of(trained / "adni")):
        shutil.copy(path, table.parent / f"{number}.nii.gz")
        rows.append(f"{number}.nii.gz,person{chr(97 + number)},{['AD', 'CN'][number % 2]}")
    table.write_text("\n".join(["path,subject,label", *rows]) + "\n")
    with pytest.raises(SplitError, match=r"LEAK: \d+ scans, under other names,"):
        run(trained, table, tmp_path / "out")


def test_a_cohort_of_another_kind_is_refused(trained, tmp_path):
    generate(
        tmp_path / "raw",
        CohortSpec((("AD", 2), ("NC", 2)), 8.0, "L2", elsewhere=True),
        workers=1,
    )
    with pytest.raises(DataError, match=r"OTHER_INPUT.*are raw.*trained on stripped"):
        run(trained, tmp_path / "raw", tmp_path / "out")


def test_the_command_line_tells_it_from_the_test_of_a_run(
    trained, elsewhere, tmp_path, monkeypatch
):
    arguments = ["test", "--ckpt_path", str(trained / "best.ckpt"), "--cohort", str(elsewhere)]
    monkeypatch.setattr("sys.argv", ["models", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="0"):
        main()
    with (tmp_path / "out" / "internal_and_external.tsv").open(newline="") as file:
        assert {row["metric"] for row in csv.DictReader(file, delimiter="\t")} >= {"auroc", "brier"}


def test_the_other_hospital_has_other_people_and_scanners():
    here, there = (
        plan_cohort(CohortSpec((("AD", 9), ("NC", 9)), elsewhere=other)) for other in (False, True)
    )
    assert not {p.subject.ptid for p in here} & {p.subject.ptid for p in there}
    assert not {p.image_id for p in here} & {p.image_id for p in there}
    assert not {p.subject.scanner for p in here} & {p.subject.scanner for p in there}
