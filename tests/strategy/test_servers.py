"""With one replica a script runs once: its other devices have servers."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import USUAL, Training

from lightning_hybrid.process.watchdogs import GRACE_S

SCRIPT = Path(__file__).with_name("served_script.py")
pytestmark = pytest.mark.distributed


def start(folder: Path, what: str, *python: str, text: str = "") -> tuple[int, str]:
    """Run the script, or a text that runs it. Returns its exit code and what it has printed."""
    command = [sys.executable, *(python or (str(SCRIPT),)), str(folder), what]
    environment = {**os.environ, **USUAL, "PYTHONPATH": f"{SCRIPT.parent}:{USUAL['PYTHONPATH']}"}
    captured: Any = {"input": text, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, env=environment, cwd=folder, **captured)
    return done.returncode, done.stdout + done.stderr


def seen(folder: Path, what: str, *python: str, text: str = "", ranks: tuple[int, ...] = ()) -> Any:
    """What the script has seen on rank 0 and on others, the drivers of more replicas."""
    code, output = start(folder, what, *python, text=text)
    assert code == 0, output
    runs = (folder / "runs").read_text().splitlines()
    assert len(runs) == 1 + len(ranks), "the script has run on other ranks"
    files = [folder / f"seen{rank}.pt" for rank in (0, *ranks)]
    found = [torch.load(file, weights_only=False) for file in files]
    return found if ranks else found[0]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_trainers_of_a_script_that_runs_once_train_as_on_one_device(tmp_path: Path) -> None:
    two, three, one, again, failed, after = seen(tmp_path, "several")
    assert failed == "on purpose"
    for found in (two, three, again, after):
        for key in ("weights", "loss", "checkpoint"):
            assert_same(found[key], one[key])
        assert not found["ranks"], "the script sees ranks, which one device does not have"


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("open_made_later", marks=pytest.mark.conformance),
        pytest.param("open_evaluation", marks=pytest.mark.conformance),
        pytest.param("open_fabric", marks=pytest.mark.conformance),
    ],
)
def test_open_sizes_that_can_only_be_one_chain_need_no_second_run(
    tmp_path: Path, what: str
) -> None:
    one, two = seen(tmp_path, what)
    assert_same(two, one)


@pytest.mark.parametrize(
    ("what", "ranks", "shape"),
    [
        ("open_replicas", (1,), (2, 1)),
        pytest.param("open_rows", (2,), (2, 2), marks=pytest.mark.conformance),
    ],
)
def test_drivers_are_started_when_replicas_are_chosen(
    tmp_path: Path, what: str, ranks: tuple[int, ...], shape: tuple[int, int]
) -> None:
    """They train as with the same sizes given, and hear where rank 0 puts checkpoints."""
    drivers = seen(tmp_path, what, ranks=ranks)
    for (chosen, place, sizes), (given, _, others) in drivers:
        assert sizes == others == shape
        assert_same(chosen, given)
        assert place == drivers[0][0][1]
        assert Path(place).exists()


@pytest.mark.conformance
def test_what_only_rank_0_has_prepared_is_for_one_replica(tmp_path: Path) -> None:
    assert seen(tmp_path, "open_prepared") == (1, 2)


@pytest.mark.conformance
def test_a_run_after_one_that_failed_before_sizes_were_chosen_has_one_replica(
    tmp_path: Path,
) -> None:
    """A script that is started later could not skip the run that has failed."""
    assert seen(tmp_path, "open_after_failure") == (1, 2)


@pytest.mark.conformance
def test_a_driver_that_fails_before_it_joins_ends_the_run_with_its_error(tmp_path: Path) -> None:
    assert seen(tmp_path, "late_failure", ranks=(1,)) == ["on purpose, late"] * 2
    code, output = start(tmp_path, "late_death")
    assert code == 1
    assert "Rank 1, on which the script was started for another replica" in output
    assert "has ended with code 3" in output


@pytest.mark.conformance
@pytest.mark.parametrize("python", [("-",), ("-i", "-q", "-")])
def test_a_prompt_and_standard_input_have_stages(tmp_path: Path, python: tuple[str, ...]) -> None:
    text = f"exec(compile(open({str(SCRIPT)!r}).read(), 'cell', 'exec'))\n"
    assert len(seen(tmp_path, "several", *python, text=text)) == 6


@pytest.mark.conformance
def test_hooks_on_gradients_of_servers_are_called_once_on_the_driver(tmp_path: Path) -> None:
    one, two, heard, heard_of_two = seen(tmp_path, "hooks")
    assert_same(two["weights"], one["weights"])
    assert_same(sorted(heard_of_two), sorted(heard))


@pytest.mark.conformance
def test_servers_import_what_stages_call_and_the_scripts_own_is_refused(tmp_path: Path) -> None:
    one, two, refused = seen(tmp_path, "operators")
    assert_same(two["weights"], one["weights"])
    assert "served_script.negate" in refused
    assert "defined in the script itself" in refused


@pytest.mark.conformance
def test_an_optimizer_that_the_script_defines_steps_on_the_driver(tmp_path: Path) -> None:
    one, two = seen(tmp_path, "optimizer")
    for key in ("weights", "checkpoint"):
        assert_same(two[key], one[key])


@pytest.mark.conformance
def test_a_network_of_configure_model_trains_alike_and_frozen_weights_stay_in_their_file(
    tmp_path: Path,
) -> None:
    (one, whole), (two, unread) = seen(tmp_path, "made_later")
    assert_same(two, one)
    assert (whole, unread) == (False, True)


@pytest.mark.conformance
def test_a_worker_reads_its_large_weights_from_their_file(tmp_path: Path) -> None:
    (one, two), read = seen(tmp_path, "from_files")
    for key in ("weights", "loss", "checkpoint"):
        assert_same(two[key], one[key])
    assert "net.layers.1.weight" in read
    assert "net.last.weight" not in read


@pytest.mark.conformance
def test_replicas_after_servers_are_refused(tmp_path: Path) -> None:
    assert "ranks 0 alone run it" in seen(tmp_path, "replicas")


@pytest.mark.conformance
def test_a_killed_server_is_named_within_seconds(tmp_path: Path) -> None:
    start_s = time.monotonic()
    code, output = start(tmp_path, "kill_server")
    assert code != 0
    assert "Lost rank 1" in output
    assert time.monotonic() - start_s < 60 + GRACE_S


@pytest.mark.conformance
def test_servers_end_with_their_driver(tmp_path: Path) -> None:
    assert start(tmp_path, "kill_driver")[0] != 0
    server, deadline = int((tmp_path / "servers").read_text()), time.monotonic() + 2 * GRACE_S
    while Path(f"/proc/{server}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.conformance
def test_drivers_stay_drivers_where_speeds_would_make_one_of_them_a_worker(tmp_path: Path) -> None:
    """By their speeds ranks 0 and 1 would have stage 0 of the two replicas; rank 2 drives."""
    config: dict[str, Any] = {"capacity": [2, 1, 1, 2], "steps": 4, "timeout_s": 120}
    drivers = Training(tmp_path, replicas=2, stages=2, **config).launch()
    assert len({driver["cluster"].order for driver in drivers}) == 1
    assert [driver["coordinates"] for driver in drivers] == [
        f"rank {2 * replica} (driver, replica {replica}, stage 1)" for replica in range(2)
    ]
