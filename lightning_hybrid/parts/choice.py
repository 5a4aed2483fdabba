"""The one place that decides which parts a run has."""

from lightning_hybrid._lightning import rank_zero_info
from lightning_hybrid.parts.asynchronous import AsynchronousReplica
from lightning_hybrid.parts.coming_batches import ComingBatches, PlainDescent
from lightning_hybrid.parts.lost_replicas import LostReplicas
from lightning_hybrid.parts.performance_log import PerformanceLog
from lightning_hybrid.parts.replanning import Replanning
from lightning_hybrid.parts.unequal_shares import UnequalShares
from lightning_hybrid.run import Part, Run


def parts_of(run: Run) -> list[Part]:
    """Make the parts of a run that trains, in the order in which a driver calls their hooks.

    Args:
        run: the run, which is about to begin on this driver.

    Raises:
        PlanError: a part does not go together with the run.
    """
    config, here, survivors = run.config, run.world.coordinates, run.world.mesh.survivors
    parts: list[Part] = []
    if config.staleness is not None:
        parts.append(AsynchronousReplica(run, rank_zero_info))
    if config.by_speed and here.replicas > 1:
        parts.append(shares := UnequalShares(run))
        if survivors is not None:
            parts.append(LostReplicas(run, survivors, shares.say_who_is_left))
    if config.streamed is not None:
        if config.streamed.plain_sgd:
            parts.append(PlainDescent(config.shown_schedule))
        if here.ranks_per_replica > 1:
            parts.append(ComingBatches(run.trainer, config.streamed.barrier))
    if config.log_performance and run.is_global_zero:
        parts.append(PerformanceLog(run))
    if run.changes_cuts:
        parts.append(Replanning(run, rank_zero_info))
    elif config.replans_cuts:
        rank_zero_info(f"replan='epoch' changes nothing in this run: {run.why_cuts_stay}.")
    return parts
