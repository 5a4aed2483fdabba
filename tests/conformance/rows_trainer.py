"""Arguments of the Trainer, schedulers and loaders."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from rows_steps import _Evaluated
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

EPOCHS = {"max_epochs": 2, "max_steps": -1}


# ---------------------------------------------------------------- gradients


class AccumulatesBySchedule(Row):
    """`GradientAccumulationScheduler` with another number in each epoch."""

    options: ClassVar = {"max_epochs": 3, "max_steps": -1}

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {**self.options, "callbacks": [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})]}


class AccumulatesAndClips(Row):
    """Accumulates and clips gradients; the last batches of an epoch are fewer than are to be
    accumulated.
    """

    fast = True
    samples = 24
    options: ClassVar = {**EPOCHS, "accumulate_grad_batches": 4, "gradient_clip_val": 0.3}


class ClipsByTheModule(Row):
    """`self.clip_gradients` under manual optimization, by norm and by value."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        how = "norm" if batch_idx % 2 else "value"
        bound = 0.3 if how == "norm" else 0.05
        self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm=how)
        optimizer.step()
        self.seen.append(loss.item())


class ConfiguresClipping(Row):
    """Overrides `configure_gradient_clipping`."""

    sampled = True

    def configure_gradient_clipping(self, optimizer: Any, *bounds: Any, **named: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.2, "norm")


# ---------------------------------------------------------------- schedulers


class _Scheduled(_Evaluated):
    """Notes the learning rate of each step; momentum and betas travel likewise."""

    options: ClassVar = {"max_epochs": 3, "max_steps": -1}
    settings: ClassVar[dict[str, Any]] = {}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_epoch=True, on_step=True)
        groups = self.trainer.optimizers[0].param_groups
        self.seen.append([[g["lr"], g["betas"][0]] for g in groups])
        return loss

    def configure_optimizers(self) -> Any:
        first = {"params": list(self.net.first.parameters()), "lr": 0.02}
        rest = [*self.net.second.parameters(), *self.net.third.parameters()]
        optimizer = torch.optim.AdamW([first, {"params": rest}], lr=0.01)
        schedule = {"scheduler": self.make(optimizer), **self.settings}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class SchedulesByEpoch(_Scheduled):
    """A scheduler that steps once per epoch."""

    sampled = True

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)


class SchedulesByStep(_Scheduled):
    """A scheduler steps every second step, with a function per group."""

    settings: ClassVar = {"interval": "step", "frequency": 2}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        factors = (lambda step: 0.9**step, lambda step: 0.8**step)
        return lr_scheduler.LambdaLR(optimizer, list(factors))


class SchedulesOneCycle(_Scheduled):
    """`OneCycleLR(total_steps=trainer.estimated_stepping_batches)`."""

    settings: ClassVar = {"interval": "step"}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return lr_scheduler.OneCycleLR(optimizer, [0.04, 0.02], total_steps=steps)


class SchedulesInSequence(_Scheduled):
    """`SequentialLR`: a warm-up, then cosine with restarts."""

    settings: ClassVar = {"interval": "step"}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        then = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)
        return lr_scheduler.SequentialLR(optimizer, [first, then], [3])


class SchedulesOnPlateau(_Scheduled):
    """`ReduceLROnPlateau`, per epoch."""

    settings: ClassVar = {"monitor": "val"}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, mode="max")


class SchedulesOnPlateauByStep(_Scheduled):
    """`ReduceLROnPlateau`, every second step."""

    settings: ClassVar = {"monitor": "train_step", "interval": "step", "frequency": 2}

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)


class SchedulesByHand(Row):
    """Steps a scheduler by hand, under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        schedule.step()
        self.seen.append([loss.item(), schedule.get_last_lr()])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2, 0.5)]


class StepsAScheduleItself(_Scheduled):
    """Overrides `lr_scheduler_step`, for schedulers of other libraries."""

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.current_epoch != 1:
            scheduler.step()


# ---------------------------------------------------------------- how long, how often


class RunsEpochs(_Evaluated):
    """`max_epochs` with validation."""

    sampled = True
    options: ClassVar = EPOCHS


class RunsOutOfTime(Row):
    """`max_time`, with `min_steps=3`. The time is over at once."""

    options: ClassVar = {"max_time": timedelta(0), "min_steps": 3, "max_steps": -1}


class StopsItself(Row):
    """Sets `trainer.should_stop` in a hook."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_step == 3


class SkipsTheRestOfTheEpoch(Row):
    """Returns -1 from `on_train_batch_start`, which ends the epoch."""

    options: ClassVar = EPOCHS

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class ValidatesEveryTwoBatches(_Evaluated):
    """`val_check_interval=2` with `check_val_every_n_epoch=None`."""

    options: ClassVar = {"val_check_interval": 2, "check_val_every_n_epoch": None}

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.global_step)


class ValidatesTwiceAnEpoch(ValidatesEveryTwoBatches):
    """`val_check_interval=0.5`."""

    sampled = True
    samples = 32
    options: ClassVar = {"val_check_interval": 0.5}


class ValidatesEverySecondEpoch(ValidatesEveryTwoBatches):
    """`check_val_every_n_epoch=2`."""

    options: ClassVar = {"check_val_every_n_epoch": 2, "max_epochs": 4, "max_steps": -1}


class LimitsBatches(_Evaluated):
    """`limit_train_batches`, `limit_val_batches`, `limit_test_batches` and
    `limit_predict_batches`.
    """

    samples = 32
    options: ClassVar = {
        **EPOCHS,
        "limit_train_batches": 0.5,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "limit_predict_batches": 1,
    }

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        return trainer.test(self), trainer.predict(self)


class Overfits(_Evaluated):
    """`overfit_batches=1`."""

    options: ClassVar = {**EPOCHS, "overfit_batches": 1}


class RunsFastForDevelopment(_Evaluated):
    """`fast_dev_run=2`."""

    options: ClassVar = {"fast_dev_run": 2}


class ChecksSanity(_Evaluated):
    """The sanity check."""

    options: ClassVar = {"num_sanity_val_steps": -1}

    def on_sanity_check_end(self) -> None:
        self.seen.append("checked")


class RunsWithoutSanityCheck(_Evaluated):
    """`num_sanity_val_steps=0`."""

    options: ClassVar = {"num_sanity_val_steps": 0}


class RunsBarebones(Row):
    """`barebones=True`."""

    options: ClassVar = {
        "barebones": True,
        "logger": None,
        "enable_checkpointing": None,
        "enable_progress_bar": None,
        "enable_model_summary": None,
    }


class ReloadsLoaders(Row):
    """`reload_dataloaders_every_n_epochs=1`."""

    options: ClassVar = {"max_epochs": 3, "max_steps": -1, "reload_dataloaders_every_n_epochs": 1}

    def train_dataloader(self) -> Any:
        self.seen.append(self.current_epoch)
        return super().train_dataloader()


# ---------------------------------------------------------------- data


class _Endless(IterableDataset):
    """Samples without a length; replica r takes every R-th batch of four."""

    def __init__(self, row: Row) -> None:
        self.row, self.samples = row, row.dataset()

    def __iter__(self) -> Iterator[Any]:
        trainer = self.row.trainer
        for index in range(len(self.samples)):
            if index // 4 % trainer.world_size == trainer.global_rank:
                yield self.samples[index]


class ReadsAStream(Row):
    """An `IterableDataset` without a length."""

    options: ClassVar = {"max_epochs": 2, "max_steps": -1}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Endless(self), batch_size=4)


class CombinesLoaders(Row):
    """Loaders of different lengths in a `CombinedLoader`. They serve training and validation."""

    mode: ClassVar = "max_size_cycle"

    def loaders(self) -> CombinedLoader:
        loaders = {
            name: DataLoader(self.dataset(samples, seed), batch_size=size)
            for name, samples, size, seed in (("a", 16, 4, 1), ("b", 6, 2, 2))
        }
        return CombinedLoader(loaders, self.mode)

    train_dataloader = val_dataloader = loaders

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch["a"]) + 0.5 * self.loss(*batch["b"])
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch["b"]), batch_size=2)


class CombinesTheShorter(CombinesLoaders):
    """A `CombinedLoader` with `mode="min_size"`."""

    mode = "min_size"


class SeveralTrainLoaders(CombinesLoaders):
    """A plain dictionary of training loaders, without `CombinedLoader`."""

    sampled = True

    def train_dataloader(self) -> Any:
        return {
            "a": DataLoader(self.dataset(16, 1), batch_size=4),
            "b": DataLoader(self.dataset(6, 2), batch_size=2),
        }


class BatchIsSmallerThanMicrobatches(Row):
    """Batches of four, and one of three, with `num_microbatches=8`."""

    samples = 11
    microbatches = 8


class LoaderGivesItsSamples(Row):
    """`use_distributed_sampler=True`: Lightning's sampler over the replicas, or none for one."""

    samples = 20
    options: ClassVar = {**EPOCHS, "use_distributed_sampler": True}
    shuffles: ClassVar = False
    control = False  # there is a sampler, which shuffles what is not shuffled

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset(), batch_size=4, shuffle=self.shuffles)


class LoaderShufflesItsSamples(LoaderGivesItsSamples):
    """`use_distributed_sampler=True` with `shuffle=True`."""

    shuffles = True


class AsksForItsStepsInSetup(LoaderGivesItsSamples):
    """`trainer.estimated_stepping_batches` in `setup`, with Lightning's distributed sampler."""

    def setup(self, stage: str) -> None:
        self.seen.append(self.trainer.estimated_stepping_batches)


class SamplesItself(Row):
    """A sampler of the user's own divides samples over the replicas."""

    sampled = True
    options: ClassVar = EPOCHS

    def train_dataloader(self) -> DataLoader:
        dataset, trainer = self.dataset(), self.trainer
        sampler = DistributedSampler(dataset, trainer.world_size, trainer.global_rank, seed=3)
        return DataLoader(dataset, batch_size=4, sampler=sampler)


class _Backwards(Sampler):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples - 1, -1, -1))


class SamplesBackwards(Row):
    """A sampler of no known kind; Lightning divides it over the replicas, and leaves it alone for
    one.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    options: ClassVar = {**EPOCHS, "use_distributed_sampler": True}
    control = False

    def train_dataloader(self) -> DataLoader:
        dataset = self.dataset()
        return DataLoader(dataset, batch_size=4, sampler=_Backwards(len(dataset)))


# ---------------------------------------------------------------- modes, profilers, precision


class EvaluatesInInferenceMode(_Evaluated):
    """`inference_mode=True` (on gloo Lightning uses `no_grad`)."""

    options: ClassVar = {"inference_mode": True}


class EvaluatesWithoutInferenceMode(_Evaluated):
    """`inference_mode=False`, and gradients in a validation step."""

    options: ClassVar = {"inference_mode": False}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            [gradient] = torch.autograd.grad(self.loss(x, y), x)
        self.seen.append(gradient.clone())


class DetectsAnomalies(Row):
    """`detect_anomaly=True`."""

    options: ClassVar = {"detect_anomaly": True}


class RunsBenchmark(Row):
    """`benchmark=True`."""

    options: ClassVar = {"benchmark": True}


class RunsDeterministically(Row):
    """`deterministic=True`."""

    options: ClassVar = {"deterministic": True}


class _Profiled(_Evaluated):
    profiler: ClassVar[Any] = None

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {"profiler": type(self).profiler(dirpath=folder, filename="profile")}

    def exercise(self, run: Run) -> Any:
        super().exercise(run)
        return any(run.folder.glob("fit-profile*"))


class ProfilesSimply(_Profiled):
    """`SimpleProfiler`."""

    profiler = SimpleProfiler


class ProfilesFunctions(_Profiled):
    """`AdvancedProfiler`."""

    profiler = AdvancedProfiler


class ProfilesOperations(_Profiled):
    """`PyTorchProfiler`. Of a network that is cut it shows operations and no modules."""

    profiler = PyTorchProfiler


class _InPrecision(_Evaluated):
    """With equal slices the sums are the reference's, digit by digit."""

    per_microbatch = True
    dtype: ClassVar = torch.float32

    def build(self) -> None:
        self.net = Layers()

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def dataset(self, samples: int | None = None, seed: int = 1) -> Any:
        dataset = super().dataset(samples, seed)
        dataset.tensors = (dataset.tensors[0].float(), dataset.tensors[1])
        return dataset


class TrainsIn32Bits(_InPrecision):
    """`precision="32-true"`, digit by digit."""

    options: ClassVar = {"precision": "32-true"}


class TrainsIn64Bits(_InPrecision):
    """`precision="64-true"`, digit by digit."""

    options: ClassVar = {"precision": "64-true"}
    trains = False  # parameters are converted after they are watched


class TrainsInBfloat16(_InPrecision):
    """`precision="bf16-true"`, digit by digit."""

    options: ClassVar = {"precision": "bf16-true"}
    trains = False  # parameters are converted after they are watched


class TrainsInMixedBfloat16(_InPrecision):
    """`precision="bf16-mixed"` with clipping, digit by digit."""

    fast = True
    options: ClassVar = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
