"""A checkpoint is Lightning's own: it loads without the package and resumes in any shape."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, ROOT, SCRIPT, Training, kill_while_it_saves
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from training_script import train

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.run.checkpoint_io import AtomicCheckpointIO
from lightning_hybrid.state import replaced_files as checkpoints
from lightning_hybrid.state import whole_checkpoint

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
slow = pytest.mark.conformance
EPOCH = 6  # batches; a checkpoint and a validation in the middle of each and after it
SETTINGS = {
    # dtype, tolerance, number of optimizers, after how many batches to go on
    "sgd": ("float32", 1e-6, 1, 6),
    "adamw": ("float64", 1e-10, 1, 3),
    "two": ("float64", 1e-10, 2, 9),  # by hand
    "copies": ("float64", 1e-10, 1, 3),  # two of the first stage
}
COPIES = {
    "optimizer": "adamw",
    "trainer": {
        "num_sanity_val_steps": 0,
        "val_check_interval": 0.5,
        "gradient_clip_val": 0.05,
    },
}


class Runs:
    """Two epochs on one device, and in two stages; each goes on with what the other has saved."""

    def __init__(self, folder: Path, optimizer: str) -> None:
        dtype, self.tolerance, self.optimizers, self.start = SETTINGS[optimizer]
        self.config = {
            **DEFAULTS,
            "optimizer": optimizer,
            "dtype": dtype,
            "goes_on": True,
            "steps": 2 * EPOCH * self.optimizers,  # Lightning counts those of each optimizer
            "checkpoint": {"monitor": "val", "filename": "{step}", "save_top_k": -1},
            "trainer": {"num_sanity_val_steps": 0, "val_check_interval": 0.5},
            **(COPIES if optimizer == "copies" else {}),
        }
        shape = {"copies": (2, 1), "stages": 3} if optimizer == "copies" else {"stages": 2}
        self.one_device, self.stages = folder / "one", folder / "stages"
        torch.set_num_threads(1)
        one = {**self.config, "strategy": "auto"}
        _, self.expected = train(one, self.one_device)
        then = {"ckpt_path": str(self.checkpoint(self.one_device)), "after": None}
        run = Training(self.stages, **{**self.config, **shape, "after": "best", "then": then})
        [self.driver] = run.run()
        start = self.checkpoint(self.stages)
        _, self.resumed = train({**one, "ckpt_path": str(start)}, folder / "resumed")

    def checkpoint(self, folder: Path, batches: int | None = None) -> Path:
        batches = self.start if batches is None else batches
        return folder / "checkpoints" / f"step={batches * self.optimizers}.ckpt"

    def assert_close(self, found: Any, expected: Any) -> None:
        close = {"rtol": self.tolerance, "atol": self.tolerance}
        torch.testing.assert_close(found, expected, **close)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sgd", marks=slow),
        pytest.param("adamw", marks=slow),
        "two",
        pytest.param("copies", marks=slow),
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("checkpoints"), request.param)


def test_a_checkpoint_holds_what_one_device_writes(runs: Runs) -> None:
    for batches in (3, 6, 9, 12):
        found, expected = (
            torch.load(runs.checkpoint(folder, batches), weights_only=True)
            for folder in (runs.stages, runs.one_device)
        )
        assert found.keys() == expected.keys()
        assert list(found["state_dict"]) == list(expected["state_dict"])
        runs.assert_close(dict(found["state_dict"]), dict(expected["state_dict"]))
        assert len(found["optimizer_states"]) == runs.optimizers
        for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"]):
            assert mine["param_groups"] == theirs["param_groups"]  # numbers of parameters
            assert list(mine["state"]) == list(theirs["state"])
            runs.assert_close(mine["state"], theirs["state"])
        assert found["lr_schedulers"] == expected["lr_schedulers"]
        assert found["loops"] == expected["loops"]


def test_stages_resume_what_one_device_began(runs: Runs) -> None:
    resumed = runs.driver["then"]
    runs.assert_close(resumed["losses"], runs.expected["losses"][runs.start :])
    runs.assert_close(dict(resumed["weights"]), dict(runs.expected["weights"]))


@pytest.mark.conformance
def test_one_device_resumes_what_stages_began(runs: Runs) -> None:
    runs.assert_close(runs.driver["losses"], runs.expected["losses"])
    runs.assert_close(runs.resumed["losses"], runs.expected["losses"][runs.start :])
    runs.assert_close(dict(runs.resumed["weights"]), dict(runs.expected["weights"]))


def test_the_best_checkpoint_is_the_same(runs: Runs) -> None:
    best = [Path(seen["best"]).name for seen in (runs.driver, runs.expected)]
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


@pytest.mark.conformance
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


def save_for_ever(path: Path) -> None:
    for number in itertools.count():
        AtomicCheckpointIO().save_checkpoint({"weights": torch.full((4_000_000,), number)}, path)


@pytest.mark.parametrize(
    "folder", ["same file system", pytest.param("another file system", marks=slow)]
)
def test_a_kill_during_saving_leaves_a_whole_checkpoint(tmp_path: Path, folder: str) -> None:
    if folder == "another file system":  # than that of the system's temporary folder
        if not Path("/dev/shm").is_dir():
            pytest.skip("there is no /dev/shm")
        tmp_path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    path = tmp_path / "last.ckpt"
    try:
        for kill in range(4):
            kill_while_it_saves(save_for_ever, path, 0.05 + 0.031 * kill)
            weights = torch.load(path, weights_only=True)["weights"]
            assert weights.numel() == 4_000_000
            assert weights.unique().numel() == 1
        assert {*tmp_path.iterdir()} <= {path, tmp_path / ".last.ckpt.part"}
        AtomicCheckpointIO().save_checkpoint({}, path)
        assert [*tmp_path.iterdir()] == [path]
    finally:
        shutil.rmtree(tmp_path)


def test_a_job_of_slurm_does_not_take_a_part_for_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, logger=False)
    whole = Path(trainer._checkpoint_connector.hpc_save_path(tmp_path))
    AtomicCheckpointIO().save_checkpoint({}, whole)
    later = Path(trainer._checkpoint_connector.hpc_save_path(tmp_path))
    checkpoints.new_file(later).touch()  # as a kill in the middle of a save leaves it
    assert len([*tmp_path.iterdir()]) == 2
    assert trainer._checkpoint_connector._hpc_resume_path == str(whole)


def test_a_disk_that_is_full_is_named_and_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"step": torch.tensor(1)}, path)

    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(whole_checkpoint, "let_go", write)
        with pytest.raises(OSError, match=r"No space left on device: '.*last.ckpt'"):
            io.save_checkpoint({"step": torch.zeros(10_000)}, path)
    assert io.load_checkpoint(path)["step"] == 1
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "error", [OSError("no source code"), FileNotFoundError(errno.ENOENT, "gone", "/data/volume")]
)
def test_what_an_object_raises_that_is_saved_is_not_taken_for_the_disk(
    tmp_path: Path, error: OSError
) -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise error

    with pytest.raises(OSError) as raised:  # noqa: PT011  (it is the one below)
        AtomicCheckpointIO().save_checkpoint({"hyper": Stubborn()}, tmp_path / "last.ckpt")
    assert raised.value is error
    assert [*tmp_path.iterdir()] == []


@pytest.mark.conformance
def test_a_checkpoint_io_of_the_user_stays(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        pass

    own = Own()
    assert HybridGabraStrategy(checkpoint_io=own).checkpoint_io is own
    assert isinstance(HybridGabraStrategy().checkpoint_io, AtomicCheckpointIO)
    wrapped = HybridGabraStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert isinstance(wrapped.checkpoint_io, AtomicCheckpointIO)
    wrapped = HybridGabraStrategy(checkpoint_io=AsyncCheckpointIO(own)).checkpoint_io
    assert wrapped.checkpoint_io is own


@slow
def test_other_shapes_go_on_with_what_a_shape_has_saved(tmp_path: Path) -> None:
    def run(name: str, **config: Any) -> list[list[float]]:
        config = {
            **DEFAULTS,
            "dtype": "float64",
            "goes_on": True,
            "steps": 9,
            "checkpoint": {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": 4},
            **config,
        }
        return [driver["losses"] for driver in Training(tmp_path / name, **config).run()]

    def assert_same(found: list[list[float]], expected: list[list[float]]) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    # two replicas of three steps an epoch; the first checkpoint is in the middle of the second
    saved = {name: str(tmp_path / name / "checkpoints/step=4.ckpt") for name in ("ddp", "stages")}
    expected = run("ddp", strategy="ddp", replicas=2)
    assert_same(run("stages", replicas=2, stages=2), expected)
    rest = [losses[4:] for losses in expected]
    for name, config in {
        "stages, then ddp": {"strategy": "ddp", "ckpt_path": saved["stages"]},
        "stages, then replicas": {"stages": 1, "ckpt_path": saved["stages"]},
        "ddp, then stages": {"stages": 2, "ckpt_path": saved["ddp"]},
    }.items():
        assert_same(run(name, replicas=2, **config), rest)
    # with another number of replicas the data is divided in another way: as on one device
    [alone] = run("one device", strategy="auto", ckpt_path=saved["stages"])
    assert_same(run("one chain", stages=3, ckpt_path=saved["stages"]), [alone])
