"""A failed rank ends all ranks, with the first cause shown first, and leaves no process behind.

What it has saved before, one device goes on with as if nothing had happened.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from training_script import train

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
Process = "subprocess.Popen[str]"
Start = Callable[..., tuple[Training, Process]]
slow = pytest.mark.conformance

EPOCH = 6  # steps
SAVING = {
    "dtype": "float64",
    "goes_on": True,
    "trainer": {"num_sanity_val_steps": 0, "limit_val_batches": 1},
    "checkpoint": {"filename": "{step}", "save_on_exception": True},
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SERVER = ["-P", "-m", "lightning_hybrid.worker"]
LAUNCHES: dict[str, dict[str, Any]] = {
    "script": {},
    "torchrun": {"launcher": TORCHRUN},
    "spawn": {"start_method": "spawn"},
}


def limit_s(more: float = 0) -> float:
    """Within what time all must be over: 15 s, and more on a machine with more to do."""
    return more + 15 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            parents[int(fields["Pid"])] = int(fields["PPid"])
        except (OSError, KeyError, ValueError):
            continue
    members = {pid}
    while grown := {p for p, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/exe").exists()}


def wait_for(condition: Callable[[], Any], training: Training, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, training.output
        time.sleep(0.1)


def ready(training: Training, ranks: int) -> dict[int, int]:
    """Wait until every rank trains and has saved. Returns process numbers by rank."""
    wait_for(lambda: len(list(training.folder.glob("pid*"))) == ranks, training)
    if "checkpoint" in training.config:
        wait_for(lambda: checkpoints(training), training)
    found = training.folder.glob("pid*")
    return {int(path.suffix[1:]): int(path.read_text()) for path in found}


def servers(members: set[int]) -> dict[int, int]:
    """Those among these processes that the script has started for workers, by rank."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in members}
    return {int(c[4]): pid for pid, c in commands.items() if c[1:4] == SERVER}


def checkpoints(training: Training) -> list[Path]:
    found = training.folder.glob("checkpoints/step=*.ckpt")
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step=")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a training that would go on for hours; what is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(**config: Any) -> tuple[Training, Process]:
        training = Training(tmp_path, **{"steps": 100_000, **config})
        started.append(training.start())
        return training, started[-1]

    yield begin
    for process in started:
        for pid in alive(family(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def end(
    training: Training, process: Process, members: set[int], since: float = 0, more: float = 0
) -> str:
    """Wait for the end of all processes of a run, which failed at ``since``, or fails by itself.

    They may take ``more`` seconds than usual. Returns what they printed.
    """
    fault = training.folder / "fault"
    deadline = time.monotonic() + 120
    while process.poll() is None or alive(members):
        members |= family(process.pid)
        if not since and fault.exists() and (text := fault.read_text()):
            since = float(text)
        assert time.monotonic() < deadline, f"{alive(members)} live on:\n{training.output}"
        time.sleep(0.05)
    assert since
    took_s = time.monotonic() - since
    print(f"ended after {took_s:.1f} s")
    assert took_s < limit_s(more), training.output
    return training.output


def ends_told_to_loggers(training: Training) -> dict[int, str]:
    """What the loggers of each driver were told at the end."""
    return {int(path.suffix[1:]): path.read_text() for path in training.folder.glob("ended.*")}


def first_error(output: str) -> str:
    """The first line that ends a traceback or reports a loss."""
    ends = re.compile(
        r"^(\[rank\d+\]: )?([\w.]+(Error|Lost): |rank \d+ .* (ends because|is killed: )|Lost rank)"
    )
    return next(line for line in output.splitlines() if ends.match(line))


def assert_resumes(training: Training, folder: Path) -> None:
    """One device goes on from the last checkpoint with the losses of an undisturbed run."""
    torch.set_num_threads(1)
    path = checkpoints(training)[-1]
    saved = int(path.stem.removeprefix("step="))
    steps = saved + 2 * EPOCH
    config = {**DEFAULTS, **SAVING, "checkpoint": None, "strategy": "auto", "steps": steps}
    _, undisturbed = train(config, folder / "undisturbed")
    _, resumed = train({**config, "ckpt_path": str(path)}, folder / "resumed")
    expected = undisturbed["losses"][saved:]
    torch.testing.assert_close(resumed["losses"], expected, rtol=1e-10, atol=1e-10)


EXCEPTIONS = [
    # where, rank, step
    ("training_step", 0, 3),  # the driver, in the user's code
    ("forward", 1, 3),  # a worker, in its stage
    ("backward", 1, 3),
    ("setup", 0, 3),  # before there is a network to cut
    ("loader", 0, 9),  # another process still
    ("forward", 0, 3),  # the driver, in its stage
    ("backward", 0, 3),
    ("validation_step", 0, 2),
    ("callback", 0, 9),
    ("configure_optimizers", 0, 3),
]


@slow
@pytest.mark.parametrize(("where", "rank", "step"), EXCEPTIONS)
def test_an_exception_ends_all_ranks_and_is_shown_first(
    start: Start, where: str, rank: int, step: int
) -> None:
    fault = {"where": where, "rank": rank, "step": step}
    options = {"trainer": {"num_sanity_val_steps": 0}} if where == "validation_step" else {}
    if where == "loader":
        options = {"loader_processes": 1}
    training, process = start(stages=2, fault=fault, logger=True, **options)
    output = end(training, process, {process.pid})
    assert process.returncode
    assert ends_told_to_loggers(training) == {0: "failed"}
    said = "Caught ValueError in DataLoader" if where == "loader" else "this error is on purpose"
    assert f"ValueError: {said}" in first_error(output), output
    assert "this error is on purpose" in output
    role = "driver" if rank == 0 else "worker"
    assert f"rank {rank} ({role}, replica 0, stage {1 - rank})" in output


UNSEEN = {"network": "unseen", "unseen": 2}
MEETS = {"network": "meets", "side": 4, "large": 3}


@slow
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (UNSEEN, "'net' (Unseen) does not compute in its stages what its Python computes: in call"),
        (MEETS, "'net' (Meets): the samples of a batch meet in call"),
    ],
)
def test_what_a_check_of_the_network_finds_ends_all_ranks_and_is_shown_first(
    start: Start, config: dict[str, Any], words: str
) -> None:
    training, process = start(stages=2, logger=True, **config)
    output = end(training, process, {process.pid}, time.monotonic(), more=100)
    assert process.returncode
    assert ends_told_to_loggers(training) == {0: "failed"}
    error = first_error(output)
    assert f"NetworkError: Network {words} 4 in training" in error, output
    assert "output of shape" in error


@slow
@pytest.mark.parametrize(("replicas", "rank"), [(1, 1), (1, 0), (2, 3)])
def test_a_transfer_that_the_backend_refuses_ends_all_ranks_and_is_shown_first(
    start: Start, replicas: int, rank: int
) -> None:
    """The peer waits for a tensor that never comes, and hears of it all the same."""
    fault = {"where": "send", "rank": rank, "step": 7}
    # (where each rank runs the script up to its first run, it can change the backend)
    launcher = [*TORCHRUN[:-1], f"{2 * replicas}"]
    training, process = start(replicas=replicas, stages=2, fault=fault, launcher=launcher)
    output = end(training, process, {process.pid})
    assert process.returncode
    assert "HybridError: The backend has refused a transfer" in first_error(output), output
    assert "this error is on purpose" in first_error(output)


@pytest.mark.parametrize(
    ("replicas", "rank"),
    [(1, 0), (1, 1), *(pytest.param(2, rank, marks=slow) for rank in range(4))],
)
def test_a_killed_rank_ends_the_others_and_is_named(
    start: Start, tmp_path: Path, replicas: int, rank: int
) -> None:
    # (who saves on exception needs all weights, and raises before Lightning gets to the loggers)
    saving = SAVING | {"checkpoint": {"filename": "{step}"}}
    training, process = start(replicas=replicas, stages=2, logger=True, **saving)
    pids = ready(training, replicas * 2)
    members = family(process.pid)
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    output = end(training, process, members, killed)
    assert process.returncode
    drivers = {*range(0, replicas * 2, 2)} - {rank}
    assert ends_told_to_loggers(training) == dict.fromkeys(drivers, "failed")
    if drivers:  # else the user's shell names it
        assert f"Lost rank {rank} " in first_error(output), output
    if replicas == 1:
        assert_resumes(training, tmp_path)


@slow
def test_a_failure_in_the_last_backward_is_no_success(start: Start) -> None:
    # after it nothing more is asked of the worker, and the other replica has all it needs
    fault = {"where": "backward", "rank": 3, "step": 3}
    training, process = start(replicas=2, stages=2, steps=5, fault=fault)
    output = end(training, process, {process.pid})
    assert process.returncode
    assert "this error is on purpose" in first_error(output), output
    assert not list(training.folder.glob("rank*.pt"))


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_between_two_stages_of_another_rank_is_shown_first(
    start: Start, rank: int
) -> None:
    devices = [0, 1, 0] if rank == 1 else [1, 0, 1, 0]  # it is in a stage in the middle
    fault = {"where": "forward", "rank": rank, "step": 3}
    training, process = start(stages=2, devices=devices, fault=fault)
    output = end(training, process, {process.pid})
    assert process.returncode
    assert "this error is on purpose" in first_error(output), output
    if rank == 1:
        assert "rank 1 (worker, replica 0) failed in stage 1" in output


@slow
def test_a_killed_rank_with_several_stages_ends_the_others_and_is_named(
    start: Start, tmp_path: Path
) -> None:
    training, process = start(stages=2, devices=[1, 0, 1, 0], **SAVING)
    pids = ready(training, 2)
    members = family(process.pid)
    killed = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    output = end(training, process, members, killed)
    assert "Lost rank 1 " in first_error(output), output
    assert_resumes(training, tmp_path)


@slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_ends_the_others_with_batches_under_way(start: Start, rank: int) -> None:
    training, process = start(stages=3, schedule="fdg", microbatches=1, loader_processes=1)
    pids = ready(training, 1)  # no operation of the test runs on workers
    members = family(process.pid)
    pids |= servers(members)
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    output = end(training, process, members, killed)
    assert process.returncode
    if rank:  # else the user's shell names it
        assert f"Lost rank {rank} " in first_error(output), output


@slow
def test_a_failed_replica_ends_the_other_replicas(start: Start) -> None:
    fault = {"where": "forward", "rank": 3, "step": 3}
    training, process = start(replicas=2, stages=2, fault=fault)
    output = end(training, process, {process.pid})
    assert process.returncode
    assert "this error is on purpose" in first_error(output), output
    assert "rank 3 (worker, replica 1, stage 0) failed" in output


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_answering_ends_the_others_and_is_named(start: Start, rank: int) -> None:
    training, process = start(stages=2, timeout_s=5)
    pids = ready(training, 2)
    members = family(process.pid)
    stopped = time.monotonic()
    os.kill(pids[rank], signal.SIGSTOP)
    if rank == 0:  # nobody kills the process that the user has started and stopped
        wait_for(lambda: not alive(members - {pids[0]}), training, 5 + limit_s())
        os.kill(pids[0], signal.SIGCONT)
    output = end(training, process, members, stopped + 5)
    assert process.returncode
    if rank == 0:
        assert "rank 1 (worker) ends: rank 0 has stopped answering" in output
    else:
        assert "Lost rank 1 " in first_error(output), output
        assert "stopped answering" in first_error(output)


@slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_sigterm_ends_all_ranks_and_saves(start: Start, tmp_path: Path, replicas: int) -> None:
    training, process = start(replicas=replicas, stages=2, **SAVING)
    ready(training, replicas * 2)
    members = family(process.pid)
    before = checkpoints(training)[-1]
    told = time.monotonic()
    process.terminate()
    output = end(training, process, members, told)
    assert "SIGTERMException" in output
    assert checkpoints(training)[-1] != before, output
    if replicas == 1:
        assert_resumes(training, tmp_path)


@slow
def test_a_handler_saves_while_all_replicas_train_on(start: Start) -> None:
    checkpoint = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    saving = SAVING | {"checkpoint": checkpoint, "saves_on_signal": True}
    training, process = start(replicas=2, stages=2, **saving)
    pids = ready(training, 4)
    for rank in (2, 0):  # the drivers, as `srun` would
        os.kill(pids[rank], signal.SIGUSR1)
    wait_for((training.folder / "signal.ckpt").exists, training)
    before = checkpoints(training)[-1]
    wait_for(lambda: checkpoints(training)[-1] != before, training)
    assert process.poll() is None
    saved = torch.load(training.folder / "signal.ckpt", weights_only=True)
    usual = torch.load(checkpoints(training)[-1], weights_only=True)
    assert saved["state_dict"].keys() == usual["state_dict"].keys()
    assert len(saved["optimizer_states"][0]["state"]) == len(usual["optimizer_states"][0]["state"])


@slow
@pytest.mark.parametrize("whom", ["group", "main process"])
def test_ctrl_c_ends_all_ranks(start: Start, tmp_path: Path, whom: str) -> None:
    # it comes in the middle of a step: what is saved then is no state of an undisturbed run
    training, process = start(stages=2, **SAVING | {"checkpoint": {"filename": "{step}"}})
    ready(training, 2)
    members = family(process.pid)
    told = time.monotonic()
    if whom == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output = end(training, process, members, told)
    assert process.returncode == 1, output
    assert "graceful shutdown" in output
    assert_resumes(training, tmp_path)


@slow
@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
@pytest.mark.parametrize("kill", [True, False])
def test_faults_end_every_launch(start: Start, launch: str, kill: bool) -> None:
    fault = None if kill else {"where": "forward", "rank": 1, "step": 3}
    training, process = start(stages=2, fault=fault, **LAUNCHES[launch])
    since, members = 0.0, {process.pid}
    if kill:
        pids = ready(training, 2)
        members = family(process.pid)
        since = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
    output = end(training, process, members, since)
    assert process.returncode
    first = first_error(output)
    if kill:
        assert "Lost rank 1 (worker" in first, output
    else:  # told by the driver, or the worker's own last line
        assert "rank 1 (worker" in first or "this error is on purpose" in first, output
        assert "this error is on purpose" in output


@slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_rank_that_is_busy_with_user_code_does_not_outlive_the_others(
    start: Start, launch: str
) -> None:
    # the driver of one replica draws figures for an hour while that of the other is killed
    fault = {"where": "callback", "rank": 1, "step": 9, "busy": True}
    training, process = start(replicas=2, stages=1, fault=fault, **LAUNCHES[launch])
    wait_for((training.folder / "busy").exists, training)
    wait_for((training.folder / "pid.0").exists, training)
    members = family(process.pid)
    since = time.monotonic()
    os.kill(int((training.folder / "pid.0").read_text()), signal.SIGKILL)
    # nobody but the agent knows of it, who asks the other process to end and waits for it
    end(training, process, members, since, more=30 if launch == "torchrun" else 0)
    assert process.returncode


@slow
def test_a_killed_loader_process_ends_all_ranks(start: Start) -> None:
    training, process = start(stages=2, loader_processes=1)
    pids = ready(training, 2)
    members = family(process.pid)
    [loader] = family(pids[0]) - {pids[0]} - {*servers(members).values()}
    since = time.monotonic()
    os.kill(loader, signal.SIGKILL)
    output = end(training, process, members, since)
    assert process.returncode
    assert f"DataLoader worker (pid {loader}) is killed" in output
    assert "rank 0 (driver" in output


@slow
def test_a_data_set_that_cannot_be_pickled_ends_all_ranks_and_is_named(start: Start) -> None:
    since = time.monotonic() + 60  # it is sent to the loader's process before the first step
    config = {"loader_processes": 1, "loader_start": "spawn", "unpicklable": True}
    training, process = start(stages=2, **config)
    output = end(training, process, {process.pid}, since)
    assert process.returncode
    reason = "AttributeError: Can't pickle local object 'data.<locals>.<lambda>'"
    assert reason in first_error(output), output
