"""MoCo, as in the examples of lightly with Lightning."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torchvision
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import nn
from torch.utils.data import DataLoader

OPTIONS: dict[str, Any] = {"max_epochs": 2}
STRATEGY = {"num_microbatches": 1}  # batch statistics are those of the whole batch


class MoCo(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = MoCoProjectionHead(512, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.backbone(x).flatten(start_dim=1)
        return self.projection_head(query)

    def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
        key = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(key).detach()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        query = self.forward(x_query)
        key = self.forward_momentum(x_key)
        return self.criterion(query, key)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def module() -> pl.LightningModule:
    return MoCo()


def loaders() -> tuple[Any, Any]:
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    rows = [((image, image.flip(2)), 0, "name") for image in images]
    return DataLoader(rows, batch_size=4, drop_last=True), None
