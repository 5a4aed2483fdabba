"""LightningCLI makes the strategy from a file and from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_script import Regression
from lightning.pytorch.cli import LightningCLI

from lightning_hybrid import (
    Asynchronous,
    BySpeed,
    Delayed,
    Equal,
    HybridGabraStrategy,
    Plan,
    Search,
    Sharded,
)
from lightning_hybrid.errors import PlanError

# Lightning's advice on unused loggers and on arguments given by the test
pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("cli_script.py")
CLASS = "lightning_hybrid.HybridGabraStrategy"
PLAN = Plan(replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("net.2",))


def strategy_of(*arguments: str) -> HybridGabraStrategy:
    """Nothing is started before `fit`."""
    defaults = ["--trainer.accelerator=cpu", "--trainer.devices=4", "--trainer.logger=false"]
    cli = LightningCLI(Regression, args=[*defaults, *arguments], run=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HybridGabraStrategy)
    return strategy


def config(folder: Path, **trainer: Any) -> Path:
    path = folder / "given.yaml"  # JSON is YAML; the CLI saves its own as config.yaml
    path.write_text(json.dumps({"trainer": trainer, "model": {"width": 5}}))
    return path


def test_the_class_and_its_arguments_from_a_file(tmp_path: Path) -> None:
    arguments = {
        "data_parallel_size": 2,
        "num_microbatches": 3,
        "plan": ["net.2"],
        "network": "net",
        "log_performance": True,
    }
    strategy = {"class_path": CLASS, "init_args": arguments}
    made = strategy_of(f"--config={config(tmp_path, strategy=strategy)}")
    assert (made.num_replicas, made.coordinates.ranks_per_replica) == (2, 2)


RECORDS: dict[str, list[Any]] = {
    "schedule": [Delayed("fdg", weights="current", shrink=0.5)],
    "search": [Search(method="merging", objective="makespan", capacity=[1.0, 2.0, 1.0, 1.0])],
    "replicas": [
        Equal(shard_states=True),
        BySpeed(replan="epoch", shard_states=True),
        Asynchronous(staleness=4),
    ],
    "checkpoint": [Sharded(asynchronous=True)],
}


@pytest.mark.parametrize(
    ("name", "record"), [(name, each) for name, some in RECORDS.items() for each in some], ids=str
)
def test_a_record_from_a_file_by_its_class(tmp_path: Path, name: str, record: Any) -> None:
    kind = f"lightning_hybrid.{type(record).__name__}"
    arguments = {"data_parallel_size": 4, name: {"class_path": kind, "init_args": vars(record)}}
    strategy = {"class_path": CLASS, "init_args": arguments}
    made = strategy_of(f"--config={config(tmp_path, strategy=strategy)}")
    assert getattr(made._config, name) == record


def test_a_record_from_the_command_line() -> None:
    name = "--trainer.strategy"
    made = strategy_of(
        f"{name}={CLASS}",
        f"{name}.search.objective=makespan",
        f"{name}.replicas=lightning_hybrid.BySpeed",
        f"{name}.replicas.on_loss=continue",
    )
    assert made._config.search == Search(objective="makespan")
    assert made._config.replicas == BySpeed(on_loss="continue")


@pytest.mark.conformance
def test_the_class_and_its_arguments_from_the_command_line() -> None:
    name = "--trainer.strategy"
    made = strategy_of(f"{name}={CLASS}", f"{name}.pipeline_parallel_size=2", f"{name}.seed=3")
    assert (made.num_replicas, made.coordinates.ranks_per_replica) == (2, 2)


def test_the_name(tmp_path: Path) -> None:
    assert strategy_of("--trainer.strategy=hybrid_gabra").coordinates.ranks_per_replica == 4
    assert strategy_of(f"--config={config(tmp_path, strategy='hybrid_gabra')}").num_replicas == 1


@pytest.mark.conformance
def test_a_plan_by_its_path(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    strategy = {"class_path": CLASS, "init_args": {"plan": str(tmp_path / "plan.json")}}
    path = config(tmp_path, strategy=strategy)
    assert strategy_of(f"--config={path}", "--trainer.devices=2").plan == PLAN


def test_a_wrong_size_is_named(tmp_path: Path) -> None:
    strategy = {"class_path": CLASS, "init_args": {"data_parallel_size": 3}}
    with pytest.raises(PlanError, match=r"data_parallel_size\(3\).*4 devices"):
        strategy_of(f"--config={config(tmp_path, strategy=strategy)}")


@pytest.mark.conformance
@pytest.mark.distributed
def test_a_run_from_a_file(tmp_path: Path) -> None:
    strategy = {
        "class_path": CLASS,
        "init_args": {"pipeline_parallel_size": 2, "plan": ["net.2"]},
    }
    path = config(
        tmp_path,
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "fit", f"--config={path}"]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=240)
    found = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert found["plan"].cuts == ("2",)
    assert not (tmp_path / "rank1.pt").exists()  # the other device has a server
    torch.manual_seed(1)
    assert not found["weights"]["net.0.weight"].equal(Regression(5).net[0].weight)
