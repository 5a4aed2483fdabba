"""What a run returns on its driver it returns on the workers, if there can be a copy of it."""

import pickle
import threading
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_hybrid.errors import HybridError
from lightning_hybrid.run.run_results import (
    Snapshot,
    adopt_attributes,
    adopt_results,
    collect_results,
)


class OneWay(Exception):
    """Python pickles it, and cannot make it again: its class wants two arguments."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(f"{where} of step {step}")


def trainer_of(module: LightningModule) -> Trainer:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    return trainer


def on_a_worker(returned: Any) -> Any:
    """What ``trainer.predict`` returns on a worker if it returns this on its driver."""
    trainer = trainer_of(LightningModule())
    results = collect_results(trainer, returned, Snapshot(trainer))
    return pickle.loads(pickle.dumps(results)).value()


def test_plain_values_are_copied() -> None:
    found = on_a_worker([{"logits": torch.arange(3), "name": "x"}, None])
    assert found[0]["logits"].tolist() == [0, 1, 2]
    assert found[0]["name"] == "x"
    assert found[1] is None


@pytest.mark.parametrize("returned", [[threading.Lock()], [lambda: 1], [OneWay(3, "x")]])
def test_what_cannot_be_copied_is_none_with_a_warning(returned: list[Any]) -> None:
    with pytest.warns(UserWarning, match=r"None on this one.*(Lock|lambda|pickle|OneWay)"):
        assert on_a_worker(returned) is None


def test_what_a_worker_has_noted_itself_stays() -> None:
    driver, worker = trainer_of(LightningModule()), trainer_of(LightningModule())
    theirs, mine = cast(Any, driver.lightning_module), cast(Any, worker.lightning_module)
    before, others = Snapshot(worker), Snapshot(driver)
    theirs.noted, theirs.told = ["last"], 1
    mine.noted = ["first"]
    adopt_results(worker, collect_results(driver, None, others), before)
    assert (mine.noted, mine.told) == (["first"], 1)


def test_an_attribute_that_cannot_be_copied_stays_what_it_is_on_each_rank() -> None:
    driver, worker = trainer_of(LightningModule()), trainer_of(LightningModule())
    before, theirs = Snapshot(worker), Snapshot(driver)
    module: Any = driver.lightning_module
    module.error, module.lock, module.seen = OneWay(3, "x"), threading.Lock(), [1, 2]
    adopt_results(worker, collect_results(driver, None, theirs), before)
    found: Any = worker.lightning_module
    assert found.seen == [1, 2]
    assert not hasattr(found, "error")
    assert not hasattr(found, "lock")


def test_what_a_teardown_hook_has_counted_on_a_worker_gives_way_to_the_drivers_count() -> None:
    class Counting(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def teardown(self, stage: str) -> None:
            self.runs += 1

    driver, worker = trainer_of(Counting()), trainer_of(Counting())
    before, theirs = Snapshot(worker), Snapshot(driver)
    mine: Any = worker.lightning_module
    driver.lightning_module.teardown("fit")
    results = collect_results(driver, None, theirs)
    adopt_results(worker, results, before)
    mine.teardown("fit")
    adopt_attributes(worker, results)
    assert mine.runs == 1


def test_what_is_trained_and_modes_are_those_of_the_driver() -> None:
    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    driver, worker = trainer_of(Net()), trainer_of(Net())
    theirs: Any = driver.lightning_module
    mine: Any = worker.lightning_module
    theirs.first.weight.requires_grad_(False)
    theirs.second.eval()
    mine.first.bias.requires_grad_(False)
    adopt_results(worker, collect_results(driver, None, Snapshot(driver)), Snapshot(worker))
    assert [p.requires_grad for p in mine.parameters()] == [False, True, True, True]
    assert [mine.training, mine.first.training, mine.second.training] == [True, True, False]


def test_numbers_of_batches_are_the_drivers_and_no_worker_loads_to_count_them() -> None:
    driver, worker = trainer_of(LightningModule()), trainer_of(LightningModule())
    adopt_results(worker, collect_results(driver, None, Snapshot(driver)), Snapshot(worker))
    with pytest.raises(HybridError, match=r"estimated_stepping_batches .* before a fit"):
        worker.fit_loop.setup_data()
    driver.fit_loop.max_batches = 3
    adopt_results(worker, collect_results(driver, None, Snapshot(driver)), Snapshot(worker))
    worker.fit_loop.setup_data()
    assert worker.num_training_batches == 3
