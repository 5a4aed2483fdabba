"""How many replicas, of how many stages, with how many micro-batches: the shortest time of a batch.

Every replica takes a batch of its own, as under DDP, so that R replicas train on R batches in a
step; or the user's code divides the batch by the number of replicas, and they train on one. What is
compared is therefore the predicted time of a step for each of its batches: that of an epoch, up to
a constant. (N devices, R replicas of S devices each, R S = N, M micro-batches, B samples in the
batch of a replica alone.)

A network is measured only at the sizes of micro-batches that may win: from what it takes at size B,
the time of any other size is estimated as proportional (which is optimistic on a device that likes
large batches), and a candidate whose estimate is behind the best measured one is left there.
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
"""Share of a device's memory that chosen sizes leave free, where they can: what a step holds is
predicted, and what the process and other code take besides is not known."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of all ranks, and what they need to speak to each other.

    Attributes:
        devices: one entry for each rank.
        capacity: relative speeds that the user gave; None: as measured.
        bandwidth_bytes_per_s: of a link between two stages.
        rates: what a step takes beside computing.
    """

    devices: tuple[Device, ...]
    capacity: tuple[float, ...] | None
    bandwidth_bytes_per_s: float
    rates: Rates

    def cluster(self, replicas: int, stages: int) -> Cluster:
        """The devices as so many replicas of so many devices."""
        cluster = make_cluster(self.devices, replicas, stages, self.capacity)
        bandwidth = self.bandwidth_bytes_per_s
        return replace(cluster, rates=self.rates, bandwidth_bytes_per_s=bandwidth)


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
        shares: samples that each replica takes in a step; empty: all take as many.
    """

    sizes: Sizes
    step_s: float
    divided: int = 1
    recompute: bool = False
    shares: tuple[int, ...] = ()

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
    if candidate.shares:
        text = f"The replicas take {', '.join(map(str, candidate.shares))} samples. {text}"
    if candidate.batches == 1:
        return f"{text}."
    return f"{text} for {candidate.batches:g} batches, {_seconds(candidate.batch_s)} each."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def _rated(candidate: Candidate) -> float:
    """The time of a batch; replicas alone get an advance."""
    return candidate.batch_s * (WORTHWHILE if candidate.sizes.stages == 1 else 1.0)


@dataclass
class Prediction:
    """What steps take, for all sizes that devices may have.

    Attributes:
        machine: the devices.
        networks: per network, what gives its parts for a number of micro-batches; it may measure.
        batch: samples in the batch of a replica that is alone.
        divided: into how many parts that is divided when there are so many replicas.
        splits: whether batches may be split into so many micro-batches, more than one.
        asked: number of micro-batches that the user wants; None: it is chosen too.
        settings: what the user has asked for.
        present_bytes: of the networks, which each device had when it was asked what it may take,
            and gives back where another one owns it.
        by_speed: whether replicas take samples by their speed.
        spare: share of the memory of the devices that is left free.
        short: what lacks in the sizes that do not fit.
    """

    machine: Machine
    networks: Sequence[Callable[[int], PartitionTable]]
    _: KW_ONLY
    batch: int
    divided: Callable[[int], int] = lambda replicas: 1
    asked: int | None = None
    splits: Callable[[int], bool] = lambda microbatches: True
    settings: PlanSettings = field(default_factory=PlanSettings)
    present_bytes: int = 0
    by_speed: bool = False
    spare: float = SPARE
    short: list[Fit] = field(default_factory=list)

    def __post_init__(self) -> None:
        # both are asked for each of the sizes, and may measure or run the user's code
        self.networks = [cache(network) for network in self.networks]
        self.divided = cache(self.divided)

    def choose(self, allowed: Callable[[int, int], bool] = lambda replicas, stages: True) -> Choice:
        """The sizes with the shortest predicted time of a batch.

        Args:
            allowed: whether numbers of replicas and stages may be taken.

        Raises:
            PlanError: no sizes are allowed, or the devices cannot hold the network in any of them.
        """
        count = len(self.machine.devices)
        possible = [s for s in self.sizes() if allowed(s.replicas, s.stages)]
        if not possible:
            raise PlanError(
                f"no numbers of replicas and stages of {count} devices are allowed here"
            )
        try:
            known, guesses = self._compared(possible)
        # a tight fit is better than none
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
        """The candidates that were measured, up to where none can be better; estimates of all."""
        guesses: list[Candidate] = []
        known: list[Candidate] = []
        problem = PlanError("")
        for sizes in possible:
            try:
                guesses.append(self.estimated(sizes))
            except PlanError as error:  # they cannot hold it
                problem = error
        # measuring takes seconds, estimating none: the most promising are measured first
        guesses.sort(key=_rated)
        for guess in guesses:
            # estimates are optimistic, so what is behind by its estimate stays behind
            if known and _rated(guess) >= min(map(_rated, known)):
                break
            try:
                known.append(self.measured(guess.sizes))
            except PlanError as error:
                problem = error
        if not known:
            raise self.why_nothing_fits() or problem
        return known, guesses

    @property
    def whole(self) -> int:
        """Micro-batches of one stage, which takes its batches as the user wants, else whole."""
        return self.asked or 1

    def batch_of(self, replicas: int) -> int:
        """Samples in the batch of each of so many replicas."""
        return max(1, self.batch // self.divided(replicas))

    def sizes(self) -> list[Sizes]:
        """All sizes that use all devices."""
        found, devices = [], len(self.machine.devices)
        for stages in (s for s in range(1, devices + 1) if devices % s == 0):
            replicas, numbers = devices // stages, [self.whole]
            if self.asked is None and stages > 1:
                # slices of two samples at least, if that can be: single ones may take a slow path
                batch = self.batch_of(replicas)
                limit = max(batch // 2, min(batch, 2))
                tried = (m for m in sorted({2, stages, 2 * stages, 4 * stages}) if m <= limit)
                numbers = [1, *filter(self.splits, tried)]
            found += [Sizes(replicas=replicas, stages=stages, microbatches=m) for m in numbers]
        return found

    def measured(self, sizes: Sizes) -> Candidate:
        """A step, from what networks take at that size of the micro-batch.

        Raises:
            PlanError: the devices cannot hold them.
        """
        slices = sizes.microbatches * self.divided(sizes.replicas)
        # a batch that cannot be cut cannot be measured in parts
        if slices > sizes.microbatches and not self.splits(slices):
            return self.estimated(sizes)
        return self._candidate([network(slices) for network in self.networks], sizes)

    def estimated(self, sizes: Sizes) -> Candidate:
        """The same, from what they take whole."""
        share = self.whole / (sizes.microbatches * self.divided(sizes.replicas))
        return self._candidate(
            [network(self.whole).scaled(share) for network in self.networks], sizes
        )

    def alone_s(self) -> float:
        """Seconds of a step on one device, however much it holds."""
        parts = [network(self.whole) for network in self.networks]
        # memory is left out: this is what to compare with, and no choice
        computed = sum(self.whole * sum((*p.forward_s, *p.backward_s)) for p in parts)
        trained = sum(sum(p.gradient_bytes) for p in parts)
        return computed + self.machine.rates.update_s_per_byte * trained

    def _candidate(self, networks: Sequence[PartitionTable], sizes: Sizes) -> Candidate:
        cluster = self.machine.cluster(sizes.replicas, sizes.stages)
        if self.by_speed and len(set(cluster.replica_speeds)) > 1:
            return self._dealt(networks, sizes, cluster)
        plans = self._plans(networks, sizes, cluster.capacities, self._limits(cluster))
        return Candidate(
            sizes=sizes,
            step_s=sum(plan.step_s for plan in plans),
            divided=self.divided(sizes.replicas),
            recompute=any(plan.recompute for plan in plans),
        )

    def _dealt(
        self, networks: Sequence[PartitionTable], sizes: Sizes, cluster: Cluster
    ) -> Candidate:
        """A step in which replicas take samples by their speed: it ends with the last of them.

        Each replica is planned as if it might have cuts of its own. All have the same, for the
        slowest device of each stage; where chains are not in proportion, a step takes longer.
        """
        batch = self.batch_of(sizes.replicas)
        shares = deal(max(sizes.replicas, sizes.replicas * batch), cluster.replica_speeds)
        # shares differ, so the last replica to end is not known before all are planned
        found: list[list[Plan]] = []
        for replica, share in enumerate(shares):
            mine = cluster.order[replica * sizes.stages : (replica + 1) * sizes.stages]
            parts = [each.scaled(share / batch) for each in networks]
            # what the slowest has room for, all are given
            limits = self._limits(cluster)
            found.append(self._plans(parts, sizes, [cluster.speeds[r] for r in mine], limits))
        slowest = max(found, key=lambda plans: sum(plan.step_s for plan in plans))
        return Candidate(
            sizes=sizes,
            step_s=sum(plan.step_s for plan in slowest),
            divided=self.divided(sizes.replicas),
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
        """A plan for each network, on the same devices.

        Args:
            networks: what a micro-batch takes.
            sizes: of the run.
            capacities: speeds of the devices of a replica.
            room: bytes that each of them may take; None: not known.
        """
        plans: list[Plan] = []
        # replicas that divide states hold less the more there are
        networks = [each.divided(sizes.replicas) for each in networks]
        for parts in networks if sizes.replicas == 1 else [each.averaged() for each in networks]:
            # one with too few parts for the stages stays on the driver
            here = sizes if len(parts.names) >= sizes.stages else replace(sizes, stages=1)
            plans.append(self._plan(parts, here, capacities, remaining(room, plans)))
        return plans

    def _limits(self, cluster: Cluster) -> tuple[int, ...] | None:
        """What each device may take, but for what is spared."""
        limits = cluster.memory_limits
        return limits and tuple(
            round((1 - self.spare) * (limit + self.present_bytes)) for limit in limits
        )

    def why_nothing_fits(self) -> PlanError | None:
        """What lacks in the sizes that were looked at, and what would fit; None: nothing lacks."""
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
            # the message says of each way that was tried what lacks there
            for each in again if limits is not None else []:
                way = Way(stages=stages, microbatches=sizes.microbatches, recompute=each)
                batch = self.batch_of(sizes.replicas)
                self.short.append(Fit.of(table, way, limits or (), batch))
            raise
