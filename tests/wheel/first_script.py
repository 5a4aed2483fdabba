"""A first script of a user: trains on the number of devices that is its argument."""

import sys

import lightning.pytorch as pl
import torch

from lightning_hybrid import HybridGabraStrategy


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh()
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)).double()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


pl.seed_everything(0)
data = torch.utils.data.DataLoader(torch.randn(64, 8, dtype=torch.float64), batch_size=8)
stages, module = int(sys.argv[1]), Net()
strategy = HybridGabraStrategy(pipeline_parallel_size=stages) if stages > 1 else "auto"
trainer = pl.Trainer(accelerator="cpu", devices=stages, strategy=strategy, max_epochs=2)
trainer.fit(module, data)
if trainer.is_global_zero:
    print(f"torch {torch.__version__}, {stages}:", *(p.sum().item() for p in module.parameters()))
