"""Replicas that divide optimizer states train as ever, and each state is on one of their ranks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import USUAL, Training
from prepared import start_ranks
from torch import Tensor

from lightning_hybrid import Delayed, Sharded
from lightning_hybrid._trees import rebuild
from lightning_hybrid.state.sharded_checkpoint import read_sharded

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("divided_states_script.py")
SAVED = "checkpoints/step=4.ckpt"


def train(folder: Path, **config: Any) -> list[dict[str, Any]]:
    """What each driver has seen."""
    usual = {"replicas": 2, "stages": 1, "optimizer": "adam", "steps": 6}
    ranks = Training(folder, script=SCRIPT, **{**usual, **config}).run()
    assert config.get("fails_at") or not any(rank["error"] for rank in ranks)
    return ranks


def numbers(value: Any) -> Any:
    return rebuild(value, lambda v: v + 0 if isinstance(v, Tensor) else v)


def load(path: Path) -> dict[str, Any]:
    """What optimizers and networks are loaded from."""
    checkpoint = read_sharded(path) if path.is_dir() else torch.load(path, weights_only=True)
    return {part: numbers(checkpoint[part]) for part in ("state_dict", "optimizer_states")}


def assert_equal(found: Any, expected: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def kept(folder: Path) -> dict[int, dict[str, int]]:
    """By rank the bytes of the states that it has, by number of the parameter."""
    files = {int(path.stem.removeprefix("kept")): path for path in folder.glob("kept*.json")}
    return {rank: json.loads(file.read_text()) for rank, file in files.items()}


def assert_divided(divided: Path, whole: Path, stages: int) -> None:
    """Each state is on one rank of those with the same stage, as large as it is otherwise."""
    found, states = kept(divided), kept(whole)
    assert found.keys() == states.keys()
    for stage in range(stages):
        shares, expected = [found[rank] for rank in sorted(found)[stage::stages]], states[stage]
        assert expected
        assert sum(map(len, shares)) == len(expected)
        assert {n: size for share in shares for n, size in share.items()} == expected


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 1), "adam"),
        pytest.param((3, 1), "momentum", marks=slow),
        pytest.param((2, 2), "adam", marks=slow),
        pytest.param((2, 2), "momentum", marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("later", [False, pytest.param(True, marks=slow)])
def test_divided_states_change_no_bit_of_a_run_and_of_its_checkpoints(
    tmp_path: Path, shape: tuple[int, int], kind: str, later: bool
) -> None:
    replicas, stages = shape
    config = {"replicas": replicas, "stages": stages, "optimizer": kind, "later": later}
    whole = train(tmp_path / "whole", **config)
    divided = train(tmp_path / "divided", divides=True, **config)
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_equal(mine["weights"], theirs["weights"])
    assert_divided(tmp_path / "divided", tmp_path / "whole", stages)
    for saved in (SAVED, "after.ckpt"):
        assert_equal(load(tmp_path / "divided" / saved), load(tmp_path / "whole" / saved))


@slow
@pytest.mark.parametrize("schedule", ["1f1b_stream", Delayed("pipedream")], ids=str)
def test_schedules_that_begin_early_step_divided_states(
    tmp_path: Path, schedule: str | Delayed
) -> None:
    config = {
        "stages": 2,
        "apart": True,
        "arguments": {
            "schedule": schedule,
            "num_microbatches": 1,
        },
        "trainer": {
            "accumulate_grad_batches": 1 + (schedule == "1f1b_stream"),
            "gradient_clip_val": 0.5,
        },
    }
    whole = train(tmp_path / "whole", **config)
    divided = train(tmp_path / "divided", divides=True, **config)
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert_equal(mine["weights"], theirs["weights"])
    assert_divided(tmp_path / "divided", tmp_path / "whole", 2)


@slow
@pytest.mark.parametrize("kind", ["full", Sharded()], ids=str)
def test_any_shape_goes_on_with_what_divided_states_have_saved(
    tmp_path: Path, kind: str | Sharded
) -> None:
    train(tmp_path / "whole", stages=2)
    train(tmp_path / "divided", stages=2, divides=True, checkpoint=kind)
    saved = tmp_path / "divided" / SAVED
    if kind != "full":
        files = {file.name for file in saved.iterdir()}
        assert files == {".metadata", "meta.pt", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert_equal(load(saved), load(tmp_path / "whole" / SAVED))
    for number, (replicas, stages) in enumerate([(2, 1), (2, 2), (1, 2), (3, 1)]):
        shape = {"replicas": replicas, "stages": stages, "ckpt_path": str(saved)}
        found = train(tmp_path / f"on{number}", divides=True, **shape)
        expected = train(tmp_path / f"whole{number}", **shape)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == theirs["losses"]
            assert_equal(mine["weights"], theirs["weights"])
        assert_divided(tmp_path / f"on{number}", tmp_path / f"whole{number}", stages)


@slow
@pytest.mark.parametrize("later", [False, True])
def test_each_rank_has_its_share_alone_of_what_is_loaded(tmp_path: Path, later: bool) -> None:
    config = {"stages": 2, "later": later}
    train(tmp_path / "saved", **config)
    config |= {"ckpt_path": str(tmp_path / "saved" / SAVED), "shrinks": 0.5}
    # (the module's `on_load_checkpoint` changes the states)
    train(tmp_path / "divided", divides=True, **config)
    train(tmp_path / "whole", **config | {"later": False})
    assert_divided(tmp_path / "divided", tmp_path / "whole", 2)  # of what is frozen by now, too
    assert_equal(load(tmp_path / "divided/after.ckpt"), load(tmp_path / "whole/after.ckpt"))


@slow
@pytest.mark.parametrize("stages", [1, 2])
def test_an_optimizer_that_steps_as_a_whole_is_not_divided(tmp_path: Path, stages: int) -> None:
    config = {"optimizer": "whole", "stages": stages}
    whole = train(tmp_path / "whole", **config)
    divided = train(tmp_path / "divided", divides=True, **config)
    output = (tmp_path / "divided/output.txt").read_text()
    assert output.count("Whole keeps all of its states on each replica") == 1
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine["losses"] == theirs["losses"]
    assert kept(tmp_path / "divided") == kept(tmp_path / "whole")
    assert_equal(load(tmp_path / "divided" / SAVED), load(tmp_path / "whole" / SAVED))


@slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_look_at_states_of_other_replicas_is_refused_by_name(tmp_path: Path, stages: int) -> None:
    for replica, driver in enumerate(train(tmp_path, stages=stages, divides=True, looks=True)):
        during, after = driver["refused"][:2], driver["refused"][2:]
        for alone, single in (during, after):
            assert f"Adam.state_dict() would have the states of replica {replica}" in alone
            assert "trainer.strategy.optimizer_state(optimizer)" in alone
            assert f"is on replica {1 - replica}, and this is replica {replica}" in single


@slow
def test_after_a_failure_weights_are_saved_and_a_line_says_that_states_are_not(
    tmp_path: Path,
) -> None:
    ranks = train(tmp_path, divides=True, fails_at=3)
    assert all("on purpose" in rank["error"] for rank in ranks)
    found = load(tmp_path / "checkpoints/step=3.ckpt")
    assert found["optimizer_states"][0]["state"] == {}
    assert_equal(dict(found["state_dict"]), ranks[0]["weights"])
    assert "what is saved now has none of them" in (tmp_path / "output.txt").read_text()


@slow
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_is_killed_in_an_exchange_ends_all(tmp_path: Path, victim: int) -> None:
    config = {"replicas": 2, "stages": 2, "optimizer": "adam", "divides": True, "dies": victim}
    training = Training(tmp_path, script=SCRIPT, **config)
    ranks = start_ranks(
        [str(SCRIPT), str(tmp_path)],
        training.processes,
        env=os.environ | USUAL,
        cwd=tmp_path,
        output=tmp_path / "output.txt",
    )
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (tmp_path / "died").exists()
    # (workers go on to serve up to the end of the script of rank 0, or end with it)
    assert [number for number, code in enumerate(codes) if code] == (
        [victim] if victim else [0, 1, 3]
    )
    for number in {0, 2} - {victim}:
        seen = torch.load(tmp_path / f"rank{number}.pt", weights_only=False)
        assert "Lost" in seen["error"]
