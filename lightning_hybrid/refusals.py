"""What of Lightning does not go together with stages, refused before anything is trained."""

from collections.abc import Iterable

from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    Accelerator,
    BatchSizeFinder,
    Callback,
    CPUAccelerator,
    CUDAAccelerator,
    LayerSync,
    ModelPruning,
    TorchSyncBatchNorm,
    Trainer,
)
from lightning_hybrid._torch import unscales_by_itself
from lightning_hybrid.errors import PlanError


def refuse_accelerator(accelerator: Accelerator) -> None:
    """Only CPUs and CUDA devices have the process groups that links are made of."""
    if not isinstance(accelerator, CPUAccelerator | CUDAAccelerator):
        raise PlanError(
            f"hybrid_gabra runs on CPUs and CUDA devices, not on "
            f"{type(accelerator).__name__}. Use Trainer(accelerator='cpu' | 'cuda')."
        )


def refuse_layer_sync(layer_sync: LayerSync | None, *, compile_stages: bool) -> None:
    """Batch statistics are taken over replicas by our own means, outside of compiled code."""
    if layer_sync is not None and not isinstance(layer_sync, TorchSyncBatchNorm):
        raise PlanError(
            f"{type(layer_sync).__name__} replaces modules, and hybrid_gabra cannot know "
            "which ranks they speak to. Use Trainer(sync_batchnorm=True), which takes batch "
            "statistics over the replicas of each stage."
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


def callbacks_allow(trainer: Trainer, replicas: int, stages: int) -> bool:
    """Whether sizes may be chosen for these callbacks."""
    try:
        refuse_callbacks(trainer, replicas, stages)
    except PlanError:
        return False
    return True


def refuse_optimizers(optimizers: Iterable[Optimizer], stages: int, *, scaled: bool) -> None:
    """Optimizers that would decide by stage whether a step is skipped.

    Args:
        optimizers: the user's.
        stages: number of devices of a replica.
        scaled: whether the loss is scaled.
    """
    for optimizer in optimizers:
        if scaled and unscales_by_itself(optimizer) and stages > 1:
            raise PlanError(
                f"{type(optimizer).__name__}(fused=True) takes the loss scale into its step, "
                "and each stage would decide by itself whether to skip it. With "
                "precision='16-mixed' use fused=False."
            )
