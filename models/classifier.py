from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryRecall,
    BinarySpecificity,
)

from models.resattnet import Depth, ResAttNet3D

Batch = dict[str, Any]
IDS = ("subject", "image_id")
"""Keys of a batch that name its scans."""


class ResAttNetClassifier(LightningModule):
    """3D-ResAttNet as a two-class classifier: AD against NC, pMCI against sMCI.

    A batch is a dictionary with at least ``image`` (B, C, D, H, W) and ``label`` (B,), 1 for the
    class whose probability is reported (AD, pMCI), 0 for the other. Logs ``train/loss``, and for
    validation and test the loss, accuracy, balanced accuracy, AUROC, sensitivity and specificity.

    Args:
        depth: Layers of the network, 18 or 34.
        in_channels: Channels C of the images.
        stem_kernel: Kernel of the network's first convolution, 3 or 7.
        attention_after: Layers (of 1 to 4) that a self-attention block follows.
        optimizer: "sgd" (Nesterov momentum 0.9) or "adamw".
        learning_rate: Learning rate at the start.
        weight_decay: Weight decay of the optimizer.
        lr_schedule: "constant", "cosine" (to 0 at the last epoch) or "step" (a tenth after each
            third of the epochs).
        class_weights: Weights of the two classes in the cross-entropy; "balanced" takes those of
            the data module (`class_weights`), None counts every scan alike.
    """

    def __init__(
        self,
        depth: Depth = 18,
        in_channels: int = 1,
        stem_kernel: Literal[3, 7] = 3,
        attention_after: list[int] = [3, 4],  # noqa: B006 (read only; a list, for YAML)
        optimizer: Literal["sgd", "adamw"] = "sgd",
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        lr_schedule: Literal["constant", "cosine", "step"] = "constant",
        class_weights: list[float] | Literal["balanced"] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.balanced = class_weights == "balanced"
        if isinstance(class_weights, str):
            class_weights = None
        if class_weights is not None and len(class_weights) != 2:
            raise ValueError(f"class_weights wants two numbers (labels 0, 1), got {class_weights}.")
        self.network = ResAttNet3D(
            depth, in_channels, stem_kernel=stem_kernel, attention_after=attention_after
        )
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)
        self.val_metrics = _metrics("val/")
        self.test_metrics = _metrics("test/")

    def setup(self, stage: str) -> None:
        """Take the weights of the classes from the data module."""
        if not self.balanced or stage != "fit":
            return
        weights = getattr(getattr(self.trainer, "datamodule", None), "class_weights", None)
        if weights is None:
            raise ValueError(
                "class_weights='balanced' needs a data module with the attribute class_weights, "
                "given as trainer.fit(model, datamodule=...). Or give the weights as numbers."
            )
        self.class_weights = torch.tensor(weights)

    def forward(self, image: Tensor) -> Tensor:
        """Scores (B, 2) of images (B, C, D, H, W)."""
        return cast(Tensor, self.network(image))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(self(batch["image"]), batch["label"])
        self.log(
            "train/loss",
            loss,
            on_step=True,
            on_epoch=True,
            prog_bar=True,
            batch_size=len(batch["label"]),
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics(self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_metrics(self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """``probabilities`` (B, 2), with the label and the ids of the scans that the batch has."""
        known = {name: batch[name] for name in (*IDS, "label") if name in batch}
        return known | {"probabilities": self(batch["image"]).softmax(dim=1)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._optimizer()
        epochs = self.trainer.max_epochs or 1
        match self.hparams["lr_schedule"]:
            case "cosine":
                cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
                return {"optimizer": optimizer, "lr_scheduler": cosine}
            case "step":
                step = lr_scheduler.StepLR(optimizer, step_size=max(1, epochs // 3))
                return {"optimizer": optimizer, "lr_scheduler": step}
            case _:
                return optimizer

    def _optimizer(self) -> torch.optim.Optimizer:
        rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
        parameters = self.parameters()
        if self.hparams["optimizer"] == "adamw":
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
        return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, momentum=0.9, nesterov=True)

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, weight=self.class_weights)

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        scores, labels = self(batch["image"]), batch["label"]
        metrics.update(scores.softmax(dim=1)[:, 1], labels)
        loss = self._loss(scores, labels)
        name = f"{metrics.prefix}loss"
        self.log(name, loss, batch_size=len(labels), sync_dist=True, prog_bar=True)

    def _log_metrics(self, metrics: MetricCollection) -> None:
        values = metrics.compute()
        metrics.reset()
        prefix = metrics.prefix
        halves = values[f"{prefix}sensitivity"] + values[f"{prefix}specificity"]
        values[f"{prefix}balanced_accuracy"] = halves / 2
        # the metrics have been gathered by compute(): all ranks log the same values
        accuracy = values.pop(f"{prefix}accuracy")
        self.log(f"{prefix}accuracy", accuracy, prog_bar=True, sync_dist=True)
        self.log_dict(values, sync_dist=True)


def _metrics(prefix: str) -> MetricCollection:
    """Metrics of P(label 1); balanced accuracy is the mean of the last two."""
    return MetricCollection(
        {
            "accuracy": BinaryAccuracy(),
            "auroc": BinaryAUROC(),
            "sensitivity": BinaryRecall(),
            "specificity": BinarySpecificity(),
        },
        prefix=prefix,
    )
