"""A sharded checkpoint is there whole or not at all, and any shape goes on with it."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training, kill_while_it_saves
from training_script import train

from lightning_hybrid.cli import main
from lightning_hybrid.run.checkpoint_io import AtomicCheckpointIO
from lightning_hybrid.state import replaced_files as checkpoints
from lightning_hybrid.state import save_alone
from lightning_hybrid.state.sharded_checkpoint import read_sharded
from lightning_hybrid.state.sharded_save_order import ShardedSaves

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance


class Alone:
    """A session of one rank, whose staged save waits for the test."""

    def __init__(self) -> None:
        self.may_go, self.awaited = Event(), False
        self.error: Exception | None = None

    def stage_shards(
        self, checkpoint: dict[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        def write() -> None:
            assert self.may_go.wait(20)
            if self.error is not None:
                raise self.error
            save_alone(checkpoint, folder)

        return write

    def await_shards(self) -> None:
        self.awaited = True


def numbered(number: int, size: int = 1000) -> dict[str, Any]:
    return {"epoch": number, "state_dict": {"weight": torch.full((size,), float(number))}}


def save(checkpoint: dict[str, Any], path: Path) -> None:
    ShardedSaves().save(partial(save_alone, checkpoint), path)


def save_for_ever(path: Path) -> None:
    for number in itertools.count():
        save(numbered(number, 1_000_000), path)


@pytest.mark.parametrize("exchanges", [True, False])  # whether the file system can do that
def test_a_kill_during_saving_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(checkpoints, "exchange_files", lambda *_: False)
    path = tmp_path / "last.ckpt"
    for kill in range(6):
        kill_while_it_saves(save_for_ever, path, 0.03 + 0.013 * kill)
        whole = path if path.exists() else tmp_path / ".last.ckpt.before"
        assert exchanges is False or whole == path
        found = read_sharded(whole, weights_only=True)
        assert (found["state_dict"]["weight"] == found["epoch"]).all()


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint(numbered(0), path)
    save(numbered(1), path)
    assert io.load_checkpoint(path)["epoch"] == 1
    io.save_checkpoint(numbered(2), path)
    assert io.load_checkpoint(path)["epoch"] == 2
    assert [*tmp_path.iterdir()] == [path]
    (tmp_path / "folder").mkdir()
    for each in (io.save_checkpoint, save):
        with pytest.raises(IsADirectoryError, match="folder"):
            each(numbered(0), tmp_path / "folder")


def test_a_save_that_fails_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "part").touch()
        raise OSError(28, "No space left on device")

    path = tmp_path / "last.ckpt"
    save(numbered(1), path)
    with pytest.raises(OSError, match="No space"):
        ShardedSaves().save(write, path)
    assert read_sharded(path)["epoch"] == 1
    assert [*tmp_path.iterdir()] == [path]


def test_a_checkpoint_is_removed_when_the_next_one_is_there(tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    saves, session = ShardedSaves(), Alone()
    save(numbered(1), first)
    saves.begin(session, numbered(2), second)
    saves.remove(first)
    assert first.exists()
    assert not second.exists()
    session.may_go.set()
    saves.finish(session)
    assert session.awaited
    assert [*tmp_path.iterdir()] == [second]
    saves.remove(second)  # nothing is under way
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_stays_where_the_next_one_fails(tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    saves, session = ShardedSaves(), Alone()
    save(numbered(1), first)
    session.error = OSError(28, "No space left on device")
    session.may_go.set()
    saves.begin(session, numbered(2), second)
    time.sleep(0.1)
    saves.remove(first)
    with pytest.raises(OSError, match="No space"):
        saves.finish(session)
    assert [*tmp_path.iterdir()] == [first]


def test_the_command_makes_an_ordinary_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "folder.ckpt", tmp_path / "whole.ckpt"
    save(numbered(3, 100_000), folder)
    assert main(["consolidate", str(folder), str(out)]) == 0
    found = torch.load(out, weights_only=True)
    assert found["epoch"] == 3
    assert torch.equal(found["state_dict"]["weight"], torch.full((100_000,), 3.0))
    assert "checkpoint written to" in capsys.readouterr().out
    assert main(["consolidate", str(folder), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["consolidate", str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    assert "is no folder" in capsys.readouterr().err


# ---------------------------------------------------------------- trainings

STEPS, START = 12, 4
CONFIG = {
    **DEFAULTS,
    "dtype": "float64",
    "optimizer": "adamw",
    "goes_on": True,
    "steps": STEPS,
    "checkpoint": {"filename": "{step}", "save_top_k": -1, "every_n_train_steps": START},
}


def run(folder: Path, **config: Any) -> list[dict[str, Any]]:
    return Training(folder, **{**CONFIG, **config}).run()


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@slow
@pytest.mark.parametrize("kind", ["sharded", "beside"])
def test_any_shape_and_one_device_go_on_with_what_a_shape_has_saved(
    tmp_path: Path, kind: str
) -> None:
    [saved] = run(tmp_path / "saved", stages=2, sharded=kind)
    torch.set_num_threads(1)
    one = {**CONFIG, "strategy": "auto"}
    _, expected = train(one, tmp_path / "one")
    assert_close(saved["losses"], expected["losses"])
    folder = tmp_path / f"saved/checkpoints/step={START}.ckpt"
    names = {file.name for file in folder.iterdir()}
    assert names == {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"}
    assert main(["consolidate", str(folder), str(tmp_path / "whole.ckpt")]) == 0
    found, whole = (
        torch.load(path, weights_only=True)
        for path in (tmp_path / "whole.ckpt", tmp_path / f"one/checkpoints/step={START}.ckpt")
    )
    assert found.keys() == whole.keys()
    assert list(found["state_dict"]) == list(whole["state_dict"])
    assert_close(dict(found["state_dict"]), dict(whole["state_dict"]))
    [mine], [theirs] = found["optimizer_states"], whole["optimizer_states"]
    assert_close(mine["state"], theirs["state"])
    assert mine["param_groups"] == theirs["param_groups"]
    for part in ("lr_schedulers", "loops"):
        assert found[part] == whole[part]
    _, alone = train({**one, "ckpt_path": str(tmp_path / "whole.ckpt")}, tmp_path / "alone")
    assert_close(alone["losses"], expected["losses"][START:])
    assert_close(dict(alone["weights"]), dict(expected["weights"]))
    [three] = run(tmp_path / "three", stages=3, ckpt_path=str(folder))
    assert_close(three["losses"], expected["losses"][START:])
    assert_close(dict(three["weights"]), dict(expected["weights"]))


@slow
def test_replicas_go_on_with_what_replicas_have_saved(tmp_path: Path) -> None:
    run(tmp_path / "saved", stages=2, sharded="sharded")
    folder = tmp_path / f"saved/checkpoints/step={START}.ckpt"
    assert main(["consolidate", str(folder), str(tmp_path / "whole.ckpt")]) == 0
    expected = run(
        tmp_path / "ddp", replicas=2, strategy="ddp", ckpt_path=str(tmp_path / "whole.ckpt")
    )
    found = run(tmp_path / "both", replicas=2, stages=2, ckpt_path=str(folder), sharded="beside")
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine["losses"], theirs["losses"])
        assert_close(dict(mine["weights"]), dict(theirs["weights"]))
