"""State dicts have the states of all ranks, and each replica loads its part alone."""

from types import SimpleNamespace
from typing import Any

import torch
from driven import TrainedBeside
from torch import nn

from lightning_hybrid.driver.optimizer_state_dicts import OptimizerStateDicts
from lightning_hybrid.state import OtherReplicas


class Divided:
    """An optimizer whose second state is on another replica."""

    def __init__(self) -> None:
        self.said: list[str] = []
        module = nn.Linear(2, 2)
        self.mine = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        names = {id(p): name for name, p in module.named_parameters()}
        others = OtherReplicas(names, 0, 2)
        others.replica_of.update(weight=0, bias=1)
        link = SimpleNamespace(optimizer=self.mine, divided=others)
        optimizers: Any = SimpleNamespace(others=others, links=[link], index_of=[self.mine].index)
        unused: Any = None
        self.others = others
        self.dicts = OptimizerStateDicts(optimizers, unused, unused, self.said.append)
        module(torch.ones(1, 2)).sum().backward()
        self.mine.step()


def test_a_state_dict_has_the_states_of_workers_and_is_empty_where_it_is_not_wanted(
    replicas: Any,
) -> None:
    trained = TrainedBeside(replicas, (1, 0), torch.optim.AdamW)
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    dicts = trained.replica.driver.state_dicts
    found = dicts.state_dict(trained.mine, here=True, unread=False)
    torch.testing.assert_close(found, trained.theirs.state_dict())
    assert dicts.state_dict(trained.mine, here=False, unread=False) == {}


def test_unread_states_are_read_when_they_are_used(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0), torch.optim.AdamW)
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    found = trained.replica.driver.state_dicts.state_dict(trained.mine, here=True, unread=True)
    expected = trained.theirs.state_dict()["state"]
    for number, state in found["state"].items():
        torch.testing.assert_close(state["exp_avg"] + 0, expected[number]["exp_avg"])


def test_a_replica_loads_none_of_the_states_that_others_have() -> None:
    divided = Divided()
    with divided.others.gathered():
        loaded = {"optimizer_states": [divided.mine.state_dict()]}
    [share] = divided.dicts.share_of(loaded)["optimizer_states"]
    assert share["state"].keys() == {0}
    assert loaded["optimizer_states"][0]["state"].keys() == {0, 1}


def test_after_a_failure_divided_states_are_left_out_and_a_line_says_so() -> None:
    divided = Divided()
    found = divided.dicts.of_this_rank(divided.mine)
    assert found["state"] == {}
    assert found["param_groups"][0]["lr"] == 0.1
    [line] = divided.said
    assert "a part of the states of SGD" in line
