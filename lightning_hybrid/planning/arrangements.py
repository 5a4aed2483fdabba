"""Search shape, devices, cuts, copies and shares together, for devices that are not alike.

A search that changes one of these and holds the others fixed misses good plans: a slow device may
be best left out, or be given a light stage, or get a copy of its stage beside it, or few samples.
So all of them are changed together, in small steps, beginning with the best plans of the single
searches. Every arrangement is one that the strategy can run: the driver of the first replica is on
the first of the used devices; and if any stage has copies, replicas take equal shares and each
keeps the whole state of the optimizer.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, pairwise, product
from operator import truediv
from typing import Any

import numpy as np

from lightning_hybrid.allocation import Breeding, evolve
from lightning_hybrid.errors import AllocationError
from lightning_hybrid.planning.balanced import balanced_ends
from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.copied_stages import CopiedStages, devices_of_copies
from lightning_hybrid.planning.memory_check import ChainSizes
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.shape_costs import (
    CostsOf,
    Ring,
    in_training,
    links_of,
    problem_of,
    ring_of,
    rings_s,
    unlimited,
    with_copies,
)
from lightning_hybrid.planning.shares import share_samples
from lightning_hybrid.planning.step_problem import StepProblem

RandomGenerator = np.random.Generator

MOST_TURNS = 3
"""Largest number of stages per device that is tried."""
_MOST_SIMULATED = 128
"""Largest product of micro-batches and devices of a replica for which stages may have copies: their
step is simulated, which takes long."""
_MOST_KEPT = 16
"""Largest number of arrangements that the search begins with, each of another shape."""
_OFTEN = (0.33, 0.57, 0.66, 0.8, 0.9, 0.95)
"""Cumulative probabilities of the first six of the seven moves in `Arrangements.neighbour`."""
_ALL_SHAPES = 8
"""Largest number of devices for which the search looks at every shape first."""
_ORDERS = 2
"""Number of random orders of the devices on which each shape is tried in a round of `_screened`."""
_WORK = 40_000
"""Limit of the search: evaluations times devices. It takes seconds."""
_EACH = 60
"""Limit of the search for few devices and partitions: evaluations for each pair of both."""


@dataclass(frozen=True)
class Arrangement:
    """A shape with its devices and cuts.

    Attributes:
        devices: numbers of all devices of the cluster. The used ones come first, replica by
            replica, each replica with its driver's device first; then those that are left out.
        replicas: number of replicas.
        copies: for each stage the number of its copies; of a loop, a 1 for each device of a
            replica.
        turns: number of stages of each device; more than 1: a loop.
        microbatches: number of micro-batches into which a replica's batch is split.
        recompute: whether stages run their forward again in the backward, to save memory.
        ends: for each stage the number after its last partition; empty: there are no cuts yet.
        inside: whether backwards run inside of the network's calls (schedule `1f1b`).
    """

    devices: tuple[int, ...]
    replicas: int
    copies: tuple[int, ...]
    turns: int
    microbatches: int
    recompute: bool
    ends: tuple[int, ...]
    inside: bool = False

    @property
    def size(self) -> int:
        """Number of devices of a replica."""
        return sum(self.copies)

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the devices that are used, replica by replica."""
        return self.devices[: self.replicas * self.size]

    @property
    def has_copies(self) -> bool:
        """Whether any stage has several copies."""
        return max(self.copies) > 1

    @property
    def chain(self) -> list[int]:
        """For each stage its device, by index in the replica: 1, 2, ... and 0, the driver's.

        A loop passes the devices in this order several times. Only for stages without copies.
        """
        return [*range(1, self.size), 0] * self.turns


class Arrangements:
    """All arrangements of a network on a cluster: their costs, and moves for `allocation.evolve`.

    The methods call an arrangement `genes`. Those that predict a time need one with cuts (`ends`).
    Results are remembered.

    Args:
        costs_of: function from samples per micro-batch to the costs of the network's partitions.
        cluster: the devices.
        batch: samples of one replica in a step.
        microbatches: the numbers of micro-batches that an arrangement may have, rising.
        may_go_inside: whether backwards may run inside of the network's calls; if not,
            `Arrangement.inside` has no effect.
    """

    def __init__(
        self,
        costs_of: CostsOf,
        cluster: ClusterDescription,
        batch: int,
        microbatches: Sequence[int],
        *,
        may_go_inside: bool = False,
    ) -> None:
        self.costs_of, self.cluster, self.batch = costs_of, cluster, batch
        self.may_go_inside = may_go_inside
        self.numbers = list(microbatches)
        self.cost = lru_cache(maxsize=None)(self._cost)
        self.kinds = lru_cache(maxsize=4096)(self._kinds)
        self.costs = lru_cache(maxsize=None)(lambda slices: costs_of(-(-batch // slices)))
        self.table = lru_cache(maxsize=None)(self._table)
        self.problem = lru_cache(maxsize=4096)(self._problem)
        self.copied = lru_cache(maxsize=1024)(self._copied)
        self._balanced = lru_cache(maxsize=None)(self._cut_evenly)
        self._picked = lru_cache(maxsize=4096)(cluster.pick)
        self._rings = lru_cache(maxsize=4096)(lambda used, size: ring_of(self._picked(used), size))
        self._links = lru_cache(maxsize=4096)(lambda used, size: links_of(self._picked(used), size))

    @cached_property
    def partitions(self) -> int:
        """Number of network partitions."""
        return len(self.costs(1).forward_s)

    @cached_property
    def may_copy(self) -> bool:
        """Whether stages may have copies: not if replicas divide the state of the optimizers."""
        return not self.costs(1).state_bytes

    def estimated(self) -> "Arrangements":
        """Make a copy of this space with estimated costs, in proportion to the samples.

        Only the costs of a whole batch are then asked of `costs_of`, which may measure.
        """
        whole, batch = self.costs(1), self.batch
        return Arrangements(
            lambda n: whole.scaled(n / batch),
            self.cluster,
            batch,
            self.numbers,
            may_go_inside=self.may_go_inside,
        )

    def _cost(self, genes: Arrangement) -> float:
        """Predicted seconds of a step per sample of all replicas; infinite: memory is lacking."""
        return self.timed(genes)[0] / (genes.replicas * self.batch)

    def timed(self, genes: Arrangement) -> tuple[float, tuple[int, ...]]:
        """Predict the step of an arrangement, with equal or unequal shares, whichever is faster.

        Returns:
            Seconds of a step, infinite if a device lacks memory for its stages, or if a stage with
            copies shares a weight; and the samples that each replica takes, empty if all take equal
            numbers.
        """
        step_s = self.equal_s(genes)
        if genes.has_copies or max(self.kinds(genes.used, genes.size)) == 0 or self.batch == 1:
            return step_s, ()
        shares, unequal_s = self._by_speed(genes)
        return (unequal_s, shares) if unequal_s < step_s and len(set(shares)) > 1 else (step_s, ())

    def equal_s(self, genes: Arrangement) -> float:
        """Predicted seconds of a step if all replicas take equal numbers of samples.

        Infinite if a device lacks memory for its stages, or if a stage with copies shares a weight.
        """
        if genes.has_copies:
            copied = self.copied(genes.used, genes.copies, genes.microbatches)
            return copied.step_time_s(genes.ends)
        return self.whole(genes).step_time_s(genes.ends, genes.chain)

    def whole(self, genes: Arrangement) -> StepProblem:
        """Make the step problem of a replica that takes an equal share of the samples.

        Its device k is as slow, and has as little memory, as the worst device k of any replica.
        Copies are not considered: each device counts as one of the chain.
        """
        return self.problem(
            *(genes.used, genes.size, genes.microbatches, self.way(genes), self.batch, None)
        )

    def way(self, genes: Arrangement) -> ChainSizes:
        """Make the sizes by which the memory of an arrangement's partitions is predicted.

        In them each device counts as one stage, in loops and with copies too.
        """
        return ChainSizes(
            stages=genes.size,
            microbatches=genes.microbatches,
            recompute=genes.recompute,
            inside=genes.inside and self.may_go_inside,
        )

    def _kinds(self, used: tuple[int, ...], size: int) -> list[int]:
        """Number the replicas by kind: those with equal devices in equal order are of one kind.

        Args:
            used: numbers of the devices that are used, replica by replica.
            size: number of devices of a replica.

        Returns:
            For each replica the number of its kind, from 0 in the order of appearance.
        """
        specs, known = self._picked(used).devices, dict[Any, int]()
        chains = [specs[k : k + size] for k in range(0, len(specs), size)]
        return [known.setdefault(chain, len(known)) for chain in chains]

    def _by_speed(self, genes: Arrangement) -> tuple[tuple[int, ...], float]:
        """Search for the shares of the replicas with the shortest step; for stages without copies.

        The time of a replica grows with its share. So shares are best if no sample of the slowest
        replica would end sooner in another replica.

        Returns:
            The samples that each replica takes, and the predicted seconds of a step with these
            shares.
        """
        used = genes.used
        size = genes.size
        slices = genes.microbatches
        chain = genes.chain
        kinds, known = self.kinds(used, size), dict[tuple[int, int], float]()

        def time_s(replica: int, share: int) -> float:
            key = kinds[replica], share
            if key not in known:
                found = self.of_replica(genes, share, replica)
                known[key] = found.step_time_s(genes.ends, chain)
            return known[key]

        total = genes.replicas * self.batch
        rest = share_samples(total - genes.replicas * (slices - 1), self.rates(genes))
        shares = [slices - 1 + share for share in rest]
        replicas = range(genes.replicas)
        now_s = [time_s(r, shares[r]) for r in replicas]
        then_s = [time_s(r, shares[r] + 1) for r in replicas]
        while True:
            worst = max(replicas, key=now_s.__getitem__)
            best = min(replicas, key=then_s.__getitem__)
            if shares[worst] == slices or then_s[best] >= now_s[worst]:
                return tuple(shares), now_s[worst]
            for replica, more in ((worst, -1), (best, 1)):
                shares[replica] += more
                now_s[replica] = time_s(replica, shares[replica])
                then_s[replica] = time_s(replica, shares[replica] + 1)

    def rates(self, genes: Arrangement) -> list[float]:
        """For each replica its speed, relative to that of a replica made of the slowest devices.

        That replica has at place k the slowest of the devices that are at place k in any replica.
        """
        speeds, size = self._picked(genes.used).relative_speeds, genes.size
        slowest = [min(speeds[k::size]) for k in range(size)]
        chains = [speeds[k : k + size] for k in range(0, len(speeds), size)]
        return [min(map(truediv, chain, slowest)) for chain in chains]

    def dealt_s(self, genes: Arrangement, shares: Sequence[int]) -> float:
        """Predicted seconds of a step in which replica r takes ``shares[r]`` samples.

        Only for stages without copies; infinite if a device lacks memory for its stages.
        """
        mine = (self.of_replica(genes, share, r) for r, share in enumerate(shares))
        return max(each.step_time_s(genes.ends, genes.chain) for each in mine)

    def of_replica(self, genes: Arrangement, share: int, replica: int) -> StepProblem:
        """Make the step problem of replica number `replica`, which takes `share` samples a step.

        Speeds and memory are those of its own devices; links are the slowest of all replicas.
        """
        return self.problem(
            *(genes.used, genes.size, genes.microbatches, self.way(genes), share, replica)
        )

    def bubble(self, genes: Arrangement, step_s: float, shares: Sequence[int]) -> float:
        """The fraction of a step's time in which the devices of an arrangement do not compute.

        Args:
            genes: the arrangement.
            step_s: seconds of its step; if they are 0, the result is 0.
            shares: samples that each replica takes; empty: all take equal numbers.
        """
        table = self.costs(genes.microbatches)
        sums = table.recomputed().sums if genes.recompute else table.sums
        speeds, busy_s = self._picked(genes.used).relative_speeds, 0.0
        owners = devices_of_copies(genes.copies) * genes.turns
        for replica in range(genes.replicas):
            share = shares[replica] / self.batch if shares else 1.0
            for (a, b), devices in zip(pairwise((0, *genes.ends)), owners):
                once_s, step_s_ = (
                    sum(sums[name][b] - sums[name][a] for name in names)
                    for names in (("forward_s", "backward_s"), ("step_s",))
                )
                for number, device in enumerate(devices):
                    dealt = len(range(number, genes.microbatches, len(devices)))
                    speed = speeds[replica * genes.size + device]
                    busy_s += (dealt * share * once_s + step_s_) / speed
        return max(0.0, 1 - busy_s / (len(genes.used) * step_s)) if step_s else 0.0

    def _table(
        self, slices: int, replicas: int, ring: Ring, way: ChainSizes, share: int
    ) -> PartitionTable:
        costs, rates = self.costs(slices).divided(replicas), self.cluster.rates
        costs = costs.averaged() if replicas > 1 else costs
        costs = costs if share == self.batch else costs.scaled(share / self.batch)
        reduce_s: Sequence[float] = rings_s(ring, costs.gradient_bytes, replicas)
        if rates is not None:
            reduce_s, step_s = rates.after_backward(costs.gradient_bytes, replicas)
            costs = replace(costs, step_s=step_s)
        return in_training(costs, way, reduce_s)

    def _problem(
        self,
        used: tuple[int, ...],
        size: int,
        slices: int,
        way: ChainSizes,
        share: int,
        replica: int | None,
    ) -> StepProblem:
        """Make the step problem of the chain of one replica, or of the slowest of all replicas.

        Args:
            used: numbers of the devices, replica by replica.
            size: number of devices of a replica.
            slices: number of micro-batches.
            way: the sizes by which the memory of partitions is predicted.
            share: samples that the replica takes in a step.
            replica: number of the replica; None: each stage has its slowest device in all replicas.
        """
        ring, links = self._rings(used, size), self._links(used, size)
        table = self.table(slices, len(used) // size, ring, way, share)
        return problem_of(table, self._picked(used), way, links, replica)

    def _copied(self, used: tuple[int, ...], copies: tuple[int, ...], slices: int) -> CopiedStages:
        size = sum(copies)
        way = ChainSizes(stages=size, microbatches=slices)
        problem = self.problem(used, size, slices, way, self.batch, None)
        return with_copies(problem, copies, self._picked(used))

    # ------------------------------------------------------------------ moves

    def neighbour(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement:
        """Make a small random change: of cuts, devices, copies, stages, replicas, micro-batches.

        Returns:
            The changed arrangement; or the same one, if the change is not possible.
        """
        moves = (
            self._cut,
            self._swapped,
            self._sliced,
            self._sized,
            self._divided,
            self._turned,
            self.laid,
        )
        changed = moves[bisect(_OFTEN, rng.random())](genes, rng)
        return changed if changed is not None and self._may_be(changed) else genes

    def random(self, rng: RandomGenerator) -> Arrangement:
        """Make a random arrangement with balanced cuts, without recomputation."""
        count = len(self.cluster.devices)
        while True:
            stages = int(rng.integers(1, min(count, self.partitions) + 1))
            replicas = int(rng.integers(1, count // stages + 1))
            copies = [1] * stages
            if stages > 1 and rng.random() < 0.5:
                for _ in range(count // replicas - stages):
                    copies[int(rng.integers(stages))] += int(rng.integers(2))
            looped = max(copies) == 1 < stages and rng.random() < 0.5
            genes = Arrangement(
                devices=tuple(rng.permutation(count).tolist()),
                replicas=replicas,
                copies=tuple(copies),
                turns=int(rng.integers(2, MOST_TURNS + 1)) if looped else 1,
                microbatches=self.numbers[int(rng.integers(len(self.numbers)))],
                recompute=False,
                ends=(),
            )
            found = self.recut(genes)
            if found is not None and self._may_be(found):
                return found

    def cross(self, left: Arrangement, right: Arrangement, rng: RandomGenerator) -> Arrangement:
        """Put the shape of `left` on the devices of `right`, with cuts of `left` or balanced cuts.

        Returns:
            The new arrangement; or `left`, if it is not possible.
        """
        changed = self._cut_or_not(replace(left, devices=right.devices), rng)
        return changed if changed is not None and self._may_be(changed) else left

    def _may_be(self, genes: Arrangement) -> bool:
        if genes.recompute and (genes.turns > 1 or genes.size == 1 or genes.microbatches == 1):
            return False
        return not genes.has_copies or (
            self.may_copy
            and len(genes.copies) > 1
            and genes.turns == 1
            and not genes.recompute
            and max(genes.copies) <= genes.microbatches
            and genes.microbatches * genes.size <= _MOST_SIMULATED
        )

    def seated(self, genes: Arrangement) -> Arrangement:
        """Reorder the used devices so that the one with the least number drives the first replica.

        The strategy needs this: it is the device of rank 0.
        """
        size, used = genes.size, list(genes.used)
        first = used.index(min(used))
        driver = first - first % size
        used[first], used[driver] = used[driver], used[first]
        used = used[driver : driver + size] + used[:driver] + used[driver + size :]
        spare = sorted(genes.devices[len(used) :])
        return replace(genes, devices=(*used, *spare))

    def across(self, genes: Arrangement) -> Arrangement | None:
        """Give each stage devices of about the same speed in all replicas, and cut again.

        Returns:
            The arrangement; None: :meth:`recut` finds no cuts.
        """
        speeds, replicas = self.cluster.relative_speeds, genes.replicas
        ranked = sorted(genes.used, key=lambda device: -speeds[device])
        used = [device for first in range(replicas) for device in ranked[first::replicas]]
        return self.recut(replace(genes, devices=(*used, *genes.devices[len(used) :])))

    def alike(self, genes: Arrangement) -> Arrangement | None:
        """Give all replicas devices of about the same total speed, and cut again.

        Returns:
            The arrangement; None: :meth:`recut` finds no cuts.
        """
        speeds, size = self.cluster.relative_speeds, genes.size
        teams: list[list[int]] = [[] for _ in range(genes.replicas)]
        for device in sorted(genes.used, key=lambda device: -speeds[device]):
            open_teams = [team for team in teams if len(team) < size]
            min(open_teams, key=lambda team: sum(speeds[k] for k in team)).append(device)
        used = [device for team in teams for device in team]
        return self.recut(replace(genes, devices=(*used, *genes.devices[len(used) :])))

    def laid(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: the replicas and stages on other devices, with new cuts.

        The devices are the fastest ones (with probability 0.7) or random ones. One stage after the
        other gets its devices in all replicas, from a list that is in random order, by number, or
        as drawn (the fastest first). With probability 0.3 the number of micro-batches is drawn too.

        Returns:
            The arrangement; None: :meth:`recut` finds no cuts.
        """
        speeds, size = self.cluster.relative_speeds, genes.size
        devices = rng.permutation(len(genes.devices)).tolist()
        if rng.random() < 0.7:  # the slowest are left out
            devices.sort(key=lambda device: -speeds[device])
        used, spare = devices[: genes.replicas * size], devices[genes.replicas * size :]
        drawn = rng.random()
        if drawn < 0.3:
            used = rng.permutation(used).tolist()
        elif drawn < 0.65:
            # neighbouring devices get one stage in all replicas: its all-reduce stays within hosts
            used.sort()
        # copies of a stage wait for the slowest one: in all replicas they are of about one speed
        stages = [devices_of_copies(genes.copies)[k] for k in rng.permutation(len(genes.copies))]
        places = [
            replica * size + k
            for stage in stages
            for k in stage
            for replica in range(genes.replicas)
        ]
        order = [device for _, device in sorted(zip(places, used))]
        slices = self.numbers[int(rng.integers(len(self.numbers)))]
        slices = slices if rng.random() < 0.3 else genes.microbatches
        return self.recut(replace(genes, devices=(*order, *spare), microbatches=slices))

    def shapes(self) -> Iterator[Arrangement]:
        """Make every shape once, with balanced cuts and without recomputation.

        A shape here is a number of replicas, copies of each stage and stages per device.

        Yields:
            Each shape on the fastest devices, with the most micro-batches that are possible.
        """
        speeds, count = self.cluster.relative_speeds, len(self.cluster.devices)
        devices = tuple(sorted(range(count), key=lambda device: -speeds[device]))
        for size in range(1, min(count, self.partitions) + 1):
            stages = [cuts for k in range(size) for cuts in combinations(range(1, size), k)]
            for replicas, cuts in product(range(1, count // size + 1), stages):
                copies = tuple(b - a for a, b in pairwise((0, *cuts, size)))
                alone = max(copies) == 1
                for turns in range(1, MOST_TURNS + 1 if alone and size > 1 else 2):
                    for slices in reversed(self.numbers):
                        genes = Arrangement(devices, replicas, copies, turns, slices, False, ())
                        found = self.recut(genes)
                        if found is not None and self._may_be(found):
                            yield found
                            break

    def recut(self, genes: Arrangement) -> Arrangement | None:
        """Give an arrangement balanced cuts, and seat the driver (:meth:`seated`).

        Cuts that do not fit into memory are made only if none are found that fit.

        Loops need several stages without copies, and recomputation also several micro-batches and
        no loop; an arrangement that lacks this gets one stage per device, or no recomputation.

        Returns:
            The arrangement; None: it needs more devices or partitions than there are, or may not
            have its copies, or no cuts are found.
        """
        chain = max(genes.copies) == 1 < genes.size
        genes = replace(genes, turns=genes.turns if chain else 1)
        again = genes.recompute and chain and genes.turns == 1 < genes.microbatches
        genes = replace(genes, recompute=again)
        stages = len(genes.copies) * genes.turns
        most = max(stages, genes.size)
        if genes.replicas * genes.size > len(genes.devices) or most > self.partitions:
            return None
        genes = self.seated(genes)
        if genes.has_copies and not self._may_be(genes):
            return None
        ends = self._balanced(replace(genes, ends=()))
        return None if ends is None else replace(genes, ends=tuple(ends))

    def _cut_evenly(self, genes: Arrangement) -> list[int] | None:
        if genes.has_copies:
            copied = self.copied(genes.used, genes.copies, genes.microbatches)
            # a stage works at the speed of all its copies
            alone, count = copied.chain, (genes.copies[-1], *genes.copies[:-1])
            problem = replace(alone, speeds=[s * k for s, k in zip(alone.speeds, count)])
            chain = [*range(1, len(genes.copies)), 0]
        else:
            problem, chain = self.whole(genes), genes.chain
        return balanced_ends(problem, chain) or balanced_ends(unlimited(problem), chain)

    def _cut(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        ends = list(genes.ends)
        if len(ends) < 2:
            return None
        for _ in range(1 + int(rng.random() < 0.4)):  # two at once: a device gives and takes
            place = int(rng.integers(len(ends) - 1))
            if genes.turns > 1 and rng.random() < 0.5:
                # from one stage of a device to another of the same, which keeps its load
                stages = range(place % genes.size, len(ends), genes.size)
                last = int(rng.choice(stages))
                place, last = min(place, last), max(place, last)
            elif rng.random() < 0.7:
                last = place + 1
            else:
                last = int(rng.integers(place, len(ends) - 1)) + 1
            step = int(rng.integers(1, 3)) * (1 if rng.random() < 0.5 else -1)
            ends[place:last] = [end + step for end in ends[place:last]]
        if any(b <= a for a, b in pairwise((0, *ends))):
            return None
        return replace(genes, ends=tuple(ends))

    def _swapped(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: exchange two devices; or two places of the chain, in all replicas at once.

        One of the two devices may be unused. A stage is as slow as its slowest device in all
        replicas, so a single device gains little elsewhere; places that are exchanged in all
        replicas keep their devices together, and take their numbers of partitions along.

        Returns:
            The changed arrangement; None: there is one device, or no cuts are found.
        """
        if len(genes.devices) < 2:
            return None
        devices = list(genes.devices)
        used = len(genes.used)
        size = genes.size
        if genes.replicas == 1 or size == 1 or rng.random() < 0.7:
            one, other = int(rng.integers(used)), int(rng.integers(len(devices)))
            devices[one], devices[other] = devices[other], devices[one]
            return self._cut_or_not(replace(genes, devices=tuple(devices)), rng)
        one, other = rng.choice(size, 2, replace=False).tolist()
        for k in range(0, used, size):
            devices[k + one], devices[k + other] = devices[k + other], devices[k + one]
        if not genes.has_copies:
            held = [b - a for a, b in pairwise((0, *genes.ends))]
            for k in range(0, len(held), size):
                a, b = k + (one - 1) % size, k + (other - 1) % size
                held[a], held[b] = held[b], held[a]
            genes = replace(genes, ends=tuple(accumulate(held)))
        return self._cut_or_not(replace(genes, devices=tuple(devices)), rng)

    def _cut_or_not(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """After a change of devices, make balanced cuts or keep the cuts, at random.

        Returns:
            The arrangement, with the driver seated; None: no balanced cuts are found.
        """
        return self.recut(genes) if rng.random() < 0.5 else self.seated(genes)

    def _sliced(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: the next larger or smaller number of micro-batches; or recomputation.

        With probability 0.2 recomputation is switched on or off.

        Returns:
            The changed arrangement; None: the change is not possible.
        """
        slices, recompute = genes.microbatches, genes.recompute
        if rng.random() < 0.2:
            recompute = not recompute
        else:
            place = self.numbers.index(slices) + (1 if rng.random() < 0.5 else -1)
            if not 0 <= place < len(self.numbers):
                return None
            slices = self.numbers[place]
        changed = replace(genes, microbatches=slices, recompute=recompute)
        # other micro-batches hold more or less, so that other cuts may fit
        return self.recut(changed) if rng.random() < 0.5 else changed

    def _sized(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: add or remove a copy of a stage, or a stage, in all replicas.

        Returns:
            The changed arrangement; None: the change is not possible.
        """
        copies, kind = list(genes.copies), int(rng.integers(4))
        place = int(rng.integers(len(copies)))
        if kind == 0:
            copies[place] += 1
        elif kind == 1 and copies[place] > 1:
            copies[place] -= 1
        elif kind == 2:
            copies.insert(place, 1)
        elif kind == 3 and len(copies) > 1:
            del copies[place]
        else:
            return None
        return self.recut(replace(genes, copies=tuple(copies)))

    def _divided(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: add or remove a replica, join replicas in pairs, or split each in two.

        A replica that two were joined into has twice as many stages; a half has half as many.

        Returns:
            The changed arrangement; None: the change is not possible.
        """
        kind, stages = int(rng.integers(4)), len(genes.copies)
        if kind < 2:
            more = 1 if kind == 0 or genes.replicas == 1 else -1
            return self.recut(replace(genes, replicas=genes.replicas + more))
        if genes.has_copies:
            return None
        if kind == 2 and genes.replicas > 1:
            changed = replace(genes, replicas=genes.replicas // 2, copies=(1,) * (2 * stages))
        elif kind == 3 and stages % 2 == 0:
            changed = replace(genes, replicas=2 * genes.replicas, copies=(1,) * (stages // 2))
        else:
            return None
        return self.recut(changed)

    def _turned(self, genes: Arrangement, rng: RandomGenerator) -> Arrangement | None:
        """A random move: one stage more or less on each device, which makes or changes a loop.

        Returns:
            The changed arrangement; None: the change is not possible.
        """
        turns = genes.turns + (1 if rng.random() < 0.5 else -1)
        if genes.has_copies or genes.size == 1 or not 1 <= turns <= MOST_TURNS:
            return None
        return self.recut(replace(genes, turns=turns))


def improve(space: Arrangements, seeds: Sequence[Arrangement], seed: int = 0) -> Arrangement | None:
    """Breed a better arrangement from some given ones, by `allocation.evolve`.

    Args:
        space: arrangements of the network.
        seeds: arrangements to begin with.
        seed: seed of the random numbers.

    Returns:
        The best arrangement found, which is no worse than any of `seeds`; None: no arrangement was
        found that fits into memory.
    """
    count = len(space.cluster.devices)
    evaluations = max(500, min(_WORK // count, _EACH * count * space.partitions))
    starts = starts_of(space, seeds, evaluations, np.random.default_rng(seed))
    breeding = Breeding(evaluations=evaluations, population=len(starts))
    try:
        return evolve(space, seed, breeding, starts)[0]
    except AllocationError:
        return None


def starts_of(
    space: Arrangements, seeds: Sequence[Arrangement], evaluations: int, rng: RandomGenerator
) -> list[Arrangement]:
    """Choose the arrangements that the breeding begins with: the best one of each kind of shape.

    Besides the seeds and variants of them, other shapes are tried. Shapes that have the same
    numbers of replicas, stages and stages per device are of one kind, if both or none have copies:
    otherwise those that differ in their copies alone would take all places.

    Args:
        space: arrangements of the network.
        seeds: arrangements that are known to be good.
        evaluations: limit of the whole breeding; one random shape is tried for every 25 of them, if
            the cluster is too large to try every shape.
        rng: random numbers.

    Returns:
        At most `_MOST_KEPT` arrangements, the best first.
    """
    seated = [space.seated(genes) for genes in seeds]
    found = [*seated, *_orders(space, seated), *_screened(space, evaluations // 25, rng)]
    kinds: dict[object, Arrangement] = {}
    for genes in _best(space, found):
        kind = genes.replicas, len(genes.copies), genes.has_copies, genes.turns
        kinds.setdefault(kind, genes)
    return [*kinds.values()][:_MOST_KEPT]


def _orders(space: Arrangements, found: Sequence[Arrangement]) -> list[Arrangement]:
    """Make up to three variants of each arrangement, all with balanced cuts.

    The variants are: the same order of devices; stages of which each has devices of about equal
    speed in all replicas; and replicas of about equal total speed.
    """
    orders = (move(genes) for genes in found for move in (space.recut, space.across, space.alike))
    return [genes for genes in orders if genes is not None]


def _screened(space: Arrangements, count: int, rng: RandomGenerator) -> list[Arrangement]:
    """Try many shapes on random orders of the devices, and keep the best of them.

    All shapes are tried on a few orders, the better half of them on a few more, and so on, until at
    most ``2 * _MOST_KEPT`` are left.

    Args:
        space: arrangements of the network.
        count: number of random shapes, if the cluster is too large to try every shape.
        rng: random numbers.

    Returns:
        At most ``2 * _MOST_KEPT`` arrangements, the best first, each of another shape.
    """
    if len(space.cluster.devices) <= _ALL_SHAPES:
        shapes = [*space.shapes()]
    else:
        shapes = [space.random(rng) for _ in range(count)]
    found = _best(space, [*shapes, *_orders(space, shapes)])
    while True:
        laid = [space.laid(genes, rng) for genes in found for _ in range(_ORDERS)]
        found = _best(space, [*found, *(genes for genes in laid if genes is not None)])
        if len(found) <= 2 * _MOST_KEPT:
            return found
        del found[len(found) // 2 :]


def _best(space: Arrangements, found: Sequence[Arrangement]) -> list[Arrangement]:
    """Keep the best arrangement of each shape; the result is sorted, the best first.

    Of one shape are those with equal numbers of replicas, copies of each stage and stages per
    device.
    """
    shapes: dict[object, Arrangement] = {}
    for genes in sorted(found, key=space.cost):
        shapes.setdefault((genes.replicas, genes.copies, genes.turns), genes)
    return [*shapes.values()]
