"""Binary segmentation, as in the example of segmentation_models_pytorch with Lightning."""

from typing import Any

import lightning.pytorch as pl
import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader

OPTIONS: dict[str, Any] = {"max_epochs": 2}
STRATEGY = {"rng": "device"}  # it drops out, and batch statistics are those of the whole batch


class PetModel(pl.LightningModule):
    def __init__(self, arch: str, encoder_name: str, in_channels: int, out_classes: int) -> None:
        super().__init__()
        self.model = smp.create_model(
            arch,
            encoder_name=encoder_name,
            encoder_weights=None,
            in_channels=in_channels,
            classes=out_classes,
        )
        # preprocessing parameters for image (those of pretrained weights, which would be fetched)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.training_step_outputs: list[Any] = []
        self.validation_step_outputs: list[Any] = []

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        # normalize image here
        image = (image - self.mean) / self.std
        return self.model(image)

    def shared_step(self, batch: Any, stage: str) -> dict[str, torch.Tensor]:
        image, mask = batch["image"], batch["mask"]
        assert image.ndim == 4
        h, w = image.shape[2:]
        assert h % 32 == 0
        assert w % 32 == 0
        assert mask.max() <= 1.0
        assert mask.min() >= 0
        logits_mask = self.forward(image)
        loss = self.loss_fn(logits_mask, mask)
        pred_mask = (logits_mask.sigmoid() > 0.5).float()
        tp, fp, fn, tn = smp.metrics.get_stats(pred_mask.long(), mask.long(), mode="binary")
        return {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}

    def shared_epoch_end(self, outputs: list[Any], stage: str) -> None:
        tp, fp, fn, tn = (torch.cat([x[k] for x in outputs]) for k in ("tp", "fp", "fn", "tn"))
        per_image = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro-imagewise")
        dataset = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro")
        metrics = {f"{stage}_per_image_iou": per_image, f"{stage}_dataset_iou": dataset}
        self.log_dict(metrics, prog_bar=True)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        train_loss_info = self.shared_step(batch, "train")
        self.training_step_outputs.append(train_loss_info)
        return train_loss_info

    def on_train_epoch_end(self) -> None:
        self.shared_epoch_end(self.training_step_outputs, "train")
        self.training_step_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        valid_loss_info = self.shared_step(batch, "valid")
        self.validation_step_outputs.append(valid_loss_info)
        return valid_loss_info

    def on_validation_epoch_end(self) -> None:
        self.shared_epoch_end(self.validation_step_outputs, "valid")
        self.validation_step_outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }


def module() -> pl.LightningModule:
    return PetModel("FPN", "resnet18", in_channels=3, out_classes=1)


def loaders() -> tuple[Any, Any]:
    generator, rows = torch.Generator().manual_seed(1), []
    for _ in range(8):
        image = torch.rand(3, 64, 64, generator=generator, dtype=torch.float64)
        rows.append({"image": image, "mask": (image.mean(0, keepdim=True) > 0.5).double()})
    return DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4)
