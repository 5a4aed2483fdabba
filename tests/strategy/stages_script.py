"""Stages that compute in special ways, and real networks: ``python stages_script.py FOLDER``.

Each job is one `fit`; they run one after the other in the same processes. FOLDER holds
``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from monai.networks import nets
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.networks import Encoder, vqvae
from lightning_hybrid import Plan
from tests.ran_here import hear_of_gradients

SEED = 7
MARK = 20.0
"""In the data of `Overflows`: no other sample has such a value."""


def dense_net() -> nn.Module:
    return nets.DenseNet121(2, 1, 3, init_features=8, growth_rate=4, dropout_prob=0.1)


def unet() -> nn.Module:
    return nets.UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.2)


def dyn_unet() -> nn.Module:
    """Returns one tensor in evaluation, and the heads of all levels in training."""
    return nets.DynUNet(
        2, 1, 2, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[4, 8, 8, 16],
        deep_supervision=True, deep_supr_num=2,
    )  # fmt: skip


def var_auto_encoder() -> nn.Module:
    """Samples in training, and does not in evaluation."""
    return nets.VarAutoEncoder(2, (1, 16, 16), 1, 8, channels=(4, 8), strides=(2, 2))


def swin_unetr() -> nn.Module:
    """With activation checkpointing, whose layers run again in the backward."""
    return nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, use_checkpoint=True)


class Perceptron(nn.Module):
    """Without batch statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.Tanh(), nn.Dropout(dropout))]
        self.layers = nn.Sequential(*layers, nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Normalised(nn.Module):
    """Batch norm in every stage; its running statistics differ in how they are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4, momentum=None), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4, affine=False), nn.ReLU())
        self.third = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x[:, None])))


class Overflows(Perceptron):
    """The gradients of the first layer, and of it alone, are infinite in some steps."""

    def forward(self, x: Tensor) -> Tensor:
        first, marks = self.layers[0](x), x[:, :1] > MARK / 2
        # the derivative of a root at 0 is infinite
        zero = torch.where(marks, first - first.detach(), 1.0).sqrt() - (~marks).to(first.dtype)
        return self.layers[4](self.layers[3](self.layers[1](first + zero)))


@dataclass(frozen=True)
class Job:
    """One network and how it is trained.

    Attributes:
        network: makes the network.
        size: of one sample; empty: tokens with a mask.
        microbatches: that a batch of it can be split into.
        cut: name of the first module of the second stage.
        dtype: of weights and samples.
        samples: of the training data.
        strategy: arguments of the strategy.
        trainer: makes arguments of the Trainer.
    """

    network: Callable[[], nn.Module]
    size: tuple[int, ...] = (6,)
    microbatches: int = 2
    cut: str = "net.layers.3"
    dtype: torch.dtype = torch.float64
    samples: int = 12
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict


def half_precision() -> dict[str, Any]:
    """Of "16-mixed" Lightning makes bf16 on a CPU, but not of the plugin behind it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.5}


REAL = {
    "DenseNet": Job(
        dense_net, (1, 32, 32), cut="net.features.denseblock2.denselayer2.layers.conv2"
    ),
    "UNet": Job(unet, (1, 8, 8, 8), cut="net.model.2.0"),
    "DynUNet": Job(dyn_unet, (1, 16, 16), cut="net.upsamples.1"),
    "VarAutoEncoder": Job(var_auto_encoder, (1, 16, 16), cut="net.decode"),
    # returns a scalar beside the volumes, and computes in float32 whatever it is given
    "VQVAE": Job(vqvae, (1, 8, 8, 8), microbatches=1, cut="net.decoder", dtype=torch.float32),
    "SwinUNETR": Job(swin_unetr, (1, 64, 64), cut="net.encoder10", samples=8),
    "Encoder": Job(Encoder, (), cut="net.layers.2"),
}
PRECISIONS = {
    "64-true": Job(Perceptron, dtype=torch.float32, trainer=lambda: {"precision": "64-true"}),
    "bf16-true": Job(Perceptron, dtype=torch.float32, trainer=lambda: {"precision": "bf16-true"}),
    "16-true": Job(Perceptron, dtype=torch.float32, trainer=lambda: {"precision": "16-true"}),
    "bf16-mixed": Job(Perceptron, dtype=torch.float32, trainer=lambda: {"precision": "bf16-mixed"}),
    "16-mixed": Job(Perceptron, dtype=torch.float32, trainer=half_precision),
    "overflow": Job(
        Overflows, cut="net.layers.1", dtype=torch.float32, samples=32, trainer=half_precision
    ),
}
COMPILED = {
    "compiled": Job(Perceptron, dtype=torch.float32, samples=11, strategy={"compile_stages": True}),
    "compiled, random": Job(partial(Perceptron, 0.3), strategy={"compile_stages": True}),
    "compiled, autocast": Job(
        Perceptron,
        dtype=torch.float32,
        strategy={"compile_stages": True},
        trainer=lambda: {"precision": "bf16-mixed"},
    ),
}
SYNCHRONISED = {
    "Normalised": Job(
        Normalised, cut="net.second.0", samples=24, trainer=lambda: {"sync_batchnorm": True}
    ),
    "ResNet": Job(
        lambda: nets.resnet10(spatial_dims=2, n_input_channels=1, num_classes=3, widen_factor=0.1),
        (1, 16, 16),
        cut="net.layer3",
        samples=24,
        trainer=lambda: {"sync_batchnorm": True},
    ),
}
IN_REPLICAS = SYNCHRONISED | {"overflow in a replica": PRECISIONS["overflow"]}


def driver_at_both_ends(*cuts: str) -> Plan:
    """Two replicas of two devices, of which the driver's has the first and the last stage."""
    return Plan(
        replicas=2, stages=3, microbatches=2, schedule="gpipe", cuts=cuts, devices=(0, 1, 0)
    )


FREE = {
    "Normalised, free": replace(
        SYNCHRONISED["Normalised"], strategy={"plan": driver_at_both_ends("second.0", "third.0")}
    ),
    "compiled, free": Job(
        Perceptron,
        samples=24,
        strategy={"compile_stages": True, "plan": driver_at_both_ends("layers.3", "layers.6")},
    ),
}
JOBS = REAL | PRECISIONS | COMPILED | IN_REPLICAS | FREE


class Training(LightningModule):
    """Trains on any outputs: their mean square distance to what is drawn for each sample."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net = job.network().to(job.dtype)
        self.seen: list[Any] = []
        self.gradients: set[str] = set()

    def on_train_start(self) -> None:
        """Note which parameters get gradients in this process."""
        for name, parameter in self.net.named_parameters():
            if parameter.requires_grad:
                hear_of_gradients(parameter, partial(self.gradients.add, name))

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        count = self.job.samples
        if not self.job.size:
            mask = (torch.arange(8) < torch.randint(3, 9, (count, 1), generator=generator)).long()
            return TensorDataset(torch.randint(0, 64, (count, 8), generator=generator), mask)
        x = torch.randn(count, *self.job.size, generator=generator, dtype=torch.float64)
        if self.job.network is Overflows:
            x[7::16, 0] = MARK
        return TensorDataset(x.to(self.job.dtype))

    def train_dataloader(self) -> DataLoader:
        """Batches of 4; with several replicas each takes every R-th batch."""
        indices = torch.arange(self.job.samples).split(4)
        mine = indices[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(self.data(), batch_sampler=[part.tolist() for part in mine])

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def loss(self, batch: Any) -> Tensor:
        outputs = [value for _, value in leaves(self.net(*batch)) if value.is_floating_point()]
        return sum(((value - 0.5) ** 2).mean() for value in outputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def leaves(value: Any) -> list[tuple[Any, Tensor]]:
    """The tensors in dictionaries and tuples, with a key for each."""
    if isinstance(value, Tensor):
        return [((), value)]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return [((key, *path), leaf) for key, part in parts for path, leaf in leaves(part)]


def fit(
    name: str, folder: Path, prepare: Callable[[Training], None] = lambda _: None, **options: Any
) -> Training:
    """Train one network, from the same start everywhere."""
    job = JOBS[name]
    seed_everything(SEED, verbose=False)
    module = Training(job)
    prepare(module)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**job.trainer(), **options},
    )
    trainer.fit(module)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and trainer.strategy.global_rank < trainer.world_size:
        module.seen.append(scaler.get_scale())
    return module


def can_be_pickled(trainer: Trainer) -> bool:
    """Whether nothing of a run is left in a Trainer."""
    module: Any = trainer.lightning_module
    module.job = None  # has lambdas of its own
    return bool(pickle.dumps(trainer))


def main(folder: Path) -> None:
    from lightning_hybrid import HybridGabraStrategy

    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    replicas, stages = config["replicas"], config["stages"]
    seen = {}
    for name in config["jobs"]:
        strategy = HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=2,
            **{"plan": [JOBS[name].cut] if stages == 2 else None} | JOBS[name].strategy,
        )
        module = fit(name, folder, strategy=strategy, devices=replicas * stages)
        seen[name] = {
            "seen": module.seen,
            "weights": module.state_dict(),
            "gradients": module.gradients,
            "parameters": {n for n, p in module.net.named_parameters() if p.requires_grad},
            "pickles": name not in SYNCHRONISED or can_be_pickled(module.trainer),
        }
    torch.save(seen, folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
