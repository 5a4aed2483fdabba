import csv
from pathlib import Path

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import speedup

TABLE3 = Path(__file__).parents[2] / "benchmarks" / "akintoye_2022_table3.csv"


@pytest.mark.parametrize(
    ("network", "task", "expected"),
    [
        ("3D-ResAttNet18", "sMCI vs pMCI", [2.27, 2.62, 3.09, 3.40, 3.78, 4.86, 5.67]),
        ("3D-ResAttNet18", "AD vs NC", [2.38, 2.95, 3.44, 3.65, 4.13, 5.17, 5.64]),
        ("3D-ResAttNet34", "sMCI vs pMCI", [2.18, 2.64, 3.08, 3.36, 3.70, 4.62, 5.29]),
        ("3D-ResAttNet34", "AD vs NC", [2.34, 2.83, 3.24, 3.58, 4.25, 4.86, 5.67]),
    ],
)
def test_the_papers_table_3_gives_the_speed_ups_of_equation_14(
    network: str, task: str, expected: list[float]
) -> None:
    with TABLE3.open() as file:
        rows = [r for r in csv.DictReader(file) if (r["network"], r["task"]) == (network, task)]
    minutes = [float(row["minutes"]) for row in rows]
    assert [row["gpus"] for row in rows] == list("12345678")
    assert [speedup(minutes[0], t) for t in minutes[1:]] == pytest.approx(expected, abs=0.006)


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match=r"parallel_s is 0\.0"):
        speedup(1.0, 0.0)
