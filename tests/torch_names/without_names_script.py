"""Trains with two stages and on one device, with a torch that seems to lack optional names.

(`lightning_hybrid` is imported with the module that finds them changed.)
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

NAME = "lightning_hybrid._torch.private_names"
FILE = Path(__file__).parents[2] / "lightning_hybrid" / "_torch" / "private_names.py"
spec = importlib.util.spec_from_file_location(NAME, FILE)
assert spec is not None
assert spec.loader is not None
names = importlib.util.module_from_spec(spec)
sys.modules[NAME] = names
spec.loader.exec_module(names)
resolve_name = names.resolve_name


def without(name: str) -> object:
    if name in names.OPTIONAL:
        raise AttributeError(name)
    return resolve_name(name)


names.resolve_name = without

from lightning.pytorch import LightningModule, Trainer  # noqa: E402

from lightning_hybrid import HybridGabraStrategy  # noqa: E402


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        data = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(data, batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(**options: object) -> dict[str, torch.Tensor]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Net()
    Trainer(accelerator="cpu", max_epochs=1, **quiet, **options).fit(module)  # type: ignore[arg-type]
    return module.state_dict()


staged = trained(devices=2, strategy=HybridGabraStrategy(pipeline_parallel_size=2))
alone = trained(devices=1)
for name, value in alone.items():
    torch.testing.assert_close(staged[name], value)
print("equal to one device")
