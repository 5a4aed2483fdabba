"""Commands as a user types them; networks come from a module in the current folder."""

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from lightning_hybrid.asking import fit_model_command
from lightning_hybrid.asking.performance import PerformanceModel, fit
from lightning_hybrid.cli import main
from lightning_hybrid.planning.plan import Plan

NETWORKS = """
import torch
from lightning.pytorch import LightningModule
from torch import nn

def perceptron(width=64, layers=6):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

def number():
    return 3

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))

class Module(LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.net = perceptron(width)
        self.example_input_array = torch.zeros(4, width)

    def forward(self, x):
        return self.net(x)
"""
CLUSTER = """
name: slow links
devices:
  - {name: A, count: 4, compute: 1 GFLOP/s, memory: 1 GB}
levels:
  - {name: Ethernet, devices: 4, bandwidth: 1 MB/s, latency: 1 us}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nets_of_the_user.py").write_text(NETWORKS)
    (tmp_path / "slow.yaml").write_text(CLUSTER)
    return tmp_path


def plan(*options: str, network: str = "nets_of_the_user:perceptron") -> int:
    return main(["plan", network, "--cluster", "slow.yaml", *options])


def test_a_plan_is_shown_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--input", "8,64", "--json", "plan.json", "--html", "plan.html") == 0
    found = Plan.load(folder / "plan.json")
    # gradients of 100 kB over 1 MB/s bind, so that replicas do not pay
    assert (found.replicas, found.world_size, found.schedule) == (1, 4, "gpipe")
    assert sum(row.parameters for row in found.rows) == 6 * (64 * 64 + 64)
    shown = capsys.readouterr().out
    assert "Not measured: counted operations" in shown
    assert "Shapes, the best first" in shown
    page = (folder / "plan.html").read_text()
    assert page.count('class="lane"') == found.world_size
    assert "Shapes, the best first" in page


def test_an_argument_of_the_network_and_fewer_devices(folder: Path) -> None:
    network = "nets_of_the_user:perceptron(width=16, layers=3)"
    assert plan("--input", "8,16", "--devices", "2", "--json", "p.json", network=network) == 0
    assert Plan.load("p.json").world_size == 2


def test_tokens_have_a_type_of_their_own() -> None:
    options = ("--devices", "1", "--json", "p.json")
    assert plan("--input", "4,7:int64", *options, network="nets_of_the_user:Tokens") == 0
    assert sum(row.parameters for row in Plan.load("p.json").rows) == 80 + 18


def test_a_configuration_names_the_module_and_the_number_of_devices(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "trainer: {devices: 2}\n"
        "model: {class_path: nets_of_the_user.Module, init_args: {width: 32}}\n"
    )
    assert main(["plan", "--config", "run.yaml", "--cluster", "slow.yaml", "--json", "p.json"]) == 0
    found = Plan.load("p.json")
    assert found.world_size == 2
    assert found.rows[0].partitions[0] == "net.0"
    (folder / "short.yaml").write_text("model: {width: 32}\n")
    assert plan("--config", "short.yaml", network="nets_of_the_user:Module") == 0


def test_measured_times_are_seconds_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_CACHE", "cache")
    assert plan("--input", "8,64", "--measure", "--optimizer", "SGD(momentum=0.9)") == 0
    assert "Measured on this machine (cpu" in capsys.readouterr().out


def test_how_many_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slow.yaml").write_text(CLUSTER.replace("1 MB/s", "100 MB/s"))
    call = ["simulate", "nets_of_the_user:perceptron", "--input", "64,64", "--cluster", "slow.yaml"]
    assert main([*call, "--speed-up", "1.9"]) == 0
    said = capsys.readouterr().out
    assert "You need 2 devices: 2 replicas x 1 stage, 1 micro-batch" in said
    assert "It fits on one device." in said
    assert main([*call, "--speed-up", "5"]) == 0
    assert "No number up to 4 is enough" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "8,64", "--devices", "5"], "has 4 devices, 5 are asked for"),
        (["--input", "8,64", "--devices", "0"], "--devices 0: at least 1"),
        (["--input", "8,x"], "--input 8,x: write sizes"),
        (["--input", "8,64:cat"], "torch has no type 'cat'"),
        (["--input", "8,63"], "Sequential cannot be called with these inputs"),
        ([], "has no example_input_array, so --input is needed"),
        (["--input", "8,64", "--optimizer", "Adma"], "torch.optim has no 'Adma'"),
        (["--input", "8,64", "--optimizer", "SGD(mass=1)"], "unexpected keyword argument 'mass'"),
        (["--input", "8,64", "--cluster", "none.yaml"], "no cluster can be read from 'none.yaml'"),
        (["--input", "8,64", "--json", "none/p.json"], "'none/p.json' cannot be written"),
        (["--config", "none.yaml"], "no configuration can be read from 'none.yaml'"),
        (["--input", "9000000,64"], "too small for the network, whatever the shape"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("lightning-hybrid plan: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("perceptron", "names no network"),
        ("no_such_module:perceptron", "no module 'no_such_module' can be imported"),
        ("nets_of_the_user:nothing", "has no 'nothing'"),
        ("nets_of_the_user:number", "makes a int: a torch.nn.Module is needed"),
        ("nets_of_the_user:perceptron(depth=3)", "unexpected keyword argument 'depth'"),
        ("nets_of_the_user:perceptron(3", "write a name, or a name with arguments"),
    ],
)
def test_a_network_that_is_not_there_is_said_in_one_line(
    network: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--input", "8,64", network=network) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory: 1 GB", "memory: 1"),
            "devices[0].memory is 1, which is no memory: write a number and its unit",
        ),
        (("latency", "latncy"), "unknown field 'latncy'; did you mean 'latency'?"),
    ],
)
def test_a_cluster_that_is_wrong_is_said_in_one_line(
    change: tuple[str, str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow.yaml").write_text(CLUSTER.replace(*change))
    assert plan("--input", "8,64") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def write_runs(path: Path, runs: int = 9) -> None:
    """Too few configurations to hold some out, which takes its time."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", "flops", "devices", "batch", "step_s"])
        for k in range(runs):
            flops, devices = 1e9 * (1 + k % 3), 1 + k // 3 % 3
            table.writerow([f"run{k}", flops, devices, 6, 0.01 + flops / 1e12 / devices])


def test_a_model_is_fitted_from_a_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit_model_command, "fit", partial(fit, generations=50))
    write_runs(folder / "runs.csv")
    assert main(["fit-model", "runs.csv", "--strength", "0", "--out", "model.json"]) == 0
    model = PerformanceModel.load("model.json")
    # the batch is the same in all runs, the name is no number
    assert [f.name for f in model.intrinsic] == ["flops"]
    assert [f.name for f in model.extrinsic] == ["devices"]
    assert model.predict_s({"flops": 2e9, "devices": 2}) == pytest.approx(0.011, rel=0.01)
    assert "flops accounts for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.csv"], "no table can be read from 'none.csv'"),
        (["runs.csv", "--time", "seconds"], "--time seconds: there is no such column"),
        (["runs.csv", "--extrinsic", "hosts"], "--extrinsic hosts: there is no such column"),
        (["runs.csv", "--strength", "-1"], "0 or more is needed"),
        (["few.csv"], "runs cannot fix the"),
        (["holes.csv"], "holes.csv, line 3: flops is '', not a number"),
    ],
)
def test_a_table_that_is_wrong_is_said_in_one_line(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(folder / "runs.csv")
    write_runs(folder / "few.csv", 2)
    (folder / "holes.csv").write_text("flops,step_s\n1,1\n,2\n")
    assert main(["fit-model", *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_plan_of_the_command_is_json_that_names_its_fields(folder: Path) -> None:
    assert plan("--input", "8,64", "--json", "plan.json") == 0
    record = json.loads((folder / "plan.json").read_text())
    row = record["rows"][0]
    assert row["forward_s"] > 0
    assert row["cut_bytes"] == 8 * 64 * 4 // record["microbatches"]
