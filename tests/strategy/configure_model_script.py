"""LightningModules that make their network in ``configure_model``: ``python ... FOLDER``.

They are trained one after the other, by a Trainer each, in the same processes. FOLDER holds
``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.ran_here import LISTENERS, noting

STEPS = 4
CHECKPOINTS = ("2.ckpt", "end.ckpt")  # saved in the run, after it
SEED = 7
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """A chain of blocks, with initialisations of its own, a buffer and batch statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.position = nn.Parameter(torch.zeros(1, width))
        nn.init.trunc_normal_(self.position, std=0.02)
        # numbers that are read while the network is made
        rates = [rate.item() for rate in torch.linspace(0.5, 1, 4)]
        self.blocks = nn.Sequential(*(Block(width) for _ in rates))
        for rate, block in zip(rates, self.blocks):
            nn.init.orthogonal_(block.linear.weight, gain=rate)
        self.register_buffer("scale", torch.arange(1, width + 1) / width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)
        self.head.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        x = self.norm(self.blocks(x) * self.scale)
        return self.head(x)


class Case(LightningModule):
    """A classifier whose network is made in ``configure_model``.

    Attributes:
        options: arguments of the Trainer.
        seen: the losses, on the driver.
    """

    options: ClassVar[dict[str, Any]] = {}
    microbatches = 1
    cuts: ClassVar[dict[int, Any]] = {
        2: ["net.blocks.2"],
        3: ["net.blocks.1", "net.blocks.3"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[float] = []
        self.gradients: Counter[str] = Counter()
        self.held: dict[str, int] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.held = held(self)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build().double()
            self.drawn = torch.rand(2)
            for name, parameter in self.net.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self.got_gradient, name))

    def build(self) -> nn.Module:
        return Net()

    def got_gradient(self, name: str, _: Tensor) -> None:
        self.gradients.update([name])

    def loader(self) -> DataLoader:
        """Batches of 4; with several replicas each takes every R-th batch."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (32,), generator=generator)
        indices = torch.arange(32).split(4)
        mine = indices[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(TensorDataset(x, y), batch_sampler=[part.tolist() for part in mine])

    train_dataloader = loader
    val_dataloader = loader
    test_dataloader = loader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(*batch), sync_dist=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.net is not None
        return nn.functional.cross_entropy(self.net(x) * self.temperature, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Plain(Case):
    """Trains, validates between; its layers leave word of where they run."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            LISTENERS[:] = [lambda *_: None]  # this process is a driver
            for name, module in self.net.named_modules():
                if next(module.children(), None) is None:
                    module.register_forward_hook(partial(noting, name))


class Accumulates(Case):
    options: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class Loads(Case):
    """Loads a state dict where the network is made."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            state = {k: torch.full_like(v, 0.1) for k, v in Net().double().state_dict().items()}
            self.net.load_state_dict(state)


class TwoLayers(nn.Module):
    """A block whose layers are computed again in the backward pass of a training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def layers(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


class ChecksBlocks(Case):
    """An evaluation, in which no block is one operation, comes first; its middle is in a block."""

    cuts: ClassVar = {2: None, 3: None}

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, WIDTH), *(TwoLayers(WIDTH) for _ in range(3)))


CASES = {case.__name__: case for case in (Plain, Accumulates, Loads, ChecksBlocks)}


class Saves(Callback):
    """Saves a checkpoint after the second step, in the middle of an epoch."""

    def __init__(self) -> None:
        self.saved = False

    def on_train_batch_end(self, trainer: Trainer, module: Case, *_: Any) -> None:
        if trainer.global_step == 2 and not self.saved:
            self.saved = True
            trainer.save_checkpoint(Path(trainer.default_root_dir, "2.ckpt"))


def held(module: nn.Module) -> dict[str, int]:
    """Bytes of the weights and buffers of a module that have memory here, by their names."""
    from torch._C import DisableTorchFunctionSubclass

    with DisableTorchFunctionSubclass():
        tensors = (*module.named_parameters(), *module.named_buffers())
        sizes = {n: t.untyped_storage().nbytes() for n, t in tensors if not t.is_meta}
        return {name: size for name, size in sizes.items() if size}


def make_trainer(case: type[Case], folder: Path, strategy: Any = "auto", **options: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        **{"max_steps": STEPS, "limit_val_batches": 1, "callbacks": [Saves()]}
        | case.options
        | options,
    )


def hybrid(case: type[Case], replicas: int, stages: int, kind: Any) -> Any:
    from lightning_hybrid import HybridGabraStrategy, Sharded

    return HybridGabraStrategy(
        data_parallel_size=replicas,
        pipeline_parallel_size=stages,
        num_microbatches=case.microbatches,
        plan=case.cuts[stages],
        checkpoint="full" if kind == "full" else Sharded(asynchronous=kind == "beside"),
    )


def run(name: str, folder: Path, replicas: int, stages: int, kind: str) -> dict[str, Any]:
    """What one driver sees of a training, and of what a script does with it afterwards."""
    case = CASES[name]
    seed_everything(SEED, verbose=False)
    module = case()
    strategy = hybrid(case, replicas, stages, kind)
    devices = replicas * stages
    trainer = make_trainer(case, folder, strategy, devices=devices)
    trainer.fit(module)
    seen: dict[str, Any] = {
        "seen": list(module.seen),
        "drawn": module.drawn,
        "gradients": Counter(module.gradients),
        "held": module.held,
        "whole": {n: t.clone() for n, t in strategy.full_state_dict().items()},
    }
    seen["test"] = trainer.test(module, verbose=False)
    trainer.save_checkpoint(folder / "end.ckpt")
    load = strategy.checkpoint_io.load_checkpoint
    seen["checkpoints"] = [load(folder / f, weights_only=True) for f in CHECKPOINTS]
    # another Trainer goes on from the checkpoint
    again = case()
    strategy = hybrid(case, replicas, stages, kind)
    trainer = make_trainer(case, folder, strategy, devices=devices, callbacks=[])
    trainer.fit(again, ckpt_path=folder / "2.ckpt")
    seen["resumed"] = list(again.seen)
    seen["resumed whole"] = strategy.full_state_dict()
    # and so does what was trained, whose weights lie on several ranks
    module.seen.clear()
    strategy = hybrid(case, replicas, stages, kind)
    trainer = make_trainer(case, folder, strategy, devices=devices, callbacks=[])
    seen["tested again"] = trainer.test(module, ckpt_path=folder / "2.ckpt", verbose=False)
    trainer.fit(module, ckpt_path=folder / "2.ckpt")
    seen["trained again"] = list(module.seen)
    return seen


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    torch.set_num_threads(1)
    shape = config["replicas"], config["stages"], config["kind"]
    seen: dict[str, Any] = {name: run(name, folder / name, *shape) for name in config["cases"]}
    rank = os.environ.get("LOCAL_RANK", "0")
    torch.save(seen, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
