"""A network made in ``configure_model`` is whole on no rank, and trains as on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configure_model_script import CASES, CHECKPOINTS, SEED, Case, make_trainer
from conftest import Training
from lightning.pytorch import seed_everything

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders, and on weights_only
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("configure_model_script.py")
SHAPES = {  # replicas, stages, and how checkpoints are saved
    (1, 2, "full"): ["Plain", "ChecksBlocks"],
    (1, 3, "full"): list(CASES),
    (2, 2, "full"): ["Plain", "Accumulates"],
    (1, 3, "sharded"): ["Plain"],
    (2, 2, "beside"): ["Plain"],
}
SLOW = {*SHAPES} - {(1, 2, "full")}


def marked(shape: tuple[int, int, str], *values: Any) -> Any:
    return pytest.param(shape, *values, marks=pytest.mark.conformance if shape in SLOW else ())


EACH = [marked(shape) for shape in SHAPES]
RUNS = [marked(shape, name) for shape, names in SHAPES.items() for name in names]
Runs = Callable[[tuple[int, int, str]], Training]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train the cases of a shape in one set of processes; ``drivers`` is what these have seen."""
    done: dict[tuple[int, int, str], Training] = {}

    def run(shape: tuple[int, int, str]) -> Training:
        if shape not in done:
            folder = tmp_path_factory.mktemp("configure_model")
            replicas, stages, kind = shape
            config = {"cases": SHAPES[shape], "kind": kind, "weighs": True}
            training = Training(folder, script=SCRIPT, replicas=replicas, stages=stages, **config)
            training.drivers = training.run()
            assert len(training.drivers) == replicas
            done[shape] = training
        return done[shape]

    return run


def one_device(name: str, folder: Path, replicas: int) -> tuple[Case, Case, list[Any]]:
    """Plain Lightning; for two replicas it takes two batches before it steps.

    Returns:
        What was trained, what was trained on from a checkpoint, and the tests of the first one
        and of the checkpoint.
    """
    torch.set_num_threads(1)
    seed_everything(SEED, verbose=False)
    case = CASES[name]
    module, again = case(), case()
    batches = replicas * module.options.get("accumulate_grad_batches", 1)
    trainer = make_trainer(case, folder, devices=1, accumulate_grad_batches=batches)
    trainer.fit(module)
    tested = [trainer.test(module, verbose=False)]
    trainer.save_checkpoint(folder / "end.ckpt")
    options: dict[str, Any] = {"accumulate_grad_batches": batches, "callbacks": []}
    trainer = make_trainer(case, folder, devices=1, **options)
    trainer.fit(again, ckpt_path=folder / "2.ckpt")
    tested.append(trainer.test(case(), ckpt_path=folder / "2.ckpt", verbose=False))
    return module, again, tested


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def compared(state: dict[str, torch.Tensor], replicas: int) -> dict[str, torch.Tensor]:
    """Running statistics are those of replica 0, as under DDP: one device has seen all batches."""
    ours = ("running", "num_batches")
    return {k: v for k, v in state.items() if replicas == 1 or not any(o in k for o in ours)}


@pytest.mark.parametrize(("shape", "name"), RUNS)
def test_trains_as_one_device(runs: Any, tmp_path: Path, shape: Any, name: str) -> None:
    replicas, *_ = shape
    drivers = [driver[name] for driver in runs(shape).drivers]
    module, again, tested = one_device(name, tmp_path, replicas)
    for replica, driver in enumerate(drivers):
        assert_same(driver["seen"], module.seen[replica::replicas])
        assert_same(driver["resumed"], again.seen[replica::replicas])
        assert_same(driver["trained again"], again.seen[replica::replicas])
    expected = compared(dict(module.state_dict()), replicas)
    first, *others = drivers
    assert list(first["whole"]) == list(module.state_dict())
    assert_same(compared(first["whole"], replicas), expected)
    resumed = compared(dict(again.state_dict()), replicas)
    assert_same(compared(first["resumed whole"], replicas), resumed)
    assert all(driver["whole"] == {} for driver in others)
    if replicas == 1:
        assert_same([first["test"], first["tested again"]], tested)
    for driver in drivers:  # the generator stands where it stands on one device
        assert torch.equal(driver["drawn"], module.drawn)


@pytest.mark.parametrize("shape", EACH)
def test_no_rank_holds_the_whole_network_while_it_trains(runs: Any, shape: Any) -> None:
    _, stages, _ = shape
    training = runs(shape)
    drivers = [driver["Plain"] for driver in training.drivers]
    whole = {name: t.nbytes for name, t in drivers[0]["whole"].items()}
    weights = {*drivers[0]["gradients"]}  # whose hooks are called on the driver
    assert len(weights) == len(whole) - 5  # all but four buffers and the temperature
    ran, held = training.ran_on_workers(), training.held_by_workers()
    for replica, driver in enumerate(drivers):
        workers = range(replica * stages + 1, (replica + 1) * stages)
        held_here = [sum(driver["held"].values()), *(held[rank] for rank in workers)]
        assert sum(held_here) < 1.2 * sum(whole.values())
        assert all(0 < size < 0.6 * sum(whole.values()) for size in held_here)
        modules = [ran[rank] for rank in workers]
        assert all(modules)
        assert sum(map(len, modules)) == len(set().union(*modules))
        names = {n.removeprefix("net.") for n in driver["held"]}
        assert not {n.rpartition(".")[0] for n in names} & set().union(*modules)
    assert {name for name, _ in CASES["Plain"]().named_parameters()} == {"temperature"}


@pytest.mark.parametrize("shape", EACH)
def test_checkpoints_are_ordinary_ones(runs: Any, shape: Any, tmp_path: Path) -> None:
    replicas, *_ = shape
    saved = runs(shape).drivers[0]["Plain"]["checkpoints"]
    one_device("Plain", tmp_path, replicas)
    for name, found in zip(CHECKPOINTS, saved, strict=True):
        expected = torch.load(tmp_path / name, weights_only=True)
        states = (compared(each["state_dict"], replicas) for each in (found, expected))
        assert_same(*states)
        assert_same(found["optimizer_states"], expected["optimizer_states"])
