"""What Lightning's callbacks do to a run, and what a script reads from them afterwards."""

import contextlib
import csv
import io
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run, load_checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

EPOCHS: dict[str, Any] = {
    "max_steps": -1,
    "max_epochs": 3,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}


class _Epochs(Row):
    """Three epochs with validation, as most callbacks count in epochs."""

    options: ClassVar = EPOCHS

    def callbacks(self, folder: Path) -> list[Callback]:
        return []

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        callbacks = self.callbacks(folder)
        saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
        return {**self.options, "callbacks": callbacks, "enable_checkpointing": saves}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(8, seed=2), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(*batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        trainer.strategy.barrier()  # rank 0 removes the last file after the others have gone on
        return self.outcome(trainer)

    def outcome(self, trainer: Trainer) -> Any:
        """What a script looks at after `fit`."""


def checkpoints(folder: Path) -> dict[str, Any]:
    """What stands in the checkpoints of a folder, by name."""
    found = {}
    for path in sorted(folder.rglob("*.ckpt")):
        content = load_checkpoint(path)
        names = ("state_dict", "optimizer_states", "global_step", "epoch")
        found[path.name, path.is_symlink()] = [content.get(name) for name in names]
    return found


class SavesCheckpoints(_Epochs):
    """`ModelCheckpoint` in each of its modes, all in one run: by steps, epochs and time,
    `save_top_k`, `monitor`, `save_last`, `save_weights_only`. Names, scores and contents of the
    files are those of one device.
    """

    fast = True
    modes: ClassVar[dict[str, dict[str, Any]]] = {
        "steps": {"every_n_train_steps": 3, "save_top_k": -1},
        "epochs": {"every_n_epochs": 2, "save_top_k": -1},
        "best two": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.3f}"},
        "largest": {"monitor": "train_loss_epoch", "mode": "max"},
        "last": {"monitor": "val_loss", "mode": "max", "save_last": True},
        "link": {"monitor": "train_loss_epoch", "save_last": "link"},
        "weights": {"every_n_train_steps": 4, "save_weights_only": True},
        "epoch end": {"monitor": "train_loss", "save_on_train_epoch_end": True, "save_top_k": 2},
        "time": {"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
        "none": {"monitor": "train_loss", "mode": "max", "save_top_k": 0},
    }

    def callbacks(self, folder: Path) -> list[Callback]:
        self.folder = folder
        return [ModelCheckpoint(dirpath=folder / name, **mode) for name, mode in self.modes.items()]

    def outcome(self, trainer: Trainer) -> Any:
        return {
            name: [
                checkpoints(self.folder / name),
                Path(callback.best_model_path).name,
                callback.best_model_score,
                Path(callback.last_model_path).name,
                Path(callback.kth_best_model_path).name,
                [(Path(path).name, score) for path, score in callback.best_k_models.items()],
            ]
            for name, callback in zip(self.modes, trainer.checkpoint_callbacks)
        }


class _RaisesLate(_Epochs):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.trainer.global_step == 5:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)

    def exercise(self, run: Run) -> Any:
        with contextlib.suppress(Exception):
            run.trainer().fit(self)
        run.trainers.clear()  # a worker is not told what its failed driver has logged
        found = checkpoints(run.folder)
        # nor of its weights: after a failure a script goes on from the checkpoint
        self.load_state_dict(next(reversed(found.values()))[0])
        return found


class SavesAfterAnException(_RaisesLate):
    """The script catches an exception of `fit` and calls `trainer.save_checkpoint`; the states of
    all optimizers are in the file.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        with contextlib.suppress(Exception):
            trainer.fit(self)
        trainer.save_checkpoint(run.folder / "after.ckpt")
        run.trainers.clear()
        found = checkpoints(run.folder) if trainer.is_global_zero else {}
        self.seen.append(found)
        return None


class SavesOnException(_RaisesLate):
    """`ModelCheckpoint(save_on_exception=True)` saves when `training_step` raises."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)

    def callbacks(self, folder: Path) -> list[Callback]:
        return [ModelCheckpoint(folder, save_on_exception=True, filename="{step}")]


class SavesOnlyOnException(_RaisesLate):
    """`OnExceptionCheckpoint` saves when `training_step` raises."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)

    def callbacks(self, folder: Path) -> list[Callback]:
        return [OnExceptionCheckpoint(folder)]


class StopsEarly(_Epochs):
    """`EarlyStopping` ends the run in the same epoch."""

    sampled = True
    options: ClassVar = {**EPOCHS, "max_epochs": 10}

    def callbacks(self, folder: Path) -> list[Callback]:
        return [EarlyStopping("val_loss", patience=1, min_delta=10.0)]

    def outcome(self, trainer: Trainer) -> Any:
        stop = trainer.early_stopping_callback
        counts = [stop.stopped_epoch, stop.wait_count, trainer.current_epoch, trainer.global_step]
        return [*counts, stop.best_score, trainer.should_stop]


class WatchesLearningRate(_Epochs):
    """`LearningRateMonitor` logs rates and momentum in each step."""

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {**super().trainer_options(folder), "logger": CSVLogger(folder)}

    def callbacks(self, folder: Path) -> list[Callback]:
        self.monitor = LearningRateMonitor("step", log_momentum=True)
        return [self.monitor]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def outcome(self, trainer: Trainer) -> Any:
        return [self.monitor.lrs, self.monitor.last_momentum_values, Path(trainer.log_dir).name]


class UnfreezesBackbone(_Epochs):
    """`BackboneFinetuning` unfreezes layers in the second epoch.

    It adds them to the optimizer. With replicas, unlike under `ddp`, what was frozen at first is
    averaged over them too.
    """

    # plain `ddp` does not average what was frozen when it began: its replicas drift apart
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    idle = True  # nothing of the first stage is trained when the gradients begin to be watched

    def build(self) -> None:
        super().build()
        self.backbone = self.net.first

    def callbacks(self, folder: Path) -> list[Callback]:
        options = {"lambda_func": lambda epoch: 1.5, "should_align": False}
        return [BackboneFinetuning(1, backbone_initial_lr=0.01, **options)]

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def outcome(self, trainer: Trainer) -> Any:
        return self.net.first.weight.requires_grad


class _Tuned(_Epochs):
    def __init__(self) -> None:
        self.lr, self.batch_size = 0.1, 2
        super().__init__()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


_RANGE: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 0.5, "early_stop_threshold": None}


class FindsLearningRate(_Tuned):
    """`LearningRateFinder` looks for a learning rate before the fit."""

    options: ClassVar = {**EPOCHS, "use_distributed_sampler": True}
    control = False  # its sampler shuffles

    def callbacks(self, folder: Path) -> list[Callback]:
        self.finder = LearningRateFinder(num_training_steps=20, **_RANGE)
        return [self.finder]

    def outcome(self, trainer: Trainer) -> Any:
        return [self.lr, self.finder.optimal_lr.results, self.finder.optimal_lr.suggestion()]


class TunesLearningRate(_Tuned):
    """`Tuner.lr_find`, then a fit by the same Trainer. It leaves the loop by an exception."""

    options: ClassVar = {**EPOCHS, "use_distributed_sampler": True}
    control = False

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        found = Tuner(trainer).lr_find(self, num_training=20, **_RANGE)
        before = {name: value.clone() for name, value in self.state_dict().items()}
        state = str(trainer.state.status)
        trainer.fit(self)
        return [found.results, found.suggestion(), self.lr, before, state]


class FindsBatchSize(_Tuned):
    """`BatchSizeFinder` looks for a batch size, with one replica."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # Lightning refuses it under `ddp`, on one device too

    def callbacks(self, folder: Path) -> list[Callback]:
        return [BatchSizeFinder(max_trials=3, steps_per_trial=2)]

    def outcome(self, trainer: Trainer) -> Any:
        return [self.batch_size, trainer.callbacks[0].optimal_batch_size]


class TunesBatchSize(_Tuned):
    """`Tuner.scale_batch_size` of `fit`, `validate` and `predict`, with one replica."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False

    def exercise(self, run: Run) -> Any:
        found = []
        for method, mode in (("fit", "binsearch"), ("validate", "power"), ("predict", "power")):
            trainer = run.trainer()
            found += [
                Tuner(trainer).scale_batch_size(self, method=method, mode=mode, max_trials=3),
                self.batch_size,
            ]
        run.trainer().fit(self)
        return found

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(8, seed=2), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class RefusesBatchSizeOfReplicas(_Tuned):
    """`BatchSizeFinder` with several replicas, as under `ddp`: look for the size with
    `data_parallel_size=1`.
    """

    shapes = (TWO_OF_TWO,)
    refused = ("BatchSizeFinder", "data_parallel_size=1")

    def callbacks(self, folder: Path) -> list[Callback]:
        return [BatchSizeFinder()]


class RefusesPruning(_Epochs):
    """`ModelPruning`: prune after `fit` instead."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    refused = ("ModelPruning", "torch.nn.utils.prune")

    def callbacks(self, folder: Path) -> list[Callback]:
        return [ModelPruning("l1_unstructured", amount=0.3)]


class _Counts(Callback):
    """The summary as it is at the start and in the middle."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_start = self.count(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.in_the_middle = self.count(pl_module)

    @staticmethod
    def count(module: Any) -> list[Any]:
        summary = summarize(module, max_depth=2)
        return [summary.total_parameters, summary.trainable_parameters, summary.param_nums]


class CountsParameters(_Epochs):
    """`ModelSummary` and `RichModelSummary` show the whole network on every rank.

    They do so at the start and in mid-run.
    """

    def callbacks(self, folder: Path) -> list[Callback]:
        self.counts = _Counts()
        return [ModelSummary(2), self.counts, RichModelSummary(2)]

    def outcome(self, trainer: Trainer) -> Any:
        return [self.counts.at_start, self.counts.in_the_middle, _Counts.count(self)]


class ShowsProgress(_Epochs):
    """`RichProgressBar` and `TQDMProgressBar` show the metrics of one device."""

    def exercise(self, run: Run) -> Any:
        shown = []
        for bar in (RichProgressBar(), TQDMProgressBar()):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                trainer = run.trainer(callbacks=[bar], enable_progress_bar=True)
                trainer.fit(self)
            shown.append(trainer.progress_bar_metrics.keys() if out.getvalue() else {})
        self.seen.append([sorted(names) for names in shown])  # the driver's
        return None


class HasTimers(_Epochs):
    """`Timer` callbacks, one of which stops the run."""

    def exercise(self, run: Run) -> Any:
        short = Timer(timedelta(microseconds=1), interval="step")
        run.trainer(callbacks=[short]).fit(self)
        steps = run.trainers[0].global_step
        long = Timer("00:01:00:00")
        run.trainer(callbacks=[long]).fit(self)
        return [steps, short.time_elapsed("train") > 0, long.time_elapsed("validate") > 0]


class UsesSmallCallbacks(_Epochs):
    """`GradientAccumulationScheduler`, `LambdaCallback` and `SpikeDetection` in one run."""

    def callbacks(self, folder: Path) -> list[Callback]:
        def note(trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            module.seen.append(outputs["loss"].item())

        return [
            GradientAccumulationScheduler({0: 1, 1: 2}),
            LambdaCallback(on_train_batch_end=note),
            SpikeDetection(warmup=1, exclude_batches_path=str(folder / "skipped.json")),
        ]


class MonitorsThroughputAndDevices(_Epochs):
    """`ThroughputMonitor` and `DeviceStatsMonitor`.

    Names and number of the values are those of one device; the values are times. Devices of workers
    are not logged.
    """

    def exercise(self, run: Run) -> Any:
        throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
        monitors = [throughput, DeviceStatsMonitor(cpu_stats=True)]
        trainer = run.trainer(callbacks=monitors, logger=CSVLogger(run.folder))
        trainer.fit(self)
        run.trainers.clear()
        with Path(trainer.log_dir, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return sorted((name, sum(bool(row[name]) for row in rows)) for name in rows[0])


class GoesOnAfterFit(_Epochs):
    """`validate`, `test`, `predict` and a second Trainer after `fit`.

    They find the callbacks as they were left.
    """

    def callbacks(self, folder: Path) -> list[Callback]:
        return [ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{epoch}")]

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.history.append(self.trainer.callback_metrics["val_loss"].item())

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        seen = [self.history[-1]]
        seen += trainer.validate(self, ckpt_path="best", verbose=False)
        seen += trainer.test(self, verbose=False)
        seen += trainer.predict(self)
        best = trainer.checkpoint_callback
        seen += [Path(best.best_model_path).name, best.best_model_score, len(self.history)]
        other = run.trainer(max_epochs=4)
        other.fit(self, ckpt_path=best.best_model_path)
        return [*seen, other.current_epoch, Path(other.checkpoint_callback.best_model_path).name]


class SavesAfterFit(_Epochs):
    """`trainer.save_checkpoint` after `fit`, and a run that goes on from it."""

    options: ClassVar = {**EPOCHS, "max_epochs": 2}

    def configure_optimizers(self) -> Any:
        weights = list(self.parameters())
        first = torch.optim.AdamW([{"params": weights[:3], "lr": 0.02}, {"params": weights[3:]}])
        return [first], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5)]

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        trainer.test(self, verbose=False)
        trainer.save_checkpoint(run.folder / "after.ckpt")
        again, second = type(self)(), run.trainer(max_epochs=4)
        second.fit(again, ckpt_path=run.folder / "after.ckpt")
        second.test(again, verbose=False)  # which restores nothing
        groups = [(group["lr"], group["betas"]) for group in trainer.optimizers[0].param_groups]
        return [checkpoints(run.folder), groups, again.state_dict()]


class AveragesWeightsBySWA(_Epochs):
    """`StochasticWeightAveraging` averages the weights of the last epochs."""

    options: ClassVar = {**EPOCHS, "max_epochs": 4}

    def callbacks(self, folder: Path) -> list[Callback]:
        self.averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)
        return [self.averaging]

    def outcome(self, trainer: Trainer) -> Any:
        return self.averaging.n_averaged


class AveragesWeightsBySWAWithBatchNorm(AveragesWeightsBySWA):
    """`StochasticWeightAveraging` of a network with batch norm: one more pass over the data gives
    the averaged network its batch statistics.
    """

    # under `ddp` each replica would validate with the statistics of its own last batch
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    per_microbatch = True
    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))


class AveragesWeights(_Epochs):
    """`WeightAveraging`, interrupted and resumed from a checkpoint."""

    def averaging(self) -> Callback:
        return WeightAveraging()

    def callbacks(self, folder: Path) -> list[Callback]:
        saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        return [self.averaging(), saving]

    def exercise(self, run: Run) -> Any:
        """Interrupted and resumed, like uninterrupted."""
        run.trainer(max_epochs=2).fit(self)
        saved = checkpoints(run.folder)
        again = type(self)()
        run.trainer().fit(again, ckpt_path=sorted(run.folder.glob("*.ckpt"))[0])
        return [saved, again.state_dict()]


class AveragesWeightsExponentially(AveragesWeights):
    """`EMAWeightAveraging(decay=0.9)`, interrupted and resumed from a checkpoint."""

    def averaging(self) -> Callback:
        return EMAWeightAveraging(decay=0.9)


class AveragesNormalizedWeights(_Epochs):
    """`WeightAveraging` of a network with batch norm: all replicas validate with the averaged
    statistics of replica 0, as under `ddp`.
    """

    shapes = (ONE_OF_TWO, TWO_OF_TWO)
    microbatches = 1
    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def callbacks(self, folder: Path) -> list[Callback]:
        return [EMAWeightAveraging(decay=0.8, update_every_n_steps=2)]


class AveragesWeightsMadeInConfigureModel(AveragesWeightsExponentially):
    """`EMAWeightAveraging` of a network that is made in `configure_model`. The callback calls the
    hook and Lightning calls it again, so the network is whole on every rank.
    """

    def build(self) -> None:
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        self.net = Layers().double()
