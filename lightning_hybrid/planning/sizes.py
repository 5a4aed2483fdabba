"""Choose numbers of replicas, stages and micro-batches for the shortest predicted time per batch.

Every replica takes a batch of its own, as under DDP, so that R replicas train on R batches in a
step; or the user's code divides the batch by the number of replicas, and they train on one. What is
compared is therefore the predicted time of a step divided by its number of batches: the time of an
epoch, up to a constant. (N devices, R replicas of S devices each, R S = N, M micro-batches, B
samples in the batch of a single replica.)

A network is profiled only for micro-batches that may be the best: from its profile for size B, the
time for any other size is estimated as proportional (which is optimistic, since devices are more
efficient with large batches), and sizes whose estimate is worse than the best measured ones are not
profiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.cluster import Cluster, Device, Rates, make_cluster
from lightning_hybrid.planning.memory_check import Fit, Way, what_lacks, what_would_fit
from lightning_hybrid.planning.memory_needed import remaining
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import plan_within
from lightning_hybrid.planning.search import PlanSettings, Replica
from lightning_hybrid.planning.shares import deal

SPARE = 0.1
"""Fraction of a device's memory that chosen sizes leave free if they can: what a step holds is
predicted, and what the process and other code take is not known."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of all ranks, and costs of communication between them.

    Attributes:
        devices: one entry for each rank.
        capacity: relative speeds that the user gave; None: as measured.
        bandwidth_bytes_per_s: bandwidth of a link between two stages.
        rates: costs of a step beside computing.
    """

    devices: tuple[Device, ...]
    capacity: tuple[float, ...] | None
    bandwidth_bytes_per_s: float
    rates: Rates

    def cluster(self, replicas: int, stages: int) -> Cluster:
        """The devices, divided into `replicas` replicas of `stages` devices."""
        cluster = make_cluster(self.devices, replicas, stages, self.capacity)
        bandwidth = self.bandwidth_bytes_per_s
        return replace(cluster, rates=self.rates, bandwidth_bytes_per_s=bandwidth)


WORTHWHILE = 0.95
"""Several stages are chosen only if they are predicted to take at most this fraction of the time of
replicas of one stage: predictions are off by some percent, and replicas alone train exactly as
under DDP."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        replicas: number of replicas.
        stages: number of devices of a replica.
        microbatches: number of micro-batches of a replica's batch.
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
    """Sizes with the predicted time of a step.

    Attributes:
        sizes: numbers of replicas, stages and micro-batches.
        step_s: predicted seconds of a step, for all networks together.
        recompute: whether activations are recomputed, since the network does not fit otherwise.
        shares: number of samples that each replica takes in a step; empty: equal numbers.
    """

    sizes: Sizes
    step_s: float
    recompute: bool = False
    shares: tuple[int, ...] = ()

    @property
    def batch_s(self) -> float:
        """Predicted seconds of a step divided by its number of batches."""
        return self.step_s / self.sizes.replicas


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen sizes, and alternatives.

    Attributes:
        best: the sizes with the shortest time of a batch; one stage is preferred by
            :data:`WORTHWHILE`.
        others: the best sizes for each other number of stages, the fastest first; those that are
            much slower are estimated only.
        alone_s: predicted seconds of a batch on a single device.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    alone_s: float

    def describe(self) -> str:
        """A text for the user: the chosen sizes, their predicted time, and the next best ones."""
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
    if candidate.shares:
        text = f"The replicas take {', '.join(map(str, candidate.shares))} samples. {text}"
    replicas = candidate.sizes.replicas
    if replicas == 1:
        return f"{text}."
    return f"{text} for {replicas} batches, {_seconds(candidate.batch_s)} each."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _rated(candidate: Candidate) -> float:
    """The time of a batch by which sizes are compared; one stage is preferred."""
    return candidate.batch_s * (WORTHWHILE if candidate.sizes.stages == 1 else 1.0)


@dataclass
class Prediction:
    """Predicts step times for all sizes that the devices allow, and chooses the best sizes.

    Attributes:
        machine: the devices.
        networks: for each network a function from the number of micro-batches to the table of its
            partitions, which may measure them.
        batch: number of samples in the batch of a single replica.
        asked: number of micro-batches that the user has set; None: it is chosen too.
        splits: function that tells whether batches may be split into a number of micro-batches.
        settings: options of the user.
        present_bytes: bytes of the networks that each device had in use when its free memory was
            read, and that are freed where another rank owns them.
        by_speed: whether replicas take samples by their speed.
        spare: fraction of the devices' memory that is left free.
        short: for the sizes that did not fit, what devices lack.
    """

    machine: Machine
    networks: Sequence[Callable[[int], PartitionTable]]
    _: KW_ONLY
    batch: int
    asked: int | None = None
    splits: Callable[[int], bool] = lambda microbatches: True
    settings: PlanSettings = field(default_factory=PlanSettings)
    present_bytes: int = 0
    by_speed: bool = False
    spare: float = SPARE
    short: list[Fit] = field(default_factory=list)

    def __post_init__(self) -> None:
        # cached, since they may measure
        self.networks = [cache(network) for network in self.networks]

    def choose(self, allowed: Callable[[int, int], bool] = lambda replicas, stages: True) -> Choice:
        """Choose the sizes with the shortest predicted time of a batch.

        Args:
            allowed: function that tells whether numbers of replicas and stages may be chosen.

        Raises:
            PlanError: no sizes are allowed, or the network fits with none of them.
        """
        count = len(self.machine.devices)
        possible = [s for s in self.sizes() if allowed(s.replicas, s.stages)]
        if not possible:
            raise PlanError(
                f"no numbers of replicas and stages of {count} devices are allowed here"
            )
        try:
            known, guesses = self._compared(possible)
        # nothing fits with memory to spare: try without
        except PlanError:
            self.spare = 0.0
            self.short.clear()
            known, guesses = self._compared(possible)
        best = min(known, key=_rated)
        seen = {candidate.sizes for candidate in known}
        rest = [*known, *(guess for guess in guesses if guess.sizes not in seen)]
        others: dict[int, Candidate] = {}
        for candidate in sorted(rest, key=_rated):
            if candidate.sizes.stages != best.sizes.stages:
                others.setdefault(candidate.sizes.stages, candidate)
        return Choice(best=best, others=tuple(others.values()), alone_s=self.alone_s())

    def _compared(self, possible: Sequence[Sizes]) -> tuple[list[Candidate], list[Candidate]]:
        """Compare sizes: those that were measured, until no other can be better; and estimates."""
        guesses: list[Candidate] = []
        known: list[Candidate] = []
        problem = PlanError("")
        for sizes in possible:
            try:
                guesses.append(self.estimated(sizes))
            except PlanError as error:  # the network does not fit
                problem = error
        # measuring takes seconds: begin with the best estimates
        guesses.sort(key=_rated)
        for guess in guesses:
            # estimates are optimistic, so the rest would not be better when measured
            if known and _rated(guess) >= min(map(_rated, known)):
                break
            try:
                known.append(self.measured(guess.sizes))
            except PlanError as error:
                problem = error
        if not known:
            raise self.why_nothing_fits() or problem
        return known, guesses

    def sizes(self) -> list[Sizes]:
        """All sizes to compare: numbers of replicas, stages and micro-batches on all devices."""
        found, devices = [], len(self.machine.devices)
        for stages in (s for s in range(1, devices + 1) if devices % s == 0):
            replicas, numbers = devices // stages, [1]
            if stages > 1 and self.asked is not None:
                numbers = [self.asked]
            elif stages > 1:
                # micro-batches of two samples at least, if possible: one may take a slow path
                limit = max(self.batch // 2, min(self.batch, 2))
                tried = (m for m in sorted({2, stages, 2 * stages, 4 * stages}) if m <= limit)
                numbers = [1, *filter(self.splits, tried)]
            found += [Sizes(replicas=replicas, stages=stages, microbatches=m) for m in numbers]
        return found

    def measured(self, sizes: Sizes) -> Candidate:
        """Predict a step from profiles of the networks at this size of the micro-batch.

        Raises:
            PlanError: the networks do not fit.
        """
        return self._candidate([network(sizes.microbatches) for network in self.networks], sizes)

    def estimated(self, sizes: Sizes) -> Candidate:
        """Predict a step from profiles for a single replica of one stage, scaled to the sizes.

        Raises:
            PlanError: the networks do not fit.
        """
        share = 1 / sizes.microbatches
        return self._candidate([network(1).scaled(share) for network in self.networks], sizes)

    def alone_s(self) -> float:
        """Predicted seconds of a step on one device, whatever its memory."""
        parts = [network(1) for network in self.networks]
        computed = sum(sum((*p.forward_s, *p.backward_s)) for p in parts)
        trained = sum(sum(p.gradient_bytes) for p in parts)
        return computed + self.machine.rates.update_s_per_byte * trained

    def _candidate(self, networks: Sequence[PartitionTable], sizes: Sizes) -> Candidate:
        """Predict a step, which ends with the slowest replica if they take samples by their speed.

        Each of them is planned as if it could have other cuts. In a run all have the same cuts, for
        the slowest device of each stage; if the speeds of replicas are not in proportion, a step
        takes longer than predicted.
        """
        cluster, batch = self.machine.cluster(sizes.replicas, sizes.stages), self.batch
        shares: tuple[int, ...] = ()
        chains: list[tuple[int, Sequence[float]]] = [(batch, cluster.capacities)]
        if self.by_speed and len(set(cluster.replica_speeds)) > 1:
            shares = deal(sizes.replicas * batch, cluster.replica_speeds)
            speeds = [cluster.speeds[rank] for rank in cluster.order]
            chains = [*zip(shares, zip(*[iter(speeds)] * sizes.stages))]
        # memory limits are those of the smallest device over all replicas
        limits = self._limits(cluster)
        found = [
            self._plans([each.scaled(share / batch) for each in networks], sizes, speeds, limits)
            for share, speeds in chains
        ]
        return Candidate(
            sizes=sizes,
            step_s=max(sum(plan.step_s for plan in plans) for plans in found),
            recompute=any(plan.recompute for plans in found for plan in plans),
            shares=shares,
        )

    def _plans(
        self,
        networks: Sequence[PartitionTable],
        sizes: Sizes,
        capacities: Sequence[float],
        room: tuple[int, ...] | None,
    ) -> list[Plan]:
        """Plan each network, all on the same devices.

        Args:
            networks: tables of the networks, for a micro-batch.
            sizes: sizes of the run.
            capacities: relative speeds of the devices of a replica.
            room: bytes that each of these devices may use; None: not known.
        """
        plans: list[Plan] = []
        # replicas may divide the optimizer state
        networks = [each.divided(sizes.replicas) for each in networks]
        for parts in networks if sizes.replicas == 1 else [each.averaged() for each in networks]:
            # a network with fewer partitions than stages stays on the driver
            here = sizes if len(parts.names) >= sizes.stages else replace(sizes, stages=1)
            plans.append(self._plan(parts, here, capacities, remaining(room, plans)))
        return plans

    def _limits(self, cluster: Cluster) -> tuple[int, ...] | None:
        """Bytes that each device may use, less those that are left free."""
        limits = cluster.memory_limits
        return limits and tuple(
            round((1 - self.spare) * (limit + self.present_bytes)) for limit in limits
        )

    def why_nothing_fits(self) -> PlanError | None:
        """The error with what devices lack and what would fit; None: memory was not the reason."""
        short = [fit for fit in self.short if not fit.fits]
        if not short:
            return None
        return PlanError(
            "the memory of the devices is too small for the network, whatever the sizes: "
            f"{what_lacks(short)}. {what_would_fit(short)} An optimizer with less state needs "
            "less; two tensors for each parameter are assumed."
        )

    def _plan(
        self,
        table: PartitionTable,
        sizes: Sizes,
        capacities: Sequence[float],
        limits: tuple[int, ...] | None,
    ) -> Plan:
        machine, stages = self.machine, sizes.stages
        rates = machine.rates
        reduce_s, step_s = rates.after_backward(table.gradient_bytes, sizes.replicas)
        limits = limits and limits[:stages]
        try:
            return plan_within(
                replace(table, reduce_s=reduce_s, step_s=step_s),
                self.settings,
                Replica(
                    replicas=sizes.replicas,
                    stages=stages,
                    microbatches=sizes.microbatches,
                    capacities=capacities[:stages],
                    bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s,
                    latency_s=rates.message_s,
                    memory_limits=limits,
                ),
            )
        except PlanError:
            recompute = self.settings.recompute if stages > 1 else False
            again = [recompute] if isinstance(recompute, bool) else [True, False]
            # note what devices lack in each way that was tried, for the error
            for each in again if limits is not None else []:
                way = Way(stages=stages, microbatches=sizes.microbatches, recompute=each)
                batch = self.batch
                self.short.append(Fit.of(table, way, limits or (), batch))
            raise
