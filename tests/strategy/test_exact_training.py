"""Synchronous training under every (replicas, stages) gives the numbers of one device."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import DEFAULTS
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DistributedSampler
from training_script import Classifier, data

from lightning_hybrid.stage.calls import draw_number, microbatch_seed

pytestmark = pytest.mark.distributed
Train = Callable[..., list[dict[str, Any]]]
SHAPES = [(1, 2), (1, 3), (2, 1), (2, 2)]
SETTINGS = {
    "residual": {},
    # the batch statistics of a micro-batch; a volume is 1x1x1 after the last stage
    "resattnet": {"side": 24, "batch": 4, "samples": 16},
}


def one_device(config: dict[str, Any]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The reference of the design, serially: per replica, the network once per micro-batch.

    Returns the losses of each replica and the final weights (buffers of replica 0).
    """
    torch.set_num_threads(1)  # as in the processes of the run; sums depend on it
    seed_everything(config.get("seed", 0), verbose=False)
    module = Classifier(config)
    replicas = [module.net, *(deepcopy(module.net) for _ in range(config["replicas"] - 1))]
    [optimizer], [schedule] = module.configure_optimizers()
    x, y = data(config).tensors
    losses: list[list[float]] = [[] for _ in replicas]
    for step in range(config["steps"]):
        gradients = []
        for replica, net in enumerate(replicas):
            if replica:  # parameters are shared in truth; buffers are each replica's own
                for theirs, mine in zip(net.parameters(), module.net.parameters()):
                    theirs.data.copy_(mine.data)
            chunk = batch_of(config, replica, step)
            net.zero_grad()
            outputs = []
            for index, part in enumerate(x[chunk].chunk(config["microbatches"])):
                draw = draw_number(step, 0)
                torch.manual_seed(microbatch_seed(config.get("seed", 0), replica, draw, index))
                outputs.append(net(part))
            loss = nn.functional.cross_entropy(torch.cat(outputs), y[chunk])
            loss.backward()
            losses[replica].append(loss.item())
            gradients.append([parameter.grad.clone() for parameter in net.parameters()])
        for parameter, *parts in zip(module.net.parameters(), *gradients):
            parameter.grad = sum(part / len(replicas) for part in parts)
        optimizer.step()
        schedule["scheduler"].step()
    return losses, module.state_dict()


def batch_of(config: dict[str, Any], replica: int, step: int) -> list[int]:
    """The samples that Lightning gives a replica in a step (as `ddp` gives a device)."""
    replicas, samples, batch = config["replicas"], config["samples"], config["batch"]
    steps_per_epoch = samples // replicas // batch
    sampler = DistributedSampler(range(samples), replicas, replica, shuffle=replicas > 1, seed=0)
    sampler.set_epoch(step // steps_per_epoch)
    first = step % steps_per_epoch * batch
    return list(sampler)[first : first + batch]


slow = pytest.mark.conformance


@pytest.mark.parametrize(
    ("replicas", "stages", "network"),
    [
        (1, 2, "residual"),
        (2, 2, "residual"),
        *(pytest.param(*shape, "residual", marks=slow) for shape in ((1, 3), (2, 1))),
        *(pytest.param(*shape, "resattnet", marks=slow) for shape in SHAPES),
    ],
)
def test_losses_and_weights_are_those_of_one_device(
    train: Train, network: str, replicas: int, stages: int
) -> None:
    config = {
        **DEFAULTS,
        **SETTINGS[network],
        "network": network,
        "dtype": "float64",
        "replicas": replicas,
        "stages": stages,
    }
    losses, weights = one_device(config)
    ranks = train(**config)
    for replica in range(replicas):
        found = ranks[replica * stages]["losses"]
        assert torch.tensor(found) == pytest.approx(torch.tensor(losses[replica]), abs=1e-10)
    for rank in ranks:  # workers too hold the whole trained network
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)
    assert_each_stage_worked_alone(ranks, config)


def assert_each_stage_worked_alone(ranks: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Every stage ran in a process of its own and owned a strict part of the parameters."""
    replicas, stages = config["replicas"], config["stages"]
    assert len({rank["pid"] for rank in ranks}) == replicas * stages
    everything = {name for name in ranks[0]["weights"] if "running" not in name}
    everything = {n.removeprefix("net.") for n in everything if "num_batches" not in n}
    calls = (config["steps"] - 1) * config["microbatches"]
    for replica in range(replicas):
        mine = ranks[replica * stages : (replica + 1) * stages]
        owned = [set(rank["gradients"]) for rank in mine]
        assert set().union(*owned) == everything
        assert sum(map(len, owned)) == len(everything)
        assert all(part for part in owned)
        if stages > 1:
            assert all(part < everything for part in owned)
        ran = [{n for n, count in rank["forwards"].items() if count >= calls} for rank in mine]
        assert sum(map(len, ran)) == len(set().union(*ran))


@slow
def test_float32_losses_are_those_of_one_device(train: Train) -> None:
    config = {**DEFAULTS, "stages": 2, "microbatches": 3, "batch": 6}
    losses, weights = one_device(config)
    driver, worker = train(**config)
    assert driver["losses"] == pytest.approx(losses[0], abs=1e-6)
    for name, value in worker["weights"].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-6, msg=name)


@slow
def test_float32_replicas_are_no_further_from_one_device_than_ddp(train: Train) -> None:
    # M = 1, so that plain ddp is the same training
    config = {**DEFAULTS, "replicas": 2, "stages": 2, "microbatches": 1}
    _, weights = one_device(config)
    hybrid = train(**config)[0]["weights"]
    ddp = train(**{**config, "strategy": "ddp", "stages": 1})[0]["weights"]

    def distance(found: dict[str, torch.Tensor]) -> float:
        return max(float((found[name] - value).abs().max()) for name, value in weights.items())

    assert distance(hybrid) <= max(distance(ddp), 1e-6)


@slow
def test_checks_of_the_network_change_no_bit(train: Train) -> None:
    config = {"network": "dropout", "side": 4, "stages": 2, "steps": 4}
    with_it, without = (train(verify=verify, **config) for verify in (1, False))
    for one, other in zip(with_it, without, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][n], value) for n, value in other["weights"].items())
