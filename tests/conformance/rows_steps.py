"""Validation, tests, predictions; what is logged and gathered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import TensorBoardLogger
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
cross_entropy = nn.functional.cross_entropy


class _Evaluated(Row):
    """Validates after each epoch, on every R-th batch."""

    def val_dataloader(self) -> Any:
        return self.batches(12, seed=2)

    def test_dataloader(self) -> Any:
        return self.batches(10, seed=3)  # the last batch is smaller

    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def batches(self, samples: int, seed: int) -> DataLoader:
        batches = torch.arange(samples).split(4)
        mine = torch.cat(batches[self.trainer.global_rank :: self.trainer.world_size])
        return DataLoader(Subset(self.dataset(samples, seed), mine.tolist()), batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(*batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.loss(*batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Evaluates(_Evaluated):
    """`fit`, `validate`, `test` and `predict` by one Trainer."""

    fast = True
    shapes = EVERY

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        validated, tested = trainer.validate(self), trainer.test(self)
        return validated, tested, trainer.predict(self)


class PredictsWithAPart(_Evaluated):
    """`predict` calls a part that is too small for stages.

    It comes after a fit of the whole network.
    """

    sampled = True
    shapes = EVERY

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.second(nn.functional.pad(batch[0], (0, 2)))

    def exercise(self, run: Run) -> Any:
        run.trainer().fit(self)
        return run.trainer().predict(self)


class PacksWhatIsPadded(_Evaluated):
    """`torch.nn.TransformerEncoder` with `src_key_padding_mask`.

    It packs sequences where nothing is trained. Evaluations run on the driver, or in stages with
    `enable_nested_tensor=False`.
    """

    shapes = EVERY
    cuts: ClassVar = {
        2: ["net.encoder.layers.1"],
        3: ["net.encoder.layers.1", "net.encoder.layers.2"],
    }

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)
            self.classify = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            length = 3 + (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long()
            padded = torch.arange(6, device=x.device) >= length
            features = self.encoder(self.embed(x[:, :, None]), src_key_padding_mask=padded)
            return self.classify(features.mean(1))

    def build(self) -> None:
        self.net = self.Net()

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        before = trainer.validate(self)
        trainer.fit(self)
        return before, trainer.validate(self), run.trainer().predict(self)


class EncodesInEvaluation(PacksWhatIsPadded):
    """`torch.nn.TransformerEncoder` in evaluations alone, without padding: layers that have no
    derivative there.
    """

    shapes = EVERY
    trains = False

    class Net(PacksWhatIsPadded.Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.classify(self.encoder(self.embed(x[:, :, None])).mean(1))

    def exercise(self, run: Run) -> Any:
        return run.trainer().validate(self), run.trainer().predict(self)


class EncodesWithAMask(PacksWhatIsPadded):
    """`torch.nn.TransformerEncoder` with a causal mask, cut inside of a layer: evaluations go
    through the stages.
    """

    cuts: ClassVar = {
        2: ["net.encoder.layers.1.linear1"],
        3: ["net.encoder.layers.1.linear1", "net.encoder.layers.2.linear1"],
    }

    class Net(PacksWhatIsPadded.Net):
        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
            return self.classify(self.encoder(self.embed(x[:, :, None]), mask=mask).mean(1))


class RegistersInForward(_Evaluated):
    """`forward` registers buffers in its first call. Later runs find them on rank 0."""

    class Centres(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.detach().mean(0))
            return super().forward(x - self.mean)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.register_buffer("scale", 1 + x.detach().std(0))
            return super().forward(x / self.scale)

    sampled = True
    shapes = EVERY
    gathered = True  # the workers' modules get no new buffers

    def build(self) -> None:
        self.net = self.Net()
        self.net.first = self.Centres(6, 8)

    def exercise(self, run: Run) -> Any:
        run.trainer().fit(self)
        predicted = run.trainer().predict(self)
        run.trainer(max_steps=2).fit(self)
        return predicted


class OnlyTests(_Evaluated):
    """Only `test` runs."""

    trains = False

    def exercise(self, run: Run) -> Any:
        return run.trainer().test(self), run.trainer().predict(self)


class FitsTwice(_Evaluated):
    """Two Trainers after one another; the second goes on with the weights of the first."""

    sampled = True

    def exercise(self, run: Run) -> Any:
        run.trainer().fit(self)
        run.trainer(max_steps=2).fit(self)


class CollectsOutputs(_Evaluated):
    """Collects `self.validation_step_outputs`, and computes with them in
    `on_validation_epoch_end`.
    """

    def on_validation_epoch_start(self) -> None:
        self.validation_step_outputs: list[tuple[Tensor, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.validation_step_outputs.append((self.net(x), y))

    def on_validation_epoch_end(self) -> None:
        outputs, targets = (torch.cat(part) for part in zip(*self.validation_step_outputs))
        self.log("val", cross_entropy(outputs, targets), sync_dist=True)
        self.seen.append(outputs)


class LogsValues(_Evaluated):
    """`self.log` with all flags, and `self.log_dict`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, logger=True, sync_dist=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("index", float(batch_idx), rank_zero_only=True)
        self.log_dict({"a/x": loss.detach() * 2, "a/y": 1.0}, batch_size=4)
        return loss


class LogsMetrics(_Evaluated):
    """Metric objects of torchmetrics, logged and computed by hand."""

    fast = True

    def build(self) -> None:
        super().build()
        self.accuracy = MulticlassAccuracy(3)
        kinds = [MulticlassAccuracy(3, average="micro"), MulticlassAUROC(3)]
        self.measures = MetricCollection(kinds, prefix="val_")
        self.by_hand = MulticlassAccuracy(3, average=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self.net(x)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return cross_entropy(output, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self.net(x)
        self.measures.update(output, y)
        self.by_hand.update(output, y)
        self.log_dict(self.measures, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.by_hand.compute())
        self.by_hand.reset()


class SeveralValidationLoaders(_Evaluated):
    """Several validation loaders, with `dataloader_idx`."""

    def val_dataloader(self) -> Any:
        return [self.batches(8, seed=2), self.batches(12, seed=4)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(*batch), sync_dist=True)


class GathersOutputs(Row):
    """`self.all_gather` of a dictionary, and with gradients."""

    fast = True
    control = False  # it adds a dimension even for one device

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        gathered = self.all_gather({"output": output.detach(), "class": y})
        self.seen.append([gathered["output"].clone(), gathered["class"].clone()])
        everything = self.all_gather(output, sync_grads=True).reshape(-1, 3)
        return cross_entropy(output, y) + 0.1 * everything.square().mean()


class _Painter(Callback):
    """Shows what the network makes of an input, in the middle of a fit."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        x = torch.linspace(0, 1, 24, dtype=torch.float64).view(4, 6)
        with torch.no_grad():
            image = pl_module.net(x).sigmoid()
        trainer.logger.experiment.add_image("output", image[None], trainer.global_step)


class LogsImages(_Evaluated):
    """A callback calls the network in mid-fit and logs images to TensorBoard."""

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        logger = TensorBoardLogger(folder, name="", version="log")
        return {"logger": logger, "callbacks": [_Painter()], "log_every_n_steps": 1}

    def exercise(self, run: Run) -> Any:
        super().exercise(run)
        run.trainers[-1].strategy.barrier()  # replica 0 closes the file
        events = EventAccumulator(str(run.folder / "log"), size_guidance={"images": 0}).Reload()
        images = [(e.step, e.encoded_image_string) for e in events.Images("output")]
        return images, [(e.step, e.value) for e in events.Scalars("val")]


class _Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        name = f"batch{batch_idx}of{trainer.global_rank}.pt"
        torch.save([prediction, batch_indices], self.folder / name)

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Any,
        batch_indices: Any,
    ) -> None:
        torch.save([predictions, batch_indices], self.folder / f"epoch{trainer.global_rank}.pt")


class WritesPredictions(_Evaluated):
    """`predict` with a `BasePredictionWriter`."""

    sampled = True
    trains = False

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {"callbacks": [_Writer(folder)]}

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        predictions = trainer.predict(self)
        trainer.strategy.barrier()  # each replica writes its own
        files = sorted(file for file in run.folder.glob("*of*.pt"))
        return predictions, {file.name: torch.load(file) for file in files}


class ReturnsNothingToPredict(_Evaluated):
    """`predict(return_predictions=False)`: the writer alone gets the predictions."""

    trains = False

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {"callbacks": [_Writer(folder)]}

    def exercise(self, run: Run) -> Any:
        return run.trainer().predict(self, return_predictions=False)


class TakesTheLossApart(_Evaluated):
    """`training_step` returns a dictionary, which hooks read.

    They are hooks of batches and of epochs.
    """

    options: ClassVar = {"max_epochs": 2, "max_steps": -1}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self.net(x)
        return {"loss": cross_entropy(output, y), "output": output.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([outputs["loss"].clone(), outputs["output"]])

    def on_train_epoch_end(self) -> None:
        self.seen.append([self.current_epoch, self.global_step])
