"""Times and sizes of a network's partitions, from which plans are made."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import StagePlan
from lightning_hybrid.planning.step_time import TIMES, StepCosts

COUNTED = "counted"
"""Stands in `PartitionTable.device` in place of a device, if FLOPs were counted and no times
measured."""


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several partitions use; the rank of the first one owns it.

    Attributes:
        size_bytes: its size.
        partitions: numbers of the partitions that use it, rising.
        elements: its number of elements.
        copy_bytes: bytes that another rank which uses the weight holds for it: a copy, and its
            gradient.
    """

    size_bytes: float
    partitions: tuple[int, ...]
    elements: int = 0
    copy_bytes: float = 0.0

    def borrowed(self, a: int, b: int) -> bool:
        """Whether partitions a .. b - 1 use the weight and an earlier partition owns it."""
        return self.partitions[0] < a and any(a <= k < b for k in self.partitions)


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Times and sizes of n network partitions, in order, at the size of a micro-batch.

    Times are seconds on a device of speed 1, or FLOPs where only those were counted
    (`is_measured`); sizes are in bytes. An empty list means: not known, or not counted; for a part
    of a split backward it means half of the backward. If several partitions use a weight, all that
    it takes counts with the first one, whose rank owns it; what other ranks hold of it is in
    `tied`.

    Attributes:
        forward_s: times of the forward of a micro-batch.
        backward_s: times of the backward of a micro-batch.
        cut_bytes: n - 1 sizes of the tensors that cross the cut after a partition, per micro-batch.
        names: names of the partitions: of the first module of each.
        parameters: numbers of parameter elements.
        layers: numbers of layers.
        reduce_s: times of the all-reduce of gradients over the replicas.
        step_s: times of the optimizer step.
        memory_bytes: memory that a partition holds in training, with the activations of all
            micro-batches that are held at once.
        parameter_bytes: sizes of the parameters.
        gradient_bytes: sizes of the gradients of those parameters that are trained.
        bucket_bytes: sizes of the copies of gradients that replicas average.
        kept_bytes: sizes of parameters, gradients, their copies and optimizer state together.
        state_bytes: the part of `kept_bytes` that is optimizer state which replicas divide; empty:
            they do not divide it.
        activation_bytes: sizes of the activations held between forward and backward, per
            micro-batch; if FLOPs were counted: of all that the layers return. A tensor that two
            partitions hold counts in both, so that their sum is an upper bound.
        working_bytes: bytes that operations allocate while they run, beside their results.
        input_part_s: times of the input part of a split backward (gradients of the inputs).
        weight_part_s: times of the weight part of a split backward (gradients of the parameters);
            None if the backward cannot be split.
        output_bytes: size of the network's outputs, per micro-batch.
        tied: weights that several partitions use.
        batch: number of samples of the micro-batch.
        device: name of the device that was measured, or `COUNTED`.

    Raises:
        PlanError: lists of unequal length.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    cut_bytes: Sequence[float]
    names: Sequence[str] = ()
    parameters: Sequence[int] = ()
    layers: Sequence[int] = ()
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    memory_bytes: Sequence[float] = ()
    parameter_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    bucket_bytes: Sequence[float] = ()
    kept_bytes: Sequence[float] = ()
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    working_bytes: Sequence[float] = ()
    input_part_s: Sequence[float] = ()
    weight_part_s: Sequence[float | None] = ()
    output_bytes: float = 0.0
    tied: Sequence[TiedWeight] = ()
    batch: int = 1
    device: str = ""

    def __post_init__(self) -> None:
        n = len(self.forward_s)
        for name in self.__dataclass_fields__:
            if name in ("output_bytes", "tied", "batch", "device"):
                continue
            values = getattr(self, name)
            # there is a cut between two partitions, and none after the last
            needed = n - 1 if name == "cut_bytes" else n
            is_given = len(values) or name in ("backward_s", "cut_bytes")
            if is_given and len(values) != needed:
                raise PlanError(
                    f"{name} has {len(values)} entries, {needed} are needed for {n} partitions"
                )

    @property
    def is_measured(self) -> bool:
        return self.device != COUNTED

    def record(self) -> dict[str, Any]:
        """Convert the table to plain values by attribute, for a file.

        Attributes that are empty by default, and were not given, are left out.
        """
        return {name: value for name, value in asdict(self).items() if value != ()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "PartitionTable":
        """Make a table from the plain values that `record` gives.

        Raises:
            TypeError, KeyError, PlanError: `record` is not that of a table, or a number in it is
                negative or not finite.
        """
        for name, value in record.items():
            values = [value] if isinstance(value, int | float) else value
            if name not in ("names", "tied", "device") and not all(
                0 <= number < math.inf
                for number in values
                if number is not None or name != "weight_part_s"
            ):
                raise PlanError(f"{name} must be finite and not negative: {value}")
        tied = [
            TiedWeight(**{**w, "partitions": (*w["partitions"],)}) for w in record.get("tied", ())
        ]
        return cls(**{**record, "tied": tied})

    def with_optimizer(
        self, state_bytes: Sequence[int], *, divides: bool = False
    ) -> "PartitionTable":
        """Make a copy whose `kept_bytes` include optimizer state.

        Args:
            state_bytes: for each partition the bytes of optimizer state of the weights that it
                owns; all that one replica keeps, or if `divides`, that of all replicas together.
            divides: whether `divided` is to divide the state by the number of replicas later.
        """
        kept = [size + state for size, state in zip(self.kept_bytes, state_bytes)]
        return replace(self, kept_bytes=kept, state_bytes=state_bytes if divides else ())

    @cached_property
    def loads(self) -> list[float]:
        """For each partition the time of its forward and backward together."""
        return [f + b for f, b in zip(self.forward_s, self.backward_s)]

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """By name of a column, its n + 1 prefix sums, from 0; for an empty column zeros.

        The columns are `forward_s`, `backward_s`, `reduce_s`, `step_s` and `memory_bytes`.
        """
        names = ("forward_s", "backward_s", "reduce_s", "step_s", "memory_bytes")
        nothing = (0.0,) * len(self.forward_s)
        return {name: [0.0, *accumulate(getattr(self, name) or nothing)] for name in names}

    def held(self, a: int, b: int) -> float:
        """Bytes that a device holds for partitions a .. b - 1, with copies of borrowed weights."""
        sums = self.sums["memory_bytes"]
        return sums[b] - sums[a] + sum(w.copy_bytes for w in self.tied if w.borrowed(a, b))

    def borrowed_by(
        self, ends: Sequence[int], devices: Sequence[int]
    ) -> Iterator[tuple[int, TiedWeight]]:
        """Find the stages that hold a copy of a weight that an earlier stage owns.

        A device with several stages that use the weight holds one copy, which counts with the
        first.

        Args:
            ends: for each stage the number after its last partition.
            devices: for each stage its device, by index in the replica.

        Yields:
            The stage's number, and the weight.
        """
        for weight in self.tied:
            first, *others = sorted({bisect_right(ends, k) for k in weight.partitions})
            have = {devices[first]}
            for stage in others:
                if devices[stage] not in have:
                    have.add(devices[stage])
                    yield stage, weight

    def held_bytes(self, in_flight: int) -> list[int]:
        """For each partition the bytes that it holds in training.

        Args:
            in_flight: number of micro-batches whose activations are held at once.
        """
        held = zip(self.kept_bytes, self.activation_bytes)
        return [round(kept + in_flight * activation) for kept, activation in held]

    def joint(self) -> "PartitionTable":
        """Make a copy whose backwards cannot be split, for instance for compiled stages."""
        return replace(self, weight_part_s=[None] * len(self.forward_s))

    def recomputed(self) -> "PartitionTable":
        """Make a copy for recomputation: each backward includes a forward, and cannot be split."""
        # autograd recomputes a stage as one operation, whose backward has no parts
        return replace(self.joint(), backward_s=self.loads)

    def untrained(self) -> "PartitionTable":
        """Make a copy for a run that does not train: partitions keep their parameters alone."""
        nothing = [0] * len(self.names)
        return replace(
            self,
            kept_bytes=self.parameter_bytes,
            gradient_bytes=nothing,
            activation_bytes=nothing,
            tied=[replace(weight, copy_bytes=weight.size_bytes) for weight in self.tied],
        )

    def averaged(self) -> "PartitionTable":
        """Make a copy whose memory includes the buckets in which gradients are averaged.

        It is for several replicas, or stages with copies.
        """
        kept = zip(self.kept_bytes, self.gradient_bytes)
        kept_bytes = [size + copy for size, copy in kept]
        return replace(self, kept_bytes=kept_bytes, bucket_bytes=self.gradient_bytes)

    def with_copies_aside(self) -> "PartitionTable":
        """Make a copy in which ranks that borrow a weight keep a second gradient of it.

        It is for schedule `1f1b`, whose backwards run before the gradient of the loss is known.
        """
        tied = [replace(w, copy_bytes=2 * w.copy_bytes - w.size_bytes) for w in self.tied]
        return replace(self, tied=tied)

    def divided(self, replicas: int) -> "PartitionTable":
        """Make a copy of the table in which replicas have divided the optimizer state.

        Args:
            replicas: number of replicas; each keeps an equal part of `state_bytes`.
        """
        kept = [
            size - state * (replicas - 1) / replicas
            for size, state in zip(self.kept_bytes, self.state_bytes)
        ]
        # no states are left to divide: a second call must not divide again
        return replace(self, kept_bytes=kept, state_bytes=()) if kept else self

    def scaled(self, share: float, unit_s: float = 1.0) -> "PartitionTable":
        """Estimate the table for a micro-batch of another size, in proportion to the samples.

        Args:
            share: number of samples, as a multiple of this table's.
            unit_s: seconds of one unit of the times, if they are FLOPs; 1: times are kept.
        """
        unit_s *= share
        factors = dict.fromkeys(("forward_s", "backward_s", "input_part_s"), unit_s)
        factors |= dict.fromkeys(("cut_bytes", "activation_bytes"), share)
        columns: dict[str, Any] = {
            name: [factor * value for value in getattr(self, name)]
            for name, factor in factors.items()
        }
        parts = [None if part is None else unit_s * part for part in self.weight_part_s]
        batch, outputs = round(share * self.batch), share * self.output_bytes
        return replace(self, weight_part_s=parts, output_bytes=outputs, batch=batch, **columns)

    def rows(self, ends: Sequence[int], costs: StepCosts) -> tuple[StagePlan, ...]:
        """Make the rows of a plan, one per stage: contents, times, memory and traffic.

        Args:
            ends: For each of S stages its end, the number after its last partition.
            costs: Times and devices of the stages.
        """
        total = sum(self.loads) or 1.0
        # the last stage has no next one to send to
        times = {name: [*getattr(costs, name), 0.0] for name in TIMES}
        cut_bytes, rows = [*self.cut_bytes, 0], []
        elements, copies = [0] * len(ends), [0.0] * len(ends)
        for stage, weight in self.borrowed_by(ends, costs.devices):
            elements[stage] += weight.elements
            copies[stage] += weight.copy_bytes
        for stage, (a, b) in enumerate(pairwise((0, *ends))):
            rows.append(
                StagePlan(
                    layers=sum(self.layers[a:b]),
                    partitions=tuple(self.names[a:b]),
                    parameters=sum(self.parameters[a:b]) + elements[stage],
                    load=sum(self.loads[a:b]) / total,
                    device=costs.devices[stage],
                    memory_bytes=_total(self.memory_bytes, a, b, copies[stage]),
                    cut_bytes=round(cut_bytes[b - 1]),
                    gradient_bytes=_total(self.gradient_bytes, a, b),
                    **{name: values[stage] for name, values in times.items()},
                )
            )
        return tuple(rows)


def _total(sizes: Sequence[float], a: int, b: int, more: float = 0.0) -> int | None:
    """Sum the sizes of partitions a .. b - 1, and add `more`; None if there are no sizes."""
    return round(sum(sizes[a:b]) + more) if sizes else None
