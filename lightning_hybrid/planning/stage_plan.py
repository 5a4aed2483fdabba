"""One stage of a plan: what it holds, and how long it is predicted to take."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one stage holds, for reports.

    Attributes:
        layers: number of layers (nodes of the captured graph).
        partitions: names of the network partitions, in order.
        parameters: number of parameter elements.
        load: share of the whole network's computation, between 0 and 1.
        device: index of the device within the replica.
        memory_bytes: held while it trains: parameters, gradients, optimizer state and the
            activations of the micro-batches in flight; None when nothing was profiled.
        peak_bytes: the most that the rank of this stage takes from the start of a run to its end,
            with its other stages; None when nothing was profiled.
        limit_bytes: what that rank may take; None: not known.
        forward_s: seconds of the forward of a micro-batch; None, like the other times, if not
            predicted.
        backward_s: seconds of its backward; where that is split, of its input part.
        weight_s: seconds of the weight part of its backward, where that is split.
        send_s: seconds in which a micro-batch keeps the link to the next stage, in either
            direction.
        latency_s: seconds by which it arrives later than that.
        reduce_s: seconds of the all-reduce of its gradients over the replicas.
        step_s: seconds of its optimizer step.
        cut_bytes: what crosses the cut after it, per micro-batch and direction; 0 after the last
            stage.
        gradient_bytes: size of its gradients, which its replicas average in a step.
    """

    layers: int
    partitions: tuple[str, ...]
    parameters: int
    load: float
    device: int
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    weight_s: float | None = None
    send_s: float | None = None
    latency_s: float | None = None
    reduce_s: float | None = None
    step_s: float | None = None
    cut_bytes: int | None = None
    gradient_bytes: int | None = None

    def without_times(self) -> Self:
        """The same, where the times are not to be relied on."""
        return replace(
            self,
            forward_s=None,
            backward_s=None,
            weight_s=None,
            send_s=None,
            latency_s=None,
            reduce_s=None,
            step_s=None,
        )
