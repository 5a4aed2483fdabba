import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def study(monkeypatch) -> ModuleType:
    # a script, which finds its neighbours beside it
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("l1_study")


def test_a_stopped_study_goes_on_and_repeats_nothing_that_is_whole(study, tmp_path) -> None:
    path, made = tmp_path / "a.json", []

    def killed() -> dict:
        made.append("killed")
        raise KeyboardInterrupt

    def whole() -> dict:
        made.append("whole")
        return {"metrics": {"test/accuracy": 0.5}}

    with pytest.raises(KeyboardInterrupt):
        study.kept(path, killed)
    path.with_suffix(".part").write_text("{ half")  # killed while it was written
    first = study.kept(path, whole)
    assert study.kept(path, killed) == first == whole()
    assert made == ["killed", "whole", "whole"]


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_the_full_study_runs_to_its_end_and_again_without_training(
    study, tmp_path, monkeypatch, capsys
) -> None:
    # the modern recipe warms up for three epochs
    tiny = study.Size(8.0, (24, 32, 24), (8, 8, 16, 16), 4, own_batches=True)
    monkeypatch.setattr(study, "FULL", tiny)
    subjects = (("AD", 14), ("NC", 14), ("sMCI", 12), ("pMCI", 12))
    monkeypatch.setattr(study, "SUBJECTS", subjects)
    options = ["--full", "--seeds", "1", "--out", str(tmp_path)]
    study.main(options)
    assert all((tmp_path / f"{name}_1.json").exists() for name in (*study.RUNS, "maps"))
    shown = capsys.readouterr().out.split("\nrun;")[1]
    monkeypatch.setattr(study, "trained", None)
    study.main(options)
    assert capsys.readouterr().out.split("\nrun;")[1] == shown
