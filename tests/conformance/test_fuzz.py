"""Random networks under stages, against plain PyTorch on one device."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from comparison import differences
from fuzz import OTHER_LAYOUTS, STEPS, Fuzzed, fuzzed, one_device, recipe
from suite import Conformance, Record, Row, assert_no_error, assert_refused, was_refused

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.errors import NetworkError, PlanError

# The first test of a class waits for all rows of the class; their session ends what hangs.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0)]


class _Fuzz(Conformance):
    refusals = (NetworkError, PlanError)
    seeds: ClassVar[range]

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        return HybridGabraStrategy(
            data_parallel_size=cls.replicas,
            pipeline_parallel_size=cls.stages,
            num_microbatches=row.microbatches,
            allocation=row.cuts[cls.stages],
        )

    @classmethod
    def catalogue(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return [fuzzed(seed) for seed in cls.seeds]

    @classmethod
    def rows(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return cls.catalogue()

    def test_row(
        self, row: type[Row], records: Callable[[type[Conformance], type[Row]], list[Record]]
    ) -> None:
        assert issubclass(row, Fuzzed)
        ranks = records(type(self), row)
        if self.stages > 1 and was_refused(ranks, row):
            assert_refused(ranks, row)
            return
        assert_no_error(ranks)
        assert len({record["pid"] for record in ranks}) == len(ranks)
        assert all(record["gradients"] for record in ranks), "a stage had no gradients"
        ways = row.parts() if self.stages > 1 else (1,)
        found = [_differences(ranks, row, self.stages, [parts] * STEPS) for parts in ways]
        said = " ".join(ranks[0]["said"])
        if all(found) and "is cut where it divides best" in said:  # a part of it
            assert self.reference is not None
            found = [_differences_from(records(self.reference, row), ranks, row, self.stages)]
        elif all(found) and "whole" in said:  # calls that cannot be split are not
            found = [_differences(ranks, row, self.stages, _as_it_went(ranks, row, self.stages))]
        assert not all(found), "\n".join(found[0][:10])


def _differences_from(
    reference: list[Record], ranks: list[Record], row: type[Fuzzed], stages: int
) -> list[str]:
    """From plain Lightning: Python that draws on the driver draws what it draws there."""
    found = []
    for replica, expected in enumerate(reference):
        seen = ranks[replica * stages]["seen"]
        found += differences(seen, expected["seen"], row.tolerance, "seen")
    for record in ranks:
        found += differences(record["weights"], reference[0]["weights"], row.tolerance, "weights")
    return found


def _differences(
    ranks: list[Record], row: type[Fuzzed], stages: int, parts: Sequence[int]
) -> list[str]:
    """From one device that takes batches in so many parts."""
    copies = one_device(row, len(ranks) // stages, parts)
    weights = copies[0].state_dict()
    found = []
    for replica, expected in enumerate(copies):
        of_replica = ranks[replica * stages : (replica + 1) * stages]
        found += differences(of_replica[0]["seen"], expected.seen, row.tolerance, "seen")
        for record in of_replica:
            found += differences(record["weights"], dict(weights), row.tolerance, "weights")
    return found


def _as_it_went(ranks: list[Record], row: type[Fuzzed], stages: int) -> list[int]:
    """The number of parts in each step, as the losses tell."""
    parts = [1] * STEPS
    losses = [record["seen"][::2] for record in ranks[::stages]]
    for step in range(STEPS):
        for parts[step] in row.parts():
            expected = [module.seen[2 * step] for module in one_device(row, len(losses), parts)]
            if expected == pytest.approx([of_one[step] for of_one in losses], rel=1e-9):
                break
    return parts


class TestFuzzControl(_Fuzz):
    """Plain Lightning on one device agrees with the loop, but for its random numbers."""

    seeds = range(1000, 1040)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "auto"

    @classmethod
    def rows(cls) -> list[type[Fuzzed]]:  # type: ignore[override]
        return [r for r in cls.catalogue() if not any(k.draws for k in recipe(r.seed).kinds)]


class FuzzOneDevice(_Fuzz):
    seeds = range(400)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "auto"


class FuzzTwoDevices(FuzzOneDevice):
    replicas = 2
    seeds = range(400, 500)

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:  # type: ignore[override]
        return "ddp"


class TestFuzzTwoStages(_Fuzz):
    stages = 2
    reference = FuzzOneDevice
    seeds = range(250)


class TestFuzzThreeStages(_Fuzz):
    stages = 3
    reference = FuzzOneDevice
    seeds = range(250, 400)


class TestFuzzReplicas(_Fuzz):
    replicas = 2
    stages = 2
    reference = FuzzTwoDevices
    seeds = range(400, 500)


class FuzzLayoutsOneDevice(FuzzOneDevice):
    seeds = range(OTHER_LAYOUTS, OTHER_LAYOUTS + 40)


class TestFuzzLayouts(_Fuzz):
    """Tensors cross cuts whose numbers lie in memory in many orders."""

    stages = 2
    reference = FuzzLayoutsOneDevice
    seeds = range(OTHER_LAYOUTS, OTHER_LAYOUTS + 40)
