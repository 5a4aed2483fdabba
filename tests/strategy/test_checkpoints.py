"""A checkpoint is Lightning's own: it loads without the package and resumes in any shape."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, ROOT, SCRIPT, Training
from training_script import train

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
EPOCH = 6  # steps; a checkpoint and a validation after each
SETTINGS = {"sgd": ("float32", 1e-6), "adamw": ("float64", 1e-10)}


class Runs:
    """Two epochs on one device, and in two stages; each goes on from the other's first epoch."""

    def __init__(self, folder: Path, optimizer: str) -> None:
        dtype, self.tolerance = SETTINGS[optimizer]
        self.config = {
            **DEFAULTS,
            "optimizer": optimizer,
            "dtype": dtype,
            "steps": 2 * EPOCH,
            "checkpoint": {"monitor": "val", "filename": "{step}", "save_top_k": -1},
            "trainer": {"num_sanity_val_steps": 0},
        }
        self.one_device, self.stages = folder / "one", folder / "stages"
        torch.set_num_threads(1)
        one = {**self.config, "strategy": "auto"}
        _, self.expected = train(one, self.one_device)
        then = {"ckpt_path": str(self.checkpoint(self.one_device)), "after": None}
        run = Training(self.stages, **{**self.config, "stages": 2, "after": "best", "then": then})
        self.driver, self.worker = run.run()
        start = self.checkpoint(self.stages)
        _, self.resumed = train({**one, "ckpt_path": str(start)}, folder / "resumed")

    @staticmethod
    def checkpoint(folder: Path, epoch: int = 1) -> Path:
        return folder / "checkpoints" / f"step={epoch * EPOCH}.ckpt"

    def assert_close(self, found: Any, expected: Any) -> None:
        close = {"rtol": self.tolerance, "atol": self.tolerance}
        torch.testing.assert_close(found, expected, **close)


@pytest.fixture(scope="module", params=SETTINGS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("checkpoints"), request.param)


def test_a_checkpoint_holds_what_one_device_writes(runs: Runs) -> None:
    for epoch in (1, 2):
        found, expected = (
            torch.load(runs.checkpoint(folder, epoch), weights_only=False)
            for folder in (runs.stages, runs.one_device)
        )
        assert found.keys() == expected.keys()
        assert list(found["state_dict"]) == list(expected["state_dict"])
        runs.assert_close(dict(found["state_dict"]), dict(expected["state_dict"]))
        for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"]):
            assert mine["param_groups"] == theirs["param_groups"]  # numbers of parameters
            assert list(mine["state"]) == list(theirs["state"])
            runs.assert_close(mine["state"], theirs["state"])
        assert found["lr_schedulers"] == expected["lr_schedulers"]
        assert found["loops"] == expected["loops"]


def test_stages_resume_what_one_device_began(runs: Runs) -> None:
    resumed = runs.driver["then"]
    runs.assert_close(resumed["losses"], runs.expected["losses"][EPOCH:])
    for rank in (runs.driver, runs.worker):
        runs.assert_close(dict(rank["then"]["weights"]), dict(runs.expected["weights"]))


def test_one_device_resumes_what_stages_began(runs: Runs) -> None:
    runs.assert_close(runs.driver["losses"], runs.expected["losses"])
    runs.assert_close(runs.resumed["losses"], runs.expected["losses"][EPOCH:])
    runs.assert_close(dict(runs.resumed["weights"]), dict(runs.expected["weights"]))


def test_the_best_checkpoint_is_the_same(runs: Runs) -> None:
    best = [Path(seen["best"]).name for seen in (runs.driver, runs.worker, runs.expected)]
    assert len(set(best)) == 1
    runs.assert_close(runs.driver["metrics"], runs.expected["metrics"])


ELSEWHERE = """
import json, sys
from pathlib import Path
import torch
from training_script import Classifier, data

path, found = sys.argv[1:]
config = json.loads((Path(path).parents[1] / "config.json").read_text())
x = data(config).tensors[0]
predictions = []
for weights_only in (True, False):
    module = Classifier.load_from_checkpoint(path, config=config, weights_only=weights_only)
    with torch.no_grad():
        predictions.append(module.eval()(x))
assert "lightning_hybrid" not in sys.modules
torch.save(predictions, found)
"""


def test_a_checkpoint_loads_without_the_package(runs: Runs, tmp_path: Path) -> None:
    best, found = runs.driver["best"], tmp_path / "predictions.pt"
    path = os.pathsep.join(map(str, (SCRIPT.parent, ROOT)))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE, best, str(found)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    expected = torch.cat(runs.driver["predictions"])
    for predictions in torch.load(found):
        runs.assert_close(predictions, expected)
