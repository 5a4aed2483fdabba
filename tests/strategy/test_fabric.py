"""Loops of users of Fabric, in real processes, against plain Fabric: one device, or ``ddp``."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import USUAL
from fabric_script import FAILS, LOOPS
from lightning.fabric import Fabric
from prepared import Forked, start_ranks

from lightning_hybrid import Delayed, HybridGabraFabricStrategy, Plan, Search
from lightning_hybrid.errors import HybridError, PlanError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("fabric_script.py")
GLOBAL = ["trains_with_a_global_batch", "goes_backward_twice"]
APART = {
    *("goes_on_from_a_checkpoint", "is_refused", "scales_its_loss"),
    *FAILS,
    *GLOBAL,
}
"""Loops that have a test of their own."""
REST = sorted(LOOPS.keys() - APART)
Seen = dict[str, list[Any]]
"""Of each loop, for each replica, what its driver has seen."""


def start(
    folder: Path, loops: Sequence[str], replicas: int, stages: int, **options: Any
) -> list[Forked]:
    """Run loops in one group of processes; without stages by plain Fabric."""
    folder.mkdir(exist_ok=True)
    config = {"loops": [*loops], "replicas": replicas, "stages": stages, "options": options}
    (folder / "config.json").write_text(json.dumps(config))
    count, command = replicas * max(1, stages), [str(SCRIPT), str(folder)]
    output = folder / "output.txt"
    return start_ranks(command, count, env=os.environ | USUAL, cwd=folder, output=output)


def run(folder: Path, loops: Sequence[str], replicas: int, stages: int, **options: Any) -> Seen:
    ranks = start(folder, loops, replicas, stages, **options)
    try:
        for process in ranks:
            assert process.wait(timeout=900) == 0, (folder / "output.txt").read_text()
    finally:
        for process in ranks:
            process.kill()
    return {
        name: [torch.load(folder / f"{name}.{replica}.pt") for replica in range(replicas)]
        for name in loops
    }


def assert_equal(found: Seen, expected: Seen) -> None:
    """Every driver has what the device of its replica has under plain Fabric."""
    for name, theirs in expected.items():
        for replica, (mine, reference) in enumerate(zip(found[name], theirs, strict=True)):
            place = f"{name}, replica {replica}: "
            torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10, msg=place.__add__)


def check(folder: Path, loops: Sequence[str], replicas: int, stages: int, **options: Any) -> None:
    expected = run(folder / "plain", loops, replicas, 0)
    assert_equal(run(folder / "staged", loops, replicas, stages, **options), expected)


def test_loops_evaluate_save_and_load_in_stages_as_on_one_device(tmp_path: Path) -> None:
    check(tmp_path, ["sets_nothing_up", "clips_by_norm_and_evaluates", "saves_and_loads"], 1, 2)


@pytest.mark.parametrize(
    ("replicas", "stages"), [(1, 2), pytest.param(1, 3, marks=slow), pytest.param(2, 2, marks=slow)]
)
def test_a_network_that_returns_its_loss_goes_back_inside_of_its_calls(
    tmp_path: Path, replicas: int, stages: int
) -> None:
    check(tmp_path, ["returns_its_loss"], replicas, stages, schedule="1f1b")
    output = (tmp_path / "staged" / "output.txt").read_text()
    assert "micro-batches, 1f1b" in output
    assert "before its backwards" not in output  # as it says where they follow


@slow
@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (1, 3), (2, 2), (2, 1)])
def test_every_loop_has_the_numbers_of_plain_fabric(
    tmp_path: Path, replicas: int, stages: int
) -> None:
    check(tmp_path, REST, replicas, stages)


@slow
@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (2, 2)])
def test_global_batches_train_as_on_one_device(tmp_path: Path, replicas: int, stages: int) -> None:
    expected = run(tmp_path / "one", GLOBAL, 1, 0)
    found = run(tmp_path / "staged", GLOBAL, replicas, stages)
    assert_equal(found, {name: ones * replicas for name, ones in expected.items()})


@slow
@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (1, 3), (2, 2), (2, 1)])
def test_an_infinite_gradient_in_one_stage_skips_the_step_in_all(
    tmp_path: Path, replicas: int, stages: int
) -> None:
    expected = run(tmp_path / "plain", ["scales_its_loss"], replicas, 0)
    [record] = expected["scales_its_loss"][0]["seen"]
    scales = [2.0**10, *record["scales"]]
    assert sum(after < before for before, after in pairwise(scales)) == 2
    found = run(tmp_path / "staged", ["scales_its_loss"], replicas, stages)
    assert_equal(found, expected)


@slow
@pytest.mark.parametrize("by", [0, 2])
def test_a_checkpoint_goes_on_under_another_number_of_stages(tmp_path: Path, by: int) -> None:
    """Saved by one device, or in two stages."""
    run(tmp_path / "saved", ["saves_and_loads"], 1, by)
    found = {}
    for stages in (0, 2):
        folder = tmp_path / f"on{stages}"
        folder.mkdir()
        shutil.copy(tmp_path / "saved" / "saved.ckpt", folder / "from.ckpt")
        found[stages] = run(folder, ["goes_on_from_a_checkpoint"], 1, stages)
    assert_equal(found[2], found[0])


def tensors_of(found: dict[str, Any]) -> list[torch.Tensor]:
    numbers = (found["drawn"], found["losses"], *found["weights"].values())
    return [torch.tensor(each, dtype=torch.float64) for each in numbers]


REFUSED = [
    "automatic_optimization=False is for the Trainer",
    "second model, Tokens",
    "SGD beside SGD",
    "SGD, which was not set up",
    "No call of a module with parameters was seen",
]


def test_what_a_loop_may_not_do_in_stages_is_refused_by_name(tmp_path: Path) -> None:
    for words in refusals(tmp_path, 1, 2):
        assert_words(words, ["no model that is set up", "'weight' has no size", *REFUSED])


@slow
def test_what_a_loop_may_not_do_with_replicas_is_refused_by_name(tmp_path: Path) -> None:
    early = ["no model that is set up", "'weight' has no size", "'0' is a torch.nn.SyncBatchNorm"]
    for words in refusals(tmp_path, 2, 2):
        assert_words(words, [*early, *REFUSED])


def refusals(folder: Path, replicas: int, stages: int) -> list[list[str]]:
    """What each driver was told."""
    found = run(folder, ["is_refused"], replicas, stages)["is_refused"]
    return [record["seen"][0]["words"] for record in found]


def assert_words(found: list[str], expected: list[str]) -> None:
    assert len(found) == len(expected), found
    for one, words in zip(found, expected):
        assert words in one


def output_of_failure(folder: Path, name: str, replicas: int, stages: int) -> str:
    """What ranks print of a loop that fails."""
    ranks = start(folder, [name], replicas, stages)
    try:
        codes = [process.wait(timeout=120) for process in ranks]
        assert all(codes[::stages])
    finally:
        for process in ranks:
            process.kill()
    return (folder / "output.txt").read_text()


@slow
@pytest.mark.parametrize(
    ("name", "words", "where"),
    [
        ("fails_on_a_driver", "ValueError: a user's mistake", "(raised on rank 0"),
        ("fails_before_the_setup", "ValueError: a user's mistake", "(raised on rank 0"),
        ("fails_in_a_stage", "IndexError", "rank 1"),
    ],
)
def test_an_error_ends_all_ranks_and_is_shown_first(
    tmp_path: Path, name: str, words: str, where: str
) -> None:
    output = output_of_failure(tmp_path, name, 1, 2)
    first = output.index(words)
    assert where in output
    later = output.find("ends because of")
    assert later == -1 or first < later, output


@slow
def test_an_error_on_one_replica_ends_the_other(tmp_path: Path) -> None:
    output = output_of_failure(tmp_path, "fails_on_a_driver", 2, 2)
    assert output.index("ValueError: a user's mistake") < output.index("ends because of")


@slow
def test_spawned_processes_have_weights_of_their_own_and_the_generators_of_the_script(
    tmp_path: Path,
) -> None:
    script = [sys.executable, str(SCRIPT.with_name("fabric_spawn_script.py"))]
    found = {}
    for stages in (0, 1, 2):
        out = tmp_path / f"{stages}.pt"
        subprocess.run(
            [*script, f"{stages}", str(out)], check=True, env=os.environ | USUAL, cwd=tmp_path
        )
        found[stages] = torch.load(out)
    for stages in (1, 2):
        for one, other in zip(tensors_of(found[stages]), tensors_of(found[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@slow
def test_a_users_shell_starts_one_process_and_that_the_servers(tmp_path: Path) -> None:
    for folder, stages in (("plain", 0), ("staged", 2)):
        (tmp_path / folder).mkdir()
        loops = ["accumulates_under_a_scheduler"]
        config = {"loops": loops, "replicas": 1, "stages": stages, "options": {}}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        command = [sys.executable, str(SCRIPT), str(tmp_path / folder)]
        subprocess.run(command, check=True, env=os.environ | USUAL, cwd=tmp_path / folder)
    name = f"{loops[0]}.0.pt"
    expected, found = (torch.load(tmp_path / kind / name) for kind in ("plain", "staged"))
    assert_equal({"": [found]}, {"": [expected]})


def test_a_schedule_that_fetches_batches_early_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Delayed\('pipedream'\) begins with later batches early"):
        HybridGabraFabricStrategy(schedule=Delayed("pipedream"))  # type: ignore[arg-type]


def test_an_epoch_at_which_cuts_are_made_anew_is_refused() -> None:
    with pytest.raises(PlanError, match=r"search=Search\(replan='epoch'\) .* knows no epochs"):
        HybridGabraFabricStrategy(search=Search(replan="epoch"))


def test_a_plan_with_shares_is_refused() -> None:
    plan = Plan(replicas=2, stages=2, microbatches=1, schedule="gpipe", cuts=("b",), shares=(3, 1))
    with pytest.raises(PlanError, match="The plan has shares"):
        HybridGabraFabricStrategy(plan=plan)


def test_an_optimizer_of_fabric_clears_gradients_as_the_one_that_it_wraps() -> None:
    HybridGabraFabricStrategy()
    optimizer, cleared = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1), []
    vars(optimizer)["zero_grad"] = cleared.append
    Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer).zero_grad(False)
    assert cleared == [False]


def test_devices_that_do_not_suit_the_sizes_are_refused_before_processes_start() -> None:
    strategy = HybridGabraFabricStrategy(pipeline_parallel_size=2)
    with pytest.raises(PlanError, match="devices must be divisible by the number of stages"):
        Fabric(accelerator="cpu", devices=3, strategy=strategy)


def test_fabric_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_CLI_USED", "1")
    with pytest.raises(HybridError, match=r"fabric\.launch\(fn\)"):
        Fabric(accelerator="cpu", devices=2, strategy="hybrid_gabra")


def test_a_setup_outside_of_what_was_launched_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy="hybrid_gabra")
    fabric.launch()
    with pytest.raises(HybridError, match=r"fabric\.launch\(fn\)"):
        fabric.setup(torch.nn.Linear(1, 1))
