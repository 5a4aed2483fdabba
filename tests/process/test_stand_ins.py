"""What a worker has in place of its driver's loaders and schedulers."""

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_hybrid.errors import HybridError
from lightning_hybrid.process.run_results import Snapshot, adopt_results, collect_results

DATA = torch.randn(6, 2)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The loaders are what this is about."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)]


def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


@pytest.fixture
def worker() -> Trainer:
    """One that has adopted a fit."""
    driver, worker = trainer(), trainer()
    driver.fit(Net(), DataLoader(DATA, batch_size=2), [DataLoader(DATA), DataLoader(DATA, 3)])
    worker.strategy.connect(Net())
    before = Snapshot(worker)
    results = collect_results(driver, None, before)
    adopt_results(worker, pickle.loads(pickle.dumps(results)), before)
    return worker


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers of loaders
def test_numbers_are_the_drivers(worker: Trainer) -> None:
    assert worker.estimated_stepping_batches == 6
    assert (len(worker.train_dataloader), worker.train_dataloader.batch_size) == (3, 2)
    assert [len(loader) for loader in worker.val_dataloaders] == [6, 2]
    assert worker.test_dataloaders is None
    [config] = worker.lr_scheduler_configs
    assert (config.interval, config.scheduler.last_epoch) == ("epoch", 2)
    assert config.scheduler.get_last_lr() == pytest.approx([0.025])


@pytest.mark.filterwarnings("ignore")
def test_everything_else_is_refused_with_a_sentence(worker: Trainer) -> None:
    refused = r"on a rank that is no driver.*is_global_zero"
    for ask in (
        lambda: worker.train_dataloader.dataset,
        lambda: next(iter(worker.train_dataloader)),
        lambda: worker.val_dataloaders[1].sampler,
        lambda: worker.lr_scheduler_configs[0].scheduler.step(),
    ):
        with pytest.raises(HybridError, match=refused):
            ask()


def test_a_worker_of_a_run_without_a_fit_does_not_wait_for_a_loader() -> None:
    driver, worker = trainer(), trainer()
    for each in (driver, worker):
        each.strategy.connect(Net())
    before = Snapshot(worker)
    adopt_results(worker, collect_results(driver, None, before), before)
    with pytest.raises(HybridError, match=r"estimated_stepping_batches .* before a fit"):
        worker.fit_loop.setup_data()
