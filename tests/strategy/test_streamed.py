"""Streamed schedules in real runs: Lightning's loops, loaders, checkpoints, and faults."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from lightning.pytorch import seed_everything
from test_exact_training import batch_of
from torch import Tensor, nn
from torch.func import functional_call
from training_script import CUTS, NETWORKS, Classifier, data
from training_script import train as train_here

from lightning_hybrid.schedules import STREAMED

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
Train = Callable[..., list[dict[str, Any]]]
BASE = {**DEFAULTS, "dtype": "float64", "microbatches": 1, "steps": 16}
BASE["loader_processes"] = 1
VALIDATES = {"num_sanity_val_steps": 1, "val_check_interval": 0.5}


def ages(config: dict[str, Any]) -> dict[str, int]:
    """By how many steps the weights of each parameter are too old."""
    network = NETWORKS[config["network"]]()
    cuts = CUTS[config["network"]][config["stages"]]
    stage, found = 0, {}
    ahead = STREAMED[config["schedule"]].look_aheads(config["stages"])
    for name, _ in network.named_parameters():
        module = name.rpartition(".")[0]
        stage = max(stage, cuts.index(module) + 1 if module in cuts else 0)
        found[name] = ahead[stage]
    return found


def serial(
    config: dict[str, Any], restarts: Collection[int]
) -> tuple[list[list[float]], nn.Module]:
    """Train on one device by the formula: each batch at weights of mixed ages, stepped at once.

    Returns the losses of each replica, and the network.
    """
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    module = Classifier(config)  # as every run begins
    network = module.net
    [optimizer], [scheduler] = module.configure_optimizers()
    age, history, restart = ages(config), [], 0
    losses: list[list[float]] = [[] for _ in range(config["replicas"])]
    samples = data(config)
    for t in range(config["steps"]):
        restart = t if t in restarts else restart
        history.append({n: p.detach().clone() for n, p in network.named_parameters()})
        mixed = {n: history[max(restart, t - age[n])][n].requires_grad_() for n in age}
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for replica, seen in enumerate(losses):
            x, y = samples[batch_of(config, replica, t)]
            loss = nn.functional.cross_entropy(functional_call(network, mixed, (x,)), y)
            found: tuple[Tensor, ...] = torch.autograd.grad(loss, [*mixed.values()])
            seen.append(loss.item())
            for (_, parameter), gradient in zip(network.named_parameters(), found):
                parameter.grad += gradient / len(losses)
        optimizer.step()
        scheduler["scheduler"].step()
    return losses, network


slow = pytest.mark.conformance


@pytest.mark.parametrize(
    ("name", "replicas", "stages"),
    [
        pytest.param("fdg", 1, 3, marks=slow),
        pytest.param("pipedream", 2, 2, marks=slow),
        pytest.param("ddg", 1, 4, marks=slow),
    ],
)
def test_a_delayed_run_is_its_serial_model(
    tmp_path: Path, name: str, replicas: int, stages: int
) -> None:
    """With epochs, validations and checkpoints, each of which begins the stream anew."""
    config = {**BASE, "stages": stages, "schedule": name, "trainer": VALIDATES}
    config |= {"replicas": replicas, "samples": 24 * replicas}
    config["checkpoint"] = {"save_top_k": -1, "every_n_train_steps": 4, "filename": "{step}"}
    drivers = Training(tmp_path, **config).run()
    # 6 batches to an epoch, validated after 3, saved after 4
    losses, network = serial(config, {3, 4, 6, 8, 9, 12, 15})
    for driver, expected in zip(drivers, losses, strict=True):
        assert driver["losses"] == pytest.approx(expected, abs=1e-9)
    for key, value in network.state_dict().items():
        for driver in drivers:
            torch.testing.assert_close(driver["weights"][f"net.{key}"], value, rtol=0, atol=1e-9)


@slow
@pytest.mark.parametrize("name", [name for name, each in STREAMED.items() if not each.plain_sgd])
def test_one_stage_is_plain_training(tmp_path: Path, name: str) -> None:
    _, expected = train_here({**BASE, "strategy": "auto"}, tmp_path / "alone")
    [rank] = Training(tmp_path / "one", **{**BASE, "stages": 1, "schedule": name}).run()
    assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    for part, value in rank["weights"].items():
        torch.testing.assert_close(value, expected["weights"][part], rtol=0, atol=1e-12)


@slow
def test_random_layers_draw_what_their_batch_draws(tmp_path: Path) -> None:
    """At a learning rate of 0 losses are those of fill-drain, which draws by batch."""
    config = {
        **BASE,
        "network": "dropout",
        "optimizer": "still",
        "stages": 3,
        "steps": 8,
        "side": 4,
    }
    [expected] = Training(tmp_path / "gpipe", **config).run()
    [found] = Training(tmp_path / "fdg", **config, schedule="fdg").run()
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert len({*found["losses"]}) > 6


@slow
def test_1f1b_is_lightnings_accumulation(tmp_path: Path) -> None:
    """Windows of four batches, the last of an epoch of two; validated in their middle."""
    config = {
        **BASE,
        "steps": 6,
        "trainer": {**VALIDATES, "accumulate_grad_batches": 4},
    }
    _, expected = train_here({**config, "strategy": "auto"}, tmp_path / "alone")
    [driver] = Training(
        tmp_path / "two", **{**config, "stages": 2, "schedule": "1f1b_stream"}
    ).run()
    assert driver["losses"] == pytest.approx(expected["losses"], abs=1e-10)
    assert driver["metrics"]["val"] == pytest.approx(expected["metrics"]["val"].item(), abs=1e-10)
    for part, value in driver["weights"].items():
        torch.testing.assert_close(value, expected["weights"][part], rtol=0, atol=1e-10)


@slow
def test_a_delayed_run_that_is_resumed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    config = {
        **BASE,
        "stages": 2,
        "schedule": "pipedream",
        # (at the end of an epoch: a loader with a state of its own is refused)
        "checkpoint": {"save_top_k": -1, "every_n_train_steps": 6, "filename": "{step}"},
    }
    [whole] = Training(tmp_path / "whole", **config).run()
    path = tmp_path / "whole/checkpoints/step=12.ckpt"
    [rest] = Training(tmp_path / "rest", **config, ckpt_path=str(path)).run()
    assert rest["losses"] == pytest.approx(whole["losses"][12:], abs=1e-10)
    for part, value in rest["weights"].items():
        torch.testing.assert_close(value, whole["weights"][part], rtol=0, atol=1e-10)


@slow
def test_a_loop_by_name_trains_as_one_device(tmp_path: Path) -> None:
    config = {**BASE, "microbatches": 2, "steps": 6}
    _, expected = train_here({**config, "strategy": "auto", "microbatches": 1}, tmp_path / "alone")
    cuts = [f"net.{name}" for name in CUTS["residual"][4]]
    loop = {"stages": 2, "schedule": "looped", "plan": cuts}
    [driver] = Training(tmp_path / "loop", **{**config, **loop}).run()
    assert "2 devices with 4 stages" in driver["plan"]
    assert driver["losses"] == pytest.approx(expected["losses"], abs=1e-10)


@slow
def test_split_backwards_train_as_one_device(tmp_path: Path) -> None:
    config = {**BASE, "microbatches": 2, "steps": 6, "stages": 3}
    alone = {**config, "strategy": "auto", "microbatches": 1, "stages": 1}
    _, expected = train_here(alone, tmp_path / "alone")
    [driver] = Training(tmp_path / "split", **config, schedule="zero_bubble").run()
    assert "zero_bubble" in driver["plan"]
    assert "split" in driver["plan"]
    assert driver["losses"] == pytest.approx(expected["losses"], abs=1e-10)


@slow
@pytest.mark.parametrize("where", ["forward", "training_step"])
def test_an_error_in_a_streamed_run_ends_all_ranks(tmp_path: Path, where: str) -> None:
    step, rank = (3, 1) if where == "forward" else (4, 0)  # on a worker, on the driver
    config = {**BASE, "network": "ticks", "stages": 2, "schedule": "fdg"}
    config["fault"] = {"where": where, "step": step, "rank": rank}
    training = Training(tmp_path, **config)
    process = training.start()
    try:
        assert process.wait(timeout=240) != 0
    finally:
        process.kill()
    assert "this error is on purpose" in training.output
