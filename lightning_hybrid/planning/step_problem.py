"""The problem that `objective="step"` solves: which run of partitions on which device, and when?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from lightning_hybrid.allocation import SLACK
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the devices of a replica, as m x m tables; the diagonal is not used.

    Attributes:
        seconds_per_byte: (m, m) seconds that a byte keeps the link from one device to another.
        latency_s: (m, m) seconds by which a message arrives later than that.
    """

    seconds_per_byte: Sequence[Sequence[float]]
    latency_s: Sequence[Sequence[float]]

    @classmethod
    def equal(cls, devices: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> "Links":
        """The same between any two devices."""
        return cls(
            seconds_per_byte=[[1 / bandwidth_bytes_per_s] * devices] * devices,
            latency_s=[[latency_s] * devices] * devices,
        )


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """n network partitions in a row, m devices, M micro-batches, run as fill-drain.

    A placement is a list of runs: the number after the last partition of each (`ends`, rising, the
    last one n) and its device. Neighbouring runs are on different devices.

    Attributes:
        forward_s: (n,) forward of one micro-batch on a device of speed 1.
        backward_s: (n,) its backward.
        cut_bytes: (n - 1,) what crosses the cut after a partition per micro-batch, in either
            direction.
        speeds: (m,) of the devices; device 0 is the driver's, which has the last partition.
        links: between the m devices.
        microbatches: M, slices of a replica's batch.
        reduce_s: (n,) all-reduce of the gradients of a partition over the replicas; empty: no time.
        step_s: (n,) its optimizer step on a device of speed 1; empty: no time.
        memory: (n,) bytes that a partition holds, its micro-batches in flight included; empty: no
            limit.
        memory_limits: (m,) bytes that a device takes.
        driver_s: seconds of what the driver does between the passes.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    cut_bytes: Sequence[float]
    speeds: Sequence[float]
    links: Links
    microbatches: int
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    memory: Sequence[float] = ()
    memory_limits: Sequence[float] = ()
    driver_s: float = 0.0

    def __post_init__(self) -> None:
        n, m = len(self.forward_s), len(self.speeds)
        for name, count in (
            ("forward_s", n),
            ("backward_s", n),
            ("cut_bytes", n - 1),
            ("reduce_s", n),
            ("step_s", n),
            ("memory", n),
            ("memory_limits", m),
        ):
            values = getattr(self, name)
            optional = name not in ("forward_s", "backward_s", "cut_bytes")
            if len(values) != count and not (optional and not len(values)):
                raise PlanError(f"{name} has {len(values)} entries, {count} are needed")
            for index, value in enumerate(values):
                if not 0 <= value < float("inf"):
                    raise PlanError(f"{name}[{index}] is {value}: a finite number >= 0 is needed")
        if bool(len(self.memory)) != bool(len(self.memory_limits)):
            raise PlanError("memory and memory_limits must be given together")
        if n < m:
            raise PlanError(f"{n} partitions cannot give each of {m} devices one")

    @property
    def n(self) -> int:
        return len(self.forward_s)

    @property
    def m(self) -> int:
        return len(self.speeds)

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """For each list of the partitions its sums up to each of them, n + 1 numbers."""
        names = ("forward_s", "backward_s", "reduce_s", "step_s", "memory")
        return {name: [0.0, *accumulate(getattr(self, name))] for name in names}

    @cached_property
    def ceilings(self) -> list[float]:
        """The memory limits, with the rounding they forgive."""
        return [limit * (1 + SLACK) for limit in self.memory_limits]

    def fits(self, ends: Sequence[int], devices: Sequence[int]) -> bool:
        """Whether every device can hold its runs."""
        if not self.ceilings:
            return True
        held, sums = [0.0] * self.m, self.sums["memory"]
        for (a, b), device in zip(pairwise((0, *ends)), devices):
            held[device] += sums[b] - sums[a]
        return all(h <= c for h, c in zip(held, self.ceilings))

    def costs(self, ends: Sequence[int], devices: Sequence[int]) -> StepCosts:
        """What the parts of a step take, by run."""
        runs = list(zip(pairwise((0, *ends)), (self.speeds[j] for j in devices)))

        def per_run(name: str) -> list[float]:
            sums = self.sums[name]
            return [(sums[b] - sums[a]) / speed for (a, b), speed in runs]

        edges = list(zip(ends, pairwise(devices)))
        rates, latency = self.links.seconds_per_byte, self.links.latency_s
        reduce = self.sums["reduce_s"]
        return StepCosts(
            forward_s=per_run("forward_s"),
            backward_s=per_run("backward_s"),
            devices=devices,
            send_s=[self.cut_bytes[end - 1] * rates[i][j] for end, (i, j) in edges],
            latency_s=[latency[i][j] for _, (i, j) in edges],
            reduce_s=[reduce[b] - reduce[a] for (a, b), _ in runs] if len(self.reduce_s) else (),
            step_s=per_run("step_s") if len(self.step_s) else (),
            driver_s=self.driver_s,
        )

    def step_time_s(self, ends: Sequence[int], devices: Sequence[int]) -> float:
        """Predicted seconds of a step; infinite where a device cannot hold its runs."""
        if not self.fits(ends, devices):
            return float("inf")
        return fill_drain_s(self.costs(ends, devices), self.microbatches)
