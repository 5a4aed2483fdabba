"""Which package of Lightning is used, and what the other one's Trainer says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid._lightning import CHOSEN
from lightning_hybrid._registration import NAMES
from lightning_hybrid._which_lightning import VARIABLE, choose, chosen_in_children
from lightning_hybrid.errors import HybridError
from lightning_hybrid.strategy.launcher import LaunchedTrainerMethod

ROOT = Path(__file__).parents[1]
OURS, THEIRS = "lightning.pytorch", "pytorch_lightning"


@pytest.mark.parametrize(
    ("wanted", "imported", "installed", "expected"),
    [
        (None, {OURS}, True, "lightning"),
        (None, {THEIRS}, True, "pytorch_lightning"),
        (None, {OURS, THEIRS}, True, "lightning"),
        (None, {"lightning_fabric"}, True, "pytorch_lightning"),
        (None, set(), True, "lightning"),
        (None, set(), False, "pytorch_lightning"),
        ("", {THEIRS}, True, "pytorch_lightning"),
        ("lightning", {THEIRS}, True, "lightning"),
        ("pytorch_lightning", {OURS}, True, "pytorch_lightning"),
    ],
)
def test_the_package_that_is_imported_is_used(
    wanted: str | None, imported: set[str], installed: bool, expected: str
) -> None:
    assert choose(wanted, imported, lightning_installed=installed) == expected


def test_a_variable_that_names_no_package_is_refused() -> None:
    with pytest.raises(HybridError, match=rf"{VARIABLE}='torch'.*lightning, pytorch_lightning"):
        choose("torch", set(), lightning_installed=True)


def output_of(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True
    )
    return ran.stdout.strip()


def test_allocations_need_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; import lightning_hybrid.allocation as allocation; "
        "found = allocation.allocate(allocation.Problem([3, 1, 2], [1, 1])); "
        "heavy = {name.partition('.')[0] for name in sys.modules}; "
        "print(found.assignment, heavy & {'torch', 'lightning', 'pytorch_lightning'})"
    )
    assert output_of(code) == "(0, 1, 1) set()"


PLANNED_FROM_NUMBERS = """
import sys
for name in ("torch", "lightning", "lightning_hybrid.graph", "lightning_hybrid.stage"):
    sys.modules[name] = None  # so that an import of it is an error
from lightning_hybrid import Plan, Search
from lightning_hybrid.config import Config
from lightning_hybrid.planning import (
    AUTO, ClusterDescription, PartitionTable, PlanSettings, ShapeRequest, plans_of, rank_shapes,
    recommended,
)

columns = dict(forward_s=1e-3, backward_s=2e-3, parameters=10**9, layers=1, parameter_bytes=4e9)
columns |= dict(gradient_bytes=4e9, kept_bytes=8e9, activation_bytes=1e6, working_bytes=0)
record = {name: [value] * 4 for name, value in columns.items()}
record |= dict(names=[*"abcd"], cut_bytes=[1e3] * 3, output_bytes=8, batch=8, device="a GPU")
table = PartitionTable.from_record(record)

def costs(samples):
    return table.scaled(samples / 8)

cluster = ClusterDescription.load("p3.16xlarge").take(4)
asked = ShapeRequest(settings=PlanSettings(schedule=AUTO))
best = recommended(rank_shapes([costs], cluster, 8, asked))
plan, *_ = plans_of(best, costs, cluster, 8)
assert Plan.from_json(plan.to_json()) == plan
print(plan.replicas, plan.cuts)
"""


def test_planning_needs_neither_torch_nor_a_captured_network() -> None:
    """Four partitions of 8 GB each, without states, on four devices of 16 GB."""
    assert output_of(PLANNED_FROM_NUMBERS) == "1 ('b', 'c', 'd')"


@pytest.mark.parametrize("words", [["--help"], ["fit-model", "--help"]])
def test_commands_that_need_no_torch_import_none(words: list[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from lightning_hybrid.cli import main; "
        f"main({words})"
    )
    assert "usage: lightning-hybrid" in output_of(code)


@pytest.mark.parametrize(
    ("imports", "made_by"),
    [
        ("import lightning_hybrid; from pytorch_lightning import Trainer", "Trainer"),
        ("import lightning_hybrid; from lightning_fabric import Fabric as Trainer", "Fabric"),
        ("from lightning_hybrid.run import Run; from lightning import Trainer", "Trainer"),
    ],
)
def test_names_of_strategies_are_known_whatever_is_imported_first(
    imports: str, made_by: str
) -> None:
    code = (
        f"{imports}; made = Trainer(accelerator='cpu', devices=2, strategy='hybrid_gabra'); "
        f"print(type(made).__name__, type(made.strategy).__name__)"
    )
    kind = "HybridGabraFabricStrategy" if made_by == "Fabric" else "HybridGabraStrategy"
    assert output_of(code).splitlines()[-1] == f"{made_by} {kind}"


@pytest.mark.conformance
def test_lightning_need_not_be_installed() -> None:
    code = (
        "import sys; sys.modules['lightning'] = None; import lightning_hybrid, pytorch_lightning; "
        "strategy = pytorch_lightning.Trainer("
        "accelerator='cpu', devices=2, strategy='hybrid_gabra', logger=False).strategy; "
        "print(isinstance(strategy, pytorch_lightning.strategies.DDPStrategy), "
        "isinstance(strategy, lightning_hybrid.HybridGabraStrategy))"
    )
    assert output_of(code) == "True True"


def test_children_choose_the_same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "pytorch_lightning")  # what is inherited otherwise
    with chosen_in_children():
        told = os.environ[VARIABLE]
    assert told == CHOSEN
    assert os.environ[VARIABLE] == "pytorch_lightning"


# in this process `lightning` is used
WHAT_TO_DO = rf"of `{THEIRS}`.*made for `{OURS}`.*before lightning_hybrid.*{VARIABLE}={THEIRS}"
# Lightning's advice on unused devices and loggers
usual_advice = pytest.mark.filterwarnings("ignore")


@usual_advice
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_of_the_other_package_says_what_to_do(name: str) -> None:
    import pytorch_lightning

    with pytest.raises(HybridError, match=WHAT_TO_DO):
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False)


@usual_advice
def test_a_strategy_tells_a_strange_trainer_of_which_package_it_is() -> None:
    import pytorch_lightning

    with pytest.raises(ValueError, match=rf"HybridGabraStrategy of {OURS}>.*{THEIRS}.strategies"):
        pytorch_lightning.Trainer(accelerator="cpu", strategy=HybridGabraStrategy(), logger=False)


@usual_advice
def test_a_process_with_a_trainer_of_the_other_package_runs_nothing() -> None:
    import pytorch_lightning

    strange = pytorch_lightning.Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(HybridError, match=WHAT_TO_DO):
        LaunchedTrainerMethod(strange.fit)()
