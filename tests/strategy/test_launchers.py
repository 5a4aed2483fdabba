"""Every way to start the processes trains alike, and the script goes on as on one device."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from ports import free_port
from test_exact_training import one_device as one_device_of
from training_script import train

from lightning_hybrid.process.watchdogs import GRACE_S

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
STEPS, MORE_STEPS = 9, 3
CONFIG = {
    **DEFAULTS,
    "dtype": "float64",
    "stages": 2,
    "steps": STEPS,
    "checkpoint": {"monitor": "val"},
    "trainer": {},
}
LATER_LINES = {
    "after": "best",
    "again": MORE_STEPS,
    "then": {"after": None, "again": None, "seed": 1, "network": "dropout", "side": 4},
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHES: dict[str, dict[str, Any]] = {
    # by name alone: the sizes are chosen
    "spawn": {"strategy": "hybrid_gabra_spawn"},
    "fork": {"strategy": "hybrid_gabra_fork"},
    "torchrun": {"strategy": "hybrid_gabra", "launcher": TORCHRUN},
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = {**CONFIG, **LATER_LINES, "strategy": "auto", "stages": 1}
    return train(config, tmp_path_factory.mktemp("one_device"))[1]


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = {**CONFIG, "strategy": "ddp", "replicas": 2, "stages": 1}
    return Training(tmp_path_factory.mktemp("ddp"), **config).run()[0]


@pytest.fixture(scope="module", params=["script", "torchrun"])
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """That of a script that runs once, or is started on each of two ranks."""
    launch = {"launcher": TORCHRUN} if request.param == "torchrun" else {}
    return Training(tmp_path_factory.mktemp(request.param), **CONFIG, **LATER_LINES, **launch)


@pytest.fixture(scope="module")
def driver(training: Training) -> dict[str, Any]:
    """What the only process has seen that comes to the end of the script."""
    [driver] = training.launch()
    return driver


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launch_trains_as_one_device_or_as_ddp(
    one_device: dict[str, Any], two_devices: dict[str, Any], tmp_path: Path, launch: str
) -> None:
    run = Training(tmp_path, **{**CONFIG, **LAUNCHES[launch]})
    drivers = run.launch()
    assert drivers
    assert "Chosen for 2 devices: " in run.output
    expected = (
        two_devices if "Chosen for 2 devices: 2 replicas x 1 stage" in run.output else one_device
    )
    for driver in drivers:
        assert_same(dict(driver["weights"]), dict(expected["weights"]))
        assert_same(driver["metrics"], expected["metrics"])
        assert Path(driver["best"]).is_file()


def test_later_lines_see_what_one_device_sees(
    one_device: dict[str, Any], driver: dict[str, Any]
) -> None:
    assert_same(dict(driver["weights"]), dict(one_device["weights"]))
    for key in ("metrics", "validation", "test", "predictions", "random", "step", "epoch"):
        assert_same(driver[key], one_device[key])
    assert Path(driver["best"]).name == Path(one_device["best"]).name


def test_a_trainer_can_fit_again(one_device: dict[str, Any], driver: dict[str, Any]) -> None:
    expected, again = one_device["again"], driver["again"]
    assert_same(again["losses"], expected["losses"])
    assert again["step"] == STEPS + MORE_STEPS
    assert_same(dict(again["weights"]), dict(expected["weights"]))


def test_a_second_trainer_works_in_the_same_processes(
    training: Training, driver: dict[str, Any]
) -> None:
    assert driver["then"]["pid"] == driver["pid"]
    assert len(driver["then"]["losses"]) == STEPS
    # one process has computed stages of both networks, and has counted on
    [ran] = training.ran_on_workers().values()
    assert {"stem", "layers.1"} <= ran


FOUR = {**DEFAULTS, "dtype": "float64", "replicas": 2, "stages": 2, "steps": 5}


def assert_trained(drivers: list[dict[str, Any]], config: dict[str, Any] = FOUR) -> None:
    """All drivers hold what one device computes."""
    losses, weights = one_device_of(config)
    for driver, expected in zip(drivers, losses, strict=True):
        assert_same(driver["losses"], expected)
        assert_same(dict(driver["weights"]), dict(weights))


def test_slurm_starts_the_processes(tmp_path: Path) -> None:
    training = Training(tmp_path, **FOUR)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "training",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": f"{free_port()}",
    }
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(4)]
    assert_trained(training.wait([training.start(environment=job | rank) for rank in ranks]))


TWO = {**FOUR, "replicas": 1}


def test_lsf_starts_the_processes(tmp_path: Path) -> None:
    training, host = Training(tmp_path, **TWO), socket.gethostname()
    (tmp_path / "hosts").write_text(f"launch-node\n{host}\n{host}\n")
    job = {
        "LSB_JOBID": "4711",
        "LSB_DJOB_RANKFILE": str(tmp_path / "hosts"),
        "JSM_NAMESPACE_SIZE": "2",
        "MASTER_PORT": f"{free_port()}",
    }
    ranks = [
        {"JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank)}
        for rank in range(2)
    ]
    assert_trained(training.wait([training.start(environment=job | rank) for rank in ranks]), TWO)


def pods(tmp_path: Path, **config: Any) -> list[dict[str, Any]]:
    """Train in two pods of Kubeflow, each with one process."""
    kubeflow = "lightning.pytorch.plugins.environments:KubeflowEnvironment"
    training = Training(tmp_path, nodes=2, environments=[kubeflow], **TWO, **config)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    ranks = [{"RANK": str(rank)} for rank in range(2)]
    return training.wait([training.start(environment=job | rank) for rank in ranks])


def test_kubeflow_starts_the_processes(tmp_path: Path) -> None:
    assert_trained(pods(tmp_path), TWO)


def test_a_script_may_have_met_the_others_in_a_default_group_of_its_own(tmp_path: Path) -> None:
    assert_trained(pods(tmp_path, default_group=True), TWO)


def test_torchrun_starts_the_processes_of_several_nodes(tmp_path: Path) -> None:
    training = Training(tmp_path, nodes=2, **FOUR)
    port, agents = f"{free_port()}", []
    for node in range(2):
        training.launcher = [
            *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *("--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"),
        ]
        agents.append(training.start())
    assert_trained(training.wait(agents))


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.87.0.1 and 10.87.0.2."""
    names = [f"hybrid{os.getpid()}{letter}" for letter in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    if not shutil.which("ip"):
        pytest.skip("there is no `ip` to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        cable = ("type", "veth", "peer", "name", "cable1", "netns", names[1])
        ip("link", "add", "cable0", "netns", names[0], *cable)
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.87.0.{number + 1}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"cable{number}", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces can be made here: {error.stderr.decode()}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_two_hosts_train_together(hosts: list[str], tmp_path: Path) -> None:
    training = Training(tmp_path, nodes=2, **FOUR)
    job = {"MASTER_ADDR": "10.87.0.1", "MASTER_PORT": "29511"}
    processes = [
        training.start(("ip", "netns", "exec", host), job | {"NODE_RANK": str(node)})
        for node, host in enumerate(hosts)
    ]
    assert_trained(training.wait(processes))


def test_the_first_rank_waits_for_the_predictions_of_the_others(tmp_path: Path) -> None:
    # it holds the store; longer than a failed run may take to end
    config = {"replicas": 2, "steps": 2, "slow_prediction_s": GRACE_S + 5}
    ranks = Training(tmp_path, **config).launch()
    assert [len(rank["predictions"]) for rank in ranks] == [3, 3]
