"""What cannot work is refused before anything is trained, in words that help."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import KubeflowEnvironment, LightningEnvironment
from torch import nn

from lightning_hybrid import HybridGabraStrategy, Plan, Search, Sharded
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.driver.discovery import Discovery
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.process import Servers
from lightning_hybrid.stage import StageOptions
from lightning_hybrid.strategy import refusals
from lightning_hybrid.strategy.launcher import HybridSubprocessLauncher
from lightning_hybrid.strategy.refusals import (
    refuse_copies,
    refuse_device,
    refuse_lazy,
)

# Lightning's advice on unused devices and loggers
pytestmark = pytest.mark.filterwarnings("ignore")
PLAN = Plan(replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("second",))
LOOP = Plan(
    replicas=1, stages=3, microbatches=2, schedule="gpipe", cuts=("b", "c"), devices=(0, 1, 0)
)


FIT = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_hybrid import HybridGabraStrategy
replicas = HybridGabraStrategy(data_parallel_size=2)
Trainer(accelerator="cpu", devices=2, strategy=replicas, logger=False).fit(BoringModel())
"""


def trainer(devices: int, **arguments: Any) -> Trainer:
    """Nothing is started before `fit`."""
    strategy = HybridGabraStrategy(**arguments)
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


def test_a_notebook_is_told_the_name_of_the_strategy_that_works_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several hosts, or `strategy="hybrid_gabra_spawn"`, in a notebook: use `hybrid_gabra`."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for wrong in ({"strategy": "hybrid_gabra_spawn"}, {"strategy": "hybrid_gabra", "num_nodes": 2}):
        with pytest.raises(PlanError, match="Use Trainer\\(strategy='hybrid_gabra'\\) on one host"):
            Trainer(accelerator="cpu", devices=2, **wrong)
    for name in ("hybrid_gabra", "hybrid_gabra_notebook"):
        Trainer(accelerator="cpu", devices=2, strategy=name, logger=False)


@pytest.mark.parametrize(
    ("devices", "rank", "seen"), [(1, 0, "0 of host 0"), (2, 1, "0 of host 1")]
)
def test_processes_that_a_cluster_has_started_are_those_that_the_trainer_wants(
    monkeypatch: pytest.MonkeyPatch, devices: int, rank: int, seen: str
) -> None:
    """`Trainer(devices=..., num_nodes=...)` and the cluster's environment (LSF, MPI, Kubeflow, Ray)
    say the same of processes and hosts."""
    for name, value in {"WORLD_SIZE": "2", "RANK": f"{rank}", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    strategy = HybridGabraStrategy()
    plugins = [KubeflowEnvironment()]
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins)
    with pytest.raises(PlanError, match=f"KubeflowEnvironment says that .* 2, .* number {seen}"):
        trainer.fit(BoringModel())


def test_stages_are_refused_under_ray() -> None:
    """Stages under Ray Train, which waits for the functions of all its processes."""

    class RayLightningEnvironment(LightningEnvironment):
        pass

    strategy = SimpleNamespace(cluster_environment=RayLightningEnvironment())
    trainer: Any = SimpleNamespace(callbacks=[], strategy=strategy)
    refusals.refuse_sizes(trainer, replicas=2, stages=1)
    with pytest.raises(PlanError, match=r"2 stages: Ray waits .* Start the script with torchrun"):
        refusals.refuse_sizes(trainer, replicas=1, stages=2)


@pytest.mark.conformance
@pytest.mark.parametrize("source", ["standard input", "command line"])
def test_a_script_without_a_file_says_that_it_cannot_be_started_again(source: str) -> None:
    """A script from standard input or `-c`, which cannot be started again."""
    arguments, text = (["-"], FIT) if source == "standard input" else (["-c", FIT], "")
    command = [sys.executable, "-W", "ignore", *arguments]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "HybridError: The script cannot be started again" in last
    assert f"sys.argv[0] is '{arguments[0]}'" in last


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_other_ranks_do_not_start_without_a_file(
    monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    """Code that is not in a file, outside of a notebook: no other rank could start it."""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__=file))
    monkeypatch.setattr(sys, "argv", ["-"])
    run = trainer(4, data_parallel_size=2)
    with pytest.raises(HybridError, match=r"cannot be started again.*sys.argv\[0\] is '-'"):
        run.fit(BoringModel())
    assert not Servers.ranks  # nobody was started: another Trainer may have other sizes


def test_before_ranks_start_that_have_no_room_for_the_network_configure_model_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network for which the ranks of a host have no room, before they start: use
    `configure_model`.
    """

    class Model(BoringModel):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = nn.Linear(width, width, bias=False)

    monkeypatch.setattr("lightning_hybrid.strategy.launcher._require_script", lambda: None)
    monkeypatch.setattr("lightning_hybrid.strategy.strategy.free_of_host", lambda: 9_000_000)
    started: list[str] = []
    monkeypatch.setattr(
        HybridSubprocessLauncher, "_call_children_scripts", lambda _: started.append("ranks")
    )
    with pytest.raises(PlanError, match=r"Model has 0.004 GB of weights") as error:
        trainer(4, data_parallel_size=4).fit(Model(1000))
    assert started == []
    text = str(error.value)
    assert "the other 3 would need 0.012 GB, and 0.009 GB is free" in text
    assert text.splitlines()[1:] == [
        "    def configure_model(self):",
        "        if self.net is None:  # what __init__ sets",
        "            self.net = ...",
    ]
    refuse_copies(Model(1000), 2, 9_000_000)
    refuse_copies(Model(1000), 3, None)


def test_accelerators_without_groups_are_refused() -> None:
    """Accelerators other than CPUs and CUDA devices (MPS)."""
    for name in ("cpu", "cuda:1"):
        refuse_device(torch.device(name))
    with pytest.raises(PlanError, match=r"not on 'mps'\. Use accelerator='cpu' or"):
        refuse_device(torch.device("mps"))


@pytest.mark.parametrize(
    ("devices", "arguments"),
    [
        (3, {"pipeline_parallel_size": 2}),
        (3, {"data_parallel_size": 2}),
        (6, {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
        (3, {"plan": PLAN}),
        (3, {"plan": LOOP}),
    ],
)
def test_devices_that_are_no_multiple_of_the_sizes(devices: int, arguments: dict[str, Any]) -> None:
    """A number of devices that is no multiple of the sizes."""
    with pytest.raises(PlanError, match=rf"2\D.*!= {devices} devices"):
        trainer(devices, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"data_parallel_size": "many"}, "data_parallel_size='many'"),
        ({"pipeline_parallel_size": 3, "plan": PLAN}, "pipeline_parallel_size=3.*2 stages"),
        ({"data_parallel_size": 2, "plan": PLAN}, "data_parallel_size=2.*1 replicas"),
        ({"pipeline_parallel_size": 3, "plan": LOOP}, "=3.*2 devices with 3 stages"),
        (
            {"plan": ["second"], "search": Search(contiguous=False)},
            "cut points.*contiguous=False",
        ),
        ({"plan": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_arguments_that_contradict(arguments: dict[str, Any], text: str) -> None:
    """Arguments of the strategy that contradict each other."""
    with pytest.raises(PlanError, match=text):
        HybridGabraStrategy(**arguments)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("cuts", ("first", "second"), r"stages\(2\) need 1"),
        ("devices", (0, 1), "end with 0"),
        ("microbatches", 0, r"microbatches\(0\)"),
    ],
)
def test_a_plan_that_contradicts_itself(field: str, value: Any, text: str) -> None:
    """A plan that contradicts itself."""
    fields = {"replicas": 1, "stages": 2, "microbatches": 2, "schedule": "gpipe", "cuts": ("x",)}
    with pytest.raises(PlanError, match=text):
        Plan(**{**fields, field: value})


class OneReplica:
    """The mesh of a single driver, as far as planning needs it."""

    def __init__(self, stages: int) -> None:
        self.coordinates = Coordinates(0, 1, stages)
        self.drivers = None


def test_more_stages_than_partitions() -> None:
    """More stages than the network has partitions."""
    stages = 50
    module = nn.ModuleDict({"net": nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))})
    remote = SimpleNamespace(suspended=nullcontext)
    calls = SimpleNamespace(as_on_one_device=False)
    driver = SimpleNamespace(  # as far as it is asked
        device=torch.device("cpu"), remote=remote, calls=calls
    )
    options = DriverOptions(
        seed=0,
        stages=StageOptions(),
        microbatches=2,
        planner=pytest.fail,
        trains=True,
        automatic=False,
        say=print,
        progress=StartProgress(None),
    )
    networks = Discovery(module, driver, OneReplica(stages), options, {})
    with pytest.raises(PlanError, match=r"3 network partitions, fewer than pipe.*=50"):
        module.net(torch.zeros(4, 6))
    networks.close()


def test_a_layer_without_a_size_is_refused_by_name() -> None:
    """`nn.LazyLinear` and its like, not called before the fit."""
    module = nn.ModuleDict({"net": nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))})
    with pytest.raises(PlanError, match=r"'net\.0\.weight' has no size before the first call"):
        refuse_lazy(module)


def test_a_sharded_checkpoint_refuses_what_passes_through_one_rank() -> None:
    """`checkpoint=Sharded()` with a `CheckpointIO`, or saved to a URL."""
    with pytest.raises(PlanError, match="AsyncCheckpointIO was given"):
        HybridGabraStrategy(
            checkpoint=Sharded(asynchronous=True), checkpoint_io=AsyncCheckpointIO()
        )
    strategy = HybridGabraStrategy(checkpoint=Sharded())
    with pytest.raises(PlanError, match="AsyncCheckpointIO was given"):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, plugins=[AsyncCheckpointIO()])
    with pytest.raises(PlanError, match=r"'s3://there/x\.ckpt'"):
        strategy.save_checkpoint({}, "s3://there/x.ckpt")


def test_an_unknown_kind_of_checkpoint_is_refused() -> None:
    """Another value of `checkpoint`."""
    with pytest.raises(
        PlanError, match=r"checkpoint='sharded' is none of 'full', Sharded\(\.\.\.\)"
    ):
        HybridGabraStrategy(checkpoint="sharded")  # type: ignore[arg-type]
