"""The problem of `objective="step"`: place partitions on devices so that a step is shortest."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_hybrid.allocation import SLACK
from lightning_hybrid.planning.partition_table import PartitionTable, TiedWeight
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """The links between the m devices of a replica, as tables; their diagonal is not used.

    Attributes:
        seconds_per_byte: (m, m) seconds for which a byte occupies the link from one device (row) to
            another (column).
        latency_s: (m, m) further seconds until a message arrives.
    """

    seconds_per_byte: Sequence[Sequence[float]]
    latency_s: Sequence[Sequence[float]]

    @classmethod
    def equal(
        cls, devices: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0
    ) -> "LinkCosts":
        """Make equal links between any two devices, of which there are `devices`."""
        return cls(
            seconds_per_byte=[[1 / bandwidth_bytes_per_s] * devices] * devices,
            latency_s=[[latency_s] * devices] * devices,
        )


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """n network partitions in a row, m <= n devices, M micro-batches, run as fill-drain.

    A placement is a list of runs of consecutive partitions; each run is a stage. It is given by two
    lists: `ends`, for each run the number after its last partition (rising, the last one is n); and
    `devices`, for each run its device, by index in the replica. Neighbouring runs are on different
    devices.

    Attributes:
        table: times and sizes of the partitions; computations and optimizer steps are timed for a
            device of speed 1.
        speeds: (m,) speeds of the devices; device 0 is the driver's, which has the last partition.
        links: links between the m devices.
        microbatches: M, number of micro-batches of a replica.
        memory_limits: (m,) bytes that a device may hold; empty: no limit. They have an effect only
            if the table has `memory_bytes`.
    """

    table: PartitionTable
    speeds: Sequence[float]
    links: LinkCosts
    microbatches: int
    memory_limits: Sequence[float] = ()

    @property
    def n(self) -> int:
        return len(self.table.forward_s)

    @property
    def m(self) -> int:
        return len(self.speeds)

    @cached_property
    def ceilings(self) -> list[float]:
        """(m,) memory limits with a tolerance for rounding errors; empty: nothing is limited."""
        # without known memory of partitions limits cannot be checked
        known = self.memory_limits if self.table.memory_bytes else ()
        return [limit * (1 + SLACK) for limit in known]

    def held(self, ends: Sequence[int], devices: Sequence[int]) -> list[float]:
        """(m,) bytes that each device holds in a placement; zeros if memory is not known.

        Copies of weights that a device borrows are included.
        """
        held, sums = [0.0] * self.m, self.table.sums["memory_bytes"]
        for (a, b), device in zip(pairwise((0, *ends)), devices):
            held[device] += sums[b] - sums[a]
        for stage, weight in self.table.borrowed_by(ends, devices):
            held[devices[stage]] += weight.copy_bytes
        return held

    def fits(self, ends: Sequence[int], devices: Sequence[int]) -> bool:
        """Whether every device has enough memory for its runs; True if memory is not limited."""
        if not self.ceilings:
            return True
        return all(h <= c for h, c in zip(self.held(ends, devices), self.ceilings))

    def with_lending(
        self, step_s: Sequence[float], ends: Sequence[int], devices: Sequence[int]
    ) -> list[float]:
        """Add to the optimizer steps the time in which devices exchange weights that they share.

        A device that has several runs with a weight exchanges it once, in the last of them.

        Args:
            step_s: for each run the seconds of its optimizer step.
            ends: for each run the number after its last partition.
            devices: for each run its device.

        Returns:
            For each run the sum of both, in seconds.
        """
        step_s = [*step_s]
        for weight in self.table.tied:
            stages = {bisect_right(ends, partition) for partition in weight.partitions}
            once = {devices[stage]: stage for stage in sorted(stages)}
            if len(once) > 1:
                for device, stage in once.items():
                    step_s[stage] += self.lending_s(weight, device)
        return step_s

    def costs(self, ends: Sequence[int], devices: Sequence[int]) -> StepCosts:
        """Compute the times of the parts of a step, for each run of a placement.

        Backwards are not split.
        """
        bounds = list(pairwise((0, *ends)))

        def per_run(name: str) -> list[float]:
            sums = self.table.sums[name]
            return [sums[b] - sums[a] for a, b in bounds]

        def computed(name: str) -> list[float]:
            return [work / self.speeds[j] for work, j in zip(per_run(name), devices)]

        edges = list(zip(ends, pairwise(devices)))
        rates, latency = self.links.seconds_per_byte, self.links.latency_s
        step_s = self.with_lending(computed("step_s"), ends, devices)
        return StepCosts(
            forward_s=computed("forward_s"),
            backward_s=computed("backward_s"),
            devices=devices,
            send_s=[self.table.cut_bytes[end - 1] * rates[i][j] for end, (i, j) in edges],
            latency_s=[latency[i][j] for _, (i, j) in edges],
            # an all-reduce does not depend on the speed of the device
            reduce_s=per_run("reduce_s"),
            step_s=step_s,
        )

    def lending_s(self, weight: TiedWeight, device: int) -> float:
        """Seconds per step in which a device exchanges a weight with the driver; 0 for the driver.

        The weight is one that several devices use. In each step its value goes one way, before the
        forward, and a gradient goes the other way, after the backward. A weight that two workers
        share goes through the driver too.
        """
        if device == 0:
            return 0.0
        rates, latency = self.links.seconds_per_byte, self.links.latency_s
        return 2 * (weight.size_bytes * rates[device][0] + latency[device][0])

    def step_time_s(self, ends: Sequence[int], devices: Sequence[int]) -> float:
        """Predicted seconds of a fill-drain step of a placement; infinite: memory is lacking."""
        if not self.fits(ends, devices):
            return float("inf")
        return fill_drain_s(self.costs(ends, devices), self.microbatches)
