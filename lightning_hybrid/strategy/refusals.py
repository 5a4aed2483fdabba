"""Refuse what of Lightning does not go together with stages, before anything is trained.

Options that contradict each other are refused in :mod:`lightning_hybrid.config`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_hybrid._lightning import (
    BatchSizeFinder,
    Callback,
    CheckpointIO,
    LayerSync,
    ModelPruning,
    TorchSyncBatchNorm,
    Trainer,
    rank_zero_info,
)
from lightning_hybrid._torch.optimizers import unscales_by_itself
from lightning_hybrid._torch.private_names import lost
from lightning_hybrid.config import Checkpoint
from lightning_hybrid.driver import present_bytes
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import gigabytes


def say_what_is_off() -> None:
    """Print, on rank 0, which features are off since this version of torch lacks private names."""
    for loss in lost():
        rank_zero_info(f"With torch {torch.__version__} {loss}.")


def refuse_interactive(*, works: bool) -> None:
    """Refuse a launcher that cannot be used in a notebook or at a prompt, if this is one.

    Args:
        works: whether the launcher can be used there.

    Raises:
        PlanError: it cannot, and this is one.
    """
    if hasattr(sys, "ps1") and not works:
        raise PlanError(
            "With this start_method, or on several hosts, hybrid_gabra starts the script anew for "
            "each rank, which a notebook or a prompt does not have. Use "
            "Trainer(strategy='hybrid_gabra') on one host, which gives one replica its stages, or "
            "'hybrid_gabra_notebook' for several, or run a script."
        )


def refuse_device(device: torch.device) -> None:
    """Refuse devices other than CPUs and CUDA devices, since there are no process groups for them.

    Raises:
        PlanError: it is such a device.
    """
    if device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"hybrid_gabra runs on CPUs and CUDA devices, not on {device.type!r}. Use "
            "accelerator='cpu' or accelerator='cuda'."
        )


def refuse_copies(module: nn.Module, others: int, free: int | None) -> None:
    """Refuse to start the script in other processes of this host if its weights have no room there.

    Each of them would build the whole network, and be killed without a reason for lack of memory.

    Args:
        module: the LightningModule, as it is in this process.
        others: number of processes that are about to start.
        free: bytes of memory that they may take together; ``None``: not known, nothing is refused.

    Raises:
        PlanError: the weights of all of them are more than ``free``.
    """
    size = _nbytes(module)
    if has_room_for_copies(module, others, free):
        return
    raise PlanError(
        f"{type(module).__name__} has {gigabytes(size)} of weights, and every rank of this host "
        f"begins with all of them, as they are made in __init__: the other {others} would need "
        f"{gigabytes(others * size)}, and {gigabytes(free or 0)} is free. {_made_later(module)}"
    )


def has_room_for_copies(module: nn.Module, others: int, free: int | None) -> bool:
    """Whether the weights of a module have room in so many other processes of this host.

    Args:
        module: the LightningModule, as it is in this process.
        others: number of other processes.
        free: bytes of memory that they may take together; ``None``: not known, so they have room.
    """
    return free is None or others * _nbytes(module) <= free


def _made_later(module: nn.Module) -> str:
    name, _ = max(module.named_children(), key=lambda child: _nbytes(child[1]), default=("net", 0))
    return (
        "Make them in configure_model, where each rank makes those of its own stages alone:\n"
        "    def configure_model(self):\n"
        f"        if self.{name} is None:  # what __init__ sets\n"
        f"            self.{name} = ..."
    )


def _nbytes(module: nn.Module) -> int:
    return present_bytes(module, torch.device("cpu"))


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a module with parameters that have no size before the first call (nn.LazyLinear).

    The work is divided by their sizes; `DDPStrategy` needs these too.

    Raises:
        PlanError: there is such a parameter or buffer.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise PlanError(
            f"{lazy[0]!r} has no size before the first call (nn.LazyLinear and its like). Call the "
            "network once with an example before the fit (at the end of `__init__`, in "
            "`configure_model` or in `setup`), or before fabric.setup."
        )


def refuse_layer_sync(
    layer_sync: LayerSync | None, *, compile_stages: bool, copies: tuple[int, ...] = ()
) -> None:
    """Refuse plugins for synchronised layers other than Lightning's ``sync_batchnorm=True``.

    That one too is refused together with compiled stages, or with copies of stages.

    Args:
        layer_sync: the Trainer's plugin; ``None``: there is none, and nothing is refused.
        compile_stages: the option of this name.
        copies: number of copies of each stage; empty: no stage has more than one.

    Raises:
        PlanError: one of these.
    """
    if layer_sync is not None and not isinstance(layer_sync, TorchSyncBatchNorm):
        raise PlanError(
            f"{type(layer_sync).__name__} replaces modules, and hybrid_gabra cannot know "
            "which ranks they speak to. Use Trainer(sync_batchnorm=True), which takes batch "
            "statistics over the replicas of each stage."
        )
    if layer_sync is not None and copies:
        raise PlanError(
            f"sync_batchnorm=True and pipeline_parallel_size={copies} do not go together: copies "
            "of a stage have other micro-batches. Leave one of them out."
        )
    if layer_sync is not None and compile_stages:
        raise PlanError(
            "sync_batchnorm=True and compile_stages=True do not go together: torch.compile "
            "does not follow the exchange of statistics. Leave one of them out."
        )


def refuse_sizes(trainer: Trainer, replicas: int, stages: int) -> None:
    """Refuse callbacks that do not work with these sizes, and several stages under Ray.

    These are callbacks that would decide, or replace parameters, on one rank alone.

    Args:
        trainer: the Trainer with the callbacks.
        replicas: number of replicas.
        stages: number of devices of a replica.

    Raises:
        PlanError: there is such a callback, or the processes are started by Ray.
    """
    environment = type(getattr(trainer.strategy, "cluster_environment", None)).__name__
    if environment == "RayLightningEnvironment" and stages > 1:
        raise PlanError(
            f"{environment} and {stages} stages: Ray waits until the function of each of its "
            "workers returns, which a rank that serves a driver does not. Start the script with "
            "torchrun, or use pipeline_parallel_size=1."
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BatchSizeFinder) and replicas > 1:
            raise PlanError(
                f"{name} tries batches until one does not fit, and {replicas} replicas would "
                "not agree on which. Look for the size with data_parallel_size=1 on "
                f"{stages} device{'s' if stages > 1 else ''}, then train with it."
            )
        if isinstance(callback, ModelPruning) and stages > 1:
            raise PlanError(
                f"{name} replaces parameters by others while they are trained on other ranks. "
                "Prune the trained network with torch.nn.utils.prune after fit, or use "
                "pipeline_parallel_size=1."
            )


def allows_sizes(trainer: Trainer, replicas: int, stages: int) -> bool:
    """Whether `refuse_sizes` accepts these numbers of replicas and stages for a Trainer."""
    try:
        refuse_sizes(trainer, replicas, stages)
    except PlanError:
        return False
    return True


def refuse_checkpoint_io(io: CheckpointIO | None, checkpoint: Checkpoint) -> None:
    """Refuse the user's checkpoint plugin together with sharded checkpoints.

    A plugin would need all of a checkpoint on one rank.

    Args:
        io: the plugin; ``None``: there is none.
        checkpoint: the option of this name.

    Raises:
        PlanError: both were given.
    """
    if io is not None and checkpoint != "full":
        raise PlanError(
            f"checkpoint={checkpoint!r} uses no CheckpointIO, and {type(io).__name__} was given: "
            "each rank writes its own part. Leave one of them out."
        )


def refuse_other_places(path: str | Path, storage_options: object, checkpoint: Checkpoint) -> None:
    """Refuse to save a sharded checkpoint elsewhere than in a folder that all ranks can write to.

    Args:
        path: where it is to be saved.
        storage_options: the argument of ``trainer.save_checkpoint``.
        checkpoint: the option of this name, for the error.

    Raises:
        PlanError: the path is a URL, or storage options were given.
    """
    if storage_options is not None or "://" in str(path):
        raise PlanError(
            f"checkpoint={checkpoint!r} cannot save to {str(path)!r}: each rank writes to a folder "
            "of a file system. Give such a path and no storage_options, or use checkpoint='full'."
        )


def refuse_optimizers(
    optimizers: Iterable[Optimizer], replicas: int, stages: int, *, scaled: bool
) -> None:
    """Refuse optimizers that would behave differently on different ranks.

    With several replicas that is an LBFGS with a line search, which evaluates as often as its own
    batch wants. With several stages and a scaled loss it is an optimizer that decides by its own
    gradients whether to skip a step (``fused=True``).

    Args:
        optimizers: the user's optimizers.
        replicas: number of replicas.
        stages: number of devices of a replica.
        scaled: whether a gradient scaler scales the loss (``precision="16-mixed"``).

    Raises:
        PlanError: there is such an optimizer.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and replicas > 1:
            search = optimizer.param_groups[0].get("line_search_fn")
            if search is not None:
                raise PlanError(
                    f"{type(optimizer).__name__}(line_search_fn={search!r}) searches by the loss "
                    "of its own replica's batch, so one replica would evaluate more often than "
                    "another one and wait for it for ever, as under DDP. Use "
                    "data_parallel_size=1."
                )
        if scaled and unscales_by_itself(optimizer) and stages > 1:
            raise PlanError(
                f"{type(optimizer).__name__}(fused=True) takes the loss scale into its step, "
                "and each stage would decide by itself whether to skip it. With "
                "precision='16-mixed' use fused=False."
            )
