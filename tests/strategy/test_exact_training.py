"""Synchronous training under every (replicas, stages) gives the numbers of one device."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DistributedSampler
from training_script import Classifier, data

from lightning_hybrid.stage.random_numbers import microbatch_seed, seed_number_of

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
                draw = seed_number_of(step, 0)
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
    tmp_path: Path, network: str, replicas: int, stages: int
) -> None:
    config = {
        **DEFAULTS,
        **SETTINGS[network],
        "network": network,
        "dtype": "float64",
        "replicas": replicas,
        "stages": stages,
    }
    if stages == 1:  # which takes a batch whole
        config["microbatches"] = 1
    losses, weights = one_device(config)
    training = Training(tmp_path, **config)
    drivers = training.run()
    for driver, expected in zip(drivers, losses, strict=True):
        found = torch.tensor(driver["losses"])
        assert found == pytest.approx(torch.tensor(expected), abs=1e-10)
        for name, value in driver["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)
    assert_each_stage_worked_alone(training, drivers)


def assert_each_stage_worked_alone(training: Training, drivers: list[dict[str, Any]]) -> None:
    """Every stage ran in a process of its own, with parameters that no other one had."""
    stages, ran = training.config["stages"], training.ran_on_workers()
    # (what modules with others inside compute themselves is noted nowhere)
    everything = {
        f"{path}.{name}"
        for path, module in Classifier(training.config).net.named_modules()
        for name, _ in module.named_parameters()
        if not [*module.children()]
    }
    for replica, driver in enumerate(drivers):
        workers = [ran[rank] for rank in range(replica * stages + 1, (replica + 1) * stages)]
        mine = everything & {*driver["gradients"]}
        theirs = {name for name in everything if name.rpartition(".")[0] in set().union(*workers)}
        assert mine | theirs == everything
        assert not mine & theirs
        assert all(workers)
        assert sum(map(len, workers)) == len(set().union(*workers))


@slow
def test_float32_losses_are_those_of_one_device(train: Train) -> None:
    config = {**DEFAULTS, "stages": 2, "microbatches": 3, "batch": 6}
    losses, weights = one_device(config)
    [driver] = train(**config)
    assert driver["losses"] == pytest.approx(losses[0], abs=1e-6)
    for name, value in driver["weights"].items():
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
