"""Sizes of a run, what a step is predicted to take with them, and which were chosen."""

from dataclasses import dataclass

WORTHWHILE = 0.95
"""Stages are taken only where they are predicted to take at most this share of the time of
replicas alone: a prediction is off by some percent, and replicas change nothing in the numbers."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        replicas: number of replicas.
        stages: number of devices of a replica.
        microbatches: number of slices of a replica's batch.
    """

    replicas: int
    stages: int
    microbatches: int

    def __str__(self) -> str:
        if self.stages == 1:
            return f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"
        slices = f"{self.microbatches} micro-batch{'es' if self.microbatches > 1 else ''}"
        return f"{self.replicas} x {self.stages} stages, {slices}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Sizes, and what a step is predicted to take with them.

    Attributes:
        sizes: replicas, stages and micro-batches.
        step_s: predicted seconds of a step, all networks together.
        divided: into how many parts a batch is divided over the replicas; 1: each takes a whole
            one.
        recompute: whether stages run their forward again for the backward, since it does not fit
            otherwise.
    """

    sizes: Sizes
    step_s: float
    divided: int = 1
    recompute: bool = False

    @property
    def batches(self) -> float:
        """How many batches the replicas take in a step."""
        return self.sizes.replicas / self.divided

    @property
    def batch_s(self) -> float:
        """Seconds for each of the batches that the replicas take in a step."""
        return self.step_s / self.batches


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and what was not.

    Attributes:
        best: the shortest time of a batch; replicas alone have an advance, see :data:`WORTHWHILE`.
        others: the best of each other number of stages, the shortest first; estimates where those
            are far behind.
        alone_s: predicted seconds of a batch on one of the devices.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    alone_s: float

    def describe(self) -> str:
        """What was chosen, what it is predicted to take, and the runners-up."""
        best = self.best
        lines = [
            f"Chosen for {best.sizes.replicas * best.sizes.stages} devices: {best.sizes}. "
            f"{_predicted(best)}"
        ]
        for other in self.others[:2]:
            lines.append(f"Next: {other.sizes}. {_predicted(other)}")
            if other.batch_s < best.batch_s:
                lines[-1] += f" Stages are taken where they save {1 - WORTHWHILE:.0%} or more."
        if self.alone_s < best.batch_s:
            lines.append(
                f"One device alone is predicted to take {_seconds(self.alone_s)} for a batch, less "
                "than any use of several: consider Trainer(devices=1)."
            )
        return "\n".join(lines)


def _predicted(candidate: Candidate) -> str:
    text = f"Predicted step: {_seconds(candidate.step_s)}"
    if candidate.recompute:
        text = f"Activations are computed again, as it does not fit otherwise. {text}"
    if candidate.batches == 1:
        return f"{text}."
    return f"{text} for {candidate.batches:g} batches, {_seconds(candidate.batch_s)} each."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"
