"""What users do in a LightningModule gives the numbers of one device under stages too."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training
from user_code_script import CASES, SEED, Case, fit

from lightning_hybrid.runtime.random import draw_number, microbatch_seed

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders, and on an unused logger
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("user_code_script.py")
IN_REPLICAS = [
    "Accumulates",
    "CallsTwice",
    "CallsWithoutGradient",
    "ChainsNetworks",
    "ClipsNorm",
    "FreezesLayers",
    "HasTemperature",
    "WantsInputGradient",
]
SOME = ["Plain", "Drops", "Accumulates"]
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ranks]:
    """Train several cases in one set of processes, once per shape."""
    done: dict[tuple[int, int], Ranks] = {}

    def run(replicas: int, stages: int, cases: list[str]) -> Ranks:
        if (replicas, stages) not in done:
            folder = tmp_path_factory.mktemp("user_code")
            config = {"replicas": replicas, "stages": stages, "cases": cases}
            done[replicas, stages] = Training(folder, script=SCRIPT, **config).run()
        return done[replicas, stages]

    return run


def one_device(name: str, folder: Path, **options: Any) -> Case:
    """Plain Lightning, the network once per micro-batch where that makes a difference."""
    torch.set_num_threads(1)
    prepare = in_microbatches if name in ("Drops", "NormalizesBatches") else lambda _: None
    return fit(name, folder, prepare, devices=1, **options)


def in_microbatches(module: Case) -> None:
    """Call the network once per micro-batch, each with random numbers of its own."""
    net, calls = module.net, (draw_number(batch, 0) for batch in count())
    original = net.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        call, parts = next(calls), []
        for index, part in enumerate(x.chunk(module.microbatches)):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(microbatch_seed(SEED, 0, call, index))
                parts.append(original(part))
        return torch.cat(parts)

    net.forward = forward


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def assert_each_rank_owned_gradients(ranks: Ranks, name: str, replicas: int = 1) -> None:
    """Ranks of a replica got gradients for different parameters, together for all."""
    assert len({rank[name]["pid"] for rank in ranks}) == len(ranks)
    trainable = {n for n, p in CASES[name]().named_parameters() if p.requires_grad}
    stages = len(ranks) // replicas
    for first in range(0, len(ranks), stages):
        owned = [set(rank[name]["gradients"]) for rank in ranks[first : first + stages]]
        assert set().union(*owned) == trainable
        assert sum(map(len, owned)) == len(trainable)
        assert all(owned) or name == "FreezesAStage"


@pytest.mark.parametrize("name", CASES)
def test_two_stages_train_as_one_device(
    runs: Callable[..., Ranks], tmp_path: Path, name: str
) -> None:
    driver, worker = ranks = runs(1, 2, list(CASES))
    expected = one_device(name, tmp_path)
    assert_same(driver[name]["seen"], expected.seen)
    for rank in ranks:  # buffers (running statistics) too
        assert_same(rank[name]["weights"], dict(expected.state_dict()))
    assert worker[name]["seen"] == []  # the user's steps ran on the driver alone
    assert_each_rank_owned_gradients(ranks, name)


@pytest.mark.parametrize("name", SOME)
def test_three_stages_train_as_one_device(
    runs: Callable[..., Ranks], tmp_path: Path, name: str
) -> None:
    ranks = runs(1, 3, SOME)
    expected = one_device(name, tmp_path)
    assert_same(ranks[0][name]["seen"], expected.seen)
    assert_same(ranks[2][name]["weights"], dict(expected.state_dict()))
    assert_each_rank_owned_gradients(ranks, name)


@pytest.mark.parametrize("name", IN_REPLICAS)
def test_replicas_of_stages_train_as_one_device_that_accumulates(
    runs: Callable[..., Ranks], tmp_path: Path, name: str
) -> None:
    ranks = runs(2, 2, IN_REPLICAS)
    # two replicas take a batch each: one device takes two before it steps
    batches = 2 * CASES[name].options.get("accumulate_grad_batches", 1)
    expected = one_device(name, tmp_path, accumulate_grad_batches=batches)
    for rank in ranks:
        assert_same(rank[name]["weights"], dict(expected.state_dict()))
    assert_each_rank_owned_gradients(ranks, name, replicas=2)


def test_a_gradient_that_is_only_asked_for_reaches_no_parameter(
    runs: Callable[..., Ranks],
) -> None:
    for rank in runs(1, 2, list(CASES)):
        found = rank["WantsInputGradient"]["gradients"]
        once_per_microbatch = rank["Plain"]["gradients"]
        assert found == once_per_microbatch
