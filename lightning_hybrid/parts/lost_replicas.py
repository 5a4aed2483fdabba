"""Let replicas go on when another one is lost (``BySpeed(on_loss="continue")``): the driver's part.

:mod:`lightning_hybrid.comm.survivors` decides who takes part in the averages of a step. With these
averages each driver tells the others whether it has received SIGTERM, so that all end in the same
step.
"""

from collections.abc import Callable, Collection, Iterator

from lightning_hybrid._lightning_private import (
    begin_batches_alone,
    load_evaluation_data_anew,
    tell_to_end,
)
from lightning_hybrid.comm import Survivors
from lightning_hybrid.driver import Driver
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.reasons_to_refuse import exchanges_more, steps_otherwise
from lightning_hybrid.process import Children
from lightning_hybrid.run import Part, Run


class LostReplicas(Part):
    """The part of a run that lets the Trainer go on when a replica is lost.

    Args:
        run: the run, which is about to begin.
        left: the replicas that are left, as they are known in this run.
        say: called with the numbers of the replicas that are lost, to tell the user.
    """

    agrees_to_end = True

    def __init__(self, run: Run, left: Survivors, say: Callable[[Collection[int]], None]) -> None:
        self._trainer = run.trainer
        self._survivors = left
        self._say = say

    def begin(self, driver: Driver) -> None:
        begin_batches_alone(self._trainer, alone=True)
        self._survivors.on_loss = self._go_on

    def _go_on(self, lost: Collection[int]) -> None:
        load_evaluation_data_anew(self._trainer)
        self._say(lost)

    def backward_is_over(self) -> None:
        self._survivors.told_to_end = self._trainer.received_sigterm

    def gradients_are_averaged(self) -> None:
        if self._survivors.told_to_end:
            tell_to_end(self._trainer)

    def last_batch_is_over(self) -> None:
        """Note that training is over: if a rank is lost from now on, the run ends."""
        self._survivors.end()

    def close(self) -> None:
        begin_batches_alone(self._trainer, alone=False)


def survives_losses(run: Run, *, scripted: bool) -> bool:
    """Whether the other replicas are to go on in this run when one is lost.

    ``False``: the user has not asked for it, or the run does not train.

    Args:
        run: the run, which is about to begin.
        scripted: whether the script starts the processes of all ranks itself.

    Raises:
        PlanError: the user has asked for it, and it is not possible in this run.
    """
    if not run.config.goes_on or not run.fitting:
        return False
    for reason in _why_not_without_a_replica(run, scripted):
        raise PlanError(f"on_loss='continue' {reason}; or use on_loss='end'.")
    return True


def _why_not_without_a_replica(run: Run, scripted: bool) -> Iterator[str]:
    """Yield reasons why this run cannot go on without a lost replica; none if it can.

    Each is the end of a sentence that begins with "on_loss='continue'", such as "needs another
    replica to go on with, ...", possibly followed by a way out. The caller adds "; or use
    on_loss='end'.".

    Args:
        run: the run.
        scripted: whether the script starts the processes of all ranks itself.
    """
    trainer, replicas = run.trainer, run.world.coordinates.replicas
    if replicas == 1:
        yield "needs another replica to go on with, and there is one. Use data_parallel_size=2"
    first = run.world.coordinates.rank == 0
    if not scripted or (first and not Children.processes):
        yield (
            "needs processes that the script has started itself. Use strategy 'hybrid_gabra' and "
            "`python FILE`, not torchrun, SLURM, spawn or fork"
        )
    if trainer.num_nodes > 1 or run.device.type != "cpu":
        yield "is for CPUs of one host, whose processes one launcher sees end"
    yield from steps_otherwise(trainer, "averages once for each batch")
    yield from exchanges_more(run)
