from pathlib import Path

import pytest
import yaml

from datamodules.cli import main
from datamodules.labels import TASKS
from datamodules.survey import cut_brains, survey

ROOT = Path(__file__).parents[2]


@pytest.mark.conformance
def test_the_demo_warns_of_no_geometry_since_its_box_holds_every_brain(tmp_path) -> None:
    data = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())["data"]
    size = ["--subjects", "330", "--resolution", "4"]
    assert " ".join(size) in (ROOT / "Makefile").read_text()
    assert main(["synth", str(tmp_path / "adni"), *size]) == 0
    found = survey(tmp_path / "adni", TASKS[data["task"]], tmp_path / "checks.json")
    assert sum(record.used for record in found.records) == 330
    assert found.problems == []
    cut = cut_brains(found.records, tuple(data["spatial_shape"]), data["spacing_mm"])
    assert [p.detail for p in [*found.warnings, *cut] if p.code == "GEOMETRY"] == []
