"""Workers write their part of a sharded checkpoint; it is that of one device."""

from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from driven import Model, batches, model, train, train_one_device
from torch import nn

from lightning_hybrid.remote import is_unread
from lightning_hybrid.state.sharded_checkpoint import (
    Shard,
    await_shard,
    leave_shard,
    read_sharded,
    write_shard,
)
from lightning_hybrid.worker import worker_shards


def optimizer_of(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def dumped(replica: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As Lightning dumps it."""
    with replica.driver.weights.gathered(unread=True):
        weights = replica.model.state_dict()
    with replica.driver.optimizers.unread():
        return {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "epoch": 1}


def assert_same(found: dict[str, Any], module: Any, optimizer: torch.optim.Optimizer) -> None:
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(dict(found["state_dict"]), dict(module.state_dict()), **close)
    expected = optimizer.state_dict()
    torch.testing.assert_close(found["optimizer_states"][0]["state"], expected["state"], **close)
    assert found["optimizer_states"][0]["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("trains", [False, True])  # whether parameters give their memory back
def test_each_rank_writes_its_weights_and_states(
    replicas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    parts = dict[int, set[str]]()

    def write(folder: str, rank: int, tensors: dict[Any, Any]) -> Shard:
        parts[rank] = {".".join(key) for key in tensors}
        return write_shard(folder, rank, tensors)

    monkeypatch.setattr(worker_shards, "write_shard", write)
    alone = model()
    expected = optimizer_of(alone)
    replica = replicas(model(), (1, 2, 0), trains=trains)
    optimizer = optimizer_of(replica.model)
    train_one_device(alone, expected)
    train(replica, optimizer)
    checkpoint = dumped(replica, optimizer)
    assert is_unread(checkpoint["state_dict"]["net.0.weight"])
    replica.driver.save_shards(checkpoint, tmp_path)
    assert {"state_dict.net.0.weight", "optimizer_0.state.1.exp_avg"} <= parts[1]
    assert len(parts) == 2
    found = read_sharded(tmp_path, weights_only=True)
    assert_same(found, alone, expected)
    # and who reads the numbers of a checkpoint before it is saved finds them
    states = checkpoint["optimizer_states"][0]["state"]
    for number, state in expected.state_dict()["state"].items():
        torch.testing.assert_close(states[number]["exp_avg"].clone(), state["exp_avg"])
    torch.testing.assert_close(
        checkpoint["state_dict"]["net.0.weight"].clone(), alone.net[0].weight.detach()
    )


def test_a_rank_that_cannot_write_does_not_end_the_run(
    replicas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replicas(model(), (1, 0))
    optimizer = optimizer_of(replica.model)
    train(replica, optimizer)

    def write(*_: Any) -> Shard:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(worker_shards, "write_shard", write)
        with pytest.raises(OSError, match="No space left"):
            replica.driver.save_shards(dumped(replica, optimizer), tmp_path)
    replica.driver.save_shards(dumped(replica, optimizer), tmp_path)
    weights = read_sharded(tmp_path)["state_dict"]
    with replica.driver.weights.gathered():
        torch.testing.assert_close(dict(weights), dict(deepcopy(replica.model.state_dict())))


def test_a_weight_of_several_stages_is_written_once(replicas: Any, tmp_path: Path) -> None:
    class Tied(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Linear(3, 3) for _ in range(4)))
            self[3].weight = self[0].weight

    module = Model(Tied()).double()
    alone = deepcopy(module)
    expected = optimizer_of(alone)
    train_one_device(alone, expected)
    replica = replicas(module, (1, 2, 0))
    optimizer = optimizer_of(replica.model)
    train(replica, optimizer)
    replica.driver.save_shards(dumped(replica, optimizer), tmp_path)
    found = read_sharded(tmp_path, weights_only=True)
    assert_same(found, alone, expected)
    assert found["state_dict"]["net.0.weight"] is found["state_dict"]["net.3.weight"]


def test_what_is_staged_is_written_as_it_was(replicas: Any, tmp_path: Path) -> None:
    alone = model()
    expected = optimizer_of(alone)
    train_one_device(alone, expected)
    replica = replicas(model(), (1, 2, 0), trains=True)
    optimizer = optimizer_of(replica.model)
    train(replica, optimizer)
    write = replica.driver.stage_shards(dumped(replica, optimizer), tmp_path, Event())
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.zero_()
    replica.driver.await_shards()
    write()
    assert_same(read_sharded(tmp_path, weights_only=True), alone, expected)
    assert {file.name for file in tmp_path.iterdir()} == {
        *(".metadata", "meta.pt"),
        *(f"__{rank}_0.distcp" for rank in range(3)),
    }


def test_a_part_that_is_not_written_is_not_waited_for_without_end(tmp_path: Path) -> None:
    given_up = Event()
    given_up.set()
    with pytest.raises(TimeoutError, match="rank 1 has not written its part"):
        await_shard(tmp_path, 1, given_up)
    leave_shard(str(tmp_path), 1, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        await_shard(tmp_path, 1, given_up)


def test_what_steps_whole_is_written_by_the_driver(replicas: Any, tmp_path: Path) -> None:
    replica = replicas(model(), (1, 0))
    optimizer = torch.optim.LBFGS(replica.model.parameters(), max_iter=2)
    replica.driver.optimizers.connect([optimizer])
    replica.driver.begin_step(0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = replica(batches()[0]).square().mean()
        replica.driver.gradients.before_backward()
        loss.backward()
        replica.driver.gradients.after_backward()
        return loss

    optimizer.step(closure)
    replica.driver.save_shards(dumped(replica, optimizer), tmp_path)
    found = read_sharded(tmp_path, weights_only=True)["optimizer_states"][0]["state"]
    torch.testing.assert_close(found[0]["d"], optimizer.state_dict()["state"][0]["d"])
