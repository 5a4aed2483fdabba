"""What of Lightning does not go together with stages, refused before anything is trained."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Optimizer

from lightning_hybrid._lightning import (
    BatchSizeFinder,
    Callback,
    CheckpointIO,
    GradientAccumulationScheduler,
    LayerSync,
    MixedPrecision,
    ModelPruning,
    TorchSyncBatchNorm,
    Trainer,
    is_overridden,
    rank_zero_info,
)
from lightning_hybrid._torch.optimizers import unscales_by_itself
from lightning_hybrid._torch.private_names import lost
from lightning_hybrid.config import Checkpoint
from lightning_hybrid.driver import present_bytes
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import gigabytes
from lightning_hybrid.process import Children
from lightning_hybrid.run import Run, scalers_of
from lightning_hybrid.schedules import LookAhead
from lightning_hybrid.stage import state_buffers
from lightning_hybrid.strategy.launcher import HybridSubprocessLauncher


def say_what_is_off() -> None:
    """Say what is off since this torch lacks private names of other versions."""
    for loss in lost():
        rank_zero_info(f"With torch {torch.__version__} {loss}.")


def refuse_interactive(*, works: bool) -> None:
    """A notebook is no script that could be started again."""
    if hasattr(sys, "ps1") and not works:
        raise PlanError(
            "With this start_method, or on several hosts, hybrid_gabra starts the script anew for "
            "each rank, which a notebook or a prompt does not have. Use "
            "Trainer(strategy='hybrid_gabra') on one host, which gives one replica its stages, or "
            "'hybrid_gabra_notebook' for several, or run a script."
        )


def refuse_device(device: torch.device) -> None:
    """Only CPUs and CUDA devices have the process groups that links are made of."""
    if device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"hybrid_gabra runs on CPUs and CUDA devices, not on {device.type!r}. Use "
            "accelerator='cpu' or accelerator='cuda'."
        )


def refuse_copies(module: nn.Module, others: int, free: int | None) -> None:
    """Other processes of a host build the network, too; a kill for memory would not say why.

    Args:
        module: the LightningModule, as it stands in this process.
        others: processes that are about to start.
        free: bytes that they may take together; None: not known.

    Raises:
        PlanError: they have no room for it.
    """
    size = _nbytes(module)
    if free is None or others * size <= free:
        return
    raise PlanError(
        f"{type(module).__name__} has {gigabytes(size)} of weights, and every rank of this host "
        f"begins with all of them, as they are made in __init__: the other {others} would need "
        f"{gigabytes(others * size)}, and {gigabytes(free)} is free. {_made_later(module)}"
    )


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

    The work is divided by their sizes; `DDPStrategy` asks for them, too.
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
    """Batch statistics are taken over replicas by our own means, outside of compiled code."""
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


def refuse_callbacks(trainer: Trainer, replicas: int, stages: int) -> None:
    """Callbacks that would decide, or change weights, on one rank alone."""
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
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if "RayTrainReportCallback" in kinds and stages > 1:
            raise PlanError(
                f"{name} calls ray.train.report, which waits for all workers of Ray, and those "
                "that have stages run no callbacks. Save by ModelCheckpoint, and call "
                "ray.train.report after fit, where all workers come."
            )


def callbacks_allow(trainer: Trainer, replicas: int, stages: int) -> bool:
    """Whether sizes may be chosen for these callbacks."""
    try:
        refuse_callbacks(trainer, replicas, stages)
    except PlanError:
        return False
    return True


def refuse_checkpoint_io(io: CheckpointIO | None, checkpoint: Checkpoint) -> None:
    """A sharded checkpoint goes through no plugin, which would need all of it on one rank."""
    if io is not None and checkpoint != "full":
        raise PlanError(
            f"checkpoint={checkpoint!r} uses no CheckpointIO, and {type(io).__name__} was given: "
            "each rank writes its own part. Leave one of them out."
        )


def refuse_other_places(path: str | Path, storage_options: object, checkpoint: Checkpoint) -> None:
    """Ranks write their parts of a sharded checkpoint to a folder that all of them see."""
    if storage_options is not None or "://" in str(path):
        raise PlanError(
            f"checkpoint={checkpoint!r} cannot save to {str(path)!r}: each rank writes to a folder "
            "of a file system. Give such a path and no storage_options, or use checkpoint='full'."
        )


def refuse_optimizers(
    optimizers: Iterable[Optimizer], replicas: int, stages: int, *, scaled: bool
) -> None:
    """Optimizers that would decide by rank whether a step is skipped, or how often it evaluates.

    Args:
        optimizers: the user's.
        replicas: how many.
        stages: number of devices of a replica.
        scaled: whether the loss is scaled.
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


def refuse_streaming(run: Run) -> None:
    """Refuse what contradicts a streamed schedule, whose forwards begin before their batch.

    What only the network's first call shows is refused in that call: see
    :mod:`lightning_hybrid.driver.streamed_calls`.

    Args:
        run: that is about to begin.
    """
    schedule = run.config.streamed
    if schedule is None or not run.fitting or run.world.coordinates.ranks_per_replica == 1:
        return
    for reason in chain(
        _unknown_batches(run), _unknown_weights(run, schedule), _waits_for_each_send(run)
    ):
        raise PlanError(
            f"{run.config.shown_schedule} begins with later batches early, and {reason}; or use "
            "schedule='gpipe'."
        )


def _unknown_batches(run: Run) -> Iterator[str]:
    """Why it is not known what later batches are, and when they step."""
    module = run.trainer.lightning_module
    if not module.automatic_optimization:
        yield (
            "with manual optimization it is not known when a batch steps. Use automatic "
            "optimization (automatic_optimization = True)"
        )
    if scalers_of(run.precision):
        yield (
            "the scale of the loss (precision='16-mixed') decides on each step only when all "
            "stages are done with it. Use precision='bf16-mixed'"
        )
    for owner in (module, getattr(run.trainer, "datamodule", None)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if owner is not None and is_overridden(hook, owner):
                yield (
                    f"{type(owner).__name__}.{hook} would be called before the steps of earlier "
                    "batches. Move its work to the dataset, or into the network"
                )
    if "dataloader_iter" in signature(module.training_step).parameters:
        yield ("training_step(dataloader_iter) fetches its batches itself. Let it take a batch")


def _waits_for_each_send(run: Run) -> Iterator[str]:
    """Why a rank cannot send before the next one is about to receive."""
    blocks = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
    if blocks and run.world.mesh.backend == "nccl":
        yield (
            "CUDA_LAUNCH_BLOCKING=1 has a rank that sends of a later batch wait for one that "
            "still trains on this batch, for ever. Unset it"
        )


def _unknown_weights(run: Run, schedule: LookAhead) -> Iterator[str]:
    """Why stages could not run ahead, or not with the right weights and buffers."""
    config = run.config
    if config.several_stages_per_device:
        yield "each device must have one stage. Use Search(contiguous=True), or such a plan"
    if config.compile_stages and schedule.delayed:
        yield (
            "compiled stages (compile_stages=True) do not say which weights their backward needs. "
            "Leave it out"
        )
    weights = config.settings.delayed_weights
    if weights == "current" and isinstance(run.precision, MixedPrecision):
        yield (
            "weights='current' is not what autocast does, which keeps its own copies of the "
            "weights. Use weights='stash'"
        )
    if run.synchronised:
        yield (
            "batch statistics over the replicas (sync_batchnorm=True) need them in step. Leave "
            "it out"
        )
    if run.world.coordinates.replicas > 1 and state_buffers(run.module):
        yield (
            "the network reads buffers in training that each step gives to all replicas "
            "(codebooks, queues, spectral norms). Use data_parallel_size=1"
        )


def survives_losses(run: Run) -> bool:
    """Whether replicas go on in this run when one is lost.

    Raises:
        PlanError: they were asked to, and cannot.
    """
    if not run.config.goes_on or not run.fitting:
        return False
    for reason in _loses_a_replica(run):
        raise PlanError(f"on_loss='continue' {reason}; or use on_loss='end'.")
    return True


def _loses_a_replica(run: Run) -> Iterator[str]:
    """Why a lost replica would be more than one that is missing in the averages of a step."""
    trainer, replicas = run.trainer, run.world.coordinates.replicas
    if replicas == 1:
        yield "needs another replica to go on with, and there is one. Use data_parallel_size=2"
    strategy: Any = trainer.strategy
    first = run.world.coordinates.rank == 0
    if not isinstance(strategy.launcher, HybridSubprocessLauncher) or (
        first and not Children.processes
    ):
        yield (
            "needs processes that the script has started itself. Use strategy 'hybrid_gabra' and "
            "`python FILE`, not torchrun, SLURM, spawn or fork"
        )
    if trainer.num_nodes > 1 or run.device.type != "cpu":
        yield "is for CPUs of one host, whose processes one launcher sees end"
    yield from _steps_otherwise(trainer, "averages once for each batch")
    yield from _exchanges_more(run)


def _steps_otherwise(trainer: Trainer, once: str) -> Iterator[str]:
    """Reasons why optimizers would not step once in each batch.

    Args:
        trainer: Lightning's.
        once: what is done once a batch, for the reason.
    """
    if not trainer.lightning_module.automatic_optimization:
        yield f"{once}. Use automatic_optimization=True"
    if trainer.accumulate_grad_batches != 1:
        accumulated = trainer.accumulate_grad_batches
        yield f"{once}, not accumulate_grad_batches={accumulated}. Leave it out"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        yield f"{once}. Leave GradientAccumulationScheduler out"


def refuse_all_but_plain_sgd(optimizers: Iterable[Optimizer], schedule: str) -> None:
    """A schedule whose formulas are those of gradient descent alone.

    Args:
        optimizers: the user's.
        schedule: the argument.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups if isinstance(optimizer, SGD) else [{}]
        if any(group.get("momentum") != 0 or group.get("weight_decay") != 0 for group in groups):
            raise PlanError(
                f"{schedule} is plain gradient descent, w - rate * gradient (Eq. 2), "
                f"and {type(optimizer).__name__} does something else. Use torch.optim.SGD without "
                "momentum and weight decay; or Delayed('fdg'), which has the same delays."
            )


def refuse_asynchronous(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """What needs all replicas in each step, or an update that does not shrink with its gradient.

    Args:
        run: that is about to begin.
        optimizers: the user's.
    """
    for reason in chain(_needs_all(run), _no_plain_steps(run, optimizers)):
        raise PlanError(f"{run.config.replicas!r} {reason}; or use replicas=Equal().")


def _needs_all(run: Run) -> Iterator[str]:
    """What replicas would have to agree on."""
    trainer = run.trainer
    if trainer.gradient_clip_val:
        yield f"clips no gradients: gradient_clip_val={trainer.gradient_clip_val}. Leave it out"
    yield from _exchanges_more(run)


def _exchanges_more(run: Run) -> Iterator[str]:
    """What replicas would exchange in a step beside gradients."""
    if scalers_of(run.precision):
        yield "has no scale of the loss (precision='16-mixed'). Use 'bf16-mixed'"
    if run.synchronised:
        yield "takes batch statistics of each replica, not sync_batchnorm=True. Leave it out"
    if state_buffers(run.module):
        yield (
            "leaves buffers to each replica, and the network has some that its steps read "
            "(codebooks, queues). Take them out"
        )


def _no_plain_steps(run: Run, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Reasons why a run has no plain step in each batch, by an optimizer for partial gradients."""
    yield from _steps_otherwise(run.trainer, "steps once a batch")
    if len(optimizers) != 1:
        yield f"has one optimizer, and configure_optimizers returns {len(optimizers)}. Return one"
    for optimizer in optimizers:
        if type(optimizer) is not SGD:
            yield (
                f"makes R updates of a part of the gradient each, and {type(optimizer).__name__} "
                "is not torch.optim.SGD: its updates may not shrink with the gradient. Use SGD"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = sorted({str(p.dtype) for p in parameters})
        if len(kinds) != 1:
            yield f"takes parameters of one type, and here are {', '.join(kinds)}. Use one"
