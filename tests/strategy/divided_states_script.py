"""A user's script whose replicas may divide optimizer states: ``python ... FOLDER``.

FOLDER holds ``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from noting_optimizers import Adam, Momentum, note
from records import read
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Whole(torch.optim.Adam):
    """Clips by the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        loss = closure and closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step()
        note(self)
        return loss


OPTIMIZERS = {
    "adam": lambda parameters: Adam(parameters, lr=0.01, weight_decay=0.1),
    "momentum": lambda parameters: Momentum(parameters, lr=0.05, momentum=0.9),
    "whole": lambda parameters: Whole(parameters, lr=0.01),
}


class Network(nn.Module):
    """Some weights are frozen for a while, and one is large enough to travel by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 600)
        self.second = nn.Linear(600, 300)
        self.norm = nn.LayerNorm(300)
        self.third = nn.Linear(300, 4)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(self.norm(torch.tanh(self.second(x))))


class Module(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.losses = config, list[float]()
        if not config.get("later"):
            self.build()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def build(self) -> None:
        torch.manual_seed(3)
        self.net = Network().double()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.build()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        [states] = checkpoint["optimizer_states"]
        for state in states["state"].values():
            state["exp_avg"] = state["exp_avg"] * self.config.get("shrinks", 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.net.norm.weight.requires_grad_()
        if self.global_step == self.config.get("fails_at"):
            raise ValueError("this error is on purpose")
        x, y = batch
        loss = nn.functional.cross_entropy(self.scale * self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.config["optimizer"]](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Looking(Callback):
    """Notes what a look at the states gives in the middle of the training, on replica 1."""

    def __init__(self) -> None:
        self.refused = list[str]()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 3 and module.config.get("looks"):
            [optimizer] = trainer.optimizers
            for look in (optimizer.state_dict, lambda: each(optimizer)):
                try:
                    look()
                except Exception as error:
                    self.refused.append(f"{type(error).__name__}: {error}")


def each(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def batches(config: dict[str, Any]) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (96,), generator=generator)
    # schedules that begin early want a process for it
    apart = {"num_workers": 1, "multiprocessing_context": "fork"} if config.get("apart") else {}
    return DataLoader(TensorDataset(x, y), batch_size=4, **apart)


def strategy(config: dict[str, Any]) -> Any:
    if not config["replicas"]:
        return "auto"
    from lightning_hybrid import Equal, HybridGabraStrategy

    return HybridGabraStrategy(
        data_parallel_size=config["replicas"],
        pipeline_parallel_size=config["stages"],
        plan=["net.second"] if config["stages"] == 2 else None,
        replicas=Equal(shard_states=config.get("divides", False)),
        checkpoint=config.get("checkpoint", "full"),
        **{"num_microbatches": 2, **config.get("arguments", {})},
    )


def die(config: dict[str, Any]) -> None:
    """This rank is killed in the middle of its third exchange of weights."""
    if config.get("dies") != int(os.environ.get("LOCAL_RANK", "0")):
        return
    from lightning_hybrid.stage.gradient_averaging import Broadcasts

    broadcast, calls = Broadcasts._broadcast, [0]

    def dying(self: Any, memory: Tensor, source: int) -> None:
        calls[0] += 1
        if calls[0] == 8:
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(self, memory, source)

    Broadcasts._broadcast = dying


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(), object_hook=read)
    die(config)
    seed_everything(0, verbose=False)
    module, looking = Module(config), Looking()
    trainer = Trainer(
        strategy=strategy(config),
        accelerator="cpu",
        devices=max(1, config["replicas"] * config["stages"]),
        max_steps=config.get("steps", 6),
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=[
            looking,
            ModelCheckpoint(
                folder / "checkpoints",
                "{step}",
                save_top_k=-1,
                every_n_train_steps=2,
                save_on_exception=bool(config.get("fails_at")),
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{k: v for k, v in config.get("trainer", {}).items() if k != "num_sanity_val_steps"},
    )
    error = ""
    try:
        trainer.fit(module, batches(config), ckpt_path=config.get("ckpt_path"))
        trainer.save_checkpoint(folder / "after.ckpt")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    environment = trainer.strategy.cluster_environment if config["replicas"] else None
    rank = environment.global_rank() if environment else 0
    seen = {
        "losses": module.losses,
        # (after a kill they are nowhere)
        "weights": {} if config.get("later") or "Lost" in error else dict(module.state_dict()),
        "refused": looking.refused,
        "error": error,
        "coordinates": str(getattr(trainer.strategy, "coordinates", "")),
    }
    if config.get("looks") and not error:
        for look in (trainer.optimizers[0].state_dict, lambda: each(trainer.optimizers[0])):
            try:
                look()
            except Exception as raised:
                looking.refused.append(f"{type(raised).__name__}: {raised}")
    torch.save(seen, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
