"""Real networks, precisions, compiled stages and shared batch statistics: the numbers stay."""

import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training as Run
from stages_script import (
    COMPILED,
    FREE,
    IN_REPLICAS,
    JOBS,
    PRECISIONS,
    REAL,
    SEED,
    SYNCHRONISED,
    Training,
    fit,
    leaves,
)
from torch import Tensor

from lightning_hybrid.stage.random_numbers import microbatch_seed, seed_number_of

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders, and on an unused logger
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("stages_script.py")
FAST = {name: PRECISIONS[name] for name in ("bf16-mixed", "16-mixed", "overflow")}
SLOW = {name: job for name, job in PRECISIONS.items() if name not in FAST}
Drivers = list[dict[str, Any]]
Runs = Callable[[int, int, str], Drivers]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run several jobs in one set of processes, once per shape and set of jobs."""
    done: dict[Any, Drivers] = {}

    def run(replicas: int, stages: int, name: str) -> Drivers:
        sets = FAST, SLOW, REAL, COMPILED, IN_REPLICAS, FREE
        jobs = next(jobs for jobs in sets if name in jobs)
        key = replicas, stages, *jobs
        if key not in done:
            folder = tmp_path_factory.mktemp("stages")
            config = {"replicas": replicas, "stages": stages, "jobs": list(jobs)}
            done[key] = Run(folder, script=SCRIPT, **config).run()
        return done[key]

    return run


def one_device(
    name: str, folder: Path, replicas: int = 1, *, whole: bool = False, **options: Any
) -> Training:
    """Plain Lightning, the network once per micro-batch, or once per batch.

    With several replicas, a batch is that of all of them, and its micro-batch i is made of the
    replicas' micro-batches i.
    """
    torch.set_num_threads(1)

    def prepare(module: Training) -> None:
        net, calls = module.net, (seed_number_of(batch, 0) for batch in count())
        original = net.forward

        def forward(*arguments: Tensor) -> Any:
            parts = 1 if whole else module.job.microbatches
            order = arrange(len(arguments[0]), replicas, parts)
            call = next(calls) if torch.is_grad_enabled() else -1
            results = []
            for index, part in enumerate(order):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(microbatch_seed(SEED, 0, call, index))
                    results.append(original(*(argument[part] for argument in arguments)))
            return joined(results, torch.cat(order).argsort())

        net.forward = forward
        if replicas > 1:
            module.train_dataloader = lambda: torch.utils.data.DataLoader(
                module.data(), batch_size=4 * replicas
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(name, folder, prepare, devices=1, **options)


def arrange(batch: int, replicas: int, microbatches: int) -> list[Tensor]:
    """Which samples of a batch are in each micro-batch."""
    shares = [share.chunk(microbatches) for share in torch.arange(batch).split(batch // replicas)]
    return [torch.cat(parts) for parts in zip(*shares)]


def joined(results: list[Any], order: Tensor) -> Any:
    """One output of those of the micro-batches, samples in the order of the batch."""
    if len(results) == 1:
        return results[0]
    columns = [
        torch.cat(parts)[order] for parts in zip(*([v for _, v in leaves(r)] for r in results))
    ]
    return columns[0] if isinstance(results[0], Tensor) else tuple(columns)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_each_stage_worked_alone(drivers: Drivers, name: str, stages: int = 2) -> None:
    """A driver makes the gradients of its own stages, so that other ranks have made the others."""
    for driver in drivers:
        mine, everything = driver[name]["gradients"], driver[name]["parameters"]
        assert mine
        assert mine < everything or stages == 1


@pytest.mark.conformance
@pytest.mark.parametrize("name", REAL)
def test_real_networks_train_as_on_one_device(runs: Runs, tmp_path: Path, name: str) -> None:
    [driver] = runs(1, 2, name)
    expected = one_device(name, tmp_path)
    tolerance = 1e-10 if JOBS[name].dtype == torch.float64 else 0.0  # bit for bit
    assert_same(driver[name]["seen"], expected.seen, tolerance)
    assert_same(driver[name]["weights"], dict(expected.state_dict()), tolerance)
    assert_each_stage_worked_alone([driver], name)


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.conformance) for name in SLOW)]
)
def test_every_precision_trains_as_on_one_device(runs: Runs, tmp_path: Path, name: str) -> None:
    """Bit for bit: what is rounded to a few bits differs much where it differs."""
    [driver] = runs(1, 2, name)
    expected = one_device(name, tmp_path)
    assert_same(driver[name]["seen"], expected.seen, 0)
    assert_same(driver[name]["weights"], dict(expected.state_dict()), 0)
    assert_each_stage_worked_alone([driver], name)


def test_one_infinite_gradient_in_one_stage_is_a_step_that_no_stage_makes(runs: Runs) -> None:
    [driver] = runs(1, 2, "overflow")
    *_, scale = driver["overflow"]["seen"]
    assert scale == 2.0**9  # halved in two of eight steps, and doubled after three good ones


@pytest.mark.conformance
def test_an_infinite_gradient_in_one_replica_is_a_step_that_no_replica_makes(runs: Runs) -> None:
    # the marked samples are all the second replica's
    mine, other = (d["overflow in a replica"] for d in runs(2, 2, "overflow in a replica"))
    assert [mine["seen"][-1], other["seen"][-1]] == [2.0**8, 2.0**8]  # halved in two of four steps
    assert_same(other["weights"], mine["weights"], 0)


@pytest.mark.conformance
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_stages_train_as_one_device(runs: Runs, tmp_path: Path, name: str) -> None:
    [driver] = runs(1, 2, name)
    expected = one_device(name, tmp_path)
    tolerance = 1e-6 if JOBS[name].dtype == torch.float32 else 1e-12
    if "autocast" in name:
        tolerance = 1e-2
    assert_same(driver[name]["seen"], expected.seen, tolerance)
    # under the names of the module
    assert_same(driver[name]["weights"], dict(expected.state_dict()), tolerance)
    assert_each_stage_worked_alone([driver], name)


@pytest.mark.conformance
@pytest.mark.parametrize("name", FREE)
def test_several_stages_on_a_device_train_as_one_device(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    assert_is_the_union_of_replicas(runs(2, 2, name), one_device(name, tmp_path, replicas=2), name)


@pytest.mark.conformance
@pytest.mark.parametrize("name", SYNCHRONISED)
@pytest.mark.parametrize("stages", [1, 2])
def test_batch_statistics_over_the_replicas_are_those_of_their_union(
    runs: Runs, tmp_path: Path, name: str, stages: int
) -> None:
    drivers = runs(2, stages, name)
    # (with one stage a batch goes whole)
    expected = one_device(name, tmp_path, replicas=2, whole=stages == 1)
    assert_is_the_union_of_replicas(drivers, expected, name, stages)


@pytest.mark.conformance
def test_a_trainer_can_be_pickled_after_it_had_shared_batch_statistics(runs: Runs) -> None:
    for driver in runs(2, 2, "Normalised"):
        assert driver["Normalised"]["pickles"]


def assert_is_the_union_of_replicas(
    drivers: Drivers, expected: Training, name: str, stages: int = 2
) -> None:
    """Two replicas against one device whose batches are those of both."""
    for driver in drivers:  # running statistics too
        assert_same(driver[name]["weights"], dict(expected.state_dict()))
    mine, other = (driver[name]["seen"] for driver in drivers)
    losses = [(a + b) / 2 for a, b in zip(mine[:-1], other[:-1])]
    assert_same(losses, expected.seen[:-1])
    assert_each_stage_worked_alone(drivers, name, stages)
