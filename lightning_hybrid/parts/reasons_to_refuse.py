"""Reasons for which several parts refuse a run."""

from collections.abc import Iterator

from lightning_hybrid._lightning import Callback, GradientAccumulationScheduler, Trainer
from lightning_hybrid.run import Run, scalers_of
from lightning_hybrid.stage import state_buffers


def steps_otherwise(trainer: Trainer, once: str) -> Iterator[str]:
    """Yield reasons why the optimizers of a run would not step once in each batch.

    Each is the end of a sentence that begins with an option of the strategy, followed by a way out.

    Args:
        trainer: the Trainer.
        once: what a part does once in each batch, with which each reason begins.
    """
    if not trainer.lightning_module.automatic_optimization:
        yield f"{once}. Use automatic_optimization=True"
    if trainer.accumulate_grad_batches != 1:
        accumulated = trainer.accumulate_grad_batches
        yield f"{once}, not accumulate_grad_batches={accumulated}. Leave it out"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        yield f"{once}. Leave GradientAccumulationScheduler out"


def exchanges_more(run: Run) -> Iterator[str]:
    """Yield reasons why replicas of a run would exchange more than gradients.

    They have the form of those of :func:`steps_otherwise`.
    """
    if scalers_of(run.precision):
        yield "has no scale of the loss (precision='16-mixed'). Use 'bf16-mixed'"
    if run.synchronised:
        yield "takes batch statistics of each replica, not sync_batchnorm=True. Leave it out"
    if state_buffers(run.module):
        yield (
            "leaves buffers to each replica, and the network has some that its steps read "
            "(codebooks, queues). Take them out"
        )
