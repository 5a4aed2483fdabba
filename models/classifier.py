from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from models.attention import AttentionKind
from models.errors import UseError
from models.optimisation import OptimizerName, ScheduleName, make_optimizer, rate_factor
from models.predictions import Prediction, Predictions, Scale, arrays, told
from models.pretrained import freeze as freeze_parts
from models.pretrained import start_from
from models.resattnet import OPTIONS, WIDTHS, Depth, ResAttNet3D, StemKernel, StemStride
from models.scores import evaluate, measured
from models.tasks import TaskName, classes_of, is_number
from models.transfer import KEY, SCALE, hashed, scale_of, transfer

Batch = dict[str, Any]
IDS = ("subject", "image_id")
"""Keys of a batch that name its scans."""


class ResAttNetClassifier(LightningModule):
    """3D-ResAttNet as a classifier: AD against NC, pMCI against sMCI, or NC, MCI and AD.

    Or it tells a number, age or MMSE: with one output, in standard deviations from the mean of the
    training scans, a squared error as loss, and the number itself in all that is written.

    A batch is a dictionary with at least ``image`` (B, C, D, H, W) and ``label`` (B,), the index of
    a class name of the task, or the number. Logs ``train/loss``, and for validation and test the
    loss and the metrics of `models.metrics` or `models.numbers`; for the test also ``<metric>_low``
    and ``<metric>_high``, the ends of a 95 % interval by ``subject``. Scans that a distributed
    sampler repeats count once (by ``image_id``).

    Args:
        task: "ad_nc", "pmci_smci" or "three_way": decides number and names of the classes; "age" or
            "mmse": a number.
        depth: Layers of the network, 18 or 34; this and the next eleven are those of `ResAttNet3D`.
        in_channels: Channels C of the images.
        stem_kernel: Kernel of the network's first convolution.
        stem_stride: Its stride.
        stem_pool: Whether max pooling follows.
        widths: Channels of layers 1 to 4.
        attention_after: Layers (of 1 to 4) that a self-attention block follows.
        attention_reduction: Their inner width is the layer's divided by this.
        attention: "sdpa" stores no attention map, "explicit" does.
        dropout: Of the inputs of the last linear layer.
        recompute: Layers whose blocks are computed again in the backward pass, to save memory.
        channels_last: Whether features lie in memory with the channels last.
        optimizer: "sgd" or "adamw".
        learning_rate: The highest learning rate.
        weight_decay: Weight decay of the optimizer.
        momentum: Of SGD; 0 is plain SGD.
        nesterov: Nesterov's variant of SGD with momentum.
        lr_schedule: "constant", "cosine" (to 0 at the end) or "step" (a tenth after each third of
            the run).
        warmup_epochs: Epochs in which the rate grows from 0, before the schedule; may be a
            fraction.
        label_smoothing: Part of each label that is spread evenly over the classes in training;
            nothing for a number.
        class_weights: Weights of the classes in the cross-entropy; "balanced" takes those of the
            data module (`class_weights`), None counts every scan alike; nothing for a number.
        transfer_from: Checkpoint whose network's weights training starts from. Refused when a
            subject held out now was trained on then.
        init_from: Folder of a MONAI bundle, or file of weights (MedicalNet's and the like), that
            training starts from: what matches in name and shape is taken (``fit --init``).
        freeze: Parts of the network, such as stem or layer1, that keep their weights and batch
            statistics.
    """

    def __init__(
        self,
        task: TaskName = "ad_nc",
        depth: Depth = 18,
        in_channels: int = 1,
        stem_kernel: StemKernel = 3,
        stem_stride: StemStride = 2,
        stem_pool: bool = True,
        # lists, for YAML; they are read only
        widths: list[int] = list(WIDTHS),  # noqa: B006
        attention_after: list[int] = [3, 4],  # noqa: B006
        attention_reduction: int = 8,
        attention: AttentionKind = "sdpa",
        dropout: float = 0.0,
        recompute: list[int] = [],  # noqa: B006
        channels_last: bool = False,
        optimizer: OptimizerName = "sgd",
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        momentum: float = 0.9,
        nesterov: bool = True,
        lr_schedule: ScheduleName = "constant",
        warmup_epochs: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: list[float] | Literal["balanced"] | None = None,
        transfer_from: str | None = None,
        init_from: str | None = None,
        freeze: list[str] = [],  # noqa: B006
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.class_names = classes_of(task)
        self.network = self.make_network()
        freeze_parts(self.network, freeze)
        self.scale: Scale | None = (0.0, 1.0) if is_number(self.class_names) else None
        """Of the number that is told, over the training scans; None: classes are."""
        if self.scale:
            class_weights = None
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", self._given_weights(class_weights), persistent=False)
        self.evaluated: list[Prediction] = []
        """What was said of each scan in the last validation or test."""
        self._seen: list[str] = []
        self._collected = Predictions()

    def network_options(self) -> dict[str, Any]:
        """The arguments of its ``ResAttNet3D``."""
        return {
            "num_classes": len(self.class_names),
            **{name: self.hparams[name] for name in OPTIONS},
        }

    def make_network(self) -> ResAttNet3D:
        """An untrained network with the options of this one."""
        return ResAttNet3D(**self.network_options())

    def setup(self, stage: str) -> None:
        """Take class weights or scale from the data module, and the weights of another run."""
        if stage != "fit":
            return
        datamodule = getattr(self.trainer, "datamodule", None)
        self._refuse_no_statistics(datamodule)
        if self.hparams["class_weights"] == "balanced" and self.class_weights is not None:
            # in place: callbacks that copy the module have copied this buffer before
            self.class_weights.copy_(torch.tensor(self._balanced_weights(datamodule)))
        if self.scale is not None:
            self.scale = self._training_scale(datamodule)
        if self.hparams["init_from"]:
            text = start_from(self.network, Path(self.hparams["init_from"]))
            rank_zero_info(f"{text}. Whom they were trained on is not known.")
        if self.hparams["transfer_from"]:
            held_out = [*_subjects(datamodule, "val"), *_subjects(datamodule, "test")]
            path = self.hparams["transfer_from"]
            self._seen = transfer(self.network, path, held_out, datamodule)

    def _refuse_no_statistics(self, datamodule: Any) -> None:
        """Refuse batches of one scan that the network shrinks to one voxel, before training.

        Raises:
            UseError: batch normalisation would end the first step.
        """
        shape, batch = (
            getattr(datamodule, "spatial_shape", ()),
            getattr(datamodule, "batch_size", 2),
        )
        stride = 8 * self.hparams["stem_stride"] * (2 if self.hparams["stem_pool"] else 1)
        if batch == 1 and shape and max(shape) <= stride:
            raise UseError(
                f"spatial_shape {list(shape)} is one voxel in layer4 (stride {stride}), and with "
                "batch_size 1 batch normalisation has one value of it; give --data.batch_size 2 or "
                f"more, or a --data.spacing_mm at which the volume has more than {stride} voxels"
            )

    def train(self, mode: bool = True) -> "ResAttNetClassifier":
        """Switch to training or evaluation; what is frozen stays in evaluation."""
        super().train(mode)
        freeze_parts(self.network, self.hparams["freeze"])
        return self

    def forward(self, image: Tensor) -> Tensor:
        """Scores (B, classes), or (B, 1) of a number, of images (B, C, D, H, W)."""
        return cast(Tensor, self.network(image))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        smoothing = self.hparams["label_smoothing"]
        loss = self._loss(self(batch["image"]), batch["label"], smoothing)
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
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """``outputs``: probabilities (B, classes) or numbers (B, 1); label and ids, where known."""
        known = {name: batch[name] for name in (*IDS, "label") if name in batch}
        return known | {"outputs": told(self(batch["image"]), self.scale)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        optimizer = make_optimizer(
            options["optimizer"],
            self.parameters(),
            options["learning_rate"],
            options["weight_decay"],
            options["momentum"],
            options["nesterov"],
        )
        schedule, warmup_epochs = options["lr_schedule"], options["warmup_epochs"]
        if schedule == "constant" and not warmup_epochs:
            return optimizer
        steps, epochs = self.trainer.estimated_stepping_batches, self.trainer.max_epochs or 0
        if steps == float("inf") or not 0 <= warmup_epochs < max(epochs, 1):
            raise UseError(
                f"lr_schedule={schedule!r} with warmup_epochs={warmup_epochs} needs a run that "
                f"ends after its warm-up: trainer.max_epochs is {self.trainer.max_epochs}. Give "
                "more epochs, or a shorter warm-up: --model.warmup_epochs 0."
            )
        warmup = warmup_epochs / max(epochs, 1)
        follow = LambdaLR(optimizer, lambda step: rate_factor(schedule, step / steps, warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follow, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember, as hashes, whom these weights have seen."""
        datamodule = getattr(self._trainer, "datamodule", None)
        checkpoint[KEY] = sorted({*self._seen, *hashed(_subjects(datamodule, "train"))})
        if self.scale is not None:
            checkpoint[SCALE] = list(self.scale)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._seen = list(checkpoint.get(KEY, ()))
        if self.scale is not None:
            self.scale = scale_of(checkpoint)

    def _given_weights(self, class_weights: list[float] | str | None) -> Tensor | None:
        if class_weights is None:
            return None
        if isinstance(class_weights, str):  # "balanced": known in `setup`
            return torch.ones(len(self.class_names))
        if len(class_weights) != len(self.class_names):
            raise ValueError(
                f"class_weights wants {len(self.class_names)} numbers, for "
                f"{', '.join(self.class_names)}; got {class_weights}."
            )
        return torch.tensor(class_weights)

    def _balanced_weights(self, datamodule: Any) -> list[float]:
        weights: list[float] | None = getattr(datamodule, "class_weights", None)
        if weights is None:
            raise ValueError(
                "class_weights='balanced' needs a data module with the attribute class_weights, "
                "given as trainer.fit(model, datamodule=...). Or give the weights as numbers."
            )
        return weights

    def _training_scale(self, datamodule: Any) -> Scale:
        scale: Scale | None = getattr(datamodule, "target_scale", None)
        if scale is None:
            raise ValueError(
                f"The task {self.hparams['task']!r} needs a data module with the attribute "
                "target_scale (mean and standard deviation over the training scans), given as "
                "trainer.fit(model, datamodule=...)."
            )
        return scale

    def _loss(self, scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        if self.scale is not None:
            mean, spread = self.scale
            return F.mse_loss(scores[:, 0], (labels - mean) / spread)
        return F.cross_entropy(scores, labels, weight=self.class_weights, label_smoothing=smoothing)

    def _evaluate(self, batch: Batch, part: str) -> None:
        scores, labels = self(batch["image"]), batch["label"]
        self._collected.add(batch, told(scores, self.scale))
        loss = self._loss(scores, labels)
        self.log(f"{part}/loss", loss, batch_size=len(labels), sync_dist=True, prog_bar=True)

    def _log_metrics(self, part: str) -> None:
        self.evaluated = self._collected.gathered()
        outputs, labels, subjects = arrays(self.evaluated)
        if not len(labels):
            return
        if part == "test":
            values = measured(outputs, labels, subjects)
        else:
            values = evaluate(outputs, labels)
        # gathered: all ranks log the same values
        first = next(iter(values))  # accuracy, or the mean absolute error
        self.log(f"{part}/{first}", values.pop(first), prog_bar=True, sync_dist=True)
        named = {f"{part}/{name}": value for name, value in values.items()}
        self.log_dict(cast(Mapping[str, Any], named), sync_dist=True)


def _subjects(datamodule: Any, part: str) -> list[str]:
    """Subjects of one part, if the data module can tell."""
    scans = getattr(datamodule, "scans", None)
    return [record.subject for record in scans(part)] if scans else []
